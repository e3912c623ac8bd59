"""The observations of a run as its outcome. Pure: observations in, verdict out.

Law: what was not seen is not said to be good: an engine that could not be asked is a problem, not a zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvbaton_proof.chaos import rest_oracle
from kvbaton_proof.chaos.board import Board, Verdict
from kvbaton_proof.chaos.chaos_plan import Plan
from kvbaton_proof.chaos.members import STORE
from kvbaton_proof.chaos.outcome import Member, Outcome, Row
from kvbaton_proof.chaos.resources import Usage


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """What one life of a member had at one instant of the run."""

    at_s: float
    life: int
    fds: int
    threads: int
    rss_mib: float


class Second(msgspec.Struct, frozen=True, array_like=True):
    """Requests that ended in one second."""

    right: int
    errors: int
    bad: int  # wrong or late


class AtRest(msgspec.Struct, frozen=True):
    """A member before the first fault and after the last one."""

    lives: int
    before: Usage | None
    after: Usage | None
    held: rest_oracle.Held | None = None  # of engines


class Seen(msgspec.Struct, frozen=True):
    """The outcome, and what a report shows beside it."""

    outcome: Outcome
    samples: Mapping[str, Sequence[Sample]]
    seconds: Sequence[Second]
    wrongs: Sequence[str]
    lates: Sequence[str]
    deaths: Sequence[str]
    slowest_s: float


class Finds(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was looked at."""

    seconds: float
    network: str
    rows: Sequence[Row]
    at_rest: Mapping[str, AtRest]
    samples: Mapping[str, Sequence[Sample]]
    deaths: Sequence[str]
    problems: Sequence[str]
    handoffs: Mapping[str, int] = {}
    moments: Mapping[str, int] = {}
    lies: Mapping[str, Mapping[str, int]] = {}
    stolen: int = 0


def seen(plan: Plan, board: Board, finds: Finds, begun_at: float) -> Seen:
    """The verdict over a run."""
    counts = board.counts()
    problems = list(finds.problems)
    for name, rest in finds.at_rest.items():
        problems += rest_oracle.grown(name, rest.before, rest.after)
        if name != STORE:  # fills up to its own bound, on purpose
            problems += rest_oracle.keeps_growing(name, _longest(finds.samples.get(name, ())))
    if not counts.right:
        problems.append("no answer was right: nothing was tried")
    outcome = Outcome(
        plan=plan.name, seed=plan.seed, engine=plan.engine, connector=plan.connector, seconds=round(finds.seconds, 1),
        requests=counts.requests, right=counts.right, errors=counts.errors, wrong=counts.wrong, late=counts.late,
        dead=len(finds.deaths),
        left_over=sum(rest.held.count for rest in finds.at_rest.values() if rest.held is not None),
        rows=tuple(sorted(finds.rows, key=lambda row: row.at_s)),
        members=tuple(_member(name, rest, finds.samples.get(name, ())) for name, rest in finds.at_rest.items()),
        problems=tuple(dict.fromkeys(problems)), errors_by_kind=dict(sorted(board.kinds.items())),
        network=finds.network, handoffs=dict(finds.handoffs), moments=dict(finds.moments),
        stolen=finds.stolen, lies={name: dict(count) for name, count in finds.lies.items()},
    )  # fmt: skip
    return Seen(
        outcome, finds.samples, _seconds(board, begun_at), board.wrongs, board.lates, finds.deaths, board.slowest_s
    )


def _member(name: str, rest: AtRest, samples: Sequence[Sample]) -> Member:
    nothing = Usage(0, 0, 0.0)
    was, now = rest.before or nothing, rest.after or nothing
    held = rest.held or rest_oracle.Held(0, 0, 0)
    return Member(
        name=name, fds=(was.fds, now.fds), threads=(was.threads, now.threads), rss_mib=(was.rss_mib, now.rss_mib),
        lives=rest.lives, pins=held.pins, used_blocks=held.used_blocks,
        rss_mib_per_minute=rest_oracle.growth_mib_per_minute(_longest(samples)),
    )  # fmt: skip


def _longest(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """The longest life: when, and MiB resident then."""
    by_life: dict[int, list[tuple[float, float]]] = {}
    for sample in samples:
        by_life.setdefault(sample.life, []).append((sample.at_s, sample.rss_mib))
    return max(by_life.values(), key=len, default=[])


def _seconds(board: Board, begun_at: float) -> list[Second]:
    found: dict[int, list[int]] = {}
    for line in board.lines:
        at = int(line.ended_at - begun_at)
        if line.ended_at >= begun_at:
            column = {Verdict.RIGHT: 0, Verdict.ERROR: 1}.get(line.verdict, 2)
            found.setdefault(at, [0, 0, 0])[column] += 1
    return [Second(*found.get(at, (0, 0, 0))) for at in range(max(found, default=-1) + 1)]
