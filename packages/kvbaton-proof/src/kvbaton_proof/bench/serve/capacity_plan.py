"""How many P and D a trace needs: a simulator of their queues, fed with speeds that were measured.

    P       one prompt after the other: `prefill_s` and each token that it has not in its prefix cache
    handoff `handoff_s` and each token of the prompt, beside P and D
    D       all its requests together, a token each in a step of `step_s` and `step_each_s` times their number

Laws: pure, and the same trace gives the same answer. A prompt goes to the P that is free
first, then to the D's in turn. What the
simulator says is worth what it says of a load that was measured: `compared` puts both beside each other, and beyond
`TOLERATED` it may predict nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from kvbaton_proof.bench.load.open_loop import Answer
from kvbaton_proof.bench.load.request_plan import Ask, Piece, at_rate
from kvbaton_proof.bench.serve.goodput import Level, capacity
from kvbaton_proof.bench.serve.serve_parts import Slo, figures

TOLERATED = 0.15
ENGINES_MAX = 64


class Speeds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Of one P, one D and the way between them."""

    prefill_tokens_s: float
    prefill_s: float = 0.0  # of each prompt, whatever its length
    handoff_s: float = 0.0
    handoff_token_s: float = 0.0  # KV bytes of a token by the bandwidth between P and D
    step_s: float
    step_each_s: float = 0.0
    seqs_max: int = 256  # in one step


class _P:
    """One prefill engine."""

    def __init__(self, speeds: Speeds) -> None:
        self.free_s = 0.0
        self._speeds = speeds
        self._cached: set[tuple[Piece, ...]] = set()

    def done(self, ask: Ask) -> float:
        """When it has the prompt."""
        new, seen = ask.input_tokens, 0
        while seen < len(ask.pieces) and ask.pieces[: seen + 1] in self._cached:
            new -= ask.pieces[seen].tokens
            seen += 1
        self._cached.update(ask.pieces[: at + 1] for at in range(seen, len(ask.pieces)))
        took_s = self._speeds.prefill_s + max(1, new) / self._speeds.prefill_tokens_s
        self.free_s = max(self.free_s, ask.due_s) + took_s
        return self.free_s


def played(asks: Sequence[Ask], speeds: Speeds, prefills: int, decodes: int) -> list[Answer]:
    """Every request's times, in the order of the trace."""
    engines = [_P(speeds) for _ in range(prefills)]
    rows: list[list[tuple[float, int]]] = [[] for _ in range(decodes)]  # of a D: when a prompt is there, and whose
    there = []
    for at, ask in enumerate(asks):
        done_s = min(engines, key=lambda each: each.free_s).done(ask)
        there.append((done_s + speeds.handoff_s + ask.input_tokens * speeds.handoff_token_s, at))
    for number, one in enumerate(sorted(there)):
        rows[number % decodes].append(one)
    answers: dict[int, Answer] = {}
    for row in rows:
        answers |= _decoded(asks, row, speeds)
    return [answers[at] for at in range(len(asks))]


def _decoded(asks: Sequence[Ask], row: Sequence[tuple[float, int]], speeds: Speeds) -> dict[int, Answer]:
    """One D: step after step, each with all that are there."""
    waiting, running, now_s = list(row), dict[int, list[float]](), 0.0
    heapq.heapify(waiting)
    answers = {}
    while waiting or running:
        if not running:
            now_s = max(now_s, waiting[0][0])
        while waiting and waiting[0][0] <= now_s and len(running) < speeds.seqs_max:
            running[heapq.heappop(waiting)[1]] = []
        now_s += speeds.step_s + speeds.step_each_s * len(running)
        for at in list(running):
            times = running[at]
            times.append(now_s)
            if len(times) == asks[at].output_tokens:
                del running[at]
                gaps = tuple(float(gap) for gap in np.diff(times))
                answers[at] = Answer(times[0] - asks[at].due_s, times[-1] - asks[at].due_s, gaps, len(times), b"")
    return answers


