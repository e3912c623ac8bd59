"""The router against workers that mean harm: none grows it, none has a client blamed for what it said itself.

Law under test: whatever a worker answers ends in an answer or an explicit error, the fault is counted as the worker's,
and what was held for the request is free with it, without the garbage collector.
"""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.api import sse
from kvbaton.router.flow import worker_leg
from kvbaton.router.flow.kv_params import PARAMS_BYTES_MAX
from kvbaton.router.flow.worker_calls import COMMENTS_BYTES_MAX
from kvbaton.router.flow.worker_leg import BRIEF_BYTES_MAX
from kvbaton.router.router_settings import Fallback
from tests.router.fake_workers import (
    QUICK,
    Cluster,
    FakeWorker,
    Script,
    after,
    begin_then,
    cluster,
    die,
    hang,
    lease,
    refuse,
    say,
    speak,
    until,
)

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}


def tells(params: bytes) -> Script:
    """A prefill worker that hands these over."""
    return say(b'{"choices":[],"kv_transfer_params":%b}' % params)


def handed(**more: Any) -> bytes:
    return json.dumps({"do_remote_prefill": True, "ticket": "t", "mode": "pull", **more}).encode()


# --- P's parameters


@pytest.mark.parametrize(
    "params",
    [
        handed(x="x" * 10_000_000),
        handed(x="x" * PARAMS_BYTES_MAX),
        handed(ticket="x" * PARAMS_BYTES_MAX),
        handed(x=[[]] * 100_000),
        handed(x=1)[:-1] + b',"y":' + b"[" * 100 + b"]" * 100 + b"}",
        handed(x=1)[:-1] + b',"y":"\xff"}',
        handed(x=1)[:-1] + b',"y":"\\ud800"}',
        handed(x=1)[:-1] + b',"y":1e999}',
    ],
    ids=["10 MB", "just too long", "a long ticket", "many lists", "depth", "no text", "half a character", "no number"],
)
async def test_parameters_that_no_d_can_read_are_ps_fault_and_another_p_is_asked(params: bytes) -> None:
    """D refused 10 MB of them with 413, which the client was told, and P stayed in service."""
    settings = msgspec.structs.replace(QUICK, suspect_s=60)
    async with cluster([tells(params)], settings=settings) as c:
        status, answer, _ = await c.post(BODY)
        assert (status, answer["error"]["code"]) == (502, "bad_answer")
        assert answer["error"]["message"].startswith("prefill worker p0 answered")
        assert c.d[0].raw == []
    async with cluster([tells(params), lease], settings=settings) as c:
        while not c.p[0].raw:
            assert (await c.post(BODY))[0] == 200
        _, shown = await c.get("/workers")
        assert {each["name"]: each["state"] for each in shown["workers"]}["p0"] == "suspect"
        assert (await c.stats())["leg_failures_total"] == {"prefill:bad_answer": 1}
    local = msgspec.structs.replace(settings, fallback=Fallback.LOCAL)
    async with cluster([tells(params)], settings=local) as c:
        assert (await c.post(BODY))[0] == 200


async def test_parameters_at_the_bound_reach_d() -> None:
    params = handed(x="x" * (PARAMS_BYTES_MAX - 100))
    async with cluster([tells(params)]) as c:
        assert (await c.post(BODY))[0] == 200
        assert len(c.d[0].params[0]["x"]) == PARAMS_BYTES_MAX - 100


async def test_what_p_took_is_not_too_large_of_the_client_where_d_refuses_it() -> None:
    async with cluster(1, [refuse(413)]) as c:
        status, answer, _ = await c.post(BODY)
        assert (status, answer["error"]["type"]) == (502, "handoff_failed")
    async with cluster([refuse(413)], 1) as c:  # but where P does not take it, it is
        assert (await c.post(BODY))[0] == 413


# --- answers without end


