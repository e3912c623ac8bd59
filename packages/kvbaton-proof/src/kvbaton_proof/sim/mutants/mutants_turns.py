"""Wrong ideas about turns: what D keeps for the next turn of a conversation."""

from __future__ import annotations

from typing import Any

from kvbaton.node import doorway, turn_keeping
from kvbaton.protocol.machines import producer
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _no_share(original: Any) -> Any:
    return property(lambda self: 0)


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


def _not_pressed(original: Any) -> Any:
    return lambda self, free_blocks, needed=0: None


def _remembered(original: Any) -> Any:
    """What was asked for stays when its request is over."""
    return lambda self, request: None


def _never(original: Any) -> Any:
    return lambda self, *arguments: None


def _none(original: Any) -> Any:
    return lambda self, *arguments: ()


TURN_MUTANTS: tuple[Mutant, ...] = (
    Mutant("no_turn_is_taken", "34", "P computes what the D of the turn before has kept for it",
           swap(turn_keeping.TurnTaker, "ask", _never)),
    Mutant("no_turn_is_kept", "34", "D keeps nothing, although there is room",
           swap(turn_keeping.TurnKeeper, "keep", _none)),
    Mutant("turns_without_share", "34", "what is kept for next turns fills the cache",
           swap(turn_keeping.TurnKeeper, "blocks", _no_share)),
    Mutant("turn_without_end", "9, 34", "a conversation that does not go on keeps its blocks for ever",
           swap(producer.Producer, "on_begun", _no_end)),
    Mutant("turn_pins_lost", "34", "a turn that was taken is never unpinned",
           swap(doorway.Doorway, "_unpinned", _pins_lost)),
    Mutant("turn_reader_keeps_the_term", "9, 34", "a reader that falls silent has the whole turn's term",
           swap(producer.Producer, "extend", _reader_keeps_the_term)),
    Mutant("turns_before_requests", "34", "requests wait for blocks that turns keep",
           swap(turn_keeping.TurnKeeper, "press", _not_pressed)),
    Mutant("turn_asked_for_ever", "34", "P remembers what it asked for when the request is over",
           swap(turn_keeping.TurnTaker, "forget", _remembered)),
)  # fmt: skip
