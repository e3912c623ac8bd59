"""One run of `kvbaton bench router`: every target in turn, under every load.

Laws: targets run one at a time and each is started anew in each round, so that no two share the machine. A target that
fails loses its own rows and no others.

Targets of the benchmark: kvbaton's router, vLLM's in two of its modes, and a toy proxy, each a fresh process.

Laws: a target is gone after its context. Every wait has a deadline, and a failure is reported with the process's last
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvbaton.control.plain.announcer import MoriioAnnouncer, registration
from kvbaton.processes.child_process import (
    GUARD,
    KVBATON_ARGV,
    Child,
    ChildError,
    Program,
    Say,
    end,
    free_ports,
    ready,
    start,
)
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton_proof.bench.kit.cpu_meter import family
from kvbaton_proof.bench.kit.piped_children import PipedChild
from kvbaton_proof.bench.kit.run_facts import own_versions
from kvbaton_proof.bench.router.router_backends import HOST, Counts
from kvbaton_proof.bench.router.router_client import get
from kvbaton_proof.bench.router.router_load import WINDOW_S_MAX, Order, Outcome
from kvbaton_proof.bench.router.router_rows import (
    DIRECT,
    KVBATON_2,
    MORIIO,
    NIXL,
    OURS,
    OWNED,
    PLAIN,
    THEIRS,
    TOY,
    Level,
    Measured,
    Row,
    Streams,
)

START_S = 60.0
POLL_S = 0.05
HOW_TO_GET_VLLM_ROUTER = "make .venv-router/.ready, or name one with --vllm-router PATH, or give --without-vllm-router"


class TargetError(ChildError):
    """A process of the benchmark did not start or did not answer; the message says which, and what it said last."""


class Backends(msgspec.Struct, frozen=True):
    """Where the backends listen."""

    prefill: int
    decode: int


class Site(msgspec.Struct, frozen=True):
    """What every target needs to know."""

    backends: Backends
    vllm_router: str | None


class Ports(msgspec.Struct, frozen=True):
    """Free ones for a target."""

    http: int
    metrics: int
    discovery: int


class Standing(msgspec.Struct, frozen=True):
    """A target that can be asked."""

    name: str
    port: int
    pid: int | None  # none where D is asked directly
    command: str


def command(name: str, site: Site, ports: Ports) -> list[str]:
    """How a target is started, each in the fastest form of it that we know."""
    prefill, decode = f"http://{HOST}:{site.backends.prefill}", f"http://{HOST}:{site.backends.decode}"
    if name in OURS:
        words = [*KVBATON_ARGV, "router", "--host", HOST, "--port", str(ports.http)]
        words += ["--processes", "2"] if name == KVBATON_2 else []
        words += ["--access-log", "off"]  # as the others log nothing of requests here
        return [*words, "--prefill-url", prefill, "--decode-url", decode]
    if name in (OWNED, PLAIN):
        owned = "on" if name == OWNED else "off"
        module = "kvbaton_proof.bench.router.router_owned"
        return [sys.executable, "-m", module, str(ports.http), prefill, decode, owned]
    if name == TOY:
        return [sys.executable, "-m", "kvbaton_proof.bench.router.router_toy", str(ports.http), prefill, decode]
    if site.vllm_router is None:
        raise TargetError(f"vllm-router is not installed: {HOW_TO_GET_VLLM_ROUTER}")
    words = [site.vllm_router, "--host", HOST, "--port", str(ports.http), "--prometheus-port", str(ports.metrics)]
    words += ["--log-level", "error", "--policy", "round_robin", "--vllm-pd-disaggregation", "--kv-connector"]
    if name == NIXL:
        return [*words, "nixl", "--prefill", prefill, "--decode", decode, "--worker-startup-check-interval", "1"]
    if name == MORIIO:
        return [*words, "moriio", "--vllm-discovery-address", f"{HOST}:{ports.discovery}"]
    raise TargetError(f"no such target: {name}")


@contextlib.asynccontextmanager
async def standing(name: str, site: Site, rng: random.Random) -> AsyncIterator[Standing]:
    """A target that answers, while the context lasts."""
    if name == DIRECT:
        yield Standing(DIRECT, site.backends.decode, None, "the client asks D itself")
        return
    ports = Ports(*free_ports(3, HOST, rng))
    words = command(name, site, ports)
    with tempfile.TemporaryDirectory(prefix="kvbaton-bench-") as directory:
        child = await start(Program(name, "router", [*GUARD, *words]), Path(directory, "log"), cwd=directory)
        try:
            if name in THEIRS:
                await _until_ok(child, ports.http, "/liveness")  # it listens for announcements by then
            async with _announced(name, site, ports):
                await _until_ok(child, ports.http, "/health")
                yield Standing(name, ports.http, child.pid, " ".join([Path(words[0]).name, *words[1:]]))
        finally:
            await end([child])


@contextlib.asynccontextmanager
async def _announced(name: str, site: Site, ports: Ports) -> AsyncIterator[None]:
    """In discovery mode the backends are made known as MoRI-IO's workers make themselves known."""
    if name != MORIIO:
        yield
        return
    announcers = []
    try:
        for number, (role, port) in enumerate((("P", site.backends.prefill), ("D", site.backends.decode))):
            peer = f"host:{HOST},handshake:{6301 + number},notify:{6401 + number}"  # nobody dials it here
            said = registration(role, f"{HOST}:{port}", peer, transfer_mode="READ")  # type: ignore[arg-type]
            announcers.append(MoriioAnnouncer(f"tcp://{HOST}:{ports.discovery}", said, interval_s=1.0))
            announcers[-1].start()
        yield
    finally:
        for announcer in announcers:
            await asyncio.to_thread(announcer.stop)


