"""`legs` where a whole router does not reach: what ends a leg, and what its end leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
from typing import Any

import msgspec
import pytest

from kvbaton.api import sse
from kvbaton.api.api_errors import ApiError
from kvbaton.api.http import http_client
from kvbaton.api.http.answer_reader import UNREAD_BYTES_MAX
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.flow.worker_calls import Legs
from kvbaton.router.flow.worker_leg import RETRY_AFTER_S_MAX, Leg, LegError
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine
from tests.api.http.raw_server import OK, Conn, Script, Server, answers, listening
from tests.async_tests import Run
from tests.router.fake_workers import QUICK, event, until

STREAM = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
FIRST = event({"choices": [{"text": "one"}]})


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections grow stale and old only where a test wants it: the machine may stand still for seconds."""
    monkeypatch.setattr(http_client, "STALE_S", 60.0)
    monkeypatch.setattr(http_client, "IDLE_S", 60.0)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def leg_to(server: Server, incarnation: int = 1) -> Leg:
    worker = ListedEngine(WorkerId("d0"), "decode", server.url, Incarnation(incarnation))
    return Leg("decode", worker, "/v1/x", (), b"{}")


@contextlib.asynccontextmanager
async def one_worker(script: Script, settings: RouterSettings = QUICK) -> AsyncIterator[tuple[Legs, Leg]]:
    """A leg to one worker; whatever happens with it, none is held as open afterwards."""
    async with listening(script) as server, Legs.open(settings) as legs:
        yield legs, leg_to(server)
        assert legs._open == {}


def now() -> float:
    return asyncio.get_running_loop().time()


async def failure(call: Awaitable[Any]) -> LegError:
    with pytest.raises(LegError) as caught:
        await asyncio.wait_for(call, 10)
    return caught.value


# --- drop


@pytest.mark.parametrize("data", [b"", b"HTTP/1.1 200 OK\r\n\r\nhalf", STREAM + chunk(b"half")])
@pytest.mark.parametrize("reused", [False, True])
async def test_dropping_a_worker_breaks_off_what_is_under_way_with_it_and_nothing_else(
    run: Run, data: bytes, reused: bool
) -> None:
    gone, asked, gate = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def script(conn: Conn) -> None:
        if reused and conn.number == 0:
            await conn.request()
            await conn.say(OK)
        await conn.request()
        if conn.number == 0:
            await conn.say(data)
            asked.set()
            await conn.gone()
            gone.set()
        else:
            await gate.wait()
            await conn.say(OK)

    async with one_worker(script) as (legs, leg):
        if reused:
            await legs.whole(leg)
        task = asyncio.create_task(failure(legs.whole(leg)))
        await asked.wait()
        other = msgspec.structs.replace(leg, worker=msgspec.structs.replace(leg.worker, incarnation=Incarnation(2)))
        lives = asyncio.create_task(legs.whole(other))
        await until(lambda: len(legs._open) == 2)
        assert legs.drop(leg.worker.peer) == 1
        error = await task
        assert (error.lost, error.stale, error.final, error.fault.code) == (True, False, False, "worker_died")
        assert legs.drop(leg.worker.peer) == 0
        await gone.wait()
        gate.set()
        assert (await lives).data == b"ok"


async def test_dropping_a_worker_ends_its_streams_with_an_error(run: Run) -> None:
    async with one_worker(answers(STREAM + chunk(FIRST), then=Conn.gone)) as (legs, leg):
        stream = await legs.stream(leg, now() + 60)
        events = stream.events()
        assert await anext(events) == FIRST
        assert legs.drop(leg.worker.peer) == 1
        with pytest.raises(ApiError) as caught:
            await asyncio.wait_for(anext(events), 10)
        assert (caught.value.status, caught.value.code) == (502, "worker_died")
        stream.close()