def endless(piece: bytes, head: bytes = b"", stop: int = 1 << 30) -> tuple[Script, list[int]]:
    """A stream of the same bytes, for as long as they are taken; and how many were."""
    sent: list[int] = []

    async def script(_: FakeWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        sent.append(0)
        number = len(sent) - 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(head)
        while sent[number] < stop:
            await response.write(piece)
            sent[number] += len(piece)
        return response

    return script, sent


@pytest.mark.parametrize(
    ("piece", "head"),
    [
        (b": still here\n\n" * 1000, b""),
        (b"\n\n" * 5000, b""),
        (b"x" * 65536, b"data: "),
        (b"retry: 1\r\n\r\n" * 999, b""),
    ],
    ids=["comments", "empty events", "one event", "other fields"],
)
async def test_what_comes_before_the_first_event_is_bounded_and_the_workers_fault(
    piece: bytes, head: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 1 << 20)

    script, sent = endless(piece, head)
    settings = msgspec.structs.replace(QUICK, decode_retries=0)
    async with cluster(1, [script], settings=settings) as c:
        status, answer, _ = await c.post({**BODY, "stream": True})
        assert (status, answer["error"]["code"]) == (502, "bad_answer")
        assert sum(sent) < 16 << 20  # what sockets hold
        numbers = await c.stats()
        assert numbers["leg_failures_total"] == {"decode:bad_answer": 1}
        assert numbers["held_bytes"] == 0
    async with cluster(1, [script, speak]) as c:
        assert (await c.events(BODY))[-1] == "[DONE]"


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_stream_that_nobody_asked_for_is_refused_before_it_is_read(side: str) -> None:
    """It was read up to the bound of an answer, 16 MiB, for each request: 48 MiB stayed with a router after 15."""
    script, sent = endless(b'data: {"type":"response.created"}\n\n' * 1000)
    settings = msgspec.structs.replace(QUICK, decode_retries=0, prefill_retries=0)
    scripts = ([script], 1) if side == "prefill" else (1, [script])
    async with cluster(*scripts, settings=settings) as c:
        status, answer, _ = await c.post(BODY)
        assert (status, answer["error"]["code"]) == (502, "bad_answer")
        assert "answered with events, and was asked for no stream" in answer["error"]["message"]
    assert sum(sent) < 8 << 20  # what sockets hold


async def test_a_few_comments_before_the_first_event_pass_and_are_told() -> None:
    first = b": wait\n\n" * 1000
    assert len(first) < COMMENTS_BYTES_MAX

    async def then_speaks(request: web.Request, response: web.StreamResponse) -> None:
        await response.write(b"data: [DONE]\n\n")

    async with (
        cluster(1, [begin_then(then_speaks, first)]) as c,
        c.session.post(c.url + "/v1/completions", json={**BODY, "stream": True}) as response,
    ):
        assert await response.read() == first + b"data: [DONE]\n\n"


async def test_the_answers_of_a_worker_fill_no_more_than_the_routers_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """48 answers of 63 MiB took 3 GiB of a router: each was within its bound, and nobody counted them."""
    monkeypatch.setattr(worker_leg, "LARGE_BYTES", 3 << 20)

    gate = asyncio.Event()

    async def long(_: FakeWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json", "Content-Length": str(8 << 20)})
        await response.prepare(request)
        await response.write(b"x" * (4 << 20))
        await gate.wait()
        return response

    settings = msgspec.structs.replace(QUICK, decode_retries=0, held_bytes_max=40 << 20)
    async with cluster(1, [long], settings=settings) as c:
        asked = [asyncio.create_task(c.post(BODY)) for _ in range(12)]
        await until(lambda: sum(task.done() for task in asked) >= 7)
        assert c.app.room.bytes <= 20 << 20
        told = {(task.result()[0], task.result()[1]["error"]["code"]) for task in asked if task.done()}
        assert told <= {(502, "bad_answer"), (503, "no_room")} and told
        numbers = await c.stats()
        assert sum(numbers["leg_failures_total"].values()) >= 7 and numbers["held_refused_total"]["answer"] >= 7
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: c.app.room.bytes == 0)


async def test_an_answer_that_the_router_has_no_room_for_is_nobodys_fault_where_it_is_small() -> None:
    settings = msgspec.structs.replace(QUICK, held_bytes_max=1 << 20)
    async with cluster(1, [say(b'{"x":"' + b"x" * (600 << 10) + b'"}'), speak], settings=settings) as c:
        while not c.d[0].raw:
            status, answer, headers = await c.post(BODY)
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "no_room", "1")
        _, shown = await c.get("/workers")
        assert {worker["state"] for worker in shown["workers"]} == {"serving"}
        assert c.app.room.bytes == 0