async def _until_ok(child: Child, port: int, path: str) -> None:
    """Until GET of `path` is answered with 200."""

    async def missing() -> list[str]:
        with contextlib.suppress(TimeoutError, ValueError):
            status, _ = await get(port, path, 2.0)
            return [] if status == 200 else [child.name]
        return [child.name]

    await ready(missing, [child], START_S, lambda _: None, verb=f"answer {path} with 200", look_s=POLL_S)


READY_S, COUNTS_S, PROBE_S = 30.0, 20.0, 20.0
ORDER_MARGIN_S = 60.0  # for an order beyond its own windows


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

    def order(self, number: int) -> tuple[str, ...]:
        """Every second round runs in reverse, so that drift of the machine does not always hit the same target."""
        return self.targets if number % 2 else self.targets[::-1]


@dataclass(slots=True)
class _Bench:
    """The processes that every target is measured with."""

    plan: RouterBenchPlan
    site: Site
    client: PipedChild
    backends: PipedChild

    def watched(self, target: Standing) -> dict[str, tuple[int, ...]]:
        """The processes that exist now: a router may have started more since it was healthy."""
        router = () if target.pid is None else family(target.pid)
        return {
            "router": router, "backends": (self.backends.pid,), "client": (self.client.pid,), "bench": (os.getpid(),)
        }  # fmt: skip

    async def carry_out(self, order: Order) -> Outcome:
        within_s = WINDOW_S_MAX + order.drain_s + ORDER_MARGIN_S
        return await asyncio.to_thread(self.client.ask, order, Outcome, within_s)

    async def counts(self) -> Counts:
        try:
            _, body = await get(self.site.backends.decode, "/counts", COUNTS_S)
        except OSError as error:
            raise TargetError(f"the benchmark's own backends do not report their requests: {error}") from None
        return msgspec.json.decode(body, type=Counts)


async def measure(plan: RouterBenchPlan, measured: Measured, say: Say) -> None:
    """Adds to what was measured. ChildFailed if one of the benchmark's own processes fails."""
    with told_to_stop() as stop:
        await unless_stopped(_measure(plan, measured, say), stop)


async def _measure(plan: RouterBenchPlan, measured: Measured, say: Say) -> None:
    rng = random.Random(os.getpid())  # for the ports
    with (
        PipedChild("kvbaton_proof.bench.router.router_backends") as backends,
        PipedChild("kvbaton_proof.bench.router.router_client") as client,
    ):
        site = Site(backends.hear(Backends, READY_S), plan.vllm_router)
        bench = _Bench(plan, site, client, backends)
        for number in range(1, plan.rounds + 1):
            for name in plan.order(number):
                begun = time.monotonic()
                try:
                    async with standing(name, bench.site, rng) as target:
                        measured.commands.setdefault(name, target.command)
                        say(f"round {number} of {plan.rounds}: {name} is up after {time.monotonic() - begun:.1f} s")
                        await _target(bench, number, target, measured, say)
                except ChildError as error:
                    measured.failures.append(f"{name}, round {number}, could not be measured: {error}")
                    say(measured.failures[-1])


async def _target(bench: _Bench, number: int, target: Standing, measured: Measured, say: Say) -> None:
    for level in bench.plan.levels:
        row = await _one_level(bench, number, target, level)
        measured.rows.append(row)
        say(_short(row))
    hold = Order(port=target.port, concurrency=bench.plan.streams, stream=True, hold_port=bench.site.backends.decode)
    outcome = await bench.carry_out(hold)
    measured.streams.append(
        Streams(
            round=number, target=target.name, asked=bench.plan.streams, open_at_once=outcome.open_at_once or 0,
            complete=outcome.answered, errors=outcome.errors,
        )
    )  # fmt: skip


async def _one_level(bench: _Bench, number: int, target: Standing, level: Level) -> Row:
    before = await bench.counts()
    order = Order(
        port=target.port, concurrency=level.concurrency, stream=level.stream, window_s=bench.plan.window_s,
        warmup_s=bench.plan.warmup_s, laps_min=bench.plan.laps_min, watched=bench.watched(target),
    )  # fmt: skip
    outcome = await bench.carry_out(order)
    after, used = await bench.counts(), outcome.used
    both = min(after.prefills - before.prefills, after.handed_over - before.handed_over)
    return Row(
        round=number, target=target.name, level=level, answered=outcome.answered, asked=outcome.asked,
        errors=outcome.errors, p50_ms=outcome.p50_ms, p99_ms=outcome.p99_ms,
        first_byte_p50_ms=outcome.first_byte_p50_ms, seconds=used.at if used else 0.0,
        router_cpu_s=used.used["router"] if used and target.pid is not None else None,
        backends_cpu_s=used.used["backends"] if used else None, client_cpu_s=used.used["client"] if used else None,
        others_cores=used.others_cores if used else None, handed_over=None if target.name == DIRECT else both,
    )  # fmt: skip


def _short(row: Row) -> str:
    cpu = "" if row.cpu_us is None else f", CPU {row.cpu_us:.0f} µs/req"
    figures = f"{row.req_per_s or 0:.0f} req/s, p50 {row.p50_ms or 0:.2f} ms, p99 {row.p99_ms or 0:.2f} ms"
    return f"  {row.target}, concurrency {row.level}: {figures}{cpu}, errors {row.error_count}"


def versions(vllm_router: str | None) -> dict[str, str]:
    own = own_versions("uvloop", "aiohttp")
    return own if vllm_router is None else {**own, "vllm-router": _vllm_router_version(vllm_router)}


def _vllm_router_version(program: str) -> str:
    """Of the package in the Python beside the program."""
    python = Path(program).resolve().parent / "python"
    code = "import importlib.metadata as m; print(m.version('vllm-router'))"
    try:
        done = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"
