"""The client of `kvbaton bench router` and its backends: every answer is told right from wrong, whole or in pieces."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
import pytest

from kvbaton_proof.bench.router import router_backends as backends
from kvbaton_proof.bench.router.router_backends import Backend, Counts, Desk
from kvbaton_proof.bench.router.router_client import carry_out, get
from kvbaton_proof.bench.router.router_load import Answer, Order, Outcome, dechunked, request

STREAM = b"".join(backends.STREAM)


def fed(data: bytes, step: int) -> Answer:
    answer = Answer()
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    done = [answer.feed(piece) for piece in pieces]
    assert done == [False] * (len(pieces) - 1) + [True]
    return answer


@pytest.mark.parametrize("step", [1, 2, 7, 100, 10_000])
def test_an_answer_is_complete_with_its_last_byte_and_not_before(step: int) -> None:
    assert fed(backends.DECODE, step).wrong(stream=False) == ""
    assert fed(STREAM, step).wrong(stream=True) == ""
    assert fed(backends.FIRST_EVENT + backends.THE_REST, step).wrong(stream=True) == ""


def test_events_that_chunks_cut_in_two_are_counted_once() -> None:
    body = dechunked(STREAM[len(backends.STREAM_HEAD) :])
    cut = b"".join(backends.chunk(body[at : at + 5]) for at in range(0, len(body), 5))
    assert fed(backends.STREAM_HEAD + cut + b"0\r\n\r\n", 10_000).wrong(stream=True) == ""


@pytest.mark.parametrize(
    ("data", "stream", "said"),
    [
        (backends.answer(b"{}", b"500 Oh"), False, "status 500"),
        (backends.answer(b"{}"), False, "another answer"),
        (b"HTTP/1.1 200 OK\r\n\r\n", False, "no length, or no body"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n", False, "no length, or no body"),
        (backends.STREAM_HEAD + backends.chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n", True, "a stream of 1 events"),
        (STREAM.replace(b"[DONE]", b"[DON'T"), True, "a stream of 17 events"),
    ],
)
def test_what_is_wrong_with_an_answer_has_a_name(data: bytes, stream: bool, said: str) -> None:
    assert fed(data, 10_000).wrong(stream).startswith(said)


def test_an_answer_that_closes_says_so() -> None:
    assert fed(backends.DECODE, 10_000).keeps_alive
    assert not fed(
        backends.DECODE.replace(b"\r\nContent-Type", b"\r\nConnection: close\r\nContent-Type"), 99
    ).keeps_alive


@pytest.mark.parametrize(
    ("head", "length"),
    [
        (b"POST / HTTP/1.1\r\nContent-Length: 12\r\n\r\n", 12),
        (b"POST / HTTP/1.1\r\ncontent-length:0\r\nA: b\r\n\r\n", 0),
        (b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n", None),
        (b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", None),
        (b"GET / HTTP/1.1\r\n\r\n", 0),
    ],
)
def test_backends_know_a_bodys_length_or_that_they_do_not(head: bytes, length: int | None) -> None:
    assert backends.content_length(head) == length


@asynccontextmanager
async def listening(make: Callable[[], asyncio.Protocol]) -> AsyncIterator[int]:
    server = await asyncio.get_running_loop().create_server(make, backends.HOST, 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


def order(port: int, concurrency: int = 3, stream: bool = False, hold_port: int | None = None) -> Order:
    return Order(
        port=port, concurrency=concurrency, stream=stream, window_s=0.05, warmup_s=0.0, drain_s=10.0,
        hold_port=hold_port,
    )  # fmt: skip


def test_a_load_counts_what_the_backends_count() -> None:
    async def work() -> tuple[Outcome, Outcome, Counts]:
        desk = Desk()
        async with listening(lambda: Backend(desk, "D")) as port:
            plain, streaming = await carry_out(order(port)), await carry_out(order(port, stream=True))
            _, body = await get(port, "/counts")
            return plain, streaming, msgspec.json.decode(body, type=Counts)

    plain, streaming, counts = asyncio.run(asyncio.wait_for(work(), 60))
    for outcome in (plain, streaming):
        assert outcome.errors == {}
        assert outcome.answered % 3 == 0 and 6 <= outcome.answered <= outcome.asked, "whole laps, at least two"
        assert outcome.p50_ms is not None and outcome.p99_ms is not None and outcome.p50_ms <= outcome.p99_ms
        assert outcome.used is not None
    assert counts == Counts(prefills=0, decodes=plain.asked + streaming.asked, handed_over=0)


def test_all_streams_are_open_at_once_before_the_first_goes_on() -> None:
    async def work() -> tuple[Outcome, Desk]:
        desk = Desk()
        async with listening(lambda: Backend(desk, "D")) as port:
            return await carry_out(order(port, 8, stream=True, hold_port=port)), desk

    outcome, desk = asyncio.run(asyncio.wait_for(work(), 60))
    assert (outcome.open_at_once, outcome.answered, outcome.asked, outcome.errors) == (8, 8, 8, {})
    assert not desk.holding and not desk.held


def test_p_gives_a_ticket_and_d_counts_who_brings_it() -> None:
    async def work() -> tuple[bytes, Counts]:
        desk = Desk()
        async with listening(lambda: Backend(desk, "P")) as p, listening(lambda: Backend(desk, "D")) as d:
            reader, writer = await asyncio.open_connection(backends.HOST, p)
            writer.write(request(stream=False))
            said = await reader.readuntil(b"}}")
            writer.close()
            reader, writer = await asyncio.open_connection(backends.HOST, d)
            writer.write(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n%s" % (len(backends.TICKET), backends.TICKET))
            await reader.readuntil(b"}}")
            writer.close()
        return said, desk.counts

    said, counts = asyncio.run(asyncio.wait_for(work(), 60))
    assert backends.TICKET in said and len(backends.TICKET) == 300
    assert counts == Counts(prefills=1, decodes=1, handed_over=1)


class Broken(asyncio.Protocol):
    """Answers every request with the same bytes, and hangs up if they are none."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.WriteTransport = transport  # type: ignore[assignment]

    def data_received(self, _: bytes) -> None:
        if self._data:
            self._transport.write(self._data)
        else:
            self._transport.close()


@pytest.mark.parametrize(
    ("data", "said"), [(b"", "connection lost"), (backends.NO_LENGTH, "status 411")], ids=["hangs up", "refuses"]
)
def test_a_router_that_fails_ends_the_load_early_with_its_errors_named(data: bytes, said: str) -> None:
    async def work() -> Outcome:
        async with listening(lambda: Broken(data)) as port:
            return await carry_out(order(port))

    outcome = asyncio.run(asyncio.wait_for(work(), 60))
    assert set(outcome.errors) == {said}
    assert outcome.answered == 0
    assert outcome.asked == sum(outcome.errors.values()), "every request is accounted for"


def test_a_router_that_is_not_there_is_an_error_and_no_wait() -> None:
    async def work() -> Outcome:
        async with listening(lambda: Broken(b"")) as port:
            pass
        return await carry_out(order(port))

    outcome = asyncio.run(asyncio.wait_for(work(), 20))
    assert sum(outcome.errors.values()) == 3
    assert all(why.startswith("cannot connect") for why in outcome.errors)
