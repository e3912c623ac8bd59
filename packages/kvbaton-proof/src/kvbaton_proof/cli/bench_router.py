"""`kvbaton bench router`: the router's overhead, compared with vLLM's router and a toy proxy in one run.

Laws: targets run one at a time and each is started anew in each round, so that no two share the machine. A target that
fails loses its own rows and no others. The exit status is 0 only if everything planned was measured (a missing
vllm-router must be excluded by name), no request failed anywhere, and kvbaton's router met its bounds.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import random
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

import kvbaton_proof.bench.router.router_page as bench_page
from kvbaton.cli import progress
from kvbaton.cli.progress import note
from kvbaton.processes.child_process import ChildError
from kvbaton.processes.open_files import raise_file_limit
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.router import router_meters, router_verdict, several_routers
from kvbaton_proof.bench.router.router_backends import Counts
from kvbaton_proof.bench.router.router_client import get
from kvbaton_proof.bench.router.router_load import Order
from kvbaton_proof.bench.router.router_meters import Watched
from kvbaton_proof.bench.router.router_page import RouterFacts
from kvbaton_proof.bench.router.router_rows import DIRECT, THEIRS, Level, Row, Streams
from kvbaton_proof.bench.router.router_targets import (
    HOW_TO_GET_VLLM_ROUTER,
    Backends,
    Helper,
    Site,
    Standing,
    TargetError,
    find_vllm_router,
    helper,
    standing,
)

READY_S = 30.0
COUNTS_S = 20.0

_note = functools.partial(note, "bench")


@dataclass(slots=True)
class RouterFindings:
    """Results so far."""

    rows: list[Row] = field(default_factory=list)
    streams: list[Streams] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    commands: dict[str, str] = field(default_factory=dict)


class RouterBenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements to take."""

    targets: tuple[str, ...]
    levels: tuple[Level, ...]
    streams: int
    rounds: int
    window_s: float
    warmup_s: float
    laps_min: int
    vllm_router: str | None
    seed: int  # for the ports

    def order(self, number: int) -> tuple[str, ...]:
        """Every second round runs in reverse, so that drift of the machine does not always hit the same target."""
        return self.targets if number % 2 else self.targets[::-1]


@dataclass(slots=True)
class Bench:
    """The processes that every target is measured with."""

    plan: RouterBenchPlan
    site: Site
    client: Helper
    backends: Helper

    def watched(self, target: Standing) -> Watched:
        """The processes that exist now: a router may have started more since it was healthy."""
        router = () if target.pid is None else router_meters.family(target.pid)
        return Watched(router, (self.backends.pid,), (self.client.pid,), (os.getpid(),))

    async def counts(self) -> Counts:
        try:
            _, body = await get(self.site.backends.decode, "/counts", COUNTS_S)
        except OSError as error:
            raise TargetError(f"the benchmark's own backends do not report their requests: {error}") from None
        return msgspec.json.decode(body, type=Counts)


def run(args: argparse.Namespace) -> int:
    out = None if args.out is None else Path(args.out)
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise CommandError(f"argument --out: {out} exists already, or its directory does not; name a new file")
    raise_file_limit()
    plan, missing = _plan(args)
    load, begun = os.getloadavg(), time.monotonic()
    try:
        with progress.shown("bench router", quiet=args.json):
            findings = asyncio.run(_run(plan))
    except TargetError as error:
        raise CommandError(f"{error}; is this machine very busy?") from None
    facts = RouterFacts(
        targets=plan.targets, missing=missing, commands=findings.commands, failures=findings.failures,
        versions=router_verdict.versions(plan.vllm_router), load_before=load, load_after=os.getloadavg(),
        window_s=plan.window_s, rounds=plan.rounds, seconds=round(time.monotonic() - begun, 1),
        command=run_facts.shown(sys.argv[1:]), date=run_facts.today(), machine=run_facts.machine(),
        cores=os.cpu_count() or 1,
    )  # fmt: skip
    report = router_verdict.Report(facts, findings.rows, findings.streams, judged=not args.no_verdict)
    several = several_routers.several_routers()
    if args.json:
        print(json.dumps({**report.as_object(), "several_routers": msgspec.to_builtins(several)}))
    else:
        print("\n".join([report.as_text(), *several_routers.as_lines(several)]))
    if out is not None:
        out.write_text(bench_page.page(facts, findings.rows, findings.streams))
        _note(f"wrote {out}")
    return report.status


