"""One run of `kvbaton bench vllm`: aggregated vLLM, with kvbaton, and with its own NIXL connector, under the same load.

Laws: targets run one at a time and each is started anew, so that no two share the machine. A target that fails loses
its own rows and no others.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

import kvbaton_proof.bench.vllm.vllm_load as bench_load
import kvbaton_proof.bench.vllm.vllm_rows as bench_rows
from kvbaton.local_cluster.vllm_engine import fetch
from kvbaton.observe.metrics.scraping import figures
from kvbaton.processes.child_process import GUARD, Say
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.bench.kit.run_facts import RunFacts
from kvbaton_proof.bench.vllm.vllm_page import VllmFacts, short
from kvbaton_proof.bench.vllm.vllm_rows import OURS, Level, Row
from kvbaton_proof.bench.vllm.vllm_targets import ALONE, TARGETS, Setup, standing
from kvbaton_proof.rig import meters as bench_meters
from kvbaton_proof.rig.connectors import D
from kvbaton_proof.rig.servers import ROUTER, Group

LEVEL_S, LEVEL_EACH_S = 120.0, 0.5  # default deadline of a level; 2 to 15 requests/s were seen on two cores
IDLE_S = 3.0  # an idle target is watched this long for busy-waiting


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


async def measure(plan: VllmBenchPlan, say: Say) -> VllmFindings:
    with told_to_stop() as stop:
        return await unless_stopped(_measure(plan, say), stop)


async def _measure(plan: VllmBenchPlan, say: Say) -> VllmFindings:
    findings = VllmFindings()
    for number in range(1, plan.rounds + 1):
        for name in plan.order(number):
            say(f"round {number} of {plan.rounds}: starting {name}")
            begun = time.monotonic()
            try:
                async with standing(name, plan.setup, say) as target:
                    say(f"{name} is up after {time.monotonic() - begun:.0f} s")
                    _keep_commands(findings, target)
                    idle = await _idle_cores(target)
                    findings.idle_cores[name] = max(idle, findings.idle_cores.get(name, 0.0))
                    say(f"{name} uses {idle:.2f} cores while idle")
                    await _all_levels(plan, number, target, findings, say)
            except (CommandError, bench_rows.BadResultError) as error:
                findings.failures.append(f"{name}, round {number}, could not be measured: {error}")
                say(findings.failures[-1])
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


async def _all_levels(plan: VllmBenchPlan, number: int, target: Group, findings: VllmFindings, say: Say) -> None:
    for level in plan.levels:
        row = await _one_level(plan, number, target, level, findings)
        findings.rows.append(row)
        say(short(row))
        for line in bench_rows.complaints([row]):
            say(f"  {line}")
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


def facts_of(plan: VllmBenchPlan, facts: RunFacts, findings: VllmFindings) -> VllmFacts:
    return VllmFacts(
        **msgspec.structs.asdict(facts),
        options={
            "prompt tokens": plan.input_tokens, "answer tokens": plan.output_tokens,
            "requests by concurrency": {level.concurrency: level.requests for level in plan.levels},
            "prefix caching": "on" if plan.setup.prefix_caching else "off", "transport": plan.setup.transport,
            "KV cache GiB": plan.setup.server.kv_gib, "OMP threads": 1,
        },
        idle_cores=findings.idle_cores, commands=findings.commands, failures=findings.failures,
    )  # fmt: skip


def is_ok(plan: VllmBenchPlan, findings: VllmFindings) -> bool:
    """Whether every request to kvbaton's targets was answered as it must be, and all that was planned was measured."""
    expected = sum(name.startswith(OURS) for name in plan.targets) * len(plan.levels) * plan.rounds
    return bench_rows.verdict(findings.rows, expected) and not findings.failures


def as_object(facts: VllmFacts, findings: VllmFindings, ok: bool) -> dict[str, Any]:
    rows = findings.rows
    wrong = [*findings.failures, *bench_rows.complaints(rows)]
    head = {"ok": ok, "wrong": wrong, **msgspec.to_builtins(facts)}
    return {**head, "rows": [_row(row) for row in rows], "ratios": msgspec.to_builtins(bench_rows.ratios(rows))}


def _row(row: Row) -> dict[str, Any]:
    per_request = {"engine_cpu_per_request_s": row.engine_cpu_per_request_s}
    return {**msgspec.to_builtins(row), "failed": row.failed, **per_request}
