"""`kvbaton bench vllm`: aggregated vLLM, with kvbaton, and with its own NIXL connector, under the same load here.

Laws: targets run one at a time and each is started anew, so that no two share the machine. A target that fails loses
its own rows and no others. The exit status is 0 only if every request to kvbaton's targets was answered in full (as the
aggregated engine answered it, where that was measured) and all their engines became idle.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import shlex
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import kvbaton_proof.bench.vllm.vllm_load as bench_load
import kvbaton_proof.bench.vllm.vllm_rows as bench_rows
import kvbaton_proof.bench.vllm.vllm_table as bench_table
from kvbaton.cli import progress
from kvbaton.cli.progress import note
from kvbaton.cli.screen import stdout
from kvbaton.local_cluster import vllm_cluster, vllm_engine
from kvbaton.local_cluster.vllm_engine import ServerOptions, fetch
from kvbaton.observe.metrics.scraping import figures
from kvbaton.processes.child_process import GUARD
from kvbaton.processes.open_files import raise_file_limit
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.kit.text_tables import plain
from kvbaton_proof.bench.vllm import vllm_targets
from kvbaton_proof.bench.vllm.vllm_page import VllmFacts, page
from kvbaton_proof.bench.vllm.vllm_rows import OURS, Level, Row
from kvbaton_proof.bench.vllm.vllm_targets import ALONE, NIXL, TARGETS, Setup, standing
from kvbaton_proof.rig import meters as bench_meters
from kvbaton_proof.rig.connectors import D
from kvbaton_proof.rig.servers import ROUTER, SERVED, Group

LEVEL_S, LEVEL_EACH_S = 120.0, 0.5  # default deadline of a level; 2 to 15 requests/s were seen on two cores
IDLE_S = 3.0  # an idle target is watched this long for busy-waiting
FRONT = (
    "all pairs are behind the same router, kvbaton's (NIXL by URL, P then D); the aggregated engine is queried "
    "directly and uses one core, a pair uses two"
)

_note = functools.partial(note, "bench")


@dataclass(slots=True)
class VllmFindings:
    """Results so far."""

    rows: list[Row] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # targets that could not be measured
    commands: dict[str, str] = field(default_factory=dict)
    idle_cores: dict[str, float] = field(default_factory=dict)  # of a target's engines together, maximum of all rounds
    answers: dict[int, list[str]] = field(default_factory=dict)  # of the aggregated engine, by concurrency


class VllmBenchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The measurements to take."""

    setup: Setup
    targets: tuple[str, ...]
    levels: tuple[Level, ...]
    rounds: int
    input_tokens: int
    output_tokens: int
    rest_s: float
    level_s: float | None

    def order(self, number: int) -> tuple[str, ...]:
        """Every second round runs in reverse, so that drift of the machine does not always hit the same target."""
        return self.targets if number % 2 else self.targets[::-1]

    def deadline_s(self, level: Level) -> float:
        return self.level_s or LEVEL_S + LEVEL_EACH_S * level.requests


def run(args: argparse.Namespace) -> int:
    out = None if args.out is None else Path(args.out)
    if out is not None and (out.exists() or not out.parent.is_dir()):
        raise CommandError(f"argument --out: {out} exists already, or its directory does not; name a new file")
    raise_file_limit()
    python = vllm_engine.find_python(args.vllm_python)
    versions = vllm_targets.versions(python)
    if NIXL in args.targets and "nixl" not in versions:
        raise CommandError(f"{python} has no nixl; make vllm-nixl installs it, or remove {NIXL} from --targets")
    plan = _plan(args, python)
    begun = time.monotonic()
    with progress.shown("bench vllm", quiet=args.json):
        findings = asyncio.run(_run(plan))
    facts = _facts(plan, versions, findings, time.monotonic() - begun)
    expected = sum(name.startswith(OURS) for name in plan.targets) * len(plan.levels) * plan.rounds
    ok = bench_rows.verdict(findings.rows, expected) and not findings.failures
    _tell(findings, facts, ok, as_json=args.json)
    if out is not None:
        out.write_text(page(facts, findings.rows))
        _note(f"wrote {out}")
    return 0 if ok else 1


