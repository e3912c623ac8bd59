"""The load against scripted servers: token times by a clock that the server turns, every failure by its name."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, TypeVar

import msgspec
import pytest
from aiohttp import web

from kvbaton_proof.bench.serve import serve_load
from kvbaton_proof.bench.serve.serve_load import CUT_OFF, LATE, Aim, Load, Pace, answer, body_of, session, warm_up
from kvbaton_proof.bench.serve.serve_meter import ERRORS_IN_A_ROW_MAX, Meter
from kvbaton_proof.bench.serve.serve_plan import Ask, Lengths, Piece, Shape, drawn, prompt
from kvbaton_proof.bench.serve.serve_stream import NO_END, SHORT, Told

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


async def streamed(request: web.Request, *pieces: bytes) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in pieces:
        await response.write(piece)
    await response.write_eof()
    return response


async def right(request: web.Request) -> web.StreamResponse:
    """Answers with as many tokens as it is asked for."""
    body = await request.json()
    return await streamed(request, TOKEN * body["max_tokens"], DONE)


AT_ONCE = Pace()


async def loaded(url: str, meter: Meter, pace: Pace = AT_ONCE, shape: Shape = SHAPE, **more: Any) -> None:
    await Load(Aim(url=url, timeout_s=20.0), pace, meter, **more).run(drawn(shape))


def test_token_times_are_the_servers_script() -> None:
    """The clock stands still but for the server, which goes on only when the client has seen a token."""

    async def work() -> Told | str:
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
            return await answer(client, url, b"{}", 3, lambda: now[0], seen.put_nowait)

    told = within(work())
    assert isinstance(told, Told), told
    assert (told.ttft_s, told.gaps_s, told.e2e_s, told.tpot_s) == (0.25, (0.5, 2.0), 2.75, 1.25)


def test_a_body_asks_for_exactly_the_plan() -> None:
    ask = Ask(3, 0.0, (Piece("u3", 6),), 5)
    body = msgspec.json.decode(body_of(ask, Aim(url="x", model="m", salt="s", seed=2)))
    assert body == {
        "prompt": prompt(ask, 2), "max_tokens": 5, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "model": "m", "cache_salt": "s",
    }  # fmt: skip
    marked = msgspec.json.decode(body_of(ask, Aim(url="x", salt="s", in_prompt=True, seed=2)))
    assert marked["prompt"] == prompt(ask, 2, "s") != prompt(ask, 2) and not {"model", "cache_salt"} & marked.keys()


def test_everything_is_sent_once_answered_and_counted() -> None:
    async def work() -> tuple[Meter, list[list[int]], list[int], int]:
        bodies: list[list[int]] = []
        ended: list[None] = []
        sent: list[int] = []

        async def handler(request: web.Request) -> web.StreamResponse:
            bodies.append((await request.json())["prompt"])
            return await right(request)

        meter = Meter()
        async with serving(handler) as url:
            await loaded(
                url, meter, Pace(concurrency=3),
                on_end=lambda: ended.append(None), on_sent=lambda ask, _: sent.append(ask.index),
            )  # fmt: skip
        return meter, bodies, sent, len(ended)

    meter, bodies, sent, ended = within(work())
    assert (meter.sent, meter.right, meter.unfinished, meter.errors) == (12, 12, 0, {})
    assert sorted(bodies) == sorted(prompt(ask, 0) for ask in drawn(SHAPE))
    assert sent == list(range(12)) and ended == 12
    assert meter.tokens.output == 36 and meter.tokens.input == sum(ask.input_tokens for ask in drawn(SHAPE))
    assert meter.times["ttft"].count == 12 and meter.times["itl"].count == 24


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

        meter = Meter()
        async with serving(handler) as url:
            await loaded(url, meter, Pace(concurrency=4))
        return most, meter.right

    assert within(work()) == (4, 12)


def test_requests_are_sent_when_they_are_due_on_the_loads_own_clock() -> None:
    async def work() -> list[tuple[float, float]]:
        sent: list[tuple[float, float]] = []
        shape = msgspec.structs.replace(SHAPE, rate=200.0)
        meter = Meter()
        async with serving(right) as url:
            await loaded(url, meter, Pace(timed=True), shape, on_sent=lambda ask, at_s: sent.append((ask.due_s, at_s)))
        assert meter.held_back.count == 12
        return sent

    sent = within(work())
    assert len(sent) == 12 and all(at_s >= due_s - 0.001 for due_s, at_s in sent), "never before it is due"


def test_after_its_seconds_a_part_sends_nothing_more() -> None:
    async def work() -> Meter:
        meter = Meter()
        shape = msgspec.structs.replace(SHAPE, requests=100_000, rate=50.0)
        async with serving(right) as url:
            await loaded(url, meter, Pace(seconds=4.0, timed=True), shape)
        return meter

    meter = within(work())
    due = sum(ask.due_s < 4.0 for ask in drawn(msgspec.structs.replace(SHAPE, requests=1000, rate=50.0)))
    assert 1 <= meter.sent <= due and meter.right == meter.sent and not meter.errors


async def refused(_: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"code": "no_pair"}}, status=503)


async def short(request: web.Request) -> web.StreamResponse:
    return await streamed(request, TOKEN, DONE)


async def endless(request: web.Request) -> web.StreamResponse:
    return await streamed(request, TOKEN * 3)


async def broken(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(TOKEN)
    assert request.transport is not None
    request.transport.abort()
    return response


async def told_off(request: web.Request) -> web.StreamResponse:
    return await streamed(request, TOKEN, b'data: {"error": {"code": "worker_died"}}\n\n')


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
def test_a_wrong_answer_is_an_error_by_its_name_and_no_time_of_it_counts(handler: Handler, said: str) -> None:
    async def work() -> Meter:
        meter = Meter()
        async with serving(handler) as url:
            await loaded(url, meter)
        return meter

    meter = within(work())
    assert (meter.sent, meter.right, meter.unfinished, meter.errors.total()) == (12, 0, 0, 12)
    assert len(meter.errors) == 1 and next(iter(meter.errors)).startswith(said)
    assert meter.times["ttft"].count == 0


def test_a_server_that_is_gone_is_given_up() -> None:
    async def work() -> Meter:
        async with serving(right) as url:
            pass
        meter = Meter()
        await loaded(url, meter, Pace(concurrency=1), msgspec.structs.replace(SHAPE, requests=5000))
        return meter

    meter = within(work())
    assert meter.errors.total() == meter.sent == ERRORS_IN_A_ROW_MAX
    assert all(kind.startswith("connection: ") for kind in meter.errors)


async def silent(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("nobody sets it")


def test_a_request_ends_by_its_own_deadline() -> None:
    async def work() -> Meter:
        meter = Meter()
        async with serving(silent) as url:
            await Load(Aim(url=url, timeout_s=0.2), Pace(), meter).run(drawn(SHAPE))
        return meter

    meter = within(work())
    assert meter.errors == {LATE: 12} and meter.sent == 12


def test_a_part_ends_by_its_own_deadline() -> None:
    async def work() -> Meter:
        meter = Meter()
        async with serving(silent) as url:
            await loaded(url, meter, Pace(deadline_s=4.0, concurrency=5))
        return meter

    meter = within(work())
    assert meter.errors == {CUT_OFF: 5} and (meter.sent, meter.unfinished) == (5, 0)


def test_who_stops_a_part_finds_what_was_measured() -> None:
    async def work() -> Meter:
        answered = 0
        stuck = asyncio.Event()

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal answered
            answered += 1
            if answered > 7:
                stuck.set()
                return await silent(request)
            return await right(request)

        meter = Meter()
        async with serving(handler) as url:
            task = asyncio.create_task(loaded(url, meter, Pace(concurrency=1)))
            await stuck.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        return meter

    meter = within(work())
    assert (meter.sent, meter.right, meter.unfinished, meter.errors) == (8, 7, 1, {})


def test_a_warm_up_asks_and_counts_nothing() -> None:
    async def work() -> int:
        asked = 0

        async def handler(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            return await right(request)

        async with serving(handler) as url:
            await warm_up(Aim(url=url), 5)
        return asked

    assert within(work()) == 5
    assert serve_load.WARMUP_ANSWER_TOKENS > 1
