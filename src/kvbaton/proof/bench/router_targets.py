"""What is measured: kvbaton's router, vLLM's in two of its modes, and a toy proxy, each a fresh process.

Laws: the process that was started is the process that is ended, by its own handle, with whatever it started; it is gone
when its context is. Ports come from outside the range that the kernel gives to connections. Every wait has a deadline,
and one that fails is told with what the process said last.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from kvbaton.control.moriio import MoriioAnnouncer, registration
from kvbaton.proof.bench.router_backends import HOST
from kvbaton.proof.bench.router_client import get
from kvbaton.proof.bench.router_load import WINDOW_S_MAX, Order, Outcome
from kvbaton.proof.bench.router_rows import DIRECT, KVBATON, MORIIO, NIXL, THEIRS, TOY

START_S, END_S = 60.0, 5.0
POLL_S = 0.05
ORDER_MARGIN_S = 60.0  # for an order beyond its own windows
PORTS = range(12_000, 32_000)
PORT_TRIES = 200
SAID_CHARS_MAX = 600
HOW_TO_GET_VLLM_ROUTER = "make .venv-router/.ready, or name one with --vllm-router PATH, or give --without-vllm-router"


class TargetError(Exception):
    """A process of the benchmark did not start or did not answer; the message says which, and what it said last."""


class Backends(msgspec.Struct, frozen=True):
    """Where the backends listen."""

    prefill: int
    decode: int


class Site(msgspec.Struct, frozen=True):
    """What every target needs to know."""

    backends: Backends
    vllm_router: str | None
    guard: tuple[str, ...] = ()  # words before a command, which then ends with this process, however that ends


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


def free_ports(count: int, rng: random.Random) -> list[int]:
    """Ports that nobody listens on now."""
    found: list[int] = []
    for _ in range(PORT_TRIES):
        port = rng.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            if port not in found:
                found.append(port)
        if len(found) == count:
            return found
    raise TargetError(f"no {count} free ports between {PORTS.start} and {PORTS.stop} in {PORT_TRIES} tries")


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
    if name == KVBATON:
        words = [sys.executable, "-m", "kvbaton.cli.main", "router", "--host", HOST, "--port", str(ports.http)]
        return [*words, "--prefill-url", prefill, "--decode-url", decode]
    if name == TOY:
        return [sys.executable, "-m", "kvbaton.proof.bench.router_toy", str(ports.http), prefill, decode]
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
    ports = Ports(*free_ports(3, rng))
    words = command(name, site, ports)
    with tempfile.TemporaryDirectory(prefix="kvbaton-bench-") as directory:
        log = Path(directory, "log")
        async with _process([*site.guard, *words], log, directory) as process:
            if name in THEIRS:
                await _until_ok(name, process, f"{ports.http}/liveness", log)  # it listens for announcements by then
            async with _announced(name, site, ports):
                await _until_ok(name, process, f"{ports.http}/health", log)
                yield Standing(name, ports.http, process.pid, " ".join([Path(words[0]).name, *words[1:]]))


@contextlib.asynccontextmanager
async def _process(words: Sequence[str], log: Path, directory: str) -> AsyncIterator[asyncio.subprocess.Process]:
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            *words, stdin=asyncio.subprocess.PIPE, stdout=out, stderr=out, cwd=directory, start_new_session=True
        )
    try:
        yield process
    finally:
        await end(process)


async def end(process: asyncio.subprocess.Process) -> None:
    """Ask, wait, insist; then the rest of the session that it led."""
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


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


async def _until_ok(name: str, process: asyncio.subprocess.Process, place: str, log: Path) -> None:
    """Until GET of `place`, a port and a path, is answered with 200."""
    port, _, path = place.partition("/")
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(OSError, TimeoutError, ValueError):
            status, _ = await get(int(port), f"/{path}", 2.0)
            if status == 200:
                return
        said = log.read_text(errors="replace")[-SAID_CHARS_MAX:].strip() or "nothing"
        if process.returncode is not None:
            raise TargetError(f"{name} ended with status {process.returncode}; it said last: {said}")
        if time.monotonic() > deadline:
            raise TargetError(f"{name} did not answer /{path} with 200 within {START_S:.0f} s; it said last: {said}")
        await asyncio.sleep(POLL_S)


class Helper:
    """A process of our own that is spoken to in lines."""

    def __init__(self, process: asyncio.subprocess.Process, name: str) -> None:
        self._process = process
        self._name = name

    @property
    def pid(self) -> int:
        return self._process.pid

    async def line(self, within_s: float) -> bytes:
        assert self._process.stdout is not None
        try:
            line = await asyncio.wait_for(self._process.stdout.readline(), within_s)
        except TimeoutError:
            self._process.kill()  # or what it says late would be taken for the answer to the next order
            raise TargetError(f"the benchmark's own {self._name} said nothing for {within_s:.0f} s") from None
        if not line:
            raise TargetError(f"the benchmark's own {self._name} ended; run it alone to see why: {self._name}")
        return line

    async def carry_out(self, order: Order) -> Outcome:
        """Send an order, await its outcome."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(order) + b"\n")
        await self._process.stdin.drain()
        within_s = WINDOW_S_MAX + order.drain_s + ORDER_MARGIN_S
        return msgspec.json.decode(await self.line(within_s), type=Outcome)


@contextlib.asynccontextmanager
async def helper(module: str) -> AsyncIterator[Helper]:
    """One of this benchmark's own processes."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, stdin=pipe, stdout=pipe, start_new_session=True
    )
    try:
        yield Helper(process, f"python -m {module}")
    finally:
        await end(process)
