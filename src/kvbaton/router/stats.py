"""What the router counts. Names ending in `_total` only rise.

Law: codes come from workers, so a label that is odd, or one too many, is counted as `other`: no series grows for ever.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

LABELS_MAX = 128
_LABEL = re.compile(r"[A-Za-z0-9_.:-]{1,80}")


def count(counter: Counter[str], label: str) -> None:
    """One more of `label`."""
    if label not in counter and (len(counter) >= LABELS_MAX or _LABEL.fullmatch(label) is None):
        label = "other"
    counter[label] += 1


@dataclass(slots=True)
class RouterStats:
    """Counters of one router; `as_numbers` is what `/stats` and `/metrics` show."""

    in_flight: int = 0
    tries: Counter[str] = field(default_factory=Counter)  # of pairs, by mode
    alone: Counter[str] = field(default_factory=Counter)  # tries on D alone, by reason
    ends: Counter[str] = field(default_factory=Counter)  # by outcome: ok, gone, or an error's code
    failures: Counter[str] = field(default_factory=Counter)  # of legs, by side and code
    retries: Counter[str] = field(default_factory=Counter)  # by side
    probes: Counter[str] = field(default_factory=Counter)  # of broken workers, by outcome
    tickets: int = 0
    discards: int = 0  # tickets given up, of which P was told
    dropped: int = 0  # legs broken off because their worker left the list
    first_byte_s: float = 0.0  # summed over those that got one
    first_bytes: int = 0

    def as_numbers(self) -> dict[str, Any]:
        return {
            "in_flight": self.in_flight,
            "tries_total": dict(self.tries),
            "alone_total": dict(self.alone),
            "ends_total": dict(self.ends),
            "leg_failures_total": dict(self.failures),
            "retries_total": dict(self.retries),
            "probes_total": dict(self.probes),
            "tickets_minted_total": self.tickets,
            "tickets_discarded_total": self.discards,
            "legs_dropped_total": self.dropped,
            "first_byte_seconds_sum_total": round(self.first_byte_s, 6),
            "first_byte_count_total": self.first_bytes,
        }
