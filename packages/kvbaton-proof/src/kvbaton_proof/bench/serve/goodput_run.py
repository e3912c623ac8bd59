"""One run of `kvbaton bench goodput`: the right answers first, then rate after rate, target by target, with faults.

Laws: all targets get the same requests in the same rhythm, and take turns. Answers are compared with those that the
first target gave without load and without faults. An engine that is killed is started again at once, and the next part
begins only when all engines serve. Every wait has a deadline; whoever stops the run gets what was measured until then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import random
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvbaton.local_cluster.vllm_engine import ServerOptions
from kvbaton.processes.child_process import Say
from kvbaton.processes.operator_control import told_to_stop
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.kit.run_facts import RunFacts
from kvbaton_proof.bench.load import request_plan
from kvbaton_proof.bench.load.open_loop import Aim, Load, Pace, warm_up
from kvbaton_proof.bench.load.request_plan import REQUESTS_MAX, Ask
from kvbaton_proof.bench.serve import goodput
from kvbaton_proof.bench.serve.goodput import SHARES, GoodputReport, Level
from kvbaton_proof.bench.serve.serve_parts import Slo
from kvbaton_proof.bench.serve.serve_run import WARMUPS, ServeTarget, Shown, probe, ran_to_its_end, started
from kvbaton_proof.bench.serve.site import Site

REFERENCES_AT_ONCE = 4
BACK_S = 300.0  # for a killed engine to serve again


class Fault(msgspec.Struct, frozen=True):
    """What is done to one engine of a role so often. Of engines without roles it is any."""

    act: str  # kill, stop or reset
    role: str  # as engines' names begin: `p` or `d`; "": any
    every_s: float
    seconds: float = 0.0  # of a stop

    def __str__(self) -> str:
        lasts = f" for {self.seconds:g} s" if self.seconds else ""
        return f"{self.act} {self.role or 'any'} every {self.every_s:g} s{lasts}"


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be measured."""

    asks: Sequence[Ask]
    slo: Slo
    rates: Sequence[float]
    levels_max: int
    pace: Pace
    timeout_s: float
    seed: int
    in_prompt: bool
    faults: Sequence[Fault] = ()


@dataclass(slots=True)
class Swept:
    """What has been measured so far."""

    references: Mapping[int, bytes] = field(default_factory=dict)
    levels: list[Level] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    engines: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    lost: set[str] = field(default_factory=set)  # clusters that did not come back
    stopped: bool = False

    def of(self, target: str, number: int = 0) -> list[Level]:
        return [each for each in self.levels if each.target == target and number in (0, each.round)]


def trace_of(path: Path, *, scale: float, requests: int | None, tokens_max: int | None) -> tuple[list[Ask], int]:
    """The requests to replay, and how many of the trace were left out because they are too long."""
    try:
        read = request_plan.read_file(path, scale=scale)
    except request_plan.TraceError as error:
        raise CommandError(f"argument --trace: {path}: {error}; see docs/bench.md for the formats") from None
    except OSError as error:
        raise CommandError(f"argument --trace: {path}: {error.strerror}; name a trace's file") from None
    asks = read if tokens_max is None else request_plan.shorter(read, tokens_max)
    if len(asks) < 2:
        raise CommandError(f"argument --tokens-max: {len(asks)} of {len(read)} requests of the trace have at most "
                           f"{tokens_max} tokens; raise it, or give a smaller --length-scale")  # fmt: skip
    kept = asks[: requests or REQUESTS_MAX]
    try:
        request_plan.at_rate(kept, 1.0)
    except request_plan.TraceError as error:
        raise CommandError(f"argument --trace: {path}: {error}") from None
    return kept, len(read) - len(asks)


async def measure(
    args: argparse.Namespace, sweep: Sweep, swept: Swept, server: ServerOptions | None, say: Say, shown: Shown
) -> None:
    longest = max(ask.input_tokens + ask.output_tokens for ask in sweep.asks)
    with told_to_stop() as stop:
        async with contextlib.AsyncExitStack() as stack:
            if args.targets:
                targets = [ServeTarget(each.name, each.url, each.mode, model=args.model) for each in args.targets]
            else:
                targets = await started(args, server, stack, say, stop)
            for target in targets:
                await probe(target, longest)
                if target.site is not None:
                    swept.engines[target.name] = len(target.site.engines)
            if args.judged:
                swept.references = await _right_answers(targets[0], sweep, stop, say, shown)
            for number in range(1, args.rounds + 1):
                await _round(number, targets, sweep, swept, stop, say, shown)
            if stop.is_set():
                say("stopped; these are the measurements so far")
                swept.stopped = True
            for site in {id(each.site): each.site for each in targets if each.site is not None}.values():
                swept.commands |= site.commands()
                swept.failures += site.dead()


async def _round(
    number: int, targets: Sequence[ServeTarget], sweep: Sweep, swept: Swept, stop: asyncio.Event, say: Say, shown: Shown
) -> None:
    left = list(targets)
    while left and not stop.is_set():
        for target in list(left):
            # The second round measures what the first has found worth measuring, so that rounds can be compared.
            rates = sweep.rates if number == 1 else sorted({each.rate for each in swept.of(target.name, 1)})
            rate = goodput.next_rate(swept.of(target.name, number), rates, sweep.levels_max)
            if rate is None or (target.site is not None and target.site.name in swept.lost):
                left.remove(target)
            elif not stop.is_set():
                await _level(number, rate, target, sweep, swept, stop, say, shown)


