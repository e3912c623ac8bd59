"""One target's turn in a run of `kvbaton bench serve`, and all its turns together: counts, times, what it used.

Laws: pure. Every request that was sent is right, an error by name, or was under way when the run was stopped. What
cannot be known is None, never 0.

Records of a load as figures: means, percentiles, and objectives that a request meets or not.

Law: a figure that does not exist is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import msgspec
import numpy as np

from kvbaton_proof.bench.load.open_loop import Answer, Record

TIMES: Mapping[str, Callable[[Answer], Sequence[float]]] = {
    "ttft": lambda answer: (answer.ttft_s,),
    "tpot": lambda answer: () if answer.tpot_s is None else (answer.tpot_s,),
    "itl": lambda answer: answer.gaps_s,
    "e2e": lambda answer: (answer.e2e_s,),
}
"""The values of each time that one answer has, in seconds."""


_UNITS = (("ms", 1e-3), ("s", 1.0), ("", 1.0))


class Slo(msgspec.Struct, frozen=True, omit_defaults=True):
    """Seconds that a request may take to count as good: to its first token, for each further one on the mean, for
    the longest gap between two, for 99 % of its gaps, and altogether.
    """

    ttft: float | None = None
    tpot: float | None = None
    itl: float | None = None
    itl_p99: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=0.5,itl=50ms`: seconds, or with a unit. ValueError says what is wrong."""
        given: dict[str, float] = {}
        for word in text.split(","):
            name, _, value = word.strip().partition("=")
            if name not in cls.__struct_fields__:
                known = ", ".join(cls.__struct_fields__)
                raise ValueError(f"got {word!r}, expected NAME=SECONDS with a name of {known}")
            unit, factor = next(each for each in _UNITS if value.endswith(each[0]))
            try:
                given[name] = float(value.removesuffix(unit)) * factor
            except ValueError:
                raise ValueError(f"{name}: got {value!r}, expected seconds, such as 0.5, 2s or 25ms") from None
            if not 0 < given[name] < float("inf"):
                raise ValueError(f"{name}: got {value}, expected seconds above 0")
        return cls(**given)

    def met_by(self, answer: Answer) -> bool:
        limits = msgspec.structs.asdict(self).items()
        return all(limit is None or _limited(name, answer) <= limit for name, limit in limits)

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g} s" for name, value in msgspec.structs.asdict(self).items() if value)


def _limited(name: str, answer: Answer) -> float:
    """What an objective is about, of one request."""
    if name == "itl_p99":
        return float(np.percentile(answer.gaps_s, 99)) if answer.gaps_s else 0.0
    return max(TIMES[name](answer), default=0.0)


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


ERROR_KINDS_MAX = 32
Number = TypeVar("Number", int, float)


class Used(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of the engines beside the answers; None where it cannot be known."""

    handed_over: int | None = None  # requests whose KV a D took from a P
    engine_cpu_s: float | None = None
    router_cpu_s: float | None = None
    others_cores: float | None = None  # what everybody else on this machine used meanwhile
    held: tuple[str, ...] = ()  # engines that still held blocks afterwards


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One target's turn in one round (0: all rounds together)."""

    round: int
    target: str
    planned: int | None  # None: as many as the time allowed
    sent: int
    right: int
    errors: Mapping[str, int]
    unfinished: int  # under way when the run was stopped
    seconds: float
    requests_per_s: float | None
    output_tokens_per_s: float | None
    input_tokens_per_s: float | None
    good: int | None  # within the objectives; None without any
    goodput_per_s: float | None
    ttft: Figures | None
    tpot: Figures | None
    itl: Figures | None
    e2e: Figures | None
    together: float | None  # share of further tokens that came in one read with the one before
    held_back_p99_ms: float | None
    same_answers: int | None  # as the first target's in the same round
    compared_answers: int | None
    used: Used = Used()

    @property
    def failed(self) -> int:
        return self.sent - self.right - self.unfinished


class Turn(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured of a part, before any figure is made of it."""

    round: int
    target: str
    records: Sequence[Record]
    seconds: float
    planned: int | None
    is_timed: bool  # requests had a time at which they were due
    used: Used = Used()


def part_of(turn: Turn, slo: Slo | None, first: Turn | None = None) -> Part:
    """The figures of one part; `first` is the one whose answers are compared."""
    compared: tuple[int, int] | None = None
    if first is not None:
        mine, theirs = _digests(turn), _digests(first)
        shared = mine.keys() & theirs.keys()
        compared = sum(mine[index] == theirs[index] for index in shared), len(shared)
    return _part(turn, slo, compared)


def together(turns: Sequence[Turn], parts: Sequence[Part], slo: Slo | None) -> Part:
    """All rounds of one target."""
    known = [(each.same_answers, each.compared_answers) for each in parts if each.same_answers is not None]
    compared = (sum(same for same, _ in known), sum(count or 0 for _, count in known)) if known else None
    used = Used(
        handed_over=_sum([each.used.handed_over for each in parts]),
        engine_cpu_s=_sum([each.used.engine_cpu_s for each in parts]),
        router_cpu_s=_sum([each.used.router_cpu_s for each in parts]),
        others_cores=_mean([each.used.others_cores for each in parts]),
        held=tuple(line for each in parts for line in each.used.held),
    )
    whole = Turn(
        round=0, target=turns[0].target, records=[record for each in turns for record in each.records],
        seconds=sum(each.seconds for each in turns), planned=_sum([each.planned for each in turns]),
        is_timed=turns[0].is_timed, used=used,
    )  # fmt: skip
    return _part(whole, slo, compared)


def _part(turn: Turn, slo: Slo | None, compared: tuple[int, int] | None) -> Part:
    right = [(each.ask, each.answer) for each in turn.records if each.answer is not None]
    answers = [answer for _, answer in right]
    errors = Counter(each.error for each in turn.records if each.error)
    gaps = times_of(answers, "itl")
    good = None if slo is None else sum(map(slo.met_by, answers))
    held_back = figures([max(0.0, each.sent_s - each.ask.due_s) for each in turn.records if turn.is_timed])
    return Part(
        round=turn.round, target=turn.target, planned=turn.planned, sent=len(turn.records), right=len(right),
        errors=_few(errors), unfinished=len(turn.records) - len(right) - errors.total(), seconds=round(turn.seconds, 3),
        requests_per_s=_rate(len(right), turn.seconds),
        input_tokens_per_s=_rate(sum(ask.input_tokens for ask, _ in right), turn.seconds),
        output_tokens_per_s=_rate(sum(answer.tokens for answer in answers), turn.seconds), good=good,
        goodput_per_s=None if good is None or not turn.seconds else round(good / turn.seconds, 3),
        together=None if not gaps else round(gaps.count(0.0) / len(gaps), 3),
        held_back_p99_ms=None if held_back is None else held_back.p99_ms,
        same_answers=None if compared is None else compared[0],
        compared_answers=None if compared is None else compared[1], used=turn.used,
        **{name: figures(times_of(answers, name)) for name in TIMES},
    )  # fmt: skip


def _digests(turn: Turn) -> dict[int, bytes]:
    return {each.ask.index: each.answer.digest for each in turn.records if each.answer is not None}


def _few(errors: Counter[str]) -> dict[str, int]:
    """The most frequent kinds, in the order of their names."""
    named = dict(errors.most_common(ERROR_KINDS_MAX))
    others = errors.total() - sum(named.values())
    return dict(sorted(named.items())) | ({"other errors": others} if others else {})


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if count and seconds else None


def _sum(values: Sequence[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