@pytest.mark.parametrize("side", ["prefill", "refusal", "models"])
async def test_what_is_no_clients_answer_is_bounded_by_what_was_asked(side: str) -> None:
    long = b'{"x":"' + b"x" * (BRIEF_BYTES_MAX + (1 << 20)) + b'"}'

    async def refuses(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
        return web.Response(body=long, status=400)

    scripts: dict[str, tuple[list[Script], list[Script]]] = {
        "prefill": ([say(long)], [speak]),
        "refusal": ([lease], [refuses]),
        "models": ([lease], [speak]),
    }
    async with cluster(*scripts[side]) as c:
        if side == "models":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(worker_leg, "BRIEF_BYTES_MAX", 10)
                status, _ = await c.get("/v1/models")
            assert status == 503
            return
        status, answer, _ = await c.post(BODY)
        assert (status, answer["error"]["code"]) == (502, "bad_answer")


async def test_a_body_under_way_is_counted_with_its_copies_and_given_back() -> None:
    gate = asyncio.Event()
    settings = msgspec.structs.replace(QUICK, held_bytes_max=4 << 20)
    async with cluster([after(gate, lease)], [say(b'{"choices":[]}')], settings=settings) as c:
        body = {**BODY, "prompt": "x" * (200 << 10)}
        asked = [asyncio.create_task(c.post(body)) for _ in range(5)]
        await until(lambda: any(task.done() for task in asked))
        assert 4 * (200 << 10) < c.app.room.bytes <= 2 << 20
        gate.set()
        statuses = sorted([(await task)[0] for task in asked])
        assert statuses[0] == 200 and statuses[-1] == 503
        await until(lambda: c.app.room.bytes == 0)


# --- nothing is left for the garbage collector


async def whole(c: Cluster) -> None:
    await c.post(BODY)


async def streamed(c: Cluster, **more: Any) -> None:
    async with c.session.post(c.url + "/v1/completions", json={**BODY, "stream": True, **more}) as response:
        await response.read()


async def several(c: Cluster) -> None:
    await streamed(c, n=2)
    await streamed(c, n=2, stream=False)


async def gone(c: Cluster) -> None:
    asking = asyncio.create_task(c.post(BODY))
    await until(lambda: c.app.stats.in_flight)
    await asyncio.sleep(0.02)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def breaks_off(_: web.Request, response: web.StreamResponse) -> None:
    await response.write(b"data: half")


STORIES: dict[str, tuple[list[Script], list[Script], Callable[[Cluster], Awaitable[None]]]] = {
    "whole": ([lease], [speak], whole),
    "streamed": ([lease], [speak], streamed),
    "several": ([lease], [speak], several),
    "P refuses": ([refuse(500)], [speak], whole),
    "P dies": ([die], [speak], whole),
    "P talks nonsense": ([say(b"nonsense")], [speak], whole),
    "D refuses": ([lease], [refuse(400)], streamed),
    "D fails": ([lease], [refuse(500), refuse(500)], whole),
    "D dies": ([lease], [die], streamed),
    "D breaks off": ([lease], [begin_then(breaks_off)], streamed),
    "D breaks off one of several": ([lease], [begin_then(breaks_off)], several),
    "the client goes": ([hang], [hang], gone),
}


@pytest.mark.parametrize("name", STORIES)
@pytest.mark.parametrize("mode", ["pull", "push"])
def test_whatever_becomes_of_a_request_it_is_free_without_the_garbage_collector(name: str, mode: str) -> None:
    prefills, decodes, ask = STORIES[name]

    async def story() -> list[Any]:
        settings = msgspec.structs.replace(QUICK, mode=mode, breaker_failures=100)
        async with cluster(prefills, decodes, settings=settings) as c:
            for _ in range(2):
                await ask(c)
            await until(lambda: not c.app.stats.in_flight)
            await c.session.close()
            await asyncio.sleep(0.05)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            return [each for each in gc.garbage if type(each).__module__.startswith(("kvbaton.router", "kvbaton.api"))]

    gc.collect()
    gc.freeze()  # of what other tests left here nothing is looked at, whenever it becomes garbage
    gc.disable()
    try:
        left = asyncio.run(asyncio.wait_for(story(), 60))
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert sorted({type(each).__name__ for each in left}) == []
