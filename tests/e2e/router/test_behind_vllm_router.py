"""Embedded workers behind the real vllm-router: by URLs, and by each of the three dialects of its discovery.

Promises 1 to 4, on whatever that router makes of a client's request.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import signal
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvbaton.control.plain.announcer import MoriioAnnouncer, registration
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_worker import reference_answers
from tests.aiohttp_server import serving
from tests.e2e import warm_workers
from tests.e2e.cluster import eventually
from tests.e2e.router.fleet import Fleet, fleet, vllm_router_on_path
from tests.vllm.router_process import moriio_router, nixl_router, p2p_nccl_router

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
AT_ONCE = 16
REQUEST_S = 30.0
PAIRED_S = 40.0
EXPONENT = re.compile(r"[0-9][eE][+-]?[0-9]")
NOBODY = "host:127.0.0.1,handshake:9,notify:9"


@pytest.fixture(autouse=True)
def _router(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm_router_on_path(monkeypatch)


class Client:
    """Asks one URL, and waits no longer than it must: a body cut short by a router shows as a time-out."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def post(self, path: str, **body: Any) -> tuple[int, str]:
        asked = {"model": "kvbaton-tiny", "temperature": 0, **body}
        timeout = aiohttp.ClientTimeout(total=REQUEST_S)
        async with self._session.post(self._url + path, json=asked, timeout=timeout) as response:
            return response.status, await response.text()

    async def whole(self, path: str, **body: Any) -> dict[str, Any]:
        status, text = await self.post(path, **body)
        assert status == 200, text
        numbers = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
        assert EXPONENT.search(numbers) is None, text
        told: dict[str, Any] = json.loads(text)
        return told

    async def streamed(self, path: str, **body: Any) -> str:
        status, text = await self.post(path, stream=True, **body)
        assert status == 200, text
        *events, done = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
        assert done == "[DONE]"
        choices = [choice for event in events for choice in json.loads(event)["choices"]]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def prompts_of(label: str, count: int) -> list[str]:
    """Unlike each other from the start, of one block to many."""
    rng = random.Random(label)
    return [f"{n} {label} " + "".join(rng.choices("abcdefgh ", k=rng.choice((3, 20, 90, 180)))) for n in range(count)]


async def exercise(url: str, workers: Fleet, label: str) -> None:
    """Each kind of request, each by a handoff, each answered as one engine alone answers it; and nothing is left."""
    before = await workers.delivered()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        routed, alone = Client(url, session), Client(workers.prefill[0].url, session)
        handoffs = await _at_once(routed, label)
        handoffs += await _chats(routed, alone, label)
        handoffs += await _several(routed, alone, label)
    for stats in await workers.at_rest():
        assert stats["faults_total"] == 0
    assert await workers.delivered() - before == handoffs, "every one of them by a handoff, none by recomputing"


async def _at_once(routed: Client, label: str) -> int:
    """Completions at once, streamed and whole."""
    prompts = prompts_of(f"{label} at once", AT_ONCE)
    right = reference_answers(prompts, 12)

    async def one(number: int) -> str:
        if number % 2:
            return await routed.streamed(COMPLETIONS, prompt=prompts[number], max_tokens=12)
        answer = await routed.whole(COMPLETIONS, prompt=prompts[number], max_tokens=12)
        assert answer["usage"]["completion_tokens"] == len(right[number])
        return str(answer["choices"][0]["text"])

    assert await asyncio.gather(*map(one, range(AT_ONCE))) == right
    return AT_ONCE


async def _chats(routed: Client, alone: Client, label: str) -> int:
    """Chats whole, streamed and with log probabilities; completions with them, and of one token."""
    texts = prompts_of(f"{label} chat", 4)
    right = reference_answers([tokenizer.encode_chat([("user", text)]) for text in texts], 9)
    asked = [{"messages": [{"role": "user", "content": text}], "max_tokens": 9} for text in texts]
    assert (await routed.whole(CHAT, **asked[0]))["choices"][0]["message"]["content"] == right[0]
    assert await routed.streamed(CHAT, **asked[1]) == right[1]
    likeliest: dict[str, Any] = {**asked[2], "logprobs": True, "top_logprobs": 3}
    answer = await routed.whole(CHAT, **likeliest)
    assert answer["choices"] == (await alone.whole(CHAT, **likeliest))["choices"]
    assert len(answer["choices"][0]["logprobs"]["content"]) == len(right[2])
    del asked[3]["max_tokens"]
    assert (await routed.whole(CHAT, **asked[3], max_completion_tokens=9))["choices"][0]["message"]["content"] == right[
        3
    ]
    first, second = prompts_of(f"{label} logprobs", 2)
    logged: dict[str, Any] = {"prompt": first, "max_tokens": 12, "min_tokens": 3, "logprobs": 3}
    assert (await routed.whole(COMPLETIONS, **logged))["choices"] == (await alone.whole(COMPLETIONS, **logged))[
        "choices"
    ]
    brief = await routed.whole(COMPLETIONS, prompt=second, max_tokens=1)
    assert brief["choices"][0]["text"] == reference_answers([second], 1)[0]
    return len(texts) + 2


