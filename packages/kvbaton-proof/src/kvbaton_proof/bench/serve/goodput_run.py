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
from collections.abc import Callable, Mapping, Sequence
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
    """What is to be measured with one trace."""

    asks: Sequence[Ask]
    trace: str = ""  # its name
    left_out: int = 0  # of it, as too long
    seconds: float | None = None  # at each rate, as many of the trace as come in these
    margin: float = 0.0  # nats: how sure a reference has to be of a token that is compared; 0: of none, text is
    slo: Slo
    rates: Sequence[float]
    levels_max: int
    pace: Pace
    timeout_s: float
    seed: int
    in_prompt: bool
    faults: Sequence[Fault] = ()

    def at(self, rate: float) -> list[Ask]:
        count = len(self.asks) if self.seconds is None else max(2, round(rate * self.seconds))
        return request_plan.at_rate(self.asks[:count], rate)


@dataclass(slots=True)
class Swept:
    """What has been measured so far; `keep` hears of each level with its requests."""

    keep: Callable[[Level, Sequence[Mapping[str, object]]], None] = lambda level, rows: None
    references: goodput.References = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
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
    args: argparse.Namespace,
    traces: Sequence[tuple[Sweep, Swept]],
    server: ServerOptions | None,
    say: Say,
    shown: Shown,
) -> None:
    """Every trace, one after the other, on the same engines."""
    longest = max(ask.input_tokens + ask.output_tokens for sweep, _ in traces for ask in sweep.asks)
    problems: list[str] = []
    with told_to_stop() as stop:
        async with contextlib.AsyncExitStack() as stack:
            if args.targets:
                targets = [ServeTarget(each.name, each.url, each.mode, model=args.model) for each in args.targets]
            else:
                targets = await started(args, server, stack, problems, say, stop)
            for target in targets:
                await probe(target, longest)
            sites = list({id(each.site): each.site for each in targets if each.site is not None}.values())
            for sweep, swept in traces:
                swept.failures += problems
                swept.engines |= {each.name: len(each.site.engines) for each in targets if each.site is not None}
                for site in sites:
                    swept.commands |= site.commands()
                await _trace(args, targets, sweep, swept, stop, say, shown)
            for site in sites:
                traces[-1][1].failures += site.dead()


async def _trace(
    args: argparse.Namespace,
    targets: Sequence[ServeTarget],
    sweep: Sweep,
    swept: Swept,
    stop: asyncio.Event,
    say: Say,
    shown: Shown,
) -> None:
    if args.judged and not stop.is_set():
        await _right_answers(targets[0], sweep, swept, stop, say, shown)
    for number in range(1, args.rounds + 1):
        await _round(number, targets, sweep, swept, stop, say, shown)
    if stop.is_set():
        say("stopped; these are the measurements so far")
    swept.stopped = stop.is_set()


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
    target: ServeTarget, sweep: Sweep, swept: Swept, stop: asyncio.Event, say: Say, shown: Shown
) -> None:
    aim = msgspec.structs.replace(_aim(target, sweep, "reference"), with_leads=bool(sweep.margin))
    load = Load(aim, msgspec.structs.replace(sweep.pace, concurrency=REFERENCES_AT_ONCE))
    with shown("right answers") as tell:
        tell(f"of {target.name}, without load")
        at_once = [msgspec.structs.replace(ask, due_s=0.0) for ask in sweep.asks]
        await ran_to_its_end(load.run(at_once), stop)
    failed = [each.error for each in load.records if each.error]
    if failed and not stop.is_set():
        raise CommandError(f"target {target.name}: {len(failed)} of {len(sweep.asks)} requests failed without load, "
                           f"the first with {failed[0]!r}; they cannot be judged")  # fmt: skip
    say(f"{len(load.records)} right answers, from {target.name} without load")
    answers = {each.ask.index: each.answer for each in load.records if each.answer is not None}
    if not sweep.margin:
        swept.references = {index: answer.digest for index, answer in answers.items()}
        return
    if not all(each.ids and each.leads for each in answers.values()) and not stop.is_set():
        raise CommandError(f"target {target.name} does not tell its tokens and how sure it is; use: --margin 0")
    known = {index: goodput.sure(answer, sweep.margin) for index, answer in answers.items()}
    swept.references = known
    swept.notes.append(
        f"An answer is compared up to the first token of which its reference was less than {sweep.margin:g} nats sure: "
        f"{sum(map(len, known.values()))} of {sum(len(each.ids) for each in answers.values())} tokens, "
        f"{sum(len(answers[index].ids) == len(each) for index, each in known.items())} of {len(known)} answers whole."
    )


def _aim(target: ServeTarget, sweep: Sweep, part: str) -> Aim:
    return Aim(
        url=target.url, headers={} if target.mode is None else {MODE_HEADER: target.mode}, model=target.model,
        salt=f"{sweep.seed}-{part}-{target.salt}-{time.time_ns()}", in_prompt=sweep.in_prompt, seed=sweep.seed,
        with_ids=bool(sweep.margin),
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
    asks = sweep.at(rate)
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
    swept.keep(level, [goodput.request_row(each, swept.references, sweep.slo) for each in load.records])
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
    sweep: Sweep, swept: Swept, facts: RunFacts, options: Mapping[str, object], notes: Sequence[str] = ()
) -> GoodputReport:
    names = list(dict.fromkeys(each.target for each in swept.levels))
    wrong = [*swept.failures, *goodput.complaints(swept.levels)]
    return GoodputReport(
        **msgspec.structs.asdict(facts), ok=not wrong and not swept.stopped, wrong=wrong, notes=[*notes, *swept.notes],
        stopped=swept.stopped, slo=str(sweep.slo), objectives=sweep.slo, options=options,
        engines=swept.engines, levels=swept.levels,
        capacities={name: [goodput.capacity(swept.of(name), share) for share in SHARES] for name in names},
        commands={name: run_facts.public(line) for name, line in swept.commands.items()},
    )  # fmt: skip