# --- refusals


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (b"Retry-After: 7\r\n", 7),
        (b"Retry-After:  7 \r\n", 7),
        (b"Retry-After: 0\r\n", 0),
        (b"Retry-After: 3600\r\n", 3600),
        (b"Retry-After: 3601\r\n", RETRY_AFTER_S_MAX),
        (b"Retry-After: " + b"9" * 5000 + b"\r\n", RETRY_AFTER_S_MAX),
        (b"", 1),
        (b"Retry-After:\r\n", 1),
        (b"Retry-After: -5\r\n", 1),
        (b"Retry-After: 1.5\r\n", 1),
        (b"Retry-After: soon\r\n", 1),
        (b"Retry-After: \xc2\xb2\r\n", 1),
        (b"Retry-After: \xff\r\n", 1),
        (b"Retry-After: Wed, 21 Oct 2026 07:28:00 GMT\r\n", 1),
    ],
)
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("streams", [False, True])
async def test_retry_after_is_a_bounded_number(
    run_once: Run, given: bytes, expected: int, status: int, streams: bool
) -> None:
    async with one_worker(answers(b"HTTP/1.1 %d No\r\n%bContent-Length: 0\r\n\r\n" % (status, given))) as (legs, leg):
        error = await failure(legs.stream(leg, now() + 60) if streams else legs.whole(leg))
        assert (error.busy, error.fault.status, error.fault.retry_after_s) == (True, status, expected)