async def _several(routed: Client, alone: Client, label: str) -> int:
    """Several prompts and choices in one request are as many handoffs."""
    one, *more = prompts_of(f"{label} several", 4)
    chosen: dict[str, Any] = {"prompt": one, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 8}
    answer = await routed.whole(COMPLETIONS, **chosen)
    assert answer["choices"] == (await alone.whole(COMPLETIONS, **chosen))["choices"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    answer = await routed.whole(COMPLETIONS, prompt=more, max_tokens=8)
    assert [choice["text"] for choice in answer["choices"]] == reference_answers(more, 8)
    return 2 + len(more)


def announced(discovery: str, dialect: str) -> tuple[str, ...]:
    return ("--announce-to", discovery.removeprefix("tcp://"), "--announce-as", dialect)


async def test_moriio_read_by_discovery_and_nixl_by_urls(tmp_path: Path) -> None:
    async with moriio_router() as router, fleet(tmp_path, *announced(router.discovery, "moriio-read")) as workers:
        await router.until_paired(PAIRED_S)
        await exercise(router.url, workers, "moriio read")
        urls = [[member.url for member in side] for side in (workers.prefill, workers.decode)]
        async with nixl_router(*urls) as by_urls:
            await exercise(by_urls.url, workers, "nixl")


async def test_p2p_nccl_by_discovery(tmp_path: Path) -> None:
    async with p2p_nccl_router() as router, fleet(tmp_path, *announced(router.discovery, "p2p-nccl")) as workers:
        await router.until_paired(PAIRED_S)
        await exercise(router.url, workers, "p2p nccl")


async def test_moriio_write_by_discovery_with_two_of_each(tmp_path: Path) -> None:
    async with moriio_router() as router:
        flags = announced(router.discovery, "moriio-write")
        async with fleet(tmp_path, *flags, prefill=2, decode=2) as workers:
            await router.until_paired(PAIRED_S)
            await eventually(_all_used(router.url, workers), 60.0)
            await workers.at_rest()
            await exercise(router.url, workers, "moriio write")
            await _stopping_costs_nothing(router.url, workers)


async def _stopping_costs_nothing(url: str, workers: Fleet) -> None:
    """One of each is told to stop while requests come; the router hears no goodbye, and none of them fails."""
    leaving = [workers.prefill[1], workers.decode[1]]
    gone = asyncio.gather(*(warm_workers.ended(member.process, 60.0) for member in leaving))

    async def ask_on(session: aiohttp.ClientSession, who: int) -> None:
        client, number = Client(url, session), 0
        while not gone.done():
            number += 1
            prompt = f"{who} {number} stopping"
            answer = await client.whole(COMPLETIONS, prompt=prompt, max_tokens=4)
            assert answer["choices"][0]["text"] == reference_answers([prompt], 4)[0]

    for member in leaving:
        member.process.send_signal(signal.SIGTERM)
    async with aiohttp.ClientSession() as session:
        await asyncio.wait_for(asyncio.gather(*(ask_on(session, who) for who in range(4))), 60)
    assert await gone == [0, 0]


def _all_used(url: str, workers: Fleet) -> Any:
    """The router is healthy with one pair; wait until it sends to all."""

    async def look() -> bool:
        async with aiohttp.ClientSession() as session:
            await Client(url, session).whole(COMPLETIONS, prompt="is anybody there", max_tokens=2)
        return all([(await member.stats())["handoffs_total"] for member in workers.decode])

    return look


async def test_an_address_that_no_peer_has_fails_its_request_alone(tmp_path: Path) -> None:
    """A stranger announces itself to the router as a prefiller, and gets every second request."""

    async def stranger(_: web.Request) -> web.Response:
        return web.json_response({"choices": []})

    app = web.Application()
    app.router.add_post("/{rest:.*}", stranger)
    async with (
        serving(app, "127.0.0.1", 0) as url,
        moriio_router() as router,
        fleet(tmp_path, *announced(router.discovery, "moriio-write")) as workers,
        aiohttp.ClientSession() as session,
    ):
        await router.until_paired(PAIRED_S)
        said = registration("P", url.removeprefix("http://"), NOBODY, transfer_mode="WRITE")
        announcer = MoriioAnnouncer(router.discovery, said)
        announcer.start()
        client, fates = Client(router.url, session), {200: 0, 400: 0}
        try:
            async with asyncio.timeout(60):
                while min(fates.values()) < 8:
                    prompt = f"{fates} stranger"
                    status, text = await client.post(COMPLETIONS, prompt=prompt, max_tokens=8)
                    fates[status] += 1
                    if status == 200:
                        assert json.loads(text)["choices"][0]["text"] == reference_answers([prompt], 8)[0]
                    else:
                        assert json.loads(text)["error"]["code"] == "peer_unknown" and NOBODY in text, text
        finally:
            await asyncio.to_thread(announcer.stop)
        assert await workers.delivered() == fates[200]
        await workers.at_rest()
