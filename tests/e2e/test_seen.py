"""Every handoff can be seen: one timeline of router, P and D for each mode, for failures too, and from files."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.e2e.cluster import Up, ask_all, eventually, get_json, some_prompts, up, wait_for
from tests.journeys import inspect, inspect_whole, journeys_of

pytestmark = pytest.mark.timeout(180)
MODES = ("pull", "stream", "push")
EACH = 5


@pytest.fixture(scope="module", params=["shm", "tcp"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    flags = ("--prefill", "2", "--decode", "2", "--transport", request.param)
    with up(tmp_path_factory.mktemp("seen"), *flags) as running:
        yield running


@pytest.mark.parametrize("mode", MODES)
def test_the_last_handoffs_have_every_stage_from_router_p_and_d(cluster: Up, mode: str) -> None:
    answers = asyncio.run(ask_all(cluster.url, some_prompts(EACH, mode), mode))
    assert all(answer.status == 200 for answer in answers)
    found = inspect_whole(cluster.url, EACH, mode, lambda journey: mode == "push" and journey["transport"] == "tcp")
    for lane in journeys_of(found)[0]["lanes"]:
        status, same = inspect(lane["request"], "--router", cluster.url)
        assert status == 0, "found by each side's name of it"
        assert [each["handoff"] for each in journeys_of(same)] == [journeys_of(found)[0]["handoff"]]


def test_a_killed_p_is_on_record_with_what_became_of_the_request(cluster: Up) -> None:
    """And what a signal has P's and D's processes write down can be joined without any router."""
    asyncio.run(ask_all(cluster.url, some_prompts(4, "before"), "pull"))
    flights = Path(_flag(cluster, "p1", "--flight-dir"))
    for worker in ("p0", "p1", "d0", "d1"):
        os.kill(cluster.pid(worker), signal.SIGUSR2)
    wait_for(lambda: len(list(flights.glob("*.dump.jsonl"))) == 4, 20)
    status, found = inspect("--last", "3", "--files", *map(str, flights.glob("*.dump.jsonl")))
    assert status == 0
    for journey in journeys_of(found):
        assert {lane["seat"] for lane in journey["lanes"]} == {"prefill", "decode"}

    async def kill_under_load() -> None:
        """Stopped first, so that some of the requests are certain to be on it when it dies."""
        os.kill(cluster.pid("p1"), signal.SIGSTOP)
        load = [asyncio.create_task(ask_all(cluster.url, some_prompts(8, "killed"), mode)) for mode in MODES]
        async with aiohttp.ClientSession() as session:

            async def is_asked() -> bool:
                told = await get_json(session, f"{cluster.url}/workers")
                return any(each["name"] == "p1" and each["tokens_under_way"] for each in told["workers"])

            await eventually(is_asked, 30)
        await asyncio.sleep(1.5)  # longer than a connection that was closed while idle takes to be known
        os.kill(cluster.pid("p1"), signal.SIGKILL)
        await asyncio.gather(*load)

    asyncio.run(kill_under_load())
    failed = wait_for(lambda: inspect("--failed", "--last", "50", "--router", cluster.url)[1].get("journeys"), 30)
    assert any("p1" in str(journey) for journey in failed)
    assert all(any(lane.get("end", "ok") not in ("ok", "delivered") for lane in each["lanes"]) for each in failed)


def test_nothing_to_show_is_said_in_one_line(cluster: Up) -> None:
    status, found = inspect("no-such-request-anywhere", "--router", cluster.url)
    assert status == 1 and journeys_of(found) == []


def _flag(cluster: Up, worker: str, flag: str) -> str:
    words = Path(f"/proc/{cluster.pid(worker)}/cmdline").read_bytes().split(b"\0")
    return words[words.index(flag.encode()) + 1].decode()
