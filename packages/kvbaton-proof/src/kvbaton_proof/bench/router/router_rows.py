"""The figures of `kvbaton bench router`: a row per round, target and level; medians, ratios, bounds and the verdict.

Laws: pure. What is added is held against the same load straight to D in the same round. Latencies and rates are medians
over the quieter half of the rounds, by what others did to the machine meanwhile; CPU time is over all of them. What was
not measured is None and meets no bound.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from kvbaton_proof.bench.kit.lab_pages import Check, check

DIRECT, KVBATON, NIXL, MORIIO, TOY = "direct", "kvbaton", "vllm-router-nixl", "vllm-router-moriio", "toy"
KVBATON_2 = "kvbaton-2"
"""The same with `--processes 2`."""
OURS = (KVBATON, KVBATON_2)
TARGETS = (DIRECT, KVBATON, KVBATON_2, NIXL, MORIIO, TOY)
"""In the order in which they are measured in the first round."""
THEIRS = (NIXL, MORIIO)
CPU_US_MAX, CPU_US_AIM = 800.0, 400.0
ADDED_MS_MAX, ADDED_MS_AIM = 1.0, 0.5
RATE_LEAST = 1.0
"""Of `KVBATON_2` at `RATE_LEVEL` requests at once, in parts of vllm-router's faster mode in the same run."""
RATE_LEVEL = 512
MORE_CPU_MOST = 1.1
"""Of `KVBATON_2` there, in parts of the CPU a request of one process."""
CPU_LEVELS = (1, 64)
"""Whose CPU figures the bound is about."""


class Level(msgspec.Struct, frozen=True, order=True):
    """A load: requests at once, or streams."""

    stream: bool
    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} streams" if self.stream else str(self.concurrency)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One target under one load in one round."""

    round: int
    target: str
    level: Level
    answered: int  # in the window
    asked: int  # with warm-up and what was under way at the end
    errors: Mapping[str, int] = {}
    seconds: float = 0.0
    p50_ms: float | None = None
    p99_ms: float | None = None
    first_byte_p50_ms: float | None = None
    router_cpu_s: float | None = None
    backends_cpu_s: float | None = None
    client_cpu_s: float | None = None
    others_cores: float | None = None
    handed_over: int | None = None  # requests that reached D with P's ticket, of those asked

    @property
    def req_per_s(self) -> float | None:
        return self.answered / self.seconds if self.seconds and self.answered else None

    @property
    def cpu_us(self) -> float | None:
        """Of the router, for one request."""
        return self._each(self.router_cpu_s)

    @property
    def backends_cpu_us(self) -> float | None:
        return self._each(self.backends_cpu_s)

    @property
    def client_cpu_us(self) -> float | None:
        return self._each(self.client_cpu_s)

    @property
    def error_count(self) -> int:
        return sum(self.errors.values())

    def _each(self, seconds: float | None) -> float | None:
        return None if seconds is None or not self.answered else seconds / self.answered * 1e6


class Streams(msgspec.Struct, frozen=True, kw_only=True):
    """Streams that were to be open all at once, and to end in full."""

    round: int
    target: str
    asked: int
    open_at_once: int
    complete: int
    errors: Mapping[str, int] = {}

    @property
    def is_whole(self) -> bool:
        return self.open_at_once == self.complete == self.asked and not self.errors


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """One target at one level: medians."""

    concurrency: int
    stream: bool
    requests: int  # all that were asked
    errors: int
    req_per_s: float | None
    p50_ms: float | None
    p99_ms: float | None
    first_byte_p50_ms: float | None
    added_p50_ms: float | None
    added_p99_ms: float | None
    cpu_us: float | None
    backends_cpu_us: float | None
    client_cpu_us: float | None
    others_cores: float | None


def percentile(values: Sequence[float], share: float, scale: float = 1.0) -> float | None:
    """The smallest value that at least this share of all do not exceed, times `scale`."""
    if not values:
        return None
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] * scale


def median(rows: Iterable[Row], value: Callable[[Row], float | None]) -> float | None:
    known = [found for row in rows if (found := value(row)) is not None]
    return statistics.median(known) if known else None


