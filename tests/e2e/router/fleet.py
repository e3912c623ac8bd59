"""Embedded workers as processes of their own, with a registry and without a router of ours: others' stand before them.

Law: a process that was started here is ended here, by its own handle, and must end well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvbaton.control import keyring
from kvbaton.control.registry import RegistryServer
from tests.e2e import warm_workers
from tests.e2e.cluster import eventually, get_json
from tests.vllm.forking import Forked

START_S = 60.0
STOP_S = 40.0
HELD = ("pins", "leases", "intakes", "running", "waiting", "loading")
ROUTER_PLACE = Path(__file__).parents[3] / ".venv-router" / "bin" / "vllm-router"


@dataclass
class Member:
    """One worker process."""

    name: str
    process: Forked
    log: Path
    url: str = ""

    def has_spoken(self) -> str:
        """Its URL, once it says that it serves."""
        said = self.log.read_text()
        assert self.process.poll() is None, f"{self.name} ended with {self.process.returncode}:\n{said}"
        match = re.search(r" serves (http://\S+)", said)
        return match[1] if match else ""

    async def stats(self) -> dict[str, Any]:
        async with aiohttp.ClientSession() as session:
            return await get_json(session, f"{self.url}/stats")


@dataclass
class Fleet:
    """Workers that know each other."""

    prefill: list[Member]
    decode: list[Member]

    @property
    def members(self) -> list[Member]:
        return [*self.prefill, *self.decode]

    async def delivered(self) -> int:
        """How many handoffs D's have taken in so far."""
        return sum([(await member.stats())["delivered_total"] for member in self.decode])

    async def at_rest(self) -> list[dict[str, Any]]:
        """What each says once none holds anything for anybody."""

        async def look() -> list[dict[str, Any]]:
            told = [await member.stats() for member in self.members]
            still = all(stats[key] == 0 for stats in told for key in HELD)
            return told if still and all(stats["free_blocks"] == stats["blocks"] for stats in told) else []

        return await eventually(look, 30.0)


@contextlib.asynccontextmanager
async def fleet(directory: Path, *flags: str, prefill: int = 1, decode: int = 1) -> AsyncIterator[Fleet]:
    """Start the workers and wait until each serves and knows all the others."""
    roles = {f"p{n}": "prefill" for n in range(prefill)} | {f"d{n}": "decode" for n in range(decode)}
    keyring.mint(directory / "keys", ["router", *roles])
    registry = RegistryServer(keyring.load(directory / "keys", "router"))
    registry.start()
    members: list[Member] = []
    try:
        for name, role in roles.items():
            own = ("--name", name, "--role", role, "--registry", registry.endpoint, "--keys", str(directory / "keys"))
            log = directory / f"{name}.log"
            members.append(Member(name, warm_workers.start((*warm_workers.MAIN, "worker", *own, *flags), log), log))
        for member in members:
            member.url = await eventually(_coroutine(member.has_spoken), START_S)
        for member in members:
            await eventually(_knows(member, len(members) - 1), START_S)
        yield Fleet(members[:prefill], members[prefill:])
    finally:
        codes = await asyncio.gather(*map(stop, members))
        registry.close()
    assert codes == [0] * len(members), [member.log.read_text()[-2000:] for member in members]


async def stop(member: Member) -> int:
    """Its exit status."""
    member.process.send_signal(signal.SIGHUP)  # at once: nobody is left for whom it should drain
    try:
        return await warm_workers.ended(member.process, STOP_S)
    except subprocess.TimeoutExpired:
        member.process.kill()
        return await warm_workers.ended(member.process, STOP_S)


def _coroutine(look: Any) -> Any:
    async def looked() -> Any:
        return look()

    return looked


def _knows(member: Member, others: int) -> Any:
    async def looked() -> bool:
        return int((await member.stats())["peers"]) == others

    return looked


def vllm_router_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the real router be found; without it the test fails, and says what to do."""
    place = Path(os.environ.get("KVBATON_VLLM_ROUTER") or ROUTER_PLACE)
    if not (place.name == "vllm-router" and os.access(place, os.X_OK)):
        pytest.fail(f"no vllm-router at {place}; run: make .venv-router/.ready (or set KVBATON_VLLM_ROUTER)")
    monkeypatch.setenv("PATH", f"{place.parent}{os.pathsep}{os.environ.get('PATH', '')}")
