"""One run of `kvbaton bench serve`: what to send, on which targets, part by part, and the report of it.

Laws: all targets get the same plan and take turns (A B C A B C), so that a busy machine affects all alike. A trace that
cannot be replayed ends the command before anything is started. Every wait has a deadline, and whoever stops the run
gets what was measured until then.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import re
import shlex
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.local_cluster.vllm_engine import ServerOptions
from kvbaton.processes.child_process import Say
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton.processes.operator_errors import CommandError, StoppedError
from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.kit.run_facts import RunFacts
from kvbaton_proof.bench.load import request_plan
from kvbaton_proof.bench.load.open_loop import UNDER_WAY_MAX, Aim, Load, Pace, ask_for_models, warm_up
from kvbaton_proof.bench.load.request_plan import REQUESTS, REQUESTS_MAX, Ask, Shape
from kvbaton_proof.bench.serve import serve_clusters, serve_parts, serve_report, vllm_site
from kvbaton_proof.bench.serve.contenders import MODEL, Contender, contender, spec_of
from kvbaton_proof.bench.serve.serve_clusters import site_of
from kvbaton_proof.bench.serve.serve_parts import TIMES, Part, Slo, Turn, Used, quantiles, times_of
from kvbaton_proof.bench.serve.serve_report import Report
from kvbaton_proof.bench.serve.site import REST_S, Site
from kvbaton_proof.rig.servers import Spec

HURRIED_S = 0.5  # for engines to become idle after Ctrl-C
WARMUPS = 4

Shown = Callable[[str], AbstractContextManager[Callable[[str], None]]]
"""Shows how far a part is, under a label."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What every part is made of."""

    asks: Callable[[], Iterable[Ask]]  # the plan, from its beginning
    planned: int | None
    longest: int  # tokens of prompt and answer together
    pace: Pace
    warmups: int
    slo: Slo | None
    seed: int
    timeout_s: float
    in_prompt: bool
    rounds: int


@dataclass(slots=True)
class ServeTarget:
    """A server to measure, and how."""

    name: str
    url: str
    mode: str | None = None
    site: Site | None = None  # if it was started here
    model: str | None = None

    @property
    def salt(self) -> str:
        """Its name without what vLLM refuses in a `cache_salt` (@ and slashes, with status 400)."""
        return re.sub(r"[^\w.-]", "-", self.name)


@dataclass(slots=True)
class Measured:
    """What has been measured so far."""

    turns: list[Turn] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    stopped: bool = False

    def first_of(self, number: int) -> Turn | None:
        """The target of this round that the others' answers are compared with."""
        return next((each for each in self.turns if each.round == number), None)


def work_of(args: argparse.Namespace) -> Work:
    if args.trace is not None:
        plan = _trace(args)
        longest, planned = max(ask.input_tokens + ask.output_tokens for ask in plan), len(plan)
        asks: Callable[[], Iterable[Ask]] = lambda: plan  # noqa: E731
    else:
        planned = args.requests or (REQUESTS if args.seconds is None else REQUESTS_MAX)
        shape = Shape(
            requests=planned, seed=args.seed, input=args.input_len, output=args.output_len, rate=args.rate,
            prefix_tokens=args.prefix_len, prefixes=args.prefixes,
        )  # fmt: skip
        longest = args.prefix_len + args.input_len.high + args.output_len.high
        asks = functools.partial(request_plan.drawn, shape)
    pairs = 0 if args.targets else args.prefill * args.decode
    return Work(
        asks=asks, planned=None if args.seconds is not None else planned, longest=longest,
        pace=Pace(
            concurrency=args.concurrency or UNDER_WAY_MAX, seconds=args.seconds, deadline_s=args.part_s,
            timed=args.trace is not None or (args.rate is not None and args.rate != float("inf")),
        ),
        warmups=max(WARMUPS, 2 * pairs) if args.warmup is None else args.warmup,
        slo=args.slo, seed=args.seed, timeout_s=args.timeout_s, in_prompt=args.no_salt, rounds=args.rounds,
    )  # fmt: skip