async def _right_answers(
    target: ServeTarget, sweep: Sweep, stop: asyncio.Event, say: Say, shown: Shown
) -> Mapping[int, bytes]:
    load = Load(_aim(target, sweep, "reference"), msgspec.structs.replace(sweep.pace, concurrency=REFERENCES_AT_ONCE))
    with shown("right answers") as tell:
        tell(f"of {target.name}, without load")
        at_once = [msgspec.structs.replace(ask, due_s=0.0) for ask in sweep.asks]
        await ran_to_its_end(load.run(at_once), stop)
    failed = [each.error for each in load.records if each.error]
    if failed and not stop.is_set():
        raise CommandError(f"target {target.name}: {len(failed)} of {len(sweep.asks)} requests failed without load, "
                           f"the first with {failed[0]!r}; they cannot be judged")  # fmt: skip
    say(f"{len(load.records)} right answers, from {target.name} without load")
    return {each.ask.index: each.answer.digest for each in load.records if each.answer is not None}


def _aim(target: ServeTarget, sweep: Sweep, part: str) -> Aim:
    return Aim(
        url=target.url, headers={} if target.mode is None else {MODE_HEADER: target.mode}, model=target.model,
        salt=f"{sweep.seed}-{part}-{target.salt}-{time.time_ns()}", in_prompt=sweep.in_prompt, seed=sweep.seed,
        timeout_s=sweep.timeout_s,
    )  # fmt: skip


async def _level(
    number: int,
    rate: float,
    target: ServeTarget,
    sweep: Sweep,
    swept: Swept,
    stop: asyncio.Event,
    say: Say,
    shown: Shown,
) -> None:
    aim = _aim(target, sweep, f"{number}-{rate:g}")
    asks = request_plan.at_rate(sweep.asks, rate)
    gc.collect()
    with shown(f"{target.name} at {rate:g}/s") as tell:
        load = Load(aim, sweep.pace, on_end=lambda: tell(f"{load.ended} of {len(asks)}"))
        if not await ran_to_its_end(warm_up(aim, WARMUPS), stop):
            return
        done, did = asyncio.Event(), Counter[str]()
        hurting = asyncio.create_task(hurt_by_plan(sweep, target.site, f"{sweep.seed}/{number}/{rate}", done, did))
        try:
            await ran_to_its_end(load.run(asks), stop)
        finally:
            done.set()
            await hurting
    if target.site is not None and not stop.is_set():
        await made_whole(target.site, did, swept, say, stop)
    if stop.is_set() and not load.records:
        return
    level = goodput.level_of(
        load.records, swept.references, sweep.slo, number=number, target=target.name, rate=rate, faults=dict(+did)
    )
    swept.levels.append(level)
    say(f"{target.name} at {rate:g}/s: {level.good} of {level.sent} good, {level.late} late, {level.wrong} wrong, "
        f"{level.failed} failed; faults: {goodput.counted(level.faults) or 'none'}")  # fmt: skip


async def made_whole(site: Site, did: Counter[str], swept: Swept, say: Say, stop: asyncio.Event) -> None:
    """An engine that ended by itself is told and started again; a cluster that does not come back is asked no more."""
    died = await site.revive()
    did["died"] += len(died)
    swept.failures += died
    try:
        if +did:
            await site.whole(BACK_S, say, stop)
    except CommandError as error:
        swept.failures.append(f"{site.name} did not come back: {error}")
        swept.lost.add(site.name)


async def hurt_by_plan(sweep: Sweep, site: Site | None, seed: str, done: asyncio.Event, did: Counter[str]) -> None:
    """The same engines at the same times for each target of a round."""
    if site is not None:
        await asyncio.gather(*(_apply(each, site, random.Random(f"{seed}/{each}"), done, did) for each in sweep.faults))


async def _apply(fault: Fault, site: Site, draw: random.Random, done: asyncio.Event, did: Counter[str]) -> None:
    names = [name for name in site.engines if name.startswith(fault.role)] or list(site.engines)
    while not await _over(done, fault.every_s):
        name = draw.choice(names)
        if fault.act == "kill":
            await site.kill(name)
            did["kill"] += 1
        elif fault.act == "stop":
            did["stop"] += 1
            site.signal(name, signal.SIGSTOP)
            try:
                await _over(done, fault.seconds)
            finally:
                site.signal(name, signal.SIGCONT)
        else:
            did["reset" if await site.reset(name) else "reset refused"] += 1


async def _over(done: asyncio.Event, within_s: float) -> bool:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(done.wait(), within_s)
    return done.is_set()


def report_of(
    sweep: Sweep, swept: Swept, facts: RunFacts, options: Mapping[str, object], notes: Sequence[str]
) -> GoodputReport:
    names = list(dict.fromkeys(each.target for each in swept.levels))
    wrong = [*swept.failures, *goodput.complaints(swept.levels)]
    return GoodputReport(
        **msgspec.structs.asdict(facts), ok=not wrong and not swept.stopped, wrong=wrong, notes=notes,
        stopped=swept.stopped, slo=str(sweep.slo), objectives=sweep.slo, options=options,
        engines=swept.engines, levels=swept.levels,
        capacities={name: [goodput.capacity(swept.of(name), share) for share in SHARES] for name in names},
        commands={name: run_facts.public(line) for name, line in swept.commands.items()},
    )  # fmt: skip
