"""The real `vllm-router` (PyPI, 0.1.16) as a process, in front of workers that a test or a benchmark brings.

Law: the process that was started is the process that is ended, by its own handle, and it is gone when the context is.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from tests.vllm.engines import free_port

START_S = 60.0
END_S = 5.0
POLL_S = 0.05


class RouterFailedError(Exception):
    """The router did not start, or is gone; the message ends with what it said last."""


@dataclass(slots=True)
class RouterProcess:
    """A router that listens."""

    url: str
    discovery: str  # `tcp://host:port` to announce to; empty in URL mode
    process: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.process.pid

    def said(self) -> str:
        """All that it wrote so far."""
        return self.log.read_text(errors="replace")

    async def until_paired(self, within_s: float = 60.0) -> None:
        """Wait until it knows a prefill and a decode worker; in discovery mode it is healthy only then."""
        await _until_ok(self, "/health", within_s)


def nixl_router(
    prefill: Sequence[str], decode: Sequence[str], *more: str, policy: str = "round_robin"
) -> AbstractAsyncContextManager[RouterProcess]:
    """URL mode: P, then D with P's `kv_transfer_params`. The workers must answer `GET /health` by then."""
    workers = [word for url in prefill for word in ("--prefill", url)]
    workers += [word for url in decode for word in ("--decode", url)]
    return _router("", "--kv-connector", "nixl", *workers, "--policy", policy, *more)


def moriio_router(
    *more: str, policy: str = "round_robin", address: str = ""
) -> AbstractAsyncContextManager[RouterProcess]:
    """Discovery mode: workers announce themselves to `discovery`; the first decides READ or WRITE for good."""
    address = address or f"127.0.0.1:{free_port()}"
    words = ("--kv-connector", "moriio", "--vllm-discovery-address", address, "--policy", policy, *more)
    return _router(f"tcp://{address}", *words)


def p2p_nccl_router(*more: str, policy: str = "round_robin") -> AbstractAsyncContextManager[RouterProcess]:
    """Discovery mode of P2pNccl, which is what the router does when it is given no connector."""
    address = f"127.0.0.1:{free_port()}"
    return _router(f"tcp://{address}", "--vllm-discovery-address", address, "--policy", policy, *more)


@asynccontextmanager
async def _router(discovery: str, *words: str) -> AsyncIterator[RouterProcess]:
    port, metrics = free_port(), free_port()
    own = ("--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics), "--log-level", "info")
    with tempfile.TemporaryDirectory(prefix="vllm-router-") as folder:
        log = Path(folder, "log")
        with log.open("wb") as out:
            process = await asyncio.create_subprocess_exec(
                executable(), *own, "--vllm-pd-disaggregation", *words, stdout=out, stderr=out, cwd=folder
            )
        router = RouterProcess(f"http://127.0.0.1:{port}", discovery, process, log)
        try:
            await _until_ok(router, "/liveness", START_S)
            yield router
        finally:
            await _end(process)


def executable() -> str:
    """What KVBATON_VLLM_ROUTER names, else what make installed, else what is beside this Python or on the path."""
    named = os.environ.get("KVBATON_VLLM_ROUTER")
    if named is not None:
        return str(Path(named).absolute())
    places = (
        Path(__file__).parents[2] / ".venv-router" / "bin",
        Path(sys.executable).parent,
        os.environ.get("PATH", ""),
    )
    found = shutil.which("vllm-router", path=os.pathsep.join(map(str, places)))
    if found is None:
        raise RouterFailedError("vllm-router is not installed; run: make .venv-router/.ready")
    return found


async def _until_ok(router: RouterProcess, path: str, within_s: float) -> None:
    """Poll until `path` answers 200."""
    deadline = asyncio.get_running_loop().time() + within_s
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=2)) as session:
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):
                async with session.get(router.url + path) as response:
                    if response.status == 200:
                        return
            if router.process.returncode is not None:
                raise RouterFailedError(f"vllm-router ended with {router.process.returncode}: {router.said()[-2000:]}")
            if asyncio.get_running_loop().time() > deadline:
                raise RouterFailedError(f"no 200 from {path} within {within_s:g} s: {router.said()[-2000:]}")
            await asyncio.sleep(POLL_S)


async def _end(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), END_S)
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