def _plan(args: argparse.Namespace, python: str) -> VllmBenchPlan:
    model = vllm_engine.tiny_model(python, vllm_cluster.TINY_KINDS[0], vllm_cluster.TINY_SEED)
    server = ServerOptions(python=python, model=str(model), served_name=SERVED, kv_gib=args.kv_gib)
    if args.input_len + args.output_len > server.max_model_len:
        raise CommandError(f"--input-len and --output-len: more than {server.max_model_len} tokens together")
    return VllmBenchPlan(
        setup=Setup(server=server, prefix_caching=args.prefix_caching, transport=args.transport),
        targets=args.targets, levels=args.levels, rounds=args.rounds, input_tokens=args.input_len,
        output_tokens=args.output_len, rest_s=args.rest_s, level_s=args.level_s,
    )  # fmt: skip


async def _run(plan: VllmBenchPlan) -> VllmFindings:
    with told_to_stop() as stop:
        return await unless_stopped(_measure(plan), stop)


async def _measure(plan: VllmBenchPlan) -> VllmFindings:
    findings = VllmFindings()
    _note(FRONT)
    for number in range(1, plan.rounds + 1):
        for name in plan.order(number):
            _note(f"round {number} of {plan.rounds}: starting {name}")
            begun = time.monotonic()
            try:
                async with standing(name, plan.setup, _note) as target:
                    _note(f"{name} is up after {time.monotonic() - begun:.0f} s")
                    _keep_commands(findings, target)
                    idle = await _idle_cores(target)
                    findings.idle_cores[name] = max(idle, findings.idle_cores.get(name, 0.0))
                    _note(f"{name} uses {idle:.2f} cores while idle")
                    await _all_levels(plan, number, target, findings)
            except (CommandError, bench_rows.BadResultError) as error:
                findings.failures.append(f"{name}, round {number}, could not be measured: {error}")
                _note(findings.failures[-1])
    return findings


def _keep_commands(findings: VllmFindings, target: Group) -> None:
    """Once for all of kvbaton's targets, which differ only in the mode that the router is asked for."""
    group = OURS.rstrip("-") if target.name.startswith(OURS) else target.name
    for each, line in zip(target.engines, target.commands(), strict=True):
        findings.commands.setdefault(f"{group} {each}", line)


async def _idle_cores(target: Group) -> float:
    before = _cpu(target, 0)
    await asyncio.sleep(IDLE_S)
    used = before.until(_cpu(target, 0))
    return round(used.engines / used.at, 3)


async def _all_levels(plan: VllmBenchPlan, number: int, target: Group, findings: VllmFindings) -> None:
    for level in plan.levels:
        row = await _one_level(plan, number, target, level, findings)
        findings.rows.append(row)
        _note(bench_table.short(row))
        for line in bench_rows.complaints([row]):
            _note(f"  {line}")
        if dead := [f"{engine.name}: {engine.tail()}" for engine in target.engines.values() if not engine.is_alive]:
            raise CommandError(f"a process ended under load: {'; '.join(dead)}")


async def _one_level(plan: VllmBenchPlan, number: int, target: Group, level: Level, findings: VllmFindings) -> Row:
    mode, server = TARGETS[target.name], plan.setup.server
    load = bench_load.Load(
        url=target.url, model=server.model, served_name=server.served_name, level=level, seed=level.concurrency,
        input_tokens=plan.input_tokens, output_tokens=plan.output_tokens,
        headers={} if mode is None else {MODE_HEADER: str(mode)},
    )  # fmt: skip
    findings.commands.setdefault("load, here on the first target at its first level", _shown(load))
    before = await _ends(target)
    outcome = await bench_load.run(
        load, [*GUARD, server.python], target.flag.parent, lambda pid: _cpu(target, pid),
        deadline_s=plan.deadline_s(level),
    )  # fmt: skip
    engines = {engine.name: engine.url for engine in target.workers.values()}
    rest = await bench_meters.come_to_rest(engines, fetch, plan.rest_s)
    after = await _ends(target)
    ends = {} if before is None or after is None else bench_meters.gained(before, after)
    handed_over = max(0, ends.get(bench_meters.DELIVERED, 0) - bench_load.WARMUPS)  # with caches some are not needed
    told = outcome.told
    texts = None if told is None else told.generated_texts
    if target.name == ALONE and texts is not None:
        findings.answers.setdefault(level.concurrency, texts)
    notes = [*rest.holding, *(() if told is None else told.complaints(plan.output_tokens))]
    if told is None:
        notes.append(f"no result; last output of the load generator: {outcome.said}")
    return Row(
        round=number, target=target.name, concurrency=level.concurrency, requests=level.requests,
        succeeded=0 if told is None else told.succeeded(plan.output_tokens), hung=outcome.hung,
        input_tokens=None if told is None else told.total_input_tokens, at_rest=rest.at_rest, rest_s=rest.seconds,
        ends=ends, handed_over=None if after is None or plan.setup.prefix_caching else handed_over,
        same_answers=None if texts is None or target.name == ALONE
        else bench_rows.same(texts, findings.answers.get(level.concurrency)),
        notes=tuple(notes), **({} if told is None else bench_rows.timings(told)), **_used(outcome, target),
    )  # fmt: skip


