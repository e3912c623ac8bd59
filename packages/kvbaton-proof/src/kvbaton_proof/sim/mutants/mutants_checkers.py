"""Wrong ideas that break no answer by themselves and that one checker alone sees: limits, bounds, planes, versions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvbaton.node import node
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.effects import UnpinPut
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.machines import (
    claims,
    consumer,
    consumer_book,
    consumer_push,
    context,
    ledger,
    pairing_source,
    pairing_target,
    producer,
)
from kvbaton.protocol.machines.backoff import Shunned
from kvbaton.protocol.machines.puts import Puts
from kvbaton.protocol.wire.messages import Commit, Written
from kvbaton.ranks import engine_store, rank_transport
from kvbaton_proof.sim.mutants.mutation import Mutant, both, swap

FOR_EVER_S = 1e6


def _oldest_in_common(original: Any) -> Any:
    def settle(ours: Any, greeted_in: int, bits: int) -> Any:
        newest = original(ours, greeted_in, bits)
        return max(ours.oldest, greeted_in) if greeted_in in ours else newest

    return settle


def _last_word_in_the_oldest(original: Any) -> Any:
    def encode(sender: Any, to: Any, session: int, message: Any, version: int) -> Any:
        return original(sender, to, session, message, 1 if isinstance(message, Commit | Written) else version)

    return encode


def _for_ever(original: Any) -> Any:
    return lambda self, worker, transport, now: original(self, worker, transport, now + FOR_EVER_S)


def _nothing(original: Any) -> Any:
    return lambda *arguments, **named: None


def _none_counted(original: Any) -> Any:
    return property(lambda self: 0)


def _unpinned_when_asked(original: Any) -> Any:
    def on_wanted(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        self.desk.emit(UnpinPut(event.put))

    return on_wanted


def _patient(original: Any) -> Any:
    def on_wanted(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        if event.put in self.states:
            self.desk.timers.set(("put", event.put), now + 3 * self.desk.settings.transfer_timeout)

    return on_wanted


def _held_anew(original: Any) -> Any:
    def extend(self: Any, lease: Any, now: float) -> Any:
        lease.term.hold_until = now + self.desk.settings.max_hold_s
        return original(self, lease, now)

    return extend


def _no_hard_deadline(original: Any) -> Any:
    def wait(self: Any, intake: Any, seconds: float, now: float) -> None:
        intake.hard_deadline = 0.0
        original(self, intake, seconds, now)

    return wait


def _any_reason(original: Any) -> Any:
    return lambda text: Reason.OTHER


def _said_twice(original: Any) -> Any:
    def completed(self: Any, lease: Any) -> None:
        original(self, lease)
        original(self, lease)

    return completed


def _one_at_a_time(original: Any) -> Any:
    def on_time(self: Any, now: float) -> None:
        key = self.desk.timers.pop_due(now)
        if key is not None:
            self._timer(*key, now)

    return on_time


def _sleeps_on(original: Any) -> Any:
    def next_deadline(self: Any) -> Any:
        due = original(self)
        return due if due is None else due + 0.5

    return next_deadline


def _first_only(original: Any) -> Any:
    def say_goodbye(self: Any, now: float) -> None:
        rest = dict(list(self.by_number.items())[1:])
        self.by_number = {number: each for number, each in self.by_number.items() if number not in rest}
        original(self, now)

    return say_goodbye


def _short_first_term(original: Any) -> Any:
    def on_begun(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        if event.lease in self.leases:
            self.desk.timers.set(("lease", event.lease), now + self.desk.settings.lease_s / 4)

    return on_begun


def _one_rank_fewer(original: Any) -> Any:
    def disconnect(self: Any, effect: Any) -> None:
        original(self, msgspec.structs.replace(effect, ranks=effect.ranks - 1))

    return disconnect


def _over_any_plane(original: Any) -> Any:
    def lend(self: Any, parts: Any, plane: Any, *rest: Any) -> None:
        forced = msgspec.structs.replace(plane, enforces=True) if plane is not None else None
        original(self, parts, forced, *rest)

    return lend


def _early(original: Any) -> Any:
    def wait(self: Any, intake: Any, seconds: float, now: float) -> None:
        original(self, intake, seconds / 3, now)

    return wait


def _every_other_fails(original: Any) -> Any:
    def on_granted(self: Any, link: Any, message: Any, now: float) -> None:
        original(self, link, message, now)
        intake = self.book.of(link, message.attempt)
        if intake is not None and intake.end is None and intake.attempt % 2:
            self.fail(intake, Reason.TRANSFER_FAILED, "for nothing", now)

    return on_granted


def _every_fifth_is_busy(original: Any) -> Any:
    def take_share(self: Any, lease: Any, reader: Any) -> None:
        if reader.attempt % 5 == 0:
            raise ProtocolError(Reason.BUSY, "seats_per_peer_max: for nothing")
        original(self, lease, reader)

    return take_share


def _never_any(what: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def end(self: Any, order: Any, opened: Any) -> None:
            if opened.what == what:
                opened.count = 0
            original(self, order, opened)

        return end

    return make


def _no(original: Any) -> Any:
    return lambda *arguments: False


def _refuses_all(original: Any) -> Any:
    def on_claim(self: Any, session: Any, claim: Any, now: float) -> None:
        if self._leases.draining:
            self._refuse(session, claim, ProtocolError(Reason.DRAINING, "it drains"))
        else:
            original(self, session, claim, now)

    return on_claim


def _gives_up_all(original: Any) -> Any:
    def on_drain(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        for lease in list(self.producer.leases.values()):
            self.producer.close(lease, Reason.DRAINING, now)

    return on_drain


def _first_rank_alone(original: Any) -> Any:
    def submit(self: Any, copy: Any) -> bool:
        if self._link.rank and copy.spans:
            return self._jobs.accept(copy) is not None
        return bool(original(self, copy))

    return submit


CHECKER_MUTANTS: tuple[Mutant, ...] = (
    Mutant("every_other_grant_fails", "17", "every other granted handoff fails for nothing",
           swap(consumer.Consumer, "on_granted", _every_other_fails)),
    Mutant("every_fifth_claim_is_busy", "27", "every fifth claim is refused as if there were no room",
           swap(claims.Claims, "_take_share", _every_fifth_is_busy)),
    Mutant("settled_for_the_oldest", "24", "a pair of new nodes talks in the oldest version that both speak",
           swap(pairing_source.__dict__, "settle", _oldest_in_common)),
    Mutant("last_word_in_the_oldest", "24", "a word that all versions share is said in the oldest",
           swap(node.__dict__, "encode", _last_word_in_the_oldest)),
    Mutant("plane_shunned_for_ever", "23", "a plane that failed once is never tried again",
           swap(Shunned, "add", _for_ever)),
    Mutant("passed_over_unseen", "23", "found here: what the source gave up is never tried again by its target",
           swap(pairing_target.Links, "_shun_passed_over", _nothing)),
    Mutant("quarantine_without_bound", "18", "D takes in more while it has no room for what is not at rest",
           swap(consumer.Consumer, "quarantined_blocks", _none_counted)),
    Mutant("restless_without_bound", "18", "P writes more while it has no room for what is not at rest",
           swap(producer.Producer, "restless_blocks", _none_counted)),
    Mutant("put_unpinned_when_asked", "32", "a put's blocks are given back while the store reads them",
           swap(Puts, "on_wanted", _unpinned_when_asked)),
    Mutant("put_waits_too_long", "9", "a store that does not answer keeps blocks longer than transfer_timeout",
           swap(Puts, "on_wanted", _patient)),
    Mutant("hold_begins_anew", "9", "every renewal begins the hold limit anew",
           swap(producer.Producer, "extend", _held_anew)),
    Mutant("load_without_limit", "9", "progress takes a load past max_hold_s",
           swap(consumer_book.ConsumerBook, "wait", _no_hard_deadline)),
    Mutant("reasons_forgotten", "17", "whatever P refuses for, D fails for another reason",
           both(*(swap(each.__dict__, "reason_of", _any_reason) for each in (consumer, consumer_push)))),
    Mutant("completed_twice", "10", "a prompt is said to be complete twice",
           swap(Doorway, "completed", _said_twice)),
    Mutant("one_timer_a_turn", "9, 26", "of all that is due a turn does one thing",
           swap(ledger.Ledger, "on_time", _one_at_a_time)),
    Mutant("sleeps_on", "9", "a loop wakes half a second after something was due",
           swap(node.Node, "next_deadline", _sleeps_on)),
    Mutant("goodbye_to_the_first", "3", "who leaves says so to one of its targets",
           swap(pairing_source.Sessions, "say_goodbye", _first_only)),
    Mutant("drain_forgotten", "9", "a claim waits at a prefiller that is about to stop",
           swap(ledger.Ledger, "_on_drain", _nothing)),
    Mutant("short_first_term", "9", "a lease runs out before the term that it was given",
           swap(producer.Producer, "on_begun", _short_first_term)),
    Mutant("disconnects_one_rank_fewer", "3", "of a peer that is gone one rank stays connected",
           swap(node.Node, "_disconnect", _one_rank_fewer)),
    Mutant("lent_over_any_plane", "28", "blocks are lent where nothing confines a peer to them",
           swap(context.LedgerContext, "lend", _over_any_plane)),
    Mutant("gives_up_early", "17", "D waits a third of what it should",
           swap(consumer_book.ConsumerBook, "wait", _early)),
    Mutant("no_store_hits", "store", "what lies in the store is found by nobody",
           swap(engine_store.EngineStore, "_end", _never_any("lookup"))),
    Mutant("nothing_brought_from_a_store", "store", "what was found in the store is computed all the same",
           swap(engine_store.EngineStore, "_end", _never_any("get"))),
    Mutant("no_fallback", "23", "where the best data plane cannot be opened, handoffs fail",
           swap(pairing_target.__dict__, "has_fallback", _no)),
    Mutant("goodbye_unheard", "3", "a peer that said goodbye is waited for",
           swap(ledger.Ledger, "_on_goodbye", _nothing)),
    Mutant("departed_reader_kept", "3", "a D that is said to have gone keeps its session",
           swap(pairing_source.Sessions, "end_worker", _nothing)),
    Mutant("departed_source_kept", "3", "a P that is said to have gone keeps its link",
           swap(pairing_target.Links, "lose_worker", _nothing)),
    Mutant("drain_refuses_what_was_granted", "9", "a prefiller that drains hands nothing over",
           swap(claims.Claims, "on_claim", _refuses_all)),
    Mutant("drain_gives_leases_up", "9", "a prefiller that drains lets go of what it has granted",
           swap(ledger.Ledger, "_on_drain", _gives_up_all)),
    Mutant("drain_keeps_turns", "34", "a decoder that drains keeps turns, and so does not end",
           swap(producer.Producer, "let_turns_go", _nothing)),
    Mutant("no_fence", "14", "who does not confirm that it has stopped writing is never shut out",
           swap(pairing_target.Links, "fence", _nothing)),
    Mutant("nothing_is_lent", "28", "no block is lent, so nothing can be read or written where that is enforced",
           swap(context.LedgerContext, "lend", _nothing)),
    Mutant("first_rank_reads_alone", "20", "of an engine's ranks the first one alone is told to read",
           swap(rank_transport.RemoteTransport, "submit", _first_rank_alone)),
)  # fmt: skip
