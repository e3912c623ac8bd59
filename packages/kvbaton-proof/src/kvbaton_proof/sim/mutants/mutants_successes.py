"""Wrong ideas that break no answer: handoffs fail, or nothing is brought, for no cause; worlds must not excuse it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.machines import claims, consumer, consumer_filling, ledger, producer
from kvbaton.ranks import engine_store, rank_transport
from kvbaton_proof.sim.mutants.mutation import Mutant, both, swap


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


def _any_reason(original: Any) -> Any:
    return lambda text: Reason.OTHER


def _never_any(what: str) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        def end(self: Any, order: Any, opened: Any) -> None:
            if opened.what == what:
                opened.count = 0
            original(self, order, opened)

        return end

    return make


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


def _short_first_term(original: Any) -> Any:
    def on_begun(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        if event.lease in self.leases:
            self.desk.timers.set(("lease", event.lease), now + self.desk.settings.lease_s / 4)

    return on_begun


def _first_rank_alone(original: Any) -> Any:
    def submit(self: Any, copy: Any) -> bool:
        if self._link.rank and copy.spans:
            return self._jobs.accept(copy) is not None
        return bool(original(self, copy))

    return submit


SUCCESS_MUTANTS: tuple[Mutant, ...] = (
    Mutant("every_other_grant_fails", "17", "every other granted handoff fails for nothing",
           swap(consumer.Consumer, "on_granted", _every_other_fails)),
    Mutant("every_fifth_claim_is_busy", "27", "every fifth claim is refused as if there were no room",
           swap(claims.Claims, "_take_share", _every_fifth_is_busy)),
    Mutant("reasons_forgotten", "17", "whatever P refuses for, D fails for another reason",
           both(*(swap(each.__dict__, "reason_of", _any_reason) for each in (consumer, consumer_filling)))),
    Mutant("no_store_hits", "store", "what lies in the store is found by nobody",
           swap(engine_store.EngineStore, "_end", _never_any("lookup"))),
    Mutant("nothing_brought_from_a_store", "store", "what was found in the store is computed all the same",
           swap(engine_store.EngineStore, "_end", _never_any("get"))),
    Mutant("drain_refuses_what_was_granted", "9", "a prefiller that drains hands nothing over",
           swap(claims.Claims, "on_claim", _refuses_all)),
    Mutant("drain_gives_leases_up", "9", "a prefiller that drains lets go of what it has granted",
           swap(ledger.Ledger, "_on_drain", _gives_up_all)),
    Mutant("short_first_term", "9", "a lease runs out before the term that it was given",
           swap(producer.Producer, "on_begun", _short_first_term)),
    Mutant("first_rank_reads_alone", "20", "of an engine's ranks the first one alone is told to read",
           swap(rank_transport.RemoteTransport, "submit", _first_rank_alone)),
)  # fmt: skip