def _used(outcome: bench_load.Outcome[bench_meters.Cpu], target: Group) -> dict[str, float | None]:
    if outcome.began is None or outcome.ended is None:
        return {}
    used = outcome.began.until(outcome.ended)
    others = max(0.0, used.others) / max(used.at, 1e-9)
    router = used.router if ROUTER in target.engines else None
    return {"engine_cpu_s": used.engines, "router_cpu_s": router, "others_cores": others}


def _cpu(target: Group, load_pid: int) -> bench_meters.Cpu:
    pids = {name: engine.process.pid for name, engine in target.engines.items() if engine.process is not None}
    router = pids.pop(ROUTER, None)
    return bench_meters.cpu(pids.values(), router, load_pid)


async def _ends(target: Group) -> dict[str, int] | None:
    """Handoffs so far on D, by how they ended; None if there is no D, or none that reports."""
    d = target.engines.get(D)
    with contextlib.suppress(OSError):
        return None if d is None else bench_meters.ends(figures(await fetch(f"{d.url}/metrics")))
    return None


def _shown(load: bench_load.Load) -> str:
    return shlex.join(["vllm", "bench", "serve", *load.words(Path("load.json"))])


def _facts(plan: VllmBenchPlan, versions: Mapping[str, str], findings: VllmFindings, seconds: float) -> VllmFacts:
    return VllmFacts(
        date=run_facts.today(), machine=run_facts.machine(with_memory=True),
        versions={"kvbaton": run_facts.own_versions()["kvbaton"], **versions},
        command=shlex.join(["kvbaton", *sys.argv[1:]]),
        options={
            "prompt tokens": plan.input_tokens, "answer tokens": plan.output_tokens,
            "requests by concurrency": {level.concurrency: level.requests for level in plan.levels},
            "prefix caching": "on" if plan.setup.prefix_caching else "off", "transport": plan.setup.transport,
            "KV cache GiB": plan.setup.server.kv_gib, "OMP threads": 1,
        },
        idle_cores=findings.idle_cores, commands=findings.commands, failures=findings.failures,
        seconds=round(seconds, 1),
    )  # fmt: skip


def _tell(findings: VllmFindings, facts: VllmFacts, ok: bool, *, as_json: bool) -> None:
    rows, found = findings.rows, bench_rows.ratios(findings.rows)
    wrong = [*findings.failures, *bench_rows.complaints(rows)]
    if as_json:
        told: dict[str, Any] = {"ok": ok, "wrong": wrong, "front": FRONT, **msgspec.to_builtins(facts)}
        told |= {"rows": [_row(row) for row in rows], "ratios": msgspec.to_builtins(found)}
        print(json.dumps(told))
        return
    print(plain(bench_table.HEAD, bench_table.grid(rows)))
    if found:
        print(f"\n{plain(bench_table.RATIO_HEAD, bench_table.ratio_grid(found))}")
    print(f"\n{FRONT}.\n{bench_table.LEGEND}")
    print("\n".join(["", *wrong, f"verdict: {stdout().verdict(ok)} ({facts.seconds:.0f} s)"]))


def _row(row: Row) -> dict[str, Any]:
    per_request = {"engine_cpu_per_request_s": row.engine_cpu_per_request_s}
    return {**msgspec.to_builtins(row), "failed": row.failed, **per_request}
