"""Wrong ideas about P: its leases, its claims, its commits and its store."""

from __future__ import annotations

from typing import Any

from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.geometry.progress import complete
from kvbaton.protocol.machines import claims, lease, pairing_state, producer, push_writer, puts
from kvbaton.protocol.wire import messages as m
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _commit_from_lease_state(original: Any) -> Any:
    return lambda lease, epoch_of: (lease.final, tuple(len(ids) for ids in lease.blocks))


def _final_without_completion(original: Any) -> Any:
    return property(lambda self: complete(self.progress, [len(ids) for ids in self.blocks]))


def _readers_by_message(original: Any) -> Any:
    def on_commit(self: Any, session: Any, message: m.Commit, now: float) -> None:
        original(self, session, message, now)
        counts = self.__dict__.setdefault("_commits", {})
        counts[message.lease] = counts.get(message.lease, 0) + 1
        held = self.leases.get(message.lease)
        if held is not None and counts[message.lease] >= held.max_readers:
            self.close(held, Reason.TICKET_SPENT, now)

    return on_commit


def _no_deadline_for_deferred(original: Any) -> Any:
    def on_begun(self: Any, event: Any, now: float) -> None:
        original(self, event, now)
        if event.deferred and event.lease in self.leases:
            self.desk.timers.clear(("lease", event.lease))

    return on_begun


def _claim_before_request_dropped(original: Any) -> Any:
    def park(self: Any, reader: Any, session: Any, claim: Any, ticket: Any, now: float) -> None:
        raise ProtocolError(Reason.UNKNOWN_LEASE, "not here")

    return park


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


def _hold_without_limit(original: Any) -> Any:
    def extend(self: Any, lease: Any, now: float) -> float:
        self.desk.timers.set(("lease", lease.id), now + self.desk.settings.lease_s)
        return float(self.desk.settings.lease_s)

    return extend


def _failed_store_keeps_pin(original: Any) -> Any:
    def on_ended(self: Any, event: ev.StoreEnded, now: float) -> None:
        if event.reason is None:
            original(self, event, now)
        else:
            self.states.pop(event.put, None)
            self.desk.timers.clear(("put", event.put))

    return on_ended


def _released_while_writing(original: Any) -> Any:
    return lambda self, lease: True


def _slowest_is_first(original: Any) -> Any:
    return lambda ranks: ranks[0]


def _old_sessions_live_on(original: Any) -> Any:
    return lambda self, session, now: []


def _stale_but_all_good(original: Any) -> Any:
    return lambda lease, epoch_of: (original(lease, epoch_of)[0], tuple(len(ids) for ids in lease.blocks))


def _parked_and_forgotten(original: Any) -> Any:
    def leave(self: Any, reader: Any, reason: str) -> None:
        if reader in self.parked:
            self._drop(reader)

    return leave


def _over_is_expired(original: Any) -> Any:
    def why_over(self: Any, id: Any, reader: Any) -> Reason:
        return Reason.LEASE_EXPIRED if id in self.tombstones else Reason.UNKNOWN_LEASE

    return why_over


SOURCE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("commit_from_lease_state", "6", "a commit answered because the lease once was",
           swap(producer.__dict__, "judge", _commit_from_lease_state)),
    Mutant("final_without_completion", "6, 10", "a commit before the final Ready",
           swap(lease.Lease, "final", _final_without_completion)),
    Mutant("readers_by_message", "4, 5", "NIXL: the count comes from the message",
           swap(producer.Producer, "on_commit", _readers_by_message)),
    Mutant("deferred_without_deadline", "9", "seed 000: a deferred write waits for ever",
           swap(producer.Producer, "on_begun", _no_deadline_for_deferred)),
    Mutant("released_while_writing", "17", "seed 000: unmapped before the send has finished",
           swap(push_writer.Writer, "at_rest", _released_while_writing)),
    Mutant("claim_before_request_dropped", "9, 12", "seed 000: what comes before its request is lost",
           swap(claims.Claims, "_park", _claim_before_request_dropped)),
    Mutant("failed_store_keeps_pin", "store", "seed 003: a failed store keeps its pin",
           swap(puts.Puts, "on_ended", _failed_store_keeps_pin)),
    Mutant("old_sessions_live_on", "3", "everything held for the old life is kept",
           swap(pairing_state.Sessions, "_end_earlier", _old_sessions_live_on)),
    Mutant("shortened_ids", "1", "NIXL push: matching by a stripped id",
           swap(claims.Claims, "on_claim", _shortened_ids)),
    Mutant("hold_without_limit", "9", "renewals pass max_hold",
           swap(producer.Producer, "extend", _hold_without_limit)),
    Mutant("ready_on_first_rank", "10", "one rank speaks for all",
           swap(lease.__dict__, "slowest", _slowest_is_first)),
    Mutant("parked_and_forgotten", "12", "P holds blocks for a D that left while its claim waited",
           swap(claims.Claims, "leave", _parked_and_forgotten)),
    Mutant("over_is_expired", "17", "whatever ended a lease, its reader hears that it has expired",
           swap(producer.Producer, "why_over", _over_is_expired)),
    Mutant("stale_but_all_good", "6", "a stale commit that vouches for every block",
           swap(producer.__dict__, "judge", _stale_but_all_good)),
)  # fmt: skip
