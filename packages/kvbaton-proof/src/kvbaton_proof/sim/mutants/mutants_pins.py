"""Wrong ideas about how much of P's cache handoffs may pin."""

from __future__ import annotations

from typing import Any

from kvbaton.node.pin_budget import PinBudget
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _always_room(original: Any) -> Any:
    return lambda self, blocks: True


def _promises_only(original: Any) -> Any:
    """What is leased is not counted: only prompts that are under way."""
    return lambda self, blocks: self.promised_blocks + blocks <= self.blocks_max or not self.promised_blocks


def _pins_only(original: Any) -> Any:
    """What is promised is not counted: all who come while nothing is leased are let in."""
    return lambda self, blocks: self.pinned_blocks + blocks <= self.blocks_max or not self.pinned_blocks


def _patient(original: Any) -> Any:
    return lambda self, now: None


def _keeps_room(original: Any) -> Any:
    def left(self: Any, request: Any) -> None:
        self._waiting.pop(request, None)
        self._refused.discard(request)

    return left


def _leases_remembered(original: Any) -> Any:
    def unpin(self: Any, lease: Any, blocks: Any) -> None:
        of = self._of.get(lease)
        original(self, lease, blocks)
        self._of[lease] = of

    return unpin


def _asked_anew(original: Any) -> Any:
    """Every question is the first: its deadline begins anew."""

    def ask(self: Any, request: Any, blocks: int, now: float, *holder: Any) -> Any:
        if request in self._waiting:
            self._waiting[request] = blocks, now + self.wait_s
        return original(self, request, blocks, now, *holder)

    return ask


PIN_MUTANTS: tuple[Mutant, ...] = (
    Mutant("pins_without_a_limit", "33", "P pins whatever is computed, until it has no block to compute with",
           swap(PinBudget, "_fits", _always_room)),
    Mutant("leases_not_counted", "33", "only prompts under way count: a D that reads slowly pins all of P",
           swap(PinBudget, "_fits", _promises_only)),
    Mutant("promises_not_counted", "33", "only leases count: what is admitted at once is pinned at once",
           swap(PinBudget, "_fits", _pins_only)),
    Mutant("waits_without_a_deadline", "33", "a prompt waits for room for as long as there is none",
           swap(PinBudget, "_expire", _patient)),
    Mutant("room_kept_for_the_gone", "33", "an aborted request keeps the room that it was promised",
           swap(PinBudget, "left", _keeps_room)),
    Mutant("deadline_begun_anew", "9, 33", "who asks again for room begins a new wait",
           swap(PinBudget, "ask", _asked_anew)),
    Mutant("leases_remembered", "33", "the budget remembers leases that are over",
           swap(PinBudget, "unpin", _leases_remembered)),
)  # fmt: skip
