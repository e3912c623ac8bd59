"""What a worker holds for others, in numbers and in the words that an operator reads."""

from __future__ import annotations

import msgspec

from kvbaton.control.registry.registry_messages import NOTHING


class HeldReport(msgspec.Struct, frozen=True):
    """What a worker still does or keeps for others."""

    requests: int = 0
    leases: int = 0
    intakes: int = 0
    claims: int = 0  # that wait for a prompt to begin

    @property
    def nothing(self) -> bool:
        return not any(msgspec.structs.astuple(self))

    def __str__(self) -> str:
        counts = msgspec.structs.asdict(self).items()
        return ", ".join(f"{n} {name if n > 1 else name[:-1]}" for name, n in counts if n) or NOTHING