def _trace(args: argparse.Namespace) -> list[Ask]:
    bound = args.requests or REQUESTS_MAX
    try:
        return request_plan.read_file(
            Path(args.trace), speed=args.trace_speed, scale=args.length_scale, requests_max=bound
        )
    except request_plan.TraceError as error:
        raise CommandError(f"argument --trace: {args.trace}: {error}; see docs/bench.md for the format") from None
    except OSError as error:
        raise CommandError(f"argument --trace: {args.trace}: {error.strerror}; name a file of JSON lines") from None


async def measure(
    args: argparse.Namespace, work: Work, server: ServerOptions | None, say: Say, shown: Shown
) -> Measured:
    measured = Measured()
    with told_to_stop() as stop:
        async with contextlib.AsyncExitStack() as stack:
            if args.targets:
                targets = [ServeTarget(each.name, each.url, each.mode, model=args.model) for each in args.targets]
            else:
                targets = await started(args, server, stack, measured.failures, say, stop)
            for target in targets:
                await probe(target, work.longest)
            for number in range(1, work.rounds + 1):
                for target in targets:
                    if not stop.is_set():
                        await _part(number, target, work, measured, stop, say, shown)
            if stop.is_set():
                say("stopped; these are the measurements so far")
                measured.stopped = True
            for site in {id(each.site): each.site for each in targets if each.site is not None}.values():
                measured.commands |= site.commands()
                measured.failures += site.dead()
    return measured


async def started(
    args: argparse.Namespace,
    server: ServerOptions | None,
    stack: contextlib.AsyncExitStack,
    problems: list[str],
    say: Say,
    stop: asyncio.Event,
) -> list[ServeTarget]:
    """Every cluster that the targets need, once; `problems` gets why one is not there."""
    if server is not None:
        return await _vllm(server, args, stack, problems, say, stop)
    sites: dict[str, Site] = {}
    for name in dict.fromkeys(map(site_of, args.compare)):
        plan = serve_clusters.plan_of(name, args)
        standing = serve_clusters.standing(name, plan, args.router_args, say, stop)
        sites[name] = await stack.enter_async_context(standing)
    found = [(name, sites[site_of(name)]) for name in args.compare]
    return [ServeTarget(name, site.url, None if site.name == name else name, site) for name, site in found]


async def _vllm(
    server: ServerOptions,
    args: argparse.Namespace,
    stack: contextlib.AsyncExitStack,
    problems: list[str],
    say: Say,
    stop: asyncio.Event,
) -> list[ServeTarget]:
    sites: dict[str, Site] = {}
    named = [contender(name) for name in args.compare]
    specs = vllm_specs(args, named, server)
    for together in [specs] if args.place else [[spec] for spec in specs]:
        standing = vllm_site.standing(together, server, args.device, problems, say, stop)
        sites |= await stack.enter_async_context(standing)
    found = [(each, sites[each.cluster]) for each in named if each.cluster in sites]
    return [ServeTarget(each.name, site.url, each.header, site) for each, site in found]


def vllm_specs(args: argparse.Namespace, named: Sequence[Contender], server: ServerOptions) -> list[Spec]:
    """The servers of every cluster, each cluster once."""
    clusters = {each.cluster: each for each in named}
    return [
        spec_of(
            each, max_model_len=server.max_model_len, router_args=args.router_args, prefill=args.prefill,
            decode=args.decode, transport=args.transport, lease_s=args.lease_s, places=args.place or (),
            args=tuple(shlex.split(args.vllm_args or "")), kv_gib=server.kv_gib, shape=args.shape or MODEL,
        )
        for each in clusters.values()
    ]  # fmt: skip


async def probe(target: ServeTarget, longest: int) -> None:
    served = await ask_for_models(target.name, target.url)
    target.model = target.model or served.model
    if served.tokens_max is not None and longest > served.tokens_max:
        raise CommandError(
            f"argument --input-len: prompt and answer have up to {longest} tokens together, {target.name} accepts "
            f"{served.tokens_max}; use shorter ones (with a trace: --length-scale)"
        )


