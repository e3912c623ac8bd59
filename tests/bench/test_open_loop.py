"""The load against scripted servers: token times by a clock that the server turns, every failure by its name."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from aiohttp import web

from kvbaton_proof.bench.load.open_loop import (
    CUT_OFF,
    ERRORS_IN_A_ROW_MAX,
    LATE,
    NO_END,
    SHORT,
    WARMUP_ANSWER_TOKENS,
    Aim,
    Answer,
    Load,
    Pace,
    Record,
    body_of,
    session,
    streamed,
    warm_up,
)
from kvbaton_proof.bench.load.request_plan import Ask, Lengths, Piece, Shape, drawn, prompt

TOKEN = b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n'
DONE = b"data: [DONE]\n\n"
SHAPE = Shape(requests=12, seed=1, input=Lengths(4, 9), output=Lengths(3, 3))
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
T = TypeVar("T")


def within(work: Coroutine[Any, Any, T], seconds: float = 30.0) -> T:
    return asyncio.run(asyncio.wait_for(work, seconds))


@contextlib.asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/v1/completions", handler)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def pieces_of(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


async def right(request: web.Request) -> web.StreamResponse:
    """Answers with as many tokens as it is asked for."""
    body = await request.json()
    return await pieces_of(request, TOKEN * body["max_tokens"], DONE)


AT_ONCE = Pace()


async def loaded(url: str, pace: Pace = AT_ONCE, shape: Shape = SHAPE, **more: Any) -> list[Record]:
    load = Load(Aim(url=url, timeout_s=20.0), pace, **more)
    await load.run(drawn(shape))
    assert load.ended == sum(bool(each.answer or each.error != CUT_OFF) for each in load.records)
    return load.records


def errors_of(records: list[Record]) -> Counter[str]:
    return Counter(each.error for each in records if each.error)


def right_of(records: list[Record]) -> int:
    return sum(each.answer is not None for each in records)


def test_token_times_are_the_servers_script() -> None:
    """The clock stands still but for the server, which goes on only when the client has seen a token."""

    async def work() -> Answer | str:
        now, seen = [100.0], asyncio.Queue[int]()

        async def script(request: web.Request) -> web.StreamResponse:
            response = web.StreamResponse()
            await response.prepare(request)
            for number, pause_s in enumerate((0.25, 0.5, 2.0), 1):
                now[0] += pause_s
                await response.write(TOKEN)
                while await seen.get() < number:
                    pass
            await response.write(DONE)
            await response.write_eof()
            return response

        async with serving(script) as url, session(Aim(url=url)) as client:
            stream = await streamed(client, url, b"{}", lambda: now[0], seen.put_nowait)
            return stream if isinstance(stream, str) else stream.answer(3)

    found = within(work())
    assert isinstance(found, Answer), found
    assert (found.ttft_s, found.gaps_s, found.e2e_s, found.tpot_s) == (0.25, (0.5, 2.0), 2.75, 1.25)


def test_a_body_asks_for_exactly_the_plan() -> None:
    ask = Ask(3, 0.0, (Piece("u3", 6),), 5)
    body = msgspec.json.decode(body_of(ask, Aim(url="x", model="m", salt="s", seed=2)))
    assert body == {
        "prompt": prompt(ask, 2), "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "model": "m", "cache_salt": "s",
    }  # fmt: skip
    marked = msgspec.json.decode(body_of(ask, Aim(url="x", salt="s", in_prompt=True, seed=2)))
    assert marked["prompt"] == prompt(ask, 2, "s") != prompt(ask, 2) and not {"model", "cache_salt"} & marked.keys()


def test_everything_is_sent_once_and_has_a_record() -> None:
    async def work() -> tuple[list[Record], list[list[int]], int]:
        bodies: list[list[int]] = []
        ended: list[None] = []

        async def handler(request: web.Request) -> web.StreamResponse:
            bodies.append((await request.json())["prompt"])
            return await right(request)

        async with serving(handler) as url:
            records = await loaded(url, Pace(concurrency=3), on_end=lambda: ended.append(None))
        return records, bodies, len(ended)

    records, bodies, ended = within(work())
    assert (len(records), right_of(records), errors_of(records), ended) == (12, 12, {}, 12)
    assert sorted(bodies) == sorted(prompt(ask, 0) for ask in drawn(SHAPE))
    assert [each.ask for each in records] == list(drawn(SHAPE))
    assert all(each.answer is not None and each.answer.tokens == 3 == len(each.answer.gaps_s) + 1 for each in records)
    assert all(each.ended_s is not None and 0 <= each.sent_s < each.ended_s for each in records)


def test_no_more_are_under_way_than_may_be() -> None:
    async def work() -> tuple[int, int]:
        under_way, most, full = 0, 0, asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal under_way, most
            under_way += 1
            most = max(most, under_way)
            if under_way == 4:
                full.set()
            await full.wait()
            under_way -= 1
            return await right(request)

        async with serving(handler) as url:
            records = await loaded(url, Pace(concurrency=4))
        return most, right_of(records)

    assert within(work()) == (4, 12)


def test_requests_are_sent_when_they_are_due_on_the_loads_own_clock() -> None:
    async def work() -> list[Record]:
        async with serving(right) as url:
            return await loaded(url, Pace(timed=True), msgspec.structs.replace(SHAPE, rate=200.0))

    records = within(work())
    assert len(records) == 12 and all(each.sent_s >= each.ask.due_s - 0.001 for each in records), "never before"


def test_after_its_seconds_a_load_sends_nothing_more() -> None:
    shape = msgspec.structs.replace(SHAPE, requests=100_000, rate=50.0)

    async def work() -> list[Record]:
        async with serving(right) as url:
            return await loaded(url, Pace(seconds=4.0, timed=True), shape)

    records = within(work())
    due = sum(ask.due_s < 4.0 for ask in drawn(msgspec.structs.replace(shape, requests=1000)))
    assert 1 <= len(records) <= due and right_of(records) == len(records)


async def refused(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"code": "no_pair"}}, status=503)


async def short(request: web.Request) -> web.StreamResponse:
    return await pieces_of(request, TOKEN, DONE)


async def endless(request: web.Request) -> web.StreamResponse:
    return await pieces_of(request, TOKEN * 3)


async def broken(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(TOKEN)
    assert request.transport is not None
    request.transport.abort()
    return response


async def told_off(request: web.Request) -> web.StreamResponse:
    return await pieces_of(request, TOKEN, b'data: {"error": {"code": "worker_died"}}\n\n')


@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (refused, "status 503: no_pair"),
        (short, SHORT),
        (endless, NO_END),
        (broken, "connection: "),
        (told_off, "error event: worker_died"),
    ],
)
def test_a_wrong_answer_is_an_error_by_its_name(handler: Handler, said: str) -> None:
    async def work() -> list[Record]:
        async with serving(handler) as url:
            return await loaded(url)

    records = within(work())
    assert right_of(records) == 0 and errors_of(records).total() == 12
    assert len(errors_of(records)) == 1 and next(iter(errors_of(records))).startswith(said)


def test_a_server_that_is_gone_is_given_up() -> None:
    async def work() -> list[Record]:
        async with serving(right) as url:
            pass
        return await loaded(url, Pace(concurrency=1), msgspec.structs.replace(SHAPE, requests=5000))

    records = within(work())
    assert errors_of(records).total() == len(records) == ERRORS_IN_A_ROW_MAX
    assert all(kind.startswith("connection: ") for kind in errors_of(records))


async def silent(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def test_a_request_ends_by_its_own_deadline_and_a_load_by_its_own() -> None:
    async def work() -> tuple[list[Record], list[Record]]:
        async with serving(silent) as url:
            load = Load(Aim(url=url, timeout_s=0.2), Pace())
            await load.run(drawn(SHAPE))
            return load.records, await loaded(url, Pace(deadline_s=4.0, concurrency=5))

    late, cut_off = within(work())
    assert errors_of(late) == {LATE: 12} and errors_of(cut_off) == {CUT_OFF: 5} and len(cut_off) == 5


def test_who_stops_a_load_finds_what_was_measured() -> None:
    async def work() -> list[Record]:
        answered = 0
        stuck = asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal answered
            answered += 1
            if answered > 7:
                stuck.set()
                return await silent(request)
            return await right(request)

        async with serving(handler) as url:
            load = Load(Aim(url=url), Pace(concurrency=1))
            task = asyncio.create_task(load.run(drawn(SHAPE)))
            await stuck.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return load.records

    records = within(work())
    assert (len(records), right_of(records), errors_of(records)) == (8, 7, {}) and records[7].ended_s is None


def test_a_warm_up_asks_and_keeps_nothing() -> None:
    async def work() -> int:
        asked = 0

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            return await right(request)

        async with serving(handler) as url:
            await warm_up(Aim(url=url), 5)
        return asked

    assert within(work()) == 5 and WARMUP_ANSWER_TOKENS > 1