def _plan(args: argparse.Namespace) -> tuple[RouterBenchPlan, dict[str, str]]:
    """The targets that can be measured, and how to get the others."""
    wanted = [name for name in args.targets if name in THEIRS]
    found = find_vllm_router(args.vllm_router, Path.cwd(), os.environ.get("PATH")) if wanted else None
    if wanted and found is None and args.vllm_router is not None:
        raise CommandError(f"argument --vllm-router: {args.vllm_router} is not a program; {HOW_TO_GET_VLLM_ROUTER}")
    missing = dict.fromkeys(wanted, HOW_TO_GET_VLLM_ROUTER) if found is None else {}
    if missing:
        _note(f"vllm-router is not installed and will not be measured: {HOW_TO_GET_VLLM_ROUTER}")
    plan = RouterBenchPlan(
        targets=tuple(name for name in args.targets if name not in missing),
        levels=(*(Level(False, count) for count in args.concurrency), Level(True, args.streams)),
        streams=args.streams, rounds=args.rounds, window_s=args.window_s, warmup_s=args.warmup_s, vllm_router=found,
        laps_min=args.laps_min, seed=os.getpid(),
    )  # fmt: skip
    return plan, missing


async def _run(plan: RouterBenchPlan) -> RouterFindings:
    with told_to_stop() as stop:
        return await unless_stopped(_measure(plan), stop)


async def _measure(plan: RouterBenchPlan) -> RouterFindings:
    findings, rng = RouterFindings(), random.Random(plan.seed)
    async with (
        helper("kvbaton_proof.bench.router.router_backends") as backends,
        helper("kvbaton_proof.bench.router.router_client") as client,
    ):
        ports = msgspec.json.decode(await backends.line(READY_S), type=Backends)
        await client.line(READY_S)
        bench = Bench(plan, Site(ports, plan.vllm_router), client, backends)
        for number in range(1, plan.rounds + 1):
            for name in plan.order(number):
                begun = time.monotonic()
                try:
                    async with standing(name, bench.site, rng) as target:
                        findings.commands.setdefault(name, target.command)
                        _note(f"round {number} of {plan.rounds}: {name} is up after {time.monotonic() - begun:.1f} s")
                        await _target(bench, number, target, findings)
                except ChildError as error:
                    findings.failures.append(f"{name}, round {number}, could not be measured: {error}")
                    _note(findings.failures[-1])
    return findings


async def _target(bench: Bench, number: int, target: Standing, findings: RouterFindings) -> None:
    for level in bench.plan.levels:
        row = await _one_level(bench, number, target, level)
        findings.rows.append(row)
        _note(_short(row))
    hold = Order(port=target.port, concurrency=bench.plan.streams, stream=True, hold_port=bench.site.backends.decode)
    outcome = await bench.client.carry_out(hold)
    findings.streams.append(
        Streams(
            round=number,
            target=target.name,
            asked=bench.plan.streams,
            open_at_once=outcome.open_at_once or 0,
            complete=outcome.answered,
            errors=outcome.errors,
        )
    )


async def _one_level(bench: Bench, number: int, target: Standing, level: Level) -> Row:
    before = await bench.counts()
    order = Order(
        port=target.port, concurrency=level.concurrency, stream=level.stream, window_s=bench.plan.window_s,
        warmup_s=bench.plan.warmup_s, laps_min=bench.plan.laps_min, watched=bench.watched(target),
    )  # fmt: skip
    outcome = await bench.client.carry_out(order)
    after, used = await bench.counts(), outcome.used
    both = min(after.prefills - before.prefills, after.handed_over - before.handed_over)
    return Row(
        round=number, target=target.name, level=level, answered=outcome.answered, asked=outcome.asked,
        errors=outcome.errors, p50_ms=outcome.p50_ms, p99_ms=outcome.p99_ms,
        first_byte_p50_ms=outcome.first_byte_p50_ms, seconds=used.at if used else 0.0,
        router_cpu_s=used.router if used and target.pid is not None else None,
        backends_cpu_s=used.backends if used else None, client_cpu_s=used.client if used else None,
        others_cores=max(0.0, used.others) / used.at if used else None,
        handed_over=None if target.name == DIRECT else both,
    )  # fmt: skip


def _short(row: Row) -> str:
    cpu = "" if row.cpu_us is None else f", CPU {row.cpu_us:.0f} µs/req"
    figures = f"{row.req_per_s or 0:.0f} req/s, p50 {row.p50_ms or 0:.2f} ms, p99 {row.p99_ms or 0:.2f} ms"
    return f"  {row.target}, concurrency {row.level}: {figures}{cpu}, errors {row.error_count}"
