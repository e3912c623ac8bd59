"""The standard plan on real vLLM, from start to outcome: `kvbaton chaos --engine vllm --plan standard`.

Laws: every step is judged before the next begins. What a fault broke for good is started again by this hand, and the
row says so. All engines are gone when this returns, however it ends; their logs stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import shlex
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from kvbaton.engines.vllm.launch import launching
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.chaos.chaos_plan import Plan, Step
from kvbaton_proof.chaos.outcome import Member, Outcome, Row
from kvbaton_proof.chaos.rest_oracle import usage
from kvbaton_proof.chaos.vllm import vllm_judge, vllm_streams
from kvbaton_proof.chaos.vllm.vllm_judge import Pair, examined, row_of
from kvbaton_proof.chaos.vllm.vllm_steps import DO, Scene, standard
from kvbaton_proof.rig import meters
from kvbaton_proof.rig.connectors import CONNECTORS, D, P
from kvbaton_proof.rig.server import Engine, EngineError

STEP_S_MAX = 600.0

Say = Callable[[str], None]
AtRest = tuple[int, int, float]


class VllmRunError(Exception):
    """The plan could not be begun; the message says what is missing."""


def run(
    connector: str,
    seed: int,
    say: Say,
    out: Path | None = None,
    faults: Sequence[str] | None = None,
    vllm_python: str | None = None,
) -> Outcome:
    """Carry the plan out; VllmRunError if there is no such fault, or no pair to do it to. Logs go to `out`."""
    with tempfile.TemporaryDirectory(prefix="kvbaton-chaos-", ignore_cleanup_errors=True) as directory:
        logs = Path(directory) if out is None else out.resolve()
        logs.mkdir(parents=True, exist_ok=True)
        try:
            plan = standard(connector, seed, faults)
            python = launching.find_python(vllm_python)
            return asyncio.run(_carried_out(plan, python, Path(directory), logs, say))
        except (ValueError, launching.LaunchError, EngineError) as error:
            raise VllmRunError(str(error)) from error


def run_streams(plan: Plan, say: Say, out: Path, vllm_python: str | None = None) -> Outcome:
    """The plan `streams`, through kvbaton's router; VllmRunError if its engines do not come up."""
    try:
        return asyncio.run(vllm_streams.carried_out(plan, launching.find_python(vllm_python), out, say))
    except (ValueError, CommandError, launching.LaunchError) as error:
        raise VllmRunError(str(error)) from error


async def _carried_out(plan: Plan, python: str, directory: Path, logs: Path, say: Say) -> Outcome:
    begun = time.monotonic()
    say(f"{plan.connector}: starting P, D and one engine alone, for the right answers")
    async with vllm_judge.standing(plan.connector, plan.seed, directory, logs, python, say) as pair:
        up = time.monotonic()
        say(f"up after {up - begun:.0f} s; {len(plan.steps)} steps")
        first = await examined(pair, up, time.monotonic)
        problems = [] if first.recover_s is not None and not first.left_over else [f"before any fault: {first.note}"]
        before = {name: _at_rest(engine) for name, engine in pair.engines.items()}
        rows: list[Row] = []
        kinds: Counter[str] = Counter()
        for number, step in enumerate(plan.steps, 1):
            row = await judged(pair, step, plan.seed, up, kinds, problems)
            if row is None:
                break
            rows.append(row)
            say(f"{number}/{len(plan.steps)} {line(row)}")
        members = [await _member(pair, engine, before[name]) for name, engine in pair.engines.items()]
    return outcome(plan, time.monotonic() - begun, rows, members, problems, kinds)


async def judged(
    pair: Pair, step: Step, seed: int, up: float, kinds: Counter[str], problems: list[str],
    prepare: Callable[[Scene], None] = lambda scene: None,
) -> Row | None:  # fmt: skip
    """One step, judged; None if there are no engines any more to go on with. `prepare` may set the scene's numbers."""
    at_s = time.monotonic() - up
    try:
        async with contextlib.AsyncExitStack() as later:
            scene = Scene(pair, step, random.Random(f"{seed}/{step.title()}"), later)
            prepare(scene)
            try:
                async with asyncio.timeout(STEP_S_MAX):
                    await DO[step.fault](scene)
            except (EngineError, TimeoutError) as error:
                problems.append(f"{step.title()}: not carried out: {error or 'it took too long'}")
            well = await examined(pair, time.monotonic(), time.monotonic)
        kinds.update(scene.tally.errors)
        problems += scene.problems
        seconds = round(time.monotonic() - up - at_s, 1)
        row = msgspec.structs.replace(row_of(step, at_s, scene.tally, well, scene.note), seconds=seconds)
        if not row.dead and (row.recover_s is None or row.left_over):
            await pair.restart(P, D)
    except EngineError as error:
        problems.append(f"after {step.title()}: {error}")
        return None
    return row


def line(row: Row) -> str:
    """A row as the progress shows it."""
    well = "never well again" if row.recover_s is None else f"well after {row.recover_s:.1f} s"
    counts = f"{row.right} right, {row.errors} errors, {row.wrong} wrong, {row.late} late, {row.dead} dead, "
    return f"{'ok  ' if row.ok else 'BAD '} {row.title}: {counts}{row.left_over} left; {well}. {row.note}"


def outcome(
    plan: Plan, seconds: float, rows: Sequence[Row], members: Sequence[Member], problems: Sequence[str],
    kinds: Counter[str],
) -> Outcome:  # fmt: skip
    """The whole run; pure."""
    named = shlex.quote(CONNECTORS[plan.connector].line or plan.connector)
    titles = ",".join(step.title() for step in plan.steps)
    only = (
        "" if len(plan.steps) == len(standard(plan.connector, plan.seed).steps) else f" --faults {shlex.quote(titles)}"
    )
    return Outcome(
        plan=plan.name, seed=plan.seed, engine=plan.engine, connector=plan.connector, seconds=round(seconds, 1),
        requests=sum(row.requests for row in rows), right=sum(row.right for row in rows),
        errors=sum(row.errors for row in rows), wrong=sum(row.wrong for row in rows),
        late=sum(row.late for row in rows), dead=sum(row.dead for row in rows),
        left_over=sum(row.left_over or 0 for row in rows), rows=tuple(rows), members=tuple(members),
        problems=tuple(problems), errors_by_kind=dict(kinds), network="loopback",
        replay=f"kvbaton chaos --engine vllm --plan standard --connector {named} --seed {plan.seed}{only}",
    )  # fmt: skip


def _at_rest(engine: Engine) -> AtRest:
    """Descriptors, threads and MiB of all processes of an engine."""
    found = [each for each in map(usage, engine.pids()) if each is not None]
    fds, threads = sum(each.fds for each in found), sum(each.threads for each in found)
    return fds, threads, round(sum(each.rss_mib for each in found), 1)


async def _member(pair: Pair, engine: Engine, before: AtRest) -> Member:
    after = _at_rest(engine)
    figures = await engine.figures(pair.session) or {}
    return Member(
        name=engine.name, fds=(before[0], after[0]), threads=(before[1], after[1]), rss_mib=(before[2], after[2]),
        lives=engine.lives, pins=int(figures.get("kvbaton_pinned_blocks", 0)),
        used_blocks=meters.held(figures, vllm_judge.BLOCKS),
    )  # fmt: skip
