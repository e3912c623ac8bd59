"""`kvbaton bench serve`: client-side latency and throughput of a cluster under load, target by target, in rounds.

Laws: all targets get the same plan and take turns (A B C A B C), so that a busy machine affects all alike. The exit
status is the verdict on answers, never on speed: 0 if every request was answered in full, 1 with counts if not. Ctrl-C
prints what was measured until then. Every wait has a deadline.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import os
import sys
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.cli import progress, screen
from kvbaton.local_cluster.vllm_engine import ServerOptions
from kvbaton.processes.open_files import raise_file_limit
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton.processes.operator_errors import CommandError, StoppedError
from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.serve import serve_meter, serve_plan, serve_report, serve_sites, serve_trace
from kvbaton_proof.bench.serve.serve_load import Aim, Load, warm_up
from kvbaton_proof.bench.serve.serve_meter import Meter, Part, Used
from kvbaton_proof.bench.serve.serve_plan import AGGREGATED, SINGLE
from kvbaton_proof.bench.serve.serve_probe import ask_for_models
from kvbaton_proof.bench.serve.serve_report import Report
from kvbaton_proof.bench.serve.serve_sites import Site, site_of
from kvbaton_proof.bench.serve.serve_summary import report_of, texts
from kvbaton_proof.bench.serve.serve_work import Findings, Work, work_of
from kvbaton_proof.bench.vllm.vllm_targets import versions as vllm_versions

INTERRUPTED = 130
HURRIED_S = 0.5  # for engines to become idle after Ctrl-C
SUFFIXES = (".md", ".svg", ".json")

note = functools.partial(progress.note, "bench")


@dataclass(slots=True)
class ServeTarget:
    """A server to measure, and how."""

    name: str
    url: str
    mode: str | None = None
    site: Site | None = None  # if it was started here
    model: str | None = None

    @property
    def hands_over(self) -> bool:
        return self.site is not None and self.site.name not in (AGGREGATED, SINGLE)


def run(args: argparse.Namespace) -> int:
    files = _files(args)
    work = work_of(args)
    server = None if args.targets else serve_sites.server_of(args)
    raise_file_limit()
    load, begun = os.getloadavg()[0], time.monotonic()
    findings = run_loop(_measure(args, work, server))
    if args.record is not None:
        Path(args.record).write_bytes(b"".join(serve_trace.written(ask, at_s) for ask, at_s in findings.sent))
    if not findings.parts:
        raise StoppedError
    more = {} if server is None else vllm_versions(server.python)
    report = report_of(args, sys.argv[1:], work, findings, (load, os.getloadavg()[0]), time.monotonic() - begun, more)
    _tell(report, as_json=args.json)
    for path, text in zip(files, texts(report, files), strict=False):
        path.write_text(text)
    if files:
        note(f"wrote {' '.join(map(str, files))}")
    if report.stopped:
        return INTERRUPTED
    return 0 if report.ok else 1


def _tell(report: Report, *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(report).decode(), flush=True)
        return
    style = screen.stdout().style
    lines = ["\n\n".join(serve_report.tables(report)), "", serve_report.LEGEND]
    lines += [serve_report.RATIO_LEGEND] if report.ratios else []
    lines += ["", *report.notes, *(style(line, "bad") for line in report.wrong)]
    verdict = style("ok", "good") if report.ok else style("stopped" if report.stopped else "NOT ok", "bad")
    print("\n".join([*lines, f"verdict: {verdict} ({report.seconds:.0f} s)"]), flush=True)


def _files(args: argparse.Namespace) -> tuple[Path, ...]:
    """Where results go; nothing is overwritten."""
    if args.record is not None and (Path(args.record).exists() or not Path(args.record).resolve().parent.is_dir()):
        raise CommandError(
            f"argument --record: {args.record} exists already, or its directory does not; name a new file"
        )
    if args.out is None:
        return ()
    name = args.name or f"{run_facts.today()}-serve"
    found = tuple(Path(args.out) / f"{name}{suffix}" for suffix in SUFFIXES)
    if not Path(args.out).is_dir():
        raise CommandError(f"argument --out: {args.out} is not a directory; create it first")
    for path in found:
        if path.exists():
            raise CommandError(f"argument --out: {path} exists already; give another --name")
    return found


async def _measure(args: argparse.Namespace, work: Work, server: ServerOptions | None) -> Findings:
    findings = Findings()
    with told_to_stop() as stop:
        async with contextlib.AsyncExitStack() as stack:
            if args.targets:
                targets = [ServeTarget(each.name, each.url, each.mode, model=args.model) for each in args.targets]
            else:
                targets = await _started(args, server, stack, stop)
            for target in targets:
                await _probe(target, work)
            for number, name in serve_plan.turns([target.name for target in targets], args.rounds):
                target = next(each for each in targets if each.name == name)
                await _part(number, target, work, findings, stop, rounds=args.rounds)
                if stop.is_set():
                    note("stopped; these are the measurements so far")
                    findings.stopped = True
                    break
            for site in {id(each.site): each.site for each in targets if each.site is not None}.values():
                findings.commands |= site.commands()
                findings.failures += site.dead()
    return findings


async def _started(
    args: argparse.Namespace, server: ServerOptions | None, stack: contextlib.AsyncExitStack, stop: asyncio.Event
) -> list[ServeTarget]:
    """Every cluster that the targets need, once."""
    sites: dict[str, Site] = {}
    for name in dict.fromkeys(map(site_of, args.compare)):
        plan = serve_sites.plan_of(name, args, server)
        standing = serve_sites.standing(name, plan, note, stop, vllm=server is not None)
        sites[name] = await stack.enter_async_context(standing)
    found = []
    for name in args.compare:
        site = sites[site_of(name)]
        found.append(ServeTarget(name, site.url, None if site_of(name) == name else name, site))
    return found


async def _probe(target: ServeTarget, work: Work) -> None:
    served = await ask_for_models(target.name, target.url)
    target.model = target.model or served.model
    if served.tokens_max is not None and work.longest > served.tokens_max:
        raise CommandError(
            f"argument --input-len: prompt and answer have up to {work.longest} tokens together, {target.name} accepts "
            f"{served.tokens_max}; use shorter ones (with a trace: --length-scale)"
        )


async def _part(
    number: int, target: ServeTarget, work: Work, findings: Findings, stop: asyncio.Event, *, rounds: int
) -> None:
    meter = Meter(work.slo, work.seed)
    meter.planned = work.planned
    aim = Aim(
        url=target.url, headers={} if target.mode is None else {MODE_HEADER: target.mode}, model=target.model,
        salt=f"{work.seed}-{number}-{target.name}-{time.time_ns()}", in_prompt=work.in_prompt, seed=work.seed,
        timeout_s=work.timeout_s,
    )  # fmt: skip
    is_first = not findings.parts
    gc.collect()
    label = f"{target.name} {number}/{rounds}"
    with progress.shown(label) as tell:

        def show() -> None:
            failed = meter.errors.total()
            done = f"{meter.right + failed} of {work.planned}" if work.planned else f"{meter.right + failed}"
            tell(f"{done} {failed} failed" if failed else done)

        load = Load(
            aim, work.pace, meter, on_end=show,
            on_sent=(lambda ask, at_s: findings.sent.append((ask, at_s))) if is_first else (lambda *_: None),
        )  # fmt: skip
        if not await _unless_stopped(warm_up(aim, work.warmups), stop):
            return
        before, handed_over = None, None
        if target.site is not None:
            handed_over, before = await target.site.handed_over(), target.site.cpu()
        await _unless_stopped(load.run(work.asks()), stop)
    used = Used()
    if target.site is not None and before is not None:
        rest_s = HURRIED_S if stop.is_set() else serve_sites.REST_S
        used = await target.site.used(before, handed_over, hands_over=target.hands_over, rest_s=rest_s)
    if stop.is_set() and not meter.sent:
        return
    first = findings.firsts.get(number)
    part = serve_meter.part(number, target.name, meter, work.slo, used, first)
    if first is None:
        findings.firsts = {number: meter}
    findings.parts.append(part)
    findings.order.append((number, target.name))
    findings.pools.setdefault(target.name, Meter(work.slo, work.seed)).add(meter)
    note(f"round {number} of {rounds}: {_short(part)}")


async def _unless_stopped(work: Coroutine[Any, Any, None], stop: asyncio.Event) -> bool:
    """Whether it ran to its end."""
    try:
        await unless_stopped(work, stop)
    except StoppedError:
        return False
    return True


def _short(part: Part) -> str:
    told = f"{part.target}: {part.right} of {part.sent} right"
    if part.requests_per_s is not None and part.ttft is not None:
        told += f", {part.requests_per_s:.2f} req/s, TTFT p50 {part.ttft.p50_ms:.0f} ms"
    return told