async def _part(
    number: int, target: ServeTarget, work: Work, measured: Measured, stop: asyncio.Event, say: Say, shown: Shown
) -> None:
    aim = Aim(
        url=target.url, headers={} if target.mode is None else {MODE_HEADER: target.mode}, model=target.model,
        salt=f"{work.seed}-{number}-{target.salt}-{time.time_ns()}", in_prompt=work.in_prompt, seed=work.seed,
        timeout_s=work.timeout_s,
    )  # fmt: skip
    gc.collect()
    before, handed_over = None, None
    with shown(f"{target.name} {number}/{work.rounds}") as tell:

        def show() -> None:
            done = f"{load.ended} of {work.planned}" if work.planned else f"{load.ended}"
            tell(f"{done} {load.failed} failed" if load.failed else done)

        load = Load(aim, work.pace, on_end=show)
        if not await ran_to_its_end(warm_up(aim, work.warmups), stop):
            return
        if target.site is not None:
            handed_over, before = await target.site.handed_over(), target.site.cpu()
        await ran_to_its_end(load.run(work.asks()), stop)
    used = Used()
    if target.site is not None and before is not None:
        rest_s = HURRIED_S if stop.is_set() else REST_S
        used = await target.site.used(before, handed_over, rest_s=rest_s)
    if stop.is_set() and not load.records:
        return
    turn = Turn(
        round=number, target=target.name, records=load.records, seconds=load.seconds, planned=work.planned,
        is_timed=work.pace.timed, used=used,
    )  # fmt: skip
    measured.turns.append(turn)
    say(f"round {number} of {work.rounds}: {_short(serve_parts.part_of(turn, work.slo))}")


async def ran_to_its_end(coroutine: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Whether it ran to its end."""
    try:
        await unless_stopped(coroutine, stop)
    except StoppedError:
        return False
    return True


def _short(part: Part) -> str:
    line = f"{part.target}: {part.right} of {part.sent} right"
    if part.requests_per_s is not None and part.ttft is not None:
        line += f", {part.requests_per_s:.2f} req/s, TTFT p50 {part.ttft.p50_ms:.0f} ms"
    return line


def report_of(args: argparse.Namespace, work: Work, measured: Measured, facts: RunFacts) -> Report:
    names = list(dict.fromkeys(turn.target for turn in measured.turns))
    parts, totals, shares = [], [], {}
    for turn in measured.turns:
        first = measured.first_of(turn.round)
        parts.append(serve_parts.part_of(turn, work.slo, None if first is turn else first))
    for name in names:
        turns = [each for each in measured.turns if each.target == name]
        totals.append(serve_parts.together(turns, [each for each in parts if each.target == name], work.slo))
        answers = [each.answer for turn in turns for each in turn.records if each.answer is not None]
        shares[name] = {time_: quantiles(times_of(answers, time_)) for time_ in TIMES}
    engine, stopped = "" if args.targets else args.engine, measured.stopped
    wrong = [*measured.failures, *serve_report.complaints(parts, exact=engine == "embedded", stopped=stopped)]
    return Report(
        **msgspec.structs.asdict(facts), ok=not wrong and not stopped, wrong=wrong,
        notes=serve_report.notes(totals, args.rate), stopped=stopped, engine=engine, options=_options(args, work),
        order=[(each.round, each.target) for each in measured.turns], targets=totals, parts=parts,
        ratios=serve_report.ratios(parts, names), quantiles=shares,
        commands={name: run_facts.public(line) for name, line in measured.commands.items()},
    )  # fmt: skip


def _options(args: argparse.Namespace, work: Work) -> dict[str, Any]:
    """The load in words, for whoever reads the figures."""
    options: dict[str, Any] = {"rounds": args.rounds, "requests a part": work.planned or f"those of {args.seconds:g} s"}
    if args.trace is not None:
        options |= {"trace": Path(args.trace).name, "speed": args.trace_speed, "lengths times": args.length_scale}
    else:
        options |= {"prompt tokens": str(args.input_len), "answer tokens": str(args.output_len)}
    if args.prefix_len:
        options["shared beginnings"] = f"{args.prefixes} of {args.prefix_len} tokens"
    if args.rate is not None:
        options["requests/s"] = f"{args.rate:g} (Poisson)"
    if args.concurrency is not None:
        options["at most at once"] = args.concurrency
    if not args.targets:
        options |= {"prefill engines": args.prefill, "decode engines": args.decode, "transport": args.transport}
    if args.slo is not None:
        options["objectives"] = str(args.slo)
    return {**options, "warm-ups a part": work.warmups, "seed": args.seed}


def recorded(measured: Measured) -> bytes:
    """What the first part sent, as a trace."""
    first = measured.turns[0].records if measured.turns else ()
    return b"".join(request_plan.written(each.ask, each.sent_s) for each in first)
