"""What the router counts. Names ending in `_total` only rise; labels come from closed lists."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class RouterStats:
    """Counters of one router; `as_numbers` is what `/stats` and `/metrics` show."""

    in_flight: int = 0
    tries: Counter[str] = field(default_factory=Counter)  # of pairs, by mode
    ends: Counter[str] = field(default_factory=Counter)  # by outcome: ok, gone, or an error's code
    failures: Counter[str] = field(default_factory=Counter)  # of legs, by side and code
    retries: Counter[str] = field(default_factory=Counter)  # by side
    tickets: int = 0
    first_byte_s: float = 0.0  # summed over those that got one
    first_bytes: int = 0

    def as_numbers(self) -> dict[str, Any]:
        return {
            "in_flight": self.in_flight,
            "tries_total": dict(self.tries),
            "ends_total": dict(self.ends),
            "leg_failures_total": dict(self.failures),
            "retries_total": dict(self.retries),
            "tickets_minted_total": self.tickets,
            "first_byte_seconds_sum_total": round(self.first_byte_s, 6),
            "first_byte_count_total": self.first_bytes,
        }
