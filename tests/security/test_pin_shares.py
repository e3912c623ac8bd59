"""Who reaches P's HTTP port, and shows nothing, cannot take the room to pin from those that come by the router."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvbaton.api.params import FIELD, LEASE_FOR_PULL
from kvbaton.node.pin_budget import PinBudget, Room
from kvbaton.protocol.ids import LeaseId, RequestId
from tests.e2e.cluster import up

pytestmark = pytest.mark.timeout(180)

STRANGERS, HONEST = 24, 12
PROMPT = "a prompt of some blocks, of which a stranger has many. " * 12
IN, WAIT, OUT = Room.ADMITTED, Room.WAITING, Room.REFUSED


async def _ask(session: aiohttp.ClientSession, url: str, number: str, **more: Any) -> int:
    body = {"prompt": number + PROMPT, "max_tokens": 1, "temperature": 0, "cache_salt": number, **more}
    async with session.post(f"{url}/v1/completions", json=body, headers={"x-kvbaton-mode": "pull"}) as response:
        await response.read()
        return response.status


def test_strangers_who_have_p_keep_prompts_leave_room_for_honest_clients(tmp_path: Path) -> None:
    """6 of 12 honest requests were answered 429 while a stranger filled the room again and again."""

    async def story(url: str) -> tuple[list[int], list[int]]:
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{url}/workers") as response:
                listed = (await response.json())["workers"]
            p0 = next(each["url"] for each in listed if each["name"] == "p0")
            taking = [
                asyncio.create_task(_ask(session, p0, f"s{n}", **{FIELD: LEASE_FOR_PULL})) for n in range(STRANGERS)
            ]
            await asyncio.wait(taking, return_when=asyncio.FIRST_COMPLETED)
            honest = [await _ask(session, url, f"h{n}") for n in range(HONEST)]
            return honest, list(await asyncio.gather(*taking))

    with up(tmp_path, "--blocks", "256") as cluster:
        honest, strangers = asyncio.run(story(cluster.url))
    assert honest == [200] * HONEST, (honest, strangers)
    assert 429 in strangers, "they did not fill their share: this shows nothing"


def pinned(budget: PinBudget, lease: int, request: str, blocks: range) -> None:
    budget.begun(LeaseId(lease), RequestId(request))
    budget.pin(LeaseId(lease), blocks)
    budget.left(RequestId(request))


def test_strangers_together_have_half_of_the_room_and_of_the_places_to_wait() -> None:
    budget = PinBudget(16, waiting_max=4)
    a, b, c, d, e = map(RequestId, "abcde")
    assert budget.ask(a, 8, 0, None) is IN
    assert [budget.ask(b, 1, 0, None), budget.ask(c, 1, 0, None)] == [WAIT, WAIT]
    assert budget.ask(d, 1, 0, None) is OUT, "half of four places"
    assert budget.ask(e, 8, 0, "d0") is IN, "it is not behind those that wait for their own share"
    pinned(budget, 1, "a", range(8))
    assert budget.ask(b, 1, 0, None) is WAIT, "a lease counts as its request did"
    budget.unpin(LeaseId(1), range(8))
    assert [budget.ask(c, 1, 0, None), budget.ask(b, 1, 0, None), budget.ask(c, 1, 0, None)] == [WAIT, IN, IN]


def test_a_strangers_prompt_that_is_larger_than_its_share_is_refused_and_a_peers_is_not() -> None:
    budget = PinBudget(16)
    assert budget.ask(RequestId("a"), 9, 0, None) is OUT
    assert budget.ask(RequestId("b"), 40, 0, "d0") is IN


def test_one_decode_worker_has_all_the_room_until_another_is_known() -> None:
    budget = PinBudget(16)
    assert budget.ask(RequestId("a"), 16, 0, "d0") is IN
    budget.left(RequestId("a"))
    assert budget.ask(RequestId("b"), 1, 0, "d1") is IN
    budget.left(RequestId("b"))
    assert [budget.ask(RequestId(each), 4, 0, "d0") for each in "cdef"] == [IN, IN, IN, WAIT]
    assert budget.ask(RequestId("g"), 4, 0, "d1") is IN
    assert budget.ask(RequestId("f"), 4, 9, "d0") is OUT, "at its deadline"


def test_those_of_one_holder_and_those_who_wait_for_the_room_are_served_in_order() -> None:
    budget = PinBudget(16)
    assert budget.ask(RequestId("a"), 16, 0, "d0") is IN
    assert [budget.ask(RequestId(each), 4, 0, holder) for each, holder in zip("bcd", ("d0", "d1", "d0"), strict=True)]
    budget.left(RequestId("a"))
    said = [budget.ask(RequestId(each), 4, 1, holder) for each, holder in zip("dcb", ("d0", "d1", "d0"), strict=True)]
    assert said == [WAIT, WAIT, IN]
    assert [budget.ask(RequestId("d"), 4, 1, "d0"), budget.ask(RequestId("c"), 4, 1, "d1")] == [WAIT, IN]
