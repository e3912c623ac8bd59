"""Wrong ideas about P: its leases, its claims, its commits and its store; about pushing and the fence that ends what
cannot be asked any more; tickets that the router took back (rule 22); how much of its cache handoffs may pin; turns.

What a generated mutant says as well is in `mutants_generated.txt`.
"""

from __future__ import annotations

from typing import Any

from kvbaton.node import doorway
from kvbaton.node.pin_budget import PinBudget
from kvbaton.protocol.effects import Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Discarded
from kvbaton.protocol.geometry.progress import nothing
from kvbaton.protocol.geometry.spans import SpanSide
from kvbaton.protocol.machines import claims, consumer_filling, pairing_target, producer, push_writer
from kvbaton.protocol.machines.context import Cargo, Route, moves, start
from kvbaton.protocol.machines.lease import ReaderState
from kvbaton.protocol.machines.push_writer import OutletState
from kvbaton.protocol.wire import messages as m
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _no_end(original: Any) -> Any:
    def on_begun(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        if event.keep_s and event.lease in self.leases:
            self.desk.timers.clear(("lease", event.lease))

    return on_begun


def _pins_lost(original: Any) -> Any:
    def unpinned(self: Any, key: Any) -> Any:
        kept = key in self._turns
        duties = original(self, key)
        return [] if kept else duties

    return unpinned


def _reader_keeps_the_term(original: Any) -> Any:
    def extend(self: Any, lease: Any, now: float) -> float:
        ttl_s = float(original(self, lease, now))
        if lease.term.is_turn:
            self.desk.timers.set(("lease", lease.id), lease.term.hold_until)
        return ttl_s

    return extend


TURN_MUTANTS: tuple[Mutant, ...] = (
    Mutant("turn_without_end", "9, 34", "a conversation that does not go on keeps its blocks for ever",
           swap(producer.Producer, "on_begun", _no_end)),
    Mutant("turn_pins_lost", "34", "a turn that was taken is never unpinned",
           swap(doorway.Doorway, "_unpinned", _pins_lost)),
    Mutant("turn_reader_keeps_the_term", "9, 34", "a reader that falls silent has the whole turn's term",
           swap(producer.Producer, "extend", _reader_keeps_the_term)),
)  # fmt: skip


def _promises_only(original: Any) -> Any:
    """What is leased is not counted: only prompts that are under way."""
    return lambda self, blocks: self.promised_blocks + blocks <= self.blocks_max or not self.promised_blocks


def _pins_only(original: Any) -> Any:
    """What is promised is not counted: all who come while nothing is leased are let in."""
    return lambda self, blocks: self.pinned_blocks + blocks <= self.blocks_max or not self.pinned_blocks


PIN_MUTANTS: tuple[Mutant, ...] = (
    Mutant("leases_not_counted", "33", "only prompts under way count: a D that reads slowly pins all of P",
           swap(PinBudget, "_fits", _promises_only)),
    Mutant("promises_not_counted", "33", "only leases count: what is admitted at once is pinned at once",
           swap(PinBudget, "_fits", _pins_only)),
)  # fmt: skip


def _is_read(lease: Any) -> bool:
    return any(seat.state is ReaderState.LIVE for seat in lease.seats.values())


def _unpinned_while_read(original: Any) -> Any:
    def on_discarded(self: Any, event: Discarded, now: float) -> None:
        lease = self.by_handoff.get(event.handoff)
        if lease is not None and _is_read(lease):
            self.desk.emit(Unpin(lease.id))
        else:
            original(self, event, now)

    return on_discarded


def _released_twice(original: Any) -> Any:
    def on_discarded(self: Any, event: Discarded, now: float) -> None:
        again = self.ended.get(event.handoff) is Reason.DISCARDED
        original(self, event, now)
        for lease in self.tombstones._items.values() if again else ():
            if lease.handoff == event.handoff:
                self.desk.emit(Unpin(lease.id))

    return on_discarded


def _of(name: str, story: str, make: Any) -> Mutant:
    return Mutant(name, "22", story, swap(producer.Producer, "on_discarded", make))


DISCARD_MUTANTS: tuple[Mutant, ...] = (
    _of("discard_unpins_while_read", "blocks are freed under a copy; the lease lives on", _unpinned_while_read),
    _of("discard_releases_twice", "a doubled word releases what is released", _released_twice),
)  # fmt: skip


def _writes_again_after_written(original: Any) -> Any:
    def repeat(self: Any, key: Any, outlet: Any) -> None:
        original(self, key, outlet)
        if outlet.state is OutletState.FLUSHED:
            held = self._leases.leases.get(outlet.lease)
            if held is None:
                return
            session = self.sessions[key[0]]
            route = Route(session.plan, SpanSide.SOURCE, session.peer, session.transport.name)
            cargo = Cargo(held.blocks, outlet.blocks, held.tokens, outlet.first_token)
            empty = nothing(len(held.blocks))
            start(self.desk, outlet.parts, route, moves(route, cargo, empty, held.progress))

    return repeat


def _fence_skipped(original: Any) -> Any:
    def fence(self: Any, link: Any, now: float) -> None:
        self.lose(link, Reason.PEER_GONE, "believed dead", now)
        self._watcher.on_link_fenced(link, now)

    return fence


def _any_fence_counts(original: Any) -> Any:
    def on_fenced(self: Any, rank: int, peer: Any, now: float) -> None:
        for link in list(self.fencing):
            link.fencing.discard((rank, peer))
            if not link.fencing:
                self.fencing.remove(link)
                self._watcher.on_link_fenced(link, now)

    return on_fenced


def _only_when_all_is_there(original: Any) -> Any:
    def read_on(self: Any, intake: Any, now: float) -> None:
        if intake.source.final:
            original(self, intake, now)

    return read_on


PUSH_MUTANTS: tuple[Mutant, ...] = (
    Mutant("nothing_is_streamed", "30", "D reads when P has computed all, and not before",
           swap(consumer_filling.Pulls, "read_on", _only_when_all_is_there)),
    Mutant("writes_after_written", "14", "P touches the spans again",
           swap(push_writer.Writer, "_repeat", _writes_again_after_written)),
    Mutant("fence_skipped", "14, 16", "silence, or a restart, taken for rest",
           swap(pairing_target.Links, "fence", _fence_skipped)),
    Mutant("any_fence_counts", "14", "found in review: the end of an earlier fence is taken for the later one's",
           swap(pairing_target.Links, "on_fenced", _any_fence_counts)),
)  # fmt: skip


def _commit_from_lease_state(original: Any) -> Any:
    return lambda lease, epoch_of: (lease.final, tuple(len(ids) for ids in lease.blocks))


def _readers_by_message(original: Any) -> Any:
    def on_commit(self: Any, session: Any, message: m.Commit, now: float) -> None:
        original(self, session, message, now)
        counts = self.__dict__.setdefault("_commits", {})
        counts[message.lease] = counts.get(message.lease, 0) + 1
        held = self.leases.get(message.lease)
        if held is not None and counts[message.lease] >= held.max_readers:
            self.close(held, Reason.TICKET_SPENT, now)

    return on_commit


def _shortened_ids(original: Any) -> Any:
    def on_claim(self: Any, session: Any, claim: Any, now: float) -> None:
        leases = self._leases.by_handoff
        close = next((h for h in leases if h[:1] == claim.handoff[:1]), claim.handoff)
        held = leases.get(claim.handoff)
        if close in leases and held is not leases[close]:
            leases[claim.handoff] = leases[close]
            try:
                original(self, session, claim, now)
            finally:
                if held is None:
                    leases.pop(claim.handoff, None)
                else:
                    leases[claim.handoff] = held
        else:
            original(self, session, claim, now)

    return on_claim


def _stale_but_all_good(original: Any) -> Any:
    return lambda lease, epoch_of: (original(lease, epoch_of)[0], tuple(len(ids) for ids in lease.blocks))


SOURCE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("commit_from_lease_state", "6", "a commit answered because the lease once was",
           swap(producer.__dict__, "judge", _commit_from_lease_state)),
    Mutant("readers_by_message", "4, 5", "NIXL: the count comes from the message",
           swap(producer.Producer, "on_commit", _readers_by_message)),
    Mutant("shortened_ids", "1", "NIXL push: matching by a stripped id",
           swap(claims.Claims, "on_claim", _shortened_ids)),
    Mutant("stale_but_all_good", "6", "a stale commit that vouches for every block",
           swap(producer.__dict__, "judge", _stale_but_all_good)),
)  # fmt: skip
