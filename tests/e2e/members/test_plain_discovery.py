"""kvbaton's router in front of workers that make themselves known in the plain formats only.

The router has no keys here: it knows its workers from their announcements, and speaks to them as the routers of MoRI-IO
and P2pNccl do.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.cluster import eventually, get_json
from tests.e2e.router.fleet import fleet
from tests.e2e.router.test_behind_vllm_router import exercise

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]


@contextlib.asynccontextmanager
async def router(log: Path, *flags: str) -> AsyncIterator[tuple[str, str]]:
    """`kvbaton router` as a process: its URL, and where it hears announcements."""
    command = [sys.executable, "-m", "kvbaton.cli.main", "router", "--port", "0", *flags]
    with log.open("wb") as out:
        process = await asyncio.create_subprocess_exec(*command, stdout=out, stderr=out)
    try:

        async def spoken() -> re.Match[str] | None:
            assert process.returncode is None, log.read_text()
            return re.search(r"clients (\S+)/v1.* plain discovery tcp://([\d.:]+)", log.read_text())

        found = await eventually(spoken, 60.0)
        yield found[1], found[2]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 40.0) == 0, log.read_text()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def health(url: str) -> tuple[int, dict[str, object]]:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/health") as answer:
        return answer.status, await answer.json()


@pytest.mark.parametrize(("dialect", "mode"), [("moriio-read", "pull"), ("moriio-write", "push"), ("p2p-nccl", "pull")])
async def test_workers_that_announce_themselves_are_served_as_others_would(
    tmp_path: Path, dialect: str, mode: str
) -> None:
    async with router(tmp_path / "router.log", "--plain-discovery", "127.0.0.1:0") as (url, discovery):
        status, told = await health(url)
        assert (status, told["status"]) == (503, "unavailable")
        announced = ("--announce-to", discovery, "--announce-as", dialect)
        async with fleet(tmp_path, *announced, prefill=2, decode=1) as workers:

            async def complete() -> bool:
                return (await health(url))[1]["pairs"] == {"pull": 0, "stream": 0, "push": 0, mode: 2}

            await eventually(complete, 60.0)
            await exercise(url, workers, dialect)
            async with aiohttp.ClientSession() as session:
                listed = (await get_json(session, f"{url}/workers"))["workers"]
            assert {worker["dialect"] for worker in listed} == {dialect.partition("-")[0].replace("p2p", "p2p_nccl")}
