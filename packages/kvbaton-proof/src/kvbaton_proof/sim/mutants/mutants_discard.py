"""Wrong ideas about tickets that the router took back (rule 22): what its word must not do, and must not miss."""

from __future__ import annotations

from typing import Any

from kvbaton.protocol.effects import Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Discarded
from kvbaton.protocol.machines import claims, producer
from kvbaton.protocol.machines.lease import ReaderState
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _is_read(lease: Any) -> bool:
    return any(seat.state is ReaderState.LIVE for seat in lease.seats.values())


def _readers_thrown_out(original: Any) -> Any:
    def on_discarded(self: Any, event: Discarded, now: float) -> None:
        lease = self.by_handoff.get(event.handoff)
        if lease is not None and _is_read(lease):
            self.close(lease, Reason.DISCARDED, now)
        else:
            original(self, event, now)

    return on_discarded


def _unpinned_while_read(original: Any) -> Any:
    def on_discarded(self: Any, event: Discarded, now: float) -> None:
        lease = self.by_handoff.get(event.handoff)
        if lease is not None and _is_read(lease):
            self.desk.emit(Unpin(lease.id))
        else:
            original(self, event, now)

    return on_discarded


def _forgotten_before_the_lease(original: Any) -> Any:
    def on_discarded(self: Any, event: Discarded, now: float) -> None:
        if event.handoff in self.by_handoff:
            original(self, event, now)

    return on_discarded


def _claims_left_parked(original: Any) -> Any:
    return lambda self, handoff, error: None


def _second_place_kept(original: Any) -> Any:
    def on_discarded(self: Any, event: Discarded, now: float) -> None:
        lease = self.by_handoff.get(event.handoff)
        promised = lease.max_readers if lease is not None else 0
        original(self, event, now)
        if lease is not None:
            lease.max_readers = promised

    return on_discarded


def _released_twice(original: Any) -> Any:
    def on_discarded(self: Any, event: Discarded, now: float) -> None:
        again = self.ended.get(event.handoff) is Reason.DISCARDED
        original(self, event, now)
        for lease in self.tombstones._items.values() if again else ():
            if lease.handoff == event.handoff:
                self.desk.emit(Unpin(lease.id))

    return on_discarded


def _remembered_for_ever(original: Any) -> Any:
    def on_discarded(self: Any, event: Discarded, now: float) -> None:
        self.ended.limit += event.handoff not in self.ended
        original(self, event, now)

    return on_discarded


def _of(name: str, story: str, make: Any) -> Mutant:
    return Mutant(name, "22", story, swap(producer.Producer, "on_discarded", make))


DISCARD_MUTANTS: tuple[Mutant, ...] = (
    _of("discard_throws_readers_out", "the router's word beats the reader who holds the lease", _readers_thrown_out),
    _of("discard_unpins_while_read", "blocks are freed under a copy; the lease lives on", _unpinned_while_read),
    _of("discard_before_lease_forgotten", "the word overtakes the lease and is lost", _forgotten_before_the_lease),
    Mutant("discard_leaves_claims_parked", "22", "a claim waits for what never begins",
           swap(claims.Claims, "on_never_begun", _claims_left_parked)),
    _of("discard_keeps_a_second_place", "found here: held for a reader who will not come", _second_place_kept),
    _of("discard_releases_twice", "a doubled word releases what is released", _released_twice),
    _of("discards_remembered_for_ever", "the memory of discards has no bound", _remembered_for_ever),
)  # fmt: skip