async def test_a_long_refusal_of_a_stream_is_read_to_its_end(run: Run) -> None:
    body = b'{"error": {"message": "%b", "code": "odd"}}' % (b"x" * (UNREAD_BYTES_MAX * 4))
    async with one_worker(answers(b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n" % len(body), body)) as (legs, leg):
        error = await failure(legs.stream(leg, now() + 60))
        assert error.fault.code == "odd"


@pytest.mark.parametrize(
    ("code", "status"), [("429", 429), (400, 400), ("200", 502), ("\u00b2\u00b2\u00b2", 502), ("4" * 5000, 502)]
)
async def test_a_first_event_that_tells_an_error_is_a_refusal_whatever_its_code(
    run_once: Run, code: str | int, status: int
) -> None:
    fault = sse.event({"error": {"message": "no", "type": "t", "code": code}})
    async with one_worker(answers(STREAM + chunk(fault) + END)) as (legs, leg):
        error = await failure(legs.stream(leg, now() + 60))
        assert (error.fault.status, error.final) == (status, status == 400)


async def test_a_first_event_without_end_lets_another_worker_be_asked(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 1000)
    gone = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(STREAM, chunk(b"data: " + b"x" * 600), chunk(b"x" * 600))
        await conn.gone()
        gone.set()

    async with one_worker(script) as (legs, leg):
        error = await failure(legs.stream(leg, now() + 60))
        assert (error.final, error.lost, error.fault.status, error.fault.code) == (False, False, 502, "bad_answer")
        await gone.wait()


async def test_a_later_event_without_end_ends_the_stream_with_an_error(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "EVENT_BYTES_MAX", 1000)
    begun = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(STREAM + chunk(FIRST))
        await begun.wait()
        await conn.say(chunk(b"x" * 1001))
        await conn.gone()

    async with one_worker(script) as (legs, leg):
        stream = await legs.stream(leg, now() + 60)
        events = stream.events()
        assert await anext(events) == FIRST
        begun.set()
        with pytest.raises(ApiError, match="more than 1000 bytes"):
            await anext(events)
        stream.close()


async def test_a_stream_that_ends_before_its_first_event_is_a_bad_answer(run: Run) -> None:
    async with one_worker(answers(STREAM + chunk(b": hello\n") + END)) as (legs, leg):
        error = await failure(legs.stream(leg, now() + 60))
        assert (error.fault.code, error.lost) == ("bad_answer", False)


@pytest.mark.parametrize("url", ["nonsense", "http://h:99999", "http://a..b:1"])
async def test_a_worker_with_a_bad_url_cannot_be_reached(run_once: Run, url: str) -> None:
    async with one_worker(answers(OK)) as (legs, leg):
        leg = msgspec.structs.replace(leg, worker=msgspec.structs.replace(leg.worker, url=url))
        for call in (legs.whole(leg), legs.stream(leg, now() + 60)):
            error = await failure(call)
            assert (error.lost, error.fault.code) == (True, "worker_unreachable")


@pytest.mark.parametrize("streams", [False, True])
async def test_a_worker_that_says_nothing_in_time_is_lost_and_its_request_aborted(run: Run, streams: bool) -> None:
    gone = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.gone()
        gone.set()

    async with one_worker(script, RouterSettings(first_byte_s=0.05)) as (legs, leg):
        error = await failure(legs.stream(leg, now() + 60) if streams else legs.whole(leg, 0.05))
        assert (error.lost, error.fault.status, error.fault.code) == (True, 504, "worker_timeout")
        await gone.wait()


async def test_only_a_connection_that_was_idle_makes_a_leg_stale(run: Run) -> None:
    async def script(conn: Conn) -> None:
        if conn.number == 0:
            await conn.request()
            await conn.say(OK)
        await conn.request()

    async with one_worker(script) as (legs, leg):
        assert (await legs.whole(leg)).data == b"ok"
        stale, died = await failure(legs.whole(leg)), await failure(legs.whole(leg))
        assert (stale.stale, stale.lost) == (True, False)
        assert (died.stale, died.lost) == (False, True)


# --- streams


async def test_a_deadline_in_mid_stream_ends_it_and_aborts_the_worker(run: Run) -> None:
    gone = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(STREAM + chunk(FIRST))
        await conn.gone()
        gone.set()

    async with one_worker(script) as (legs, leg):
        stream = await legs.stream(leg, now() + 0.05)
        events = stream.events()
        assert await anext(events) == FIRST
        with pytest.raises(ApiError, match="deadline") as caught:
            await anext(events)
        assert (caught.value.status, stream.ended) == (504, False)
        await gone.wait()
        stream.close()


async def test_a_deadline_without_a_length_is_no_end_of_the_stream(run: Run) -> None:
    async with one_worker(answers(b"HTTP/1.1 200 OK\r\n\r\n" + FIRST + sse.DONE, then=Conn.gone)) as (legs, leg):
        stream = await legs.stream(leg, now() + 0.05)
        with pytest.raises(ApiError, match="deadline"):
            async for _ in stream.events():
                pass
        stream.close()


async def test_a_second_close_does_not_touch_a_connection_that_is_in_use_again(run: Run) -> None:
    gate, asked = asyncio.Event(), asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(STREAM + chunk(FIRST), chunk(sse.DONE) + END)
        await conn.request()
        asked.set()
        await gate.wait()
        await conn.say(OK)
        await conn.gone()

    async with one_worker(script) as (legs, leg):
        stream = await legs.stream(leg, now() + 60)
        assert b"".join([data async for data in stream.events()]) == FIRST + sse.DONE
        assert stream.ended
        stream.close()
        assert legs._pool.idle == 1
        next_one = asyncio.create_task(legs.whole(leg))
        await asked.wait()
        stream.close()
        gate.set()
        assert (await next_one).data == b"ok"


async def test_the_deadline_of_a_refused_stream_does_not_hit_who_uses_its_connection_next(run: Run) -> None:
    gate, asked = asyncio.Event(), asyncio.Event()
    fault = sse.event({"error": {"message": "no", "type": "t", "code": 500}})

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(STREAM + chunk(fault) + END)
        await conn.request()
        asked.set()
        await gate.wait()
        await conn.say(OK)
        await conn.gone()

    async with one_worker(script) as (legs, leg):
        deadline = now() + 0.2
        await failure(legs.stream(leg, deadline))
        assert legs._pool.idle == 1
        next_one = asyncio.create_task(legs.whole(leg))
        await asked.wait()
        late = asyncio.Event()
        asyncio.get_running_loop().call_at(deadline + 0.05, late.set)
        await late.wait()
        gate.set()
        assert (await next_one).data == b"ok"


async def test_closing_a_stream_early_aborts_the_worker(run: Run) -> None:
    gone = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(STREAM + chunk(FIRST))
        await conn.gone()
        gone.set()

    async with one_worker(script) as (legs, leg):
        stream = await legs.stream(leg, now() + 60)
        stream.close()
        stream.close()
        await gone.wait()
        assert legs._pool.idle == 0
