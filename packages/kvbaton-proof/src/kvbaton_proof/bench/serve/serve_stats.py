"""Times under load as figures: means, percentiles, and objectives that a request meets or not.

Laws: memory is bounded whatever comes: what cannot all be kept is sampled evenly (`Reservoir`), and is exact until
then. A figure that does not exist is None, never 0.
"""

from __future__ import annotations

import random
from array import array

import msgspec
import numpy as np

from kvbaton_proof.bench.serve.serve_stream import Told

KEPT_MAX = 1 << 17  # more than there are requests in a part, so only gaps between tokens are ever sampled there
SLO_FIELDS = ("ttft", "tpot", "itl", "e2e")


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds that a request may take to count as good: to its first token, for each further one on the mean, for
    the longest gap between two, and altogether.
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=0.5,itl=0.05`. ValueError says what is wrong."""
        given: dict[str, float] = {}
        for word in text.split(","):
            name, _, value = word.strip().partition("=")
            if name not in SLO_FIELDS:
                raise ValueError(f"got {word!r}, expected NAME=SECONDS with a name of {', '.join(SLO_FIELDS)}")
            try:
                given[name] = float(value)
            except ValueError:
                raise ValueError(f"{name}: got {value!r}, expected seconds") from None
            if not 0 < given[name] < float("inf"):
                raise ValueError(f"{name}: got {value}, expected seconds above 0")
        return cls(**given)

    def met_by(self, told: Told) -> bool:
        found = {"ttft": told.ttft_s, "tpot": told.tpot_s, "itl": max(told.gaps_s, default=None), "e2e": told.e2e_s}
        for name, value in found.items():
            limit = getattr(self, name)
            if limit is not None and value is not None and value > limit:
                return False
        return True

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g} s" for name, value in msgspec.structs.asdict(self).items() if value)


class Reservoir:
    """Numbers, all of them until there are too many, and then an even sample of all that came."""

    __slots__ = ("_rng", "_size", "count", "kept")

    def __init__(self, size: int = KEPT_MAX, seed: int = 0) -> None:
        self.kept = array("d")
        self.count = 0
        self._size = size
        self._rng = random.Random(seed)

    def add(self, value: float) -> None:
        self.count += 1
        if len(self.kept) < self._size:
            self.kept.append(value)
        elif (at := self._rng.randrange(self.count)) < self._size:
            self.kept[at] = value


class Figures(msgspec.Struct, frozen=True):
    """A distribution, in milliseconds."""

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


def figures(reservoir: Reservoir) -> Figures | None:
    """None of nothing. Percentiles lie between two values where the share falls between them, as numpy's do."""
    if not reservoir.kept:
        return None
    values = np.asarray(reservoir.kept) * 1e3
    p50, p90, p99 = (float(each) for each in np.percentile(values, [50, 90, 99]))
    return Figures(reservoir.count, *(round(x, 3) for x in (float(values.mean()), p50, p90, p99, float(values.max()))))


def quantiles(reservoir: Reservoir) -> list[float]:
    """The values in milliseconds that 0, 1, 2 … 100 % do not exceed; nothing of nothing."""
    if not reservoir.kept:
        return []
    return [round(float(each), 3) for each in np.percentile(np.asarray(reservoir.kept) * 1e3, np.arange(101))]
