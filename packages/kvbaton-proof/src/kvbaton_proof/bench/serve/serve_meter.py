"""Results of a load: counts and times of one part of a run, and of all parts of a target together.

Laws: every request that was sent is right, an error by name, or was under way when the run was stopped. What cannot be
known is None, never 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from kvbaton_proof.bench.serve.serve_stats import Figures, Reservoir, Slo, figures
from kvbaton_proof.bench.serve.serve_stream import Told

ERRORS_IN_A_ROW_MAX = 200
ERROR_KINDS_MAX = 32
TIMES = ("ttft", "tpot", "itl", "e2e")
_SUMMED = ("sent", "right", "good", "unfinished", "seconds")


@dataclass(slots=True)
class Tokens:
    """Of right answers."""

    input: int = 0
    output: int = 0
    gaps: int = 0
    gaps_of_none: int = 0  # tokens that came in one read with the one before


class Meter:
    """Counts one part, or, by `add`, all parts of a target."""

    def __init__(self, slo: Slo | None = None, seed: int = 0) -> None:
        self.times = {name: Reservoir(seed=seed) for name in TIMES}
        self.held_back = Reservoir(seed=seed)  # from when a request was due until it was sent
        self.sent = self.right = self.good = self.unfinished = 0
        self.tokens = Tokens()
        self.errors: Counter[str] = Counter()
        self.digests: dict[int, bytes] = {}  # of answers, by index
        self.planned: int | None = None  # None: as many as the time allows
        self.seconds = 0.0  # from the first that was sent to the last that ended
        self._slo = slo
        self._failed_in_a_row = 0

    @property
    def is_hopeless(self) -> bool:
        return self._failed_in_a_row >= ERRORS_IN_A_ROW_MAX

    def answered(self, index: int, input_tokens: int, told: Told) -> None:
        self.right += 1
        self._failed_in_a_row = 0
        self.good += self._slo is None or self._slo.met_by(told)
        self.tokens.input += input_tokens
        self.tokens.output += told.tokens
        self.digests[index] = told.digest
        self.times["ttft"].add(told.ttft_s)
        self.times["e2e"].add(told.e2e_s)
        if told.tpot_s is not None:
            self.times["tpot"].add(told.tpot_s)
        for gap in told.gaps_s:
            self.times["itl"].add(gap)
        self.tokens.gaps += len(told.gaps_s)
        self.tokens.gaps_of_none += told.gaps_s.count(0.0)

    def failed(self, why: str) -> None:
        self._failed_in_a_row += 1
        self.errors[why if why in self.errors or len(self.errors) < ERROR_KINDS_MAX else "other errors"] += 1

    def add(self, other: Meter) -> None:
        """Another part of the same plan: as many values of it count, however many it had."""
        pairs = [(reservoir, self.times[name]) for name, reservoir in other.times.items()]
        for source, target in [*pairs, (other.held_back, self.held_back)]:
            for value in source.kept:
                target.add(value)
        for mine, theirs, names in ((self, other, _SUMMED), (self.tokens, other.tokens, Tokens.__slots__)):
            for name in names:
                setattr(mine, name, getattr(mine, name) + getattr(theirs, name))
        if other.planned is not None:
            self.planned = (self.planned or 0) + other.planned
        self.errors.update(other.errors)

    def close(self) -> None:
        """Whatever has not ended by now does not end any more."""
        self.unfinished = self.sent - self.right - self.errors.total()

    def same_as(self, other: Meter) -> tuple[int, int]:
        """Answers that are the other's, of those that both have."""
        shared = self.digests.keys() & other.digests.keys()
        return sum(self.digests[index] == other.digests[index] for index in shared), len(shared)


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


def part(number: int, target: str, meter: Meter, slo: Slo | None, used: Used, first: Meter | None) -> Part:
    """The figures of a meter; `first` is the one whose answers are compared."""
    same, compared = (None, None) if first is None else meter.same_as(first)
    return _part(number, target, meter, slo, used, same, compared)


def together(parts: Sequence[Part], meter: Meter, slo: Slo | None) -> Part:
    """All rounds of one target; `meter` holds their times."""
    same = [each.same_answers for each in parts if each.same_answers is not None]
    compared = [each.compared_answers for each in parts if each.compared_answers is not None]
    used = Used(
        handed_over=_sum([each.used.handed_over for each in parts]),
        engine_cpu_s=_sum([each.used.engine_cpu_s for each in parts]),
        router_cpu_s=_sum([each.used.router_cpu_s for each in parts]),
        others_cores=_mean([each.used.others_cores for each in parts]),
        held=tuple(line for each in parts for line in each.used.held),
    )
    return _part(0, parts[0].target, meter, slo, used, sum(same) if same else None, sum(compared) if same else None)


def _part(
    number: int, target: str, meter: Meter, slo: Slo | None, used: Used, same: int | None, compared: int | None
) -> Part:
    held_back = figures(meter.held_back)
    good = None if slo is None else meter.good
    return Part(
        round=number, target=target, planned=meter.planned, sent=meter.sent, right=meter.right,
        errors=dict(sorted(meter.errors.items())),
        unfinished=meter.unfinished, seconds=round(meter.seconds, 3),
        requests_per_s=_rate(meter.right, meter.seconds), input_tokens_per_s=_rate(meter.tokens.input, meter.seconds),
        output_tokens_per_s=_rate(meter.tokens.output, meter.seconds), good=good,
        goodput_per_s=None if good is None or not meter.seconds else round(good / meter.seconds, 3),
        together=None if not meter.tokens.gaps else round(meter.tokens.gaps_of_none / meter.tokens.gaps, 3),
        held_back_p99_ms=None if held_back is None else held_back.p99_ms,
        same_answers=same, compared_answers=compared, used=used,
        **{name: figures(reservoir) for name, reservoir in meter.times.items()},
    )  # fmt: skip


def _rate(count: int, seconds: float) -> float | None:
    return round(count / seconds, 3) if count and seconds else None


Number = TypeVar("Number", int, float)


def _sum(values: Sequence[Number | None]) -> Number | None:
    known = [value for value in values if value is not None]
    return sum(known[1:], known[0]) if known else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
