"""Records of a load as figures: means, percentiles, and objectives that a request meets or not.

Law: a figure that does not exist is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from kvbaton_proof.bench.load.token_stream import Answer

TIMES: Mapping[str, Callable[[Answer], Sequence[float]]] = {
    "ttft": lambda answer: (answer.ttft_s,),
    "tpot": lambda answer: () if answer.tpot_s is None else (answer.tpot_s,),
    "itl": lambda answer: answer.gaps_s,
    "e2e": lambda answer: (answer.e2e_s,),
}
"""The values of each time that one answer has, in seconds."""


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
            if name not in TIMES:
                raise ValueError(f"got {word!r}, expected NAME=SECONDS with a name of {', '.join(TIMES)}")
            try:
                given[name] = float(value)
            except ValueError:
                raise ValueError(f"{name}: got {value!r}, expected seconds") from None
            if not 0 < given[name] < float("inf"):
                raise ValueError(f"{name}: got {value}, expected seconds above 0")
        return cls(**given)

    def met_by(self, answer: Answer) -> bool:
        for name, limit in msgspec.structs.asdict(self).items():
            if limit is not None and max(TIMES[name](answer), default=0.0) > limit:
                return False
        return True

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g} s" for name, value in msgspec.structs.asdict(self).items() if value)


class Figures(msgspec.Struct, frozen=True):
    """A distribution, in milliseconds."""

    count: int
    mean_ms: float
    p50_ms: float
    p90_ms: float
    p99_ms: float
    max_ms: float


def figures(seconds: Sequence[float]) -> Figures | None:
    """None of nothing. Percentiles lie between two values where the share falls between them, as numpy's do."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1e3
    p50, p90, p99 = (float(each) for each in np.percentile(values, [50, 90, 99]))
    return Figures(len(seconds), *(round(x, 3) for x in (float(values.mean()), p50, p90, p99, float(values.max()))))


def times_of(answers: Sequence[Answer], name: str) -> list[float]:
    return [value for answer in answers for value in TIMES[name](answer)]


def quantiles(seconds: Sequence[float]) -> list[float]:
    """The values in milliseconds that 0, 1, 2 … 100 % do not exceed; nothing of nothing."""
    if not seconds:
        return []
    return [round(float(each), 3) for each in np.percentile(np.asarray(seconds) * 1e3, np.arange(101))]
