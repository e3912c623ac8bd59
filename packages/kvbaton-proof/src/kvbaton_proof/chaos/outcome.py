"""The observations of a chaos run, and whether the promises held. Pure: observations in, verdict out.

Laws: what cannot be measured is not reported as zero: it is None; an engine that could not be asked is a problem.
`ok` says that every promise held, of whatever connector ran; a peer is judged by the same line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvbaton_proof.chaos import rest_oracle
from kvbaton_proof.chaos.chaos_plan import Plan
from kvbaton_proof.chaos.judged_request import Board, Verdict
from kvbaton_proof.chaos.members import STORE
from kvbaton_proof.chaos.rest_oracle import Usage


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of the plan, from the moment it was done until the cluster was well again.

    Counts of answers are of requests that ended meanwhile. `late`: not ended by their deadline, hangs among them.
    """

    at_s: float
    title: str
    fault: str
    promises: tuple[int, ...]
    requests: int = 0
    right: int = 0
    errors: int = 0  # told so, with a status or by a closed connection
    wrong: int = 0
    late: int = 0
    dead: int = 0  # engines that died, though nobody killed them
    left_over: int | None = 0  # pins, used blocks and leases that stayed; None: could not be asked
    recover_s: float | None = None  # from the end of the fault until answers were right again; None: never
    note: str = ""
    seconds: float | None = None  # from the fault until the cluster was well again, or was no longer waited for

    @property
    def ok(self) -> bool:
        return not (self.wrong or self.late or self.dead or self.left_over) and self.recover_s is not None


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process at rest, before the first fault and after the last one. Zeros before: it was not there then."""

    name: str
    fds: tuple[int, int]
    threads: tuple[int, int]
    rss_mib: tuple[float, float]
    lives: int  # how often it was started
    pins: int
    used_blocks: int
    rss_mib_per_minute: float | None = None  # over the second half of its longest life; None: too short to tell


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run; this is what --json prints, with `ok` beside it."""

    plan: str
    seed: int
    engine: str
    connector: str
    seconds: float
    requests: int
    right: int
    errors: int
    wrong: int
    late: int
    dead: int
    left_over: int
    rows: tuple[Row, ...]
    members: tuple[Member, ...] = ()
    problems: tuple[str, ...] = ()  # each breaks the verdict: what grew, what stayed, what could not be done
    errors_by_kind: dict[str, int] = {}
    handoffs: dict[str, int] = {}  # after all of it, by mode: of some prompts that nobody had, so many came over
    moments: dict[str, int] = {}  # named ones that were reached, and missed
    stolen: int = 0  # prompts that reached a process which no one should have sent them to
    lies: dict[str, dict[str, int]] = {}  # of a liar, by name: how often told, refused and believed
    network: str = ""  # namespaces or relay
    replay: str = ""  # the command that repeats it

    @property
    def ok(self) -> bool:
        broken = self.wrong or self.late or self.dead or self.left_over or self.stolen or self.problems
        return not broken and all(row.ok for row in self.rows)


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
