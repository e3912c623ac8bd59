"""Targets of the benchmark: kvbaton's router, vLLM's in two of its modes, and a toy proxy, each a fresh process.

Laws: a target is gone after its context. Every wait has a deadline, and a failure is reported with the process's last
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from kvbaton.control.plain.announcer import MoriioAnnouncer, registration
from kvbaton.processes.child_process import (
    GUARD,
    KVBATON_ARGV,
    Child,
    ChildError,
    Program,
    end,
    free_ports,
    ready,
    start,
)
from kvbaton_proof.bench.router.router_backends import HOST
from kvbaton_proof.bench.router.router_client import get
from kvbaton_proof.bench.router.router_rows import DIRECT, KVBATON_2, MORIIO, NIXL, OURS, THEIRS, TOY

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


def find_vllm_router(given: str | None, start: Path, search: str | None) -> str | None:
    """As given, else of the environment that `make .venv-router/.ready` makes in or above `start`, else on the path."""
    if given is not None:
        found = shutil.which(given)
        return None if found is None else os.path.abspath(found)
    for directory in (start, *start.parents):
        place = directory / ".venv-router" / "bin" / "vllm-router"
        if os.access(place, os.X_OK):
            return str(place)
    return shutil.which("vllm-router", path=search)


def command(name: str, site: Site, ports: Ports) -> list[str]:
    """How a target is started, each in the fastest form of it that we know."""
    prefill, decode = f"http://{HOST}:{site.backends.prefill}", f"http://{HOST}:{site.backends.decode}"
    if name in OURS:
        words = [*KVBATON_ARGV, "router", "--host", HOST, "--port", str(ports.http)]
        words += ["--processes", "2"] if name == KVBATON_2 else []
        words += ["--access-log", "off"]  # as the others log nothing of requests here
        return [*words, "--prefill-url", prefill, "--decode-url", decode]
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