def quiet(rows: Sequence[Row]) -> list[Row]:
    """The quieter half."""
    return sorted(rows, key=lambda row: row.others_cores or 0.0)[: -(-len(rows) // 2)]


def levels(rows: Iterable[Row]) -> list[Level]:
    return sorted({row.level for row in rows})


def of(rows: Iterable[Row], target: str, level: Level) -> list[Row]:
    return [row for row in rows if row.target == target and row.level == level]


def added(rows: Sequence[Row], row: Row, value: Callable[[Row], float | None]) -> float | None:
    """What this row has more than the same load straight to D in the same round."""
    base = [each for each in of(rows, DIRECT, row.level) if each.round == row.round]
    own, direct = value(row), median(base, value)
    return None if own is None or direct is None or row.target == DIRECT else own - direct


def summary(rows: Sequence[Row], target: str, level: Level) -> Summary | None:
    mine = of(rows, target, level)
    if not mine:
        return None
    used: dict[str, Callable[[Row], float | None]] = {
        "cpu_us": lambda row: row.cpu_us, "backends_cpu_us": lambda row: row.backends_cpu_us,
        "client_cpu_us": lambda row: row.client_cpu_us,
    }  # fmt: skip
    timed: dict[str, Callable[[Row], float | None]] = {
        "req_per_s": lambda row: row.req_per_s, "p50_ms": lambda row: row.p50_ms, "p99_ms": lambda row: row.p99_ms,
        "first_byte_p50_ms": lambda row: row.first_byte_p50_ms, "others_cores": lambda row: row.others_cores,
        "added_p50_ms": lambda row: added(rows, row, lambda each: each.p50_ms),
        "added_p99_ms": lambda row: added(rows, row, lambda each: each.p99_ms),
    }  # fmt: skip
    return Summary(
        concurrency=level.concurrency,
        stream=level.stream,
        requests=sum(row.asked for row in mine),
        errors=sum(row.error_count for row in mine),
        **{name: _rounded(median(mine, value)) for name, value in used.items()},
        **{name: _rounded(median(quiet(mine), value)) for name, value in timed.items()},
    )


def summaries(rows: Sequence[Row], target: str) -> dict[str, Summary]:
    found = {str(level): summary(rows, target, level) for level in levels(rows)}
    return {level: each for level, each in found.items() if each is not None}


def cpu_us(rows: Sequence[Row], target: str) -> float | None:
    """The one figure for what a request costs: the median over the levels 1 and 64."""
    each = [median(of(rows, target, Level(False, count)), lambda row: row.cpu_us) for count in CPU_LEVELS]
    known = [value for value in each if value is not None]
    return _rounded(statistics.median(known)) if known else None


def ratios(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float | None]]]:
    """A figure of ours divided by another's at the same level, by target (of one process) or pair, and by figure."""
    found = {}
    pairs = [(KVBATON_2, KVBATON), *((our, their) for their in (*THEIRS, TOY) for our in OURS)]
    for our, their in pairs:
        ours, theirs = summaries(rows, our), summaries(rows, their)
        shared = [level for level in ours if level in theirs]
        if not shared:
            continue
        found[their if our == KVBATON else f"{our} / {their}"] = {
            name: {level: _divided(getattr(ours[level], name), getattr(theirs[level], name)) for level in shared}
            for name in ("cpu_us", "added_p50_ms", "req_per_s")
        }
    return found


def bounds(rows: Sequence[Row], streams: Sequence[Streams]) -> list[Check]:
    """What kvbaton's router has to meet."""
    alone = summary(rows, KVBATON, Level(False, 1))
    added_ms = None if alone is None else alone.added_p50_ms
    mine = [each for each in streams if each.target == KVBATON]
    whole = sum(each.asked for each in mine if each.is_whole) if mine else None
    return [
        check("CPU µs a request, 1 and 64 at once", cpu_us(rows, KVBATON), "<=", CPU_US_MAX, aim=CPU_US_AIM),
        check("ms added to p50, one at once", added_ms, "<=", ADDED_MS_MAX, aim=ADDED_MS_AIM),
        check("streams open at once that ended in full", whole, ">=", sum(each.asked for each in mine)),
        *_bounds_of_two(rows),
    ]


def _bounds_of_two(rows: Sequence[Row]) -> list[Check]:
    """Of two processes beside one, and beside vllm-router; none where they were not measured together."""
    level = Level(False, RATE_LEVEL)
    two, one = summary(rows, KVBATON_2, level), summary(rows, KVBATON, level)
    theirs = [each.req_per_s for name in THEIRS if (each := summary(rows, name, level)) is not None and each.req_per_s]
    found = []
    if two is not None and theirs:
        what = f"req/s of two processes, in parts of vllm-router's best, {RATE_LEVEL} at once"
        found.append(check(what, _divided(two.req_per_s, max(theirs)), ">=", RATE_LEAST))
    if two is not None and one is not None:
        what = f"CPU a request of two processes, in parts of one's, {RATE_LEVEL} at once"
        found.append(check(what, _divided(two.cpu_us, one.cpu_us), "<=", MORE_CPU_MOST))
    return found


def complaints(rows: Sequence[Row], streams: Sequence[Streams]) -> list[str]:
    """What went wrong, a line each."""
    said = []
    for row in rows:
        where = f"{row.target}, {row.level} at once, round {row.round}"
        if row.errors:
            kinds = ", ".join(f"{count} {why}" for why, count in sorted(row.errors.items()))
            said.append(f"{where}: {row.error_count} of {row.asked} requests failed ({kinds})")
        if not row.answered:
            said.append(f"{where}: nothing was answered in the window")
        if row.handed_over is not None and row.handed_over < row.asked - row.error_count:
            said.append(f"{where}: only {row.handed_over} of {row.asked} requests reached D with P's ticket")
    for each in streams:
        if not each.is_whole:
            kinds = "".join(f", {count} {why}" for why, count in sorted(each.errors.items()))
            said.append(
                f"{each.target}, round {each.round}: of {each.asked} streams {each.open_at_once} were open at once and "
                f"{each.complete} ended in full{kinds}"
            )
    return said


def _divided(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or theirs is None or theirs <= 0 else round(ours / theirs, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
