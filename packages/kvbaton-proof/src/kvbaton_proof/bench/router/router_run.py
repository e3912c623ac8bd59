"""One run of `kvbaton bench router`: every target in turn, under every load.

Laws: targets run one at a time and each is started anew in each round, so that no two share the machine. A target that
fails loses its own rows and no others.
"""

from __future__ import annotations

import os
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from kvbaton.processes.child_process import ChildError, Say
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton_proof.bench.kit.cpu_meter import family
from kvbaton_proof.bench.kit.run_facts import own_versions
from kvbaton_proof.bench.router.router_backends import Counts
from kvbaton_proof.bench.router.router_client import get
from kvbaton_proof.bench.router.router_load import Order
from kvbaton_proof.bench.router.router_page import Measured
from kvbaton_proof.bench.router.router_rows import DIRECT, Level, Row, Streams
from kvbaton_proof.bench.router.router_targets import Backends, Helper, Site, Standing, TargetError, helper, standing

READY_S, COUNTS_S, PROBE_S = 30.0, 20.0, 20.0


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
    client: Helper
    backends: Helper

    def watched(self, target: Standing) -> dict[str, tuple[int, ...]]:
        """The processes that exist now: a router may have started more since it was healthy."""
        router = () if target.pid is None else family(target.pid)
        return {
            "router": router, "backends": (self.backends.pid,), "client": (self.client.pid,), "bench": (os.getpid(),)
        }  # fmt: skip

    async def counts(self) -> Counts:
        try:
            _, body = await get(self.site.backends.decode, "/counts", COUNTS_S)
        except OSError as error:
            raise TargetError(f"the benchmark's own backends do not report their requests: {error}") from None
        return msgspec.json.decode(body, type=Counts)


async def measure(plan: RouterBenchPlan, measured: Measured, say: Say) -> None:
    """Adds to what was measured. TargetError if the benchmark's own processes fail."""
    with told_to_stop() as stop:
        await unless_stopped(_measure(plan, measured, say), stop)


async def _measure(plan: RouterBenchPlan, measured: Measured, say: Say) -> None:
    rng = random.Random(os.getpid())  # for the ports
    async with (
        helper("kvbaton_proof.bench.router.router_backends") as backends,
        helper("kvbaton_proof.bench.router.router_client") as client,
    ):
        ports = msgspec.json.decode(await backends.line(READY_S), type=Backends)
        await client.line(READY_S)
        bench = _Bench(plan, Site(ports, plan.vllm_router), client, backends)
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
    outcome = await bench.client.carry_out(hold)
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
    outcome = await bench.client.carry_out(order)
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
