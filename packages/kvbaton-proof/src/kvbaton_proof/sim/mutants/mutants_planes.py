"""Wrong ideas about data planes that cannot be opened (rule 23)."""

from __future__ import annotations

from typing import Any

from kvbaton.protocol.machines import pairing_target
from kvbaton.protocol.machines.pairing_state import Shunned
from kvbaton_proof.sim.mutants.mutation import Mutant, swap


def _forgets(original: Any) -> Any:
    return lambda self, worker, transport, now: None


def _trusts(original: Any) -> Any:
    return lambda self, link, ranks, now: None


def _does_not_say(original: Any) -> Any:
    def without(self: Any, worker: Any, transports: Any, now: float) -> tuple[str, ...]:
        return tuple(transports)

    return without


PLANE_MUTANTS: tuple[Mutant, ...] = (
    Mutant("plane_not_remembered", "23", "the same shut plane is greeted for again and again",
           swap(Shunned, "add", _forgets)),
    Mutant("plane_not_probed", "23", "the first handoffs find out that the plane is shut",
           swap(pairing_target.Links, "_probe", _trusts)),
    Mutant("plane_still_offered", "23", "the plane that failed stays on the card, and P takes it again",
           swap(Shunned, "without", _does_not_say)),
)  # fmt: skip