def level(asks: Sequence[Ask], rate: float, speeds: Speeds, prefills: int, decodes: int, slo: Slo) -> Level:
    """What `bench goodput` would measure at this rate."""
    answers = played(at_rate(asks, rate), speeds, prefills, decodes)
    good = sum(map(slo.met_by, answers))
    ttft, itl = figures([each.ttft_s for each in answers]), figures([gap for each in answers for gap in each.gaps_s])
    return Level(
        round=0, target=f"{prefills}P{decodes}D", rate=round(rate, 3), sent=len(answers), good=good,
        late=len(answers) - good, wrong=0, failed=0, errors={}, faults={},
        ttft_p50_ms=None if ttft is None else ttft.p50_ms, ttft_p99_ms=None if ttft is None else ttft.p99_ms,
        itl_p99_ms=None if itl is None else itl.p99_ms,
    )  # fmt: skip


def needed(asks: Sequence[Ask], rate: float, speeds: Speeds, slo: Slo, share: float) -> Level | None:
    """Engines with which so many are good: from one P and one D, always one more of those that help most."""
    prefills = decodes = 1
    found = level(asks, rate, speeds, prefills, decodes, slo)
    while found.share < share:
        if prefills + decodes == ENGINES_MAX:
            return None
        more_p = level(asks, rate, speeds, prefills + 1, decodes, slo)
        more_d = level(asks, rate, speeds, prefills, decodes + 1, slo)
        is_p = _gain(more_p, slo) >= _gain(more_d, slo)
        prefills, decodes, found = (prefills + 1, decodes, more_p) if is_p else (prefills, decodes + 1, more_d)
    return found


def _gain(found: Level, slo: Slo) -> tuple[float, float]:
    """By good requests; where these are as many, by how far the times are from the objectives."""
    limits = ((found.ttft_p50_ms, slo.ttft), (found.itl_p99_ms, slo.itl_p99 or slo.tpot or slo.itl))
    return found.share, -sum((at or 0.0) / 1e3 / limit for at, limit in limits if limit)


class Beside(msgspec.Struct, frozen=True):
    """A prediction beside what was measured: rates up to which a share is good."""

    target: str
    share: float
    predicted: float | None
    measured: float | None

    @property
    def off(self) -> float | None:
        """By which part of the measured one; None: one of them lies outside of the rates."""
        if self.predicted is None or not self.measured:
            return None
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        return self.off is not None and abs(self.off) <= TOLERATED


def compared(predicted: Sequence[Level], measured: Sequence[Level], share: float) -> Beside:
    """Both over the same rates."""
    return Beside(measured[0].target, share, capacity(predicted, share).rate, capacity(measured, share).rate)


def fitted(ttft_s: Mapping[int, float], each_s: Mapping[int, float], gap_s: Mapping[int, float]) -> Speeds:
    """Speeds from what a client saw of an idle pair. By length of the prompt: seconds to the first token of one
    request, and between the ends of several that were asked at once; by number of streams: the gap between tokens.
    """
    fixed_s, token_s = _line(each_s)
    first_s, first_token_s = _line(ttft_s)
    step_s, step_each_s = _line(gap_s)
    handoff_s = first_s - fixed_s - step_s - step_each_s
    apart_s = first_token_s - token_s
    return Speeds(
        prefill_tokens_s=round(1 / token_s, 1), prefill_s=round(fixed_s, 6), handoff_s=round(max(0.0, handoff_s), 6),
        handoff_token_s=round(max(0.0, apart_s), 9), step_s=round(step_s, 6), step_each_s=round(step_each_s, 6),
    )  # fmt: skip


def _line(points: Mapping[int, float]) -> tuple[float, float]:
    """Least squares; neither may be below nothing."""
    slope, at_0 = np.polyfit(list(points), list(points.values()), 1)
    slope = max(float(slope), 1e-9)
    return max(0.0, float(at_0)), slope
