"""`wire` against servers that do anything: an exchange ends once, as a whole answer or as the right `WireError`."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest

from kvbaton.api.http import http_client
from kvbaton.api.http.answer_reader import READ_BYTES_MAX, UNREAD_BYTES_MAX
from kvbaton.api.http.http_client import Exchange, Origin, Pool, header, origin, request_bytes
from kvbaton.api.http.http_types import (
    HEADERS_BYTES_MAX,
    BrokenError,
    GarbageError,
    LateError,
    NoRoomError,
    StaleError,
    UnreachableError,
    WireError,
)
from tests.api.http.raw_server import OK, Conn, Script, Server, answers, listening
from tests.async_tests import Run
from tests.router.fake_workers import until

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
LOOP_BYTES_MAX = 256 << 10
"""What either loop hands over at once, at most."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections grow stale and old only where a test wants it: the machine may stand still for seconds."""
    monkeypatch.setattr(http_client, "STALE_S", 60.0)
    monkeypatch.setattr(http_client, "IDLE_S", 60.0)


@contextlib.asynccontextmanager
async def one_server(script: Script) -> AsyncIterator[tuple[Pool, Server]]:
    """A pool and one server."""
    pool = Pool(5.0)
    try:
        async with listening(script) as server:
            yield pool, server
    finally:
        pool.close()


def get(server: Server, path: str = "/x") -> tuple[Origin, bytes]:
    place = origin(server.url)
    return place, request_bytes("GET", place, path, (), None)


async def fetch(pool: Pool, server: Server, limit: int = 1 << 20) -> tuple[int, bytes]:
    exchange = await pool.exchange(*get(server))
    try:
        data = await exchange.whole(limit)
        return exchange.status, data
    finally:
        exchange.close()


async def drained(exchange: Exchange) -> bytes:
    """All that can be read, piece by piece."""
    found = b""
    while data := await exchange.read():
        found += data
    return found


class Transport(asyncio.Transport):
    """A connection without a network, for the order of things that no network can be told to keep."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unsent_bytes = 0
        self.paused = self.gone = False

    def write(self, data: Any) -> None:
        assert not self.gone
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False

    def is_closing(self) -> bool:
        return self.gone

    def abort(self) -> None:
        self.gone = True


def unplugged(pool: Pool) -> tuple[Exchange, Transport]:
    """An exchange over a connection without a network."""
    transport = Transport()
    exchange = Exchange(pool, origin("http://nowhere:1"))
    exchange.connection_made(transport)
    return exchange, transport


async def outcome(*pieces: bytes, served: bool = False, lost: bool = True) -> tuple[int, bytes] | WireError:
    """What an exchange comes to when these pieces arrive, and then the connection is closed."""
    pool = Pool(1.0)
    exchange, transport = unplugged(pool)
    if served:
        exchange.send(b"?")
        exchange.data_received(OK)
        await exchange.whole(100)
        exchange.close()
        assert pool.idle == 1
    exchange.send(b"?")
    for piece in pieces:
        if piece and not transport.gone:
            exchange.data_received(piece)
    if lost:
        exchange.connection_lost(None)
    pool.close()
    try:
        data = await asyncio.wait_for(exchange.whole(1 << 20), 20)
    except WireError as error:
        return error
    return exchange.status, data


# --- answers

ANSWERS: dict[str, tuple[bytes, int, bytes]] = {
    "a length": (HEAD + b"Content-Length: 5\r\n\r\nhello", 200, b"hello"),
    "a length of nothing": (HEAD + b"Content-Length: 0\r\n\r\n", 200, b""),
    "chunks": (CHUNKED + b"3\r\nhel\r\n2\r\nlo\r\n0\r\n\r\n", 200, b"hello"),
    "chunks with extensions": (CHUNKED + b"3;a=b\r\nhel\r\n2\r\nlo\r\n0;c\r\n\r\n", 200, b"hello"),
    "chunks with trailers": (CHUNKED + b"5\r\nhello\r\n0\r\nX-Sum: 1\r\nX-More: 2\r\n\r\n", 200, b"hello"),
    "no chunk": (CHUNKED + b"0\r\n\r\n", 200, b""),
    "a 204": (b"HTTP/1.1 204 No Content\r\n\r\n", 204, b""),
    "a 204 that gives a length": (b"HTTP/1.1 204 No Content\r\nContent-Length: 3\r\n\r\n", 204, b""),
    "100 first": (b"HTTP/1.1 100 Continue\r\n\r\n" + OK, 200, b"ok"),
    "103 with headers, twice": (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" * 2 + OK, 200, b"ok"),
    "an error": (b"HTTP/1.1 503 Busy\r\nContent-Length: 2\r\nRetry-After: 7\r\n\r\nno", 503, b"no"),
    "an upgrade that is only offered": (HEAD + b"Upgrade: h2c\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
    "an empty header": (HEAD + b"X-Empty:\r\nContent-Length: 2\r\n\r\nok", 200, b"ok"),
}
ENDED_BY_CLOSING: dict[str, tuple[bytes, int, bytes]] = {
    "HTTP/1.1 without a length": (HEAD + b"\r\nhello", 200, b"hello"),
    "HTTP/1.0 without a length": (b"HTTP/1.0 200 OK\r\n\r\nhello", 200, b"hello"),
    "an encoding that is not chunked": (HEAD + b"Transfer-Encoding: gzip\r\n\r\nhello", 200, b"hello"),
}


@pytest.mark.parametrize(("data", "status", "body"), ANSWERS.values(), ids=ANSWERS)
async def test_an_answer_is_read_to_its_end_and_its_connection_used_again(
    run: Run, data: bytes, status: int, body: bytes
) -> None:
    middle = len(data) // 2
    async with one_server(answers(data[:middle], data[middle:])) as (pool, server):
        for _ in range(3):
            assert await fetch(pool, server) == (status, body)
        assert (server.conns, pool.idle) == (1, 1)


@pytest.mark.parametrize(("data", "status", "body"), ENDED_BY_CLOSING.values(), ids=ENDED_BY_CLOSING)
async def test_an_answer_without_a_length_ends_with_its_connection(
    run: Run, data: bytes, status: int, body: bytes
) -> None:
    async with one_server(answers(data, then=Conn.close)) as (pool, server):
        assert await fetch(pool, server) == (status, body)
        assert await fetch(pool, server) == (status, body)
        assert (server.conns, pool.idle) == (2, 0)


@pytest.mark.parametrize(("data", "status", "body"), ANSWERS.values(), ids=ANSWERS)
async def test_it_does_not_matter_where_an_answer_is_cut(run_once: Run, data: bytes, status: int, body: bytes) -> None:
    for at in range(1, len(data)):
        assert await outcome(data[:at], data[at:], lost=False) == (status, body)
    assert await outcome(*(data[at : at + 1] for at in range(len(data))), lost=False) == (status, body)


@pytest.mark.parametrize(("data", "status", "body"), ANSWERS.values(), ids=ANSWERS)
async def test_wherever_a_connection_closes_early_the_answer_is_broken(
    run_once: Run, data: bytes, status: int, body: bytes
) -> None:
    for at in range(len(data)):
        assert type(await outcome(data[:at])) is BrokenError
        assert type(await outcome(data[:at], served=True)) is (BrokenError if at else StaleError)


async def test_a_stream_is_read_as_it_comes(run: Run) -> None:
    gates = [asyncio.Event() for _ in range(3)]

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(CHUNKED)
        for number, gate in enumerate(gates):
            await gate.wait()
            await conn.say(b"1\r\n%d\r\n" % number)
        await conn.say(b"0\r\n\r\n")
        await conn.gone()

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.head()
        assert (exchange.status, exchange.headers) == (200, [(b"transfer-encoding", b"chunked")])
        for number, gate in enumerate(gates):
            gate.set()
            assert await exchange.read() == b"%d" % number
        assert await exchange.read() == b""
        assert await exchange.read() == b""
        exchange.close()
        assert pool.idle == 1


async def test_trailers_and_interim_headers_are_no_headers_of_the_answer(run_once: Run) -> None:
    exchange, _ = unplugged(Pool(1.0))
    exchange.send(b"?")
    exchange.data_received(b"HTTP/1.1 103 Early Hints\r\nRetry-After: 1\r\n\r\n" + CHUNKED)
    exchange.data_received(b"2\r\nok\r\n0\r\nRetry-After: 2\r\n\r\n")
    assert await exchange.whole(9) == b"ok"
    assert exchange.headers == [(b"transfer-encoding", b"chunked")]


async def test_a_header_is_found_by_its_lower_case_name_and_without_blanks(run_once: Run) -> None:
    exchange, _ = unplugged(Pool(1.0))
    exchange.send(b"?")
    exchange.data_received(HEAD + b"RETRY-After:  7 \r\nX: \xff\r\nx: 2\r\nContent-Length: 0\r\n\r\n")
    assert header(exchange.headers, b"retry-after") == "7"
    assert header(exchange.headers, b"x") == "2"
    assert header(exchange.headers, b"y") is None


# --- what goes out


async def test_a_request_goes_out_under_the_prefix_with_its_headers_and_body(run: Run) -> None:
    heard: list[bytes] = []

    async def script(conn: Conn) -> None:
        heard.append(await conn.request())
        await conn.say(OK)

    async with one_server(script) as (pool, server):
        place = origin(server.url + "/pre/fix/")
        exchange = await pool.exchange(place, request_bytes("POST", place, "/v1/x", [(b"A", b"b")], b"{}"))
        assert await exchange.whole(9) == b"ok"
        exchange.close()
        assert heard == [
            b"POST /pre/fix/v1/x HTTP/1.1\r\nHost: %b\r\nA: b\r\n"
            b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}" % place.authority.encode()
        ]


def test_a_get_has_no_body() -> None:
    place = origin("http://h:1")
    assert request_bytes("GET", place, "/x", (), None) == b"GET /x HTTP/1.1\r\nHost: h:1\r\n\r\n"


def test_an_ipv6_literal_is_connected_to_bare_and_named_in_brackets() -> None:
    place = origin("http://[::1]:8001")
    assert (place.host, place.port, place.authority) == ("::1", 8001, "[::1]:8001")
    assert b"Host: [::1]:8001\r\n" in request_bytes("GET", place, "/", (), None)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h", Origin("h", 80, False, "h", "")),
        ("https://h/", Origin("h", 443, True, "h", "")),
        ("HTTP://10.0.0.1:8000/a/b/", Origin("10.0.0.1", 8000, False, "10.0.0.1:8000", "/a/b")),
    ],
)
def test_a_url_is_a_place(url: str, expected: Origin) -> None:
    assert origin(url) == expected


BAD_URLS = [
    *("", "h:1", "http://", "http://:80", "ftp://h:1", "unix:/x", "//h:1"),
    *("http://h:99999", "http://h:x", "http://h:-1", "http://h:0", "http://[::1", "http://[::1]x:1"),
    *("http://u@h:1", "http://:secret@h:1", "http://@h:1", "http://h:1?a=b", "http://h:1#a"),
    *("http://a b:1", "http://h:1/a b", "http://h\x00:1", "http://h:1/\r\nX: y", "http://h\u00e9:1", " http://h:1"),
]


@pytest.mark.parametrize("url", BAD_URLS)
def test_a_bad_url_is_refused_by_name(url: str) -> None:
    with pytest.raises(ValueError, match=r"^url: got .* expected http://host:port"):
        origin(url)


# --- use of connections


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Connection: close\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        HEAD + b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
    ],
    ids=["close", "HTTP/1.0", "close, chunked"],
)
async def test_a_connection_that_is_to_close_is_closed_from_here(run: Run, data: bytes) -> None:
    seen: list[int] = []

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(data)
        await conn.gone()  # and does not close it itself
        seen.append(conn.number)

    async with one_server(script) as (pool, server):
        assert await fetch(pool, server) == (200, b"ok")
        assert await fetch(pool, server) == (200, b"ok")
        assert pool.idle == 0
        await until(lambda: seen == [0, 1])


async def test_an_http_1_0_server_that_keeps_alive_is_asked_again(run: Run) -> None:
    async with one_server(answers(b"HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok")) as (
        pool,
        server,
    ):
        await fetch(pool, server)
        await fetch(pool, server)
        assert server.conns == 1


async def test_exchanges_at_the_same_time_have_connections_of_their_own(run: Run) -> None:
    gate = asyncio.Event()

    async def script(conn: Conn) -> None:
        while True:
            await conn.request()
            if conn.number == 0:
                await gate.wait()
            await conn.say(HEAD + b"Content-Length: 1\r\n\r\n%d" % conn.number)

    async with one_server(script) as (pool, server):
        slow = asyncio.create_task(fetch(pool, server))
        await until(lambda: server.conns == 1)
        assert await fetch(pool, server) == (200, b"1")  # nobody waits behind the slow one
        gate.set()
        assert await slow == (200, b"0")
        assert (server.conns, pool.idle) == (2, 2)


@pytest.mark.parametrize("how", [Conn.close, Conn.reset], ids=["closes", "resets"])
async def test_a_connection_that_the_server_closes_while_idle_is_not_used_again(
    run: Run, how: Callable[[Conn], None]
) -> None:
    async with one_server(answers(OK, then=how)) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.whole(9)
        exchange.close()
        await until(lambda: not exchange.usable)
        assert await fetch(pool, server) == (200, b"ok")
        assert server.conns == 2


@pytest.mark.parametrize("how", [Conn.close, Conn.reset], ids=["closes", "resets"])
async def test_a_request_that_meets_with_the_close_of_an_idle_connection_is_stale(
    run: Run, how: Callable[[Conn], None]
) -> None:
    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(OK)
        await conn.request()
        how(conn)

    async with one_server(script) as (pool, server):
        assert await fetch(pool, server) == (200, b"ok")
        with pytest.raises(StaleError, match="idle"):
            await fetch(pool, server)
        assert await fetch(pool, server) == (200, b"ok")
        assert server.conns == 2


@pytest.mark.parametrize("how", [Conn.close, Conn.reset], ids=["closes", "resets"])
async def test_a_worker_that_goes_long_after_it_was_asked_did_not_close_an_idle_connection(
    run: Run, how: Callable[[Conn], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had the request and died with it: it is to blame, and its end is a failure on record."""
    monkeypatch.setattr(http_client, "STALE_S", 0.02)

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(OK)
        await conn.request()
        await asyncio.sleep(0.05)  # longer than that
        how(conn)

    async with one_server(script) as (pool, server):
        assert await fetch(pool, server) == (200, b"ok")
        with pytest.raises(BrokenError):
            await fetch(pool, server)


@pytest.mark.parametrize("how", [Conn.close, Conn.reset], ids=["closes", "resets"])
async def test_a_new_connection_is_never_stale(run: Run, how: Callable[[Conn], None]) -> None:
    async def script(conn: Conn) -> None:
        await conn.request()
        how(conn)

    async with one_server(script) as (pool, server):
        with pytest.raises(BrokenError):
            await fetch(pool, server)


@pytest.mark.parametrize("how", [Conn.close, Conn.reset], ids=["closes", "resets"])
async def test_a_server_that_closes_on_sight_breaks_the_exchange(run: Run, how: Callable[[Conn], None]) -> None:
    async def script(conn: Conn) -> None:
        how(conn)

    async with one_server(script) as (pool, server):
        for _ in range(20):
            with pytest.raises((BrokenError, UnreachableError)):
                await fetch(pool, server)


@pytest.mark.parametrize("extra", [b"", b"\r\n", OK, OK[:4], b"!?", HEAD, b"HTTP/1.1 100 Continue\r\n\r\n"])
@pytest.mark.parametrize("together", [True, False])
async def test_more_than_one_answer_changes_nothing_about_the_first_nor_the_next(
    run: Run, extra: bytes, together: bool
) -> None:
    first = CHUNKED + b"3\r\none\r\n0\r\n\r\n"
    sent = asyncio.Event()

    async def script(conn: Conn) -> None:
        while True:
            await conn.request()
            if conn.number == 0:
                await (conn.say(first + extra) if together else conn.say(first, extra))
                sent.set()
            else:
                await conn.say(OK)

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        assert await exchange.whole(99) == b"one"
        assert (exchange.status, exchange.headers) == (200, [(b"transfer-encoding", b"chunked")])
        await sent.wait()
        if extra.strip():
            await until(exchange._transport.is_closing)
        exchange.close()
        if extra.strip():
            assert pool.idle == 0
            assert await fetch(pool, server) == (200, b"ok")


async def test_what_comes_over_an_idle_connection_closes_it(run: Run) -> None:
    asked = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(OK)
        if conn.number == 0:
            await asked.wait()
            await conn.say(b"HTTP/1.1 408 Request Timeout\r\nContent-Length: 0\r\n\r\n")
            await conn.gone()

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.whole(9)
        exchange.close()
        assert pool.idle == 1
        asked.set()
        await until(lambda: not exchange.usable)
        assert await fetch(pool, server) == (200, b"ok")
        assert server.conns == 2


async def test_an_answer_that_is_not_read_to_its_end_costs_its_connection(run: Run) -> None:
    seen = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(OK)
        await conn.gone()
        seen.set()

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.head()
        await until(lambda: exchange._answer.complete)
        exchange.close()
        assert pool.idle == 0
        await seen.wait()


async def test_an_answer_before_the_request_was_wholly_sent_is_an_answer_but_ends_the_connection(run: Run) -> None:
    closed = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.head()
        await conn.say(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
        await closed.wait()
        await conn.gone()

    async with one_server(script) as (pool, server):
        place = origin(server.url)
        exchange = await pool.exchange(place, request_bytes("POST", place, "/x", (), bytes(64 << 20)))
        assert (await exchange.whole(9), exchange.status) == (b"no", 413)
        assert exchange._transport.get_write_buffer_size() > 0
        exchange.close()
        assert pool.idle == 0
        closed.set()


async def test_an_early_refusal_that_closes_is_told(run: Run) -> None:
    async def script(conn: Conn) -> None:
        await conn.head()
        await conn.say(b"HTTP/1.1 413 Too Large\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno")

    async with one_server(script) as (pool, server):
        place = origin(server.url)
        exchange = await pool.exchange(place, request_bytes("POST", place, "/x", (), bytes(64 << 20)))
        try:
            assert (await exchange.whole(9), exchange.status) == (b"no", 413)
        finally:
            exchange.close()


async def test_what_a_new_connection_says_before_it_is_asked_is_its_answer(run_once: Run) -> None:
    full = b"HTTP/1.1 503 Full\r\nConnection: close\r\nContent-Length: 2\r\n\r\nno"
    pool = Pool(1.0)
    exchange, _ = unplugged(pool)
    exchange.data_received(full)
    exchange.send(b"?")
    assert (await asyncio.wait_for(exchange.whole(9), 20), exchange.status) == (b"no", 503)

    exchange, transport = unplugged(pool)
    transport.gone = True
    exchange.connection_lost(ConnectionResetError())
    exchange.send(b"?")
    with pytest.raises(BrokenError, match="ConnectionResetError"):
        await asyncio.wait_for(exchange.whole(9), 20)


# --- what is no answer

GARBAGE: dict[str, bytes] = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a request": b"GET / HTTP/1.1\r\n\r\n",
    "an odd version": b"HTTP/7.3 200 OK\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "a status below 100": b"HTTP/1.1 099 Odd\r\nContent-Length: 0\r\n\r\n",
    "a status of 0 and a body without end": b"HTTP/1.1 000 Odd\r\n\r\nabc",
    "an upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: Upgrade\r\n\r\nxyz",
    "an upgrade to nothing": b"HTTP/1.1 101 Switching Protocols\r\n\r\n",
    "a length and chunks": HEAD + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and a length": HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
    "two lengths": HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
    "a length below 0": HEAD + b"Content-Length: -1\r\n\r\n",
    "a length beyond 64 bits": HEAD + b"Content-Length: 99999999999999999999\r\n\r\n",
    "a chunk of odd length": CHUNKED + b"xyz\r\n",
    "a chunk longer than it says": CHUNKED + b"1\r\nabc\r\n",
    "a header line without a name": HEAD + b": x\r\n\r\n",
    "an interim answer with a body": b"HTTP/1.1 100 Continue\r\nContent-Length: 3\r\n\r\nabc" + OK,
    "headers without end": HEAD + b"X: y\r\n" * (HEADERS_BYTES_MAX // 5),
    "a header without end": HEAD + b"X: " + bytes(HEADERS_BYTES_MAX).replace(b"\0", b"y"),
    "too many headers": HEAD + b"X: y\r\n" * (HEADERS_BYTES_MAX // 5) + b"Content-Length: 2\r\n\r\nok",
    "interim answers without end": b"HTTP/1.1 100 Continue\r\n\r\n" * (HEADERS_BYTES_MAX // 24),
    "trailers without end": CHUNKED + b"2\r\nok\r\n0\r\n" + b"X: y\r\n" * (LOOP_BYTES_MAX // 4),
    "a trailer without end": CHUNKED + b"2\r\nok\r\n0\r\nX: " + bytes(LOOP_BYTES_MAX * 2).replace(b"\0", b"y"),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE)
async def test_what_is_not_http_is_garbage_at_once_and_closes_the_connection(run: Run, data: bytes) -> None:
    seen = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(data)
        await conn.gone()
        seen.set()

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        with pytest.raises(GarbageError):
            await exchange.whole(1 << 20)
        await until(seen.is_set)  # the connection is closed before the exchange is
        exchange.close()
        assert pool.idle == 0


async def test_a_body_over_the_limit_is_garbage_before_it_is_there(run: Run) -> None:
    seen = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(HEAD + b"Content-Length: 1000000000\r\n\r\n", bytes(1001))
        await conn.gone()
        seen.set()

    async with one_server(script) as (pool, server):
        with pytest.raises(GarbageError, match="more than 1000 bytes"):
            await fetch(pool, server, limit=1000)
        await seen.wait()


@pytest.mark.parametrize("length", [999, 1000])
async def test_a_body_within_the_limit_passes(run: Run, length: int) -> None:
    async with one_server(answers(HEAD + b"Content-Length: %d\r\n\r\n" % length, bytes(length))) as (pool, server):
        assert await fetch(pool, server, limit=1000) == (200, bytes(length))


async def test_a_body_over_the_limit_that_came_whole_is_garbage_too(run_once: Run) -> None:
    exchange, _ = unplugged(Pool(1.0))
    exchange.send(b"?")
    exchange.data_received(OK)
    with pytest.raises(GarbageError, match="more than 1 bytes"):
        await exchange.whole(1)
    exchange, _ = unplugged(Pool(1.0))
    exchange.send(b"?")
    exchange.data_received(CHUNKED + b"2\r\nok\r\n")  # and no end
    with pytest.raises(GarbageError, match="more than 1 bytes"):
        await asyncio.wait_for(exchange.whole(1), 20)


async def test_events_before_the_garbage_are_still_read(run: Run) -> None:
    async with one_server(answers(CHUNKED + b"4\r\ngood\r\nxyz\r\n", then=Conn.gone)) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.head()
        assert await exchange.read() == b"good"
        for _ in range(2):
            with pytest.raises(GarbageError):
                await exchange.read()
        exchange.close()


async def test_a_close_in_mid_stream_is_told_after_what_came_before_it(run: Run) -> None:
    async with one_server(answers(CHUNKED + b"4\r\ngood\r\n", then=Conn.close)) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.head()
        assert await exchange.read() == b"good"
        for _ in range(2):
            with pytest.raises(BrokenError):
                await exchange.read()
        exchange.close()


async def test_a_reset_does_not_end_an_answer_without_a_length(run: Run) -> None:
    heard = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(HEAD + b"\r\nhalf")
        await heard.wait()
        conn.reset()

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        assert await exchange.read() == b"half"
        heard.set()
        with pytest.raises(BrokenError, match="ConnectionResetError"):
            await exchange.read()
        exchange.close()


@pytest.mark.parametrize("data", [b"", HEAD, HEAD + b"\r\nhalf", CHUNKED + b"4\r\nhalf"])
@pytest.mark.parametrize("reused", [False, True])
async def test_what_is_broken_off_here_is_broken_and_neither_stale_nor_whole(
    run: Run, data: bytes, reused: bool
) -> None:
    async def script(conn: Conn) -> None:
        if reused:
            await conn.request()
            await conn.say(OK)
        await conn.request()
        await conn.say(data)
        await conn.gone()

    async with one_server(script) as (pool, server):
        if reused:
            await fetch(pool, server)
        exchange = await pool.exchange(*get(server))
        waiting = asyncio.create_task(exchange.whole(99))
        if data:
            await until(lambda: exchange._answer.heard)
        exchange.abort()
        with pytest.raises(BrokenError):
            await asyncio.wait_for(waiting, 20)
        exchange.close()
        assert (server.conns, pool.idle) == (1, 0)


async def test_no_bytes_whatever_make_anything_but_an_answer_or_a_wire_error(run_once: Run) -> None:
    rng = random.Random(7)
    seeds = [row[0] for row in (ANSWERS | ENDED_BY_CLOSING).values()] + [data[:300] for data in GARBAGE.values()]

    for _ in range(3000):
        data = bytearray(rng.choice(seeds) + rng.choice(seeds))
        for _ in range(rng.randrange(6)):
            at = rng.randrange(len(data))
            data[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        cut = rng.randrange(len(data) + 1)
        found = await outcome(bytes(data[:cut]), bytes(data[cut:]), served=rng.random() < 0.3)
        assert isinstance(found, tuple | WireError), bytes(data)
        if isinstance(found, tuple):
            assert 200 <= found[0] <= 999


# --- waiting


async def test_a_reader_that_is_slow_stops_the_worker_and_loses_nothing(run: Run) -> None:
    length = 16 << 20
    data = random.Random(3).randbytes(length)

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(HEAD + b"Content-Length: %d\r\n\r\n" % length)
        await conn.say(*(data[at : at + 65536] for at in range(0, length, 65536)))
        await conn.request()

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.head()
        found = []
        for _ in range(3):
            await until(lambda: exchange._paused)
            assert not exchange._transport.is_reading()
            for _ in range(20):
                await asyncio.sleep(0)
            assert exchange._answer.body.unread <= UNREAD_BYTES_MAX + LOOP_BYTES_MAX
            found.append(await exchange.read())
        found.append(await drained(exchange))
        assert b"".join(found) == data
        exchange.close()
        assert pool.idle == 1


async def test_what_was_stopped_before_all_of_it_was_wanted_goes_on(run: Run) -> None:
    length = UNREAD_BYTES_MAX * 3

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(b"HTTP/1.1 500 Oops\r\nContent-Length: %d\r\n\r\n" % length, bytes(length))
        await conn.request()

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.head()
        await until(lambda: exchange._paused)
        assert await asyncio.wait_for(exchange.whole(1 << 20), 20) == bytes(length)
        exchange.close()
        assert pool.idle == 1


async def test_a_stopped_stream_may_be_closed_and_its_rest_read(run: Run) -> None:
    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(HEAD + b"\r\n")
        while True:
            await conn.say(bytes(65536))

    async with one_server(script) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.head()
        await until(lambda: exchange._paused)
        exchange.abort()
        read = 0
        with pytest.raises(BrokenError):
            while found := await exchange.read():
                assert len(found) <= READ_BYTES_MAX
                read += len(found)
        assert read > UNREAD_BYTES_MAX // 2
        exchange.close()


@pytest.mark.parametrize("data", [b"", HEAD, OK[:-1], CHUNKED + b"5\r\nhel"])
async def test_cancelling_the_wait_closes_the_connection(run: Run, data: bytes) -> None:
    asked, seen = asyncio.Event(), asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(data)
        asked.set()
        await conn.gone()
        seen.set()

    async with one_server(script) as (pool, server):
        task = asyncio.create_task(fetch(pool, server))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await seen.wait()
        assert pool.idle == 0


async def test_cancelling_at_any_turn_of_the_loop_leaves_no_connection(run: Run) -> None:
    gone: list[int] = []

    async def script(conn: Conn) -> None:
        await conn.gone()
        gone.append(conn.number)

    async with one_server(script) as (pool, server):
        for turns in range(20):
            task = asyncio.create_task(fetch(pool, server))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: server.conns and len(gone) == server.conns)


async def test_data_between_two_waits_is_not_lost(run_once: Run) -> None:
    exchange, _ = unplugged(Pool(1.0))
    exchange.send(b"?")
    waiting = asyncio.create_task(exchange.head())
    await asyncio.sleep(0)
    exchange.data_received(CHUNKED)  # wakes the waiter, which has not run yet when the rest comes
    exchange.data_received(b"2\r\nok\r\n")
    exchange.data_received(b"0\r\n\r\n")
    exchange.connection_lost(None)
    await waiting
    assert await drained(exchange) == b"ok"


# --- connecting


async def test_a_refused_connection_is_unreachable(run: Run) -> None:
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("127.0.0.1", 0))
        pool = Pool(5.0)
        with pytest.raises(UnreachableError, match=r"(?i)refused|connect call failed"):
            await pool.exchange(origin(f"http://127.0.0.1:{bound.getsockname()[1]}"), b"?")


async def test_connecting_has_a_time_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    pool = Pool(0.01)
    monkeypatch.setattr(pool.loop, "create_connection", never)
    with pytest.raises(UnreachableError, match=r"0\.01 s"):
        await pool.exchange(origin("http://h:1"), b"?")


@pytest.mark.parametrize("host", ["a..b", "x" * 64, "no-such-host.invalid"])
async def test_a_name_that_cannot_be_looked_up_is_unreachable(run: Run, host: str) -> None:
    with pytest.raises(UnreachableError, match=r"."):
        await Pool(10.0).exchange(origin(f"http://{host}:1"), b"?")


async def test_https_with_a_server_that_does_not_speak_it_is_unreachable(run: Run) -> None:
    async def script(conn: Conn) -> None:
        await conn.say(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await conn.gone()

    async with one_server(script) as (pool, server):
        with pytest.raises(UnreachableError, match=r"."):
            await pool.exchange(origin(server.url.replace("http", "https")), b"?")


# --- the pool


async def test_idle_connections_are_bounded(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_MAX", 2)
    gone: list[int] = []
    gate = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await gate.wait()
        await conn.say(OK)
        await conn.gone()
        gone.append(conn.number)

    async with one_server(script) as (pool, server):
        tasks = [asyncio.create_task(fetch(pool, server)) for _ in range(5)]
        await until(lambda: server.conns == 5)
        gate.set()
        await asyncio.gather(*tasks)
        assert pool.idle == 2
        await until(lambda: len(gone) == 3)


async def test_idle_connections_are_let_go_in_time(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_client, "IDLE_S", 0.02)
    gone = asyncio.Event()

    async def script(conn: Conn) -> None:
        await conn.request()
        await conn.say(OK)
        await conn.gone()
        gone.set()

    async with one_server(script) as (pool, server):
        await fetch(pool, server)
        await gone.wait()
        await until(lambda: pool._sweeping is None)  # nothing is left to be looked after
        assert (pool.idle, pool._idle) == (0, {})


async def test_one_that_was_idle_too_long_is_not_used_even_before_it_is_swept(run: Run) -> None:
    async with one_server(answers(OK)) as (pool, server):
        exchange = await pool.exchange(*get(server))
        await exchange.whole(9)
        exchange.close()
        exchange.idle_since -= http_client.IDLE_S
        assert await fetch(pool, server) == (200, b"ok")
        assert server.conns == 2
        assert exchange._transport.is_closing()


async def test_the_sweep_leaves_those_that_were_used_lately(run: Run) -> None:
    async with one_server(answers(OK)) as (pool, server):
        first = await pool.exchange(*get(server))
        second = await pool.exchange(*get(server))
        for exchange in (first, second):
            await exchange.whole(9)
            exchange.close()
        first.idle_since -= http_client.IDLE_S
        pool._sweep()
        assert (pool.idle, first.usable, second.usable) == (1, False, True)
        assert pool._sweeping is not None


async def test_a_closed_pool_keeps_nothing_and_lets_what_is_under_way_end(run: Run) -> None:
    asked, gate, gone = asyncio.Event(), asyncio.Event(), []

    async def script(conn: Conn) -> None:
        await conn.request()
        if conn.number == 1:
            asked.set()
            await gate.wait()
        await conn.say(OK)
        await conn.gone()
        gone.append(conn.number)

    async with one_server(script) as (pool, server):
        idle, busy = await pool.exchange(*get(server)), await pool.exchange(*get(server))
        await idle.whole(9)
        idle.close()
        assert pool.idle == 1
        await asked.wait()
        pool.close()
        await until(lambda: gone == [0])
        gate.set()
        assert await busy.whole(9) == b"ok"
        busy.close()
        await until(lambda: gone == [0, 1])
        assert (pool.idle, pool._idle) == (0, {})
        pool.close()


async def test_a_connection_that_is_used_again_is_late_by_the_time_of_each_exchange(run: Run) -> None:
    pool = Pool(5.0)
    exchange, _ = unplugged(pool)
    for timeout_s in (60.0, 0.01, 60.0):
        exchange.send(b"GET / HTTP/1.1\r\n\r\n")
        exchange.expire_in(timeout_s)
        exchange.data_received(OK)
        assert await exchange.whole(1 << 10)
        exchange.close()
    exchange.send(b"GET / HTTP/1.1\r\n\r\n")
    exchange.expire_in(60.0)
    await asyncio.sleep(0.05)  # the timer of an exchange before has run out
    for timeout_s in (60.0, 0.0, 0.0002, 0.0):
        exchange.expire_in(timeout_s)
    with pytest.raises(LateError):
        await exchange.head()
    exchange.close()
    exchange.connection_lost(None)
    pool.close()


async def test_a_pool_at_its_bound_takes_an_idle_connection_for_a_new_one_or_says_that_there_is_none(run: Run) -> None:
    async with one_server(answers(OK)) as (pool, server):
        pool._connections_max = 1
        place, data = get(server)
        other = msgspec.structs.replace(place, prefix="/other")
        assert (await fetch(pool, server))[0] == 200
        exchange = await pool.exchange(place, data)  # the idle one
        with pytest.raises(NoRoomError):
            await pool.exchange(other, data)
        assert await exchange.whole(1 << 10)
        exchange.close()
        await until(lambda: pool.idle == 1)
        exchange = await pool.exchange(other, data)
        assert await exchange.whole(1 << 10)
        exchange.close()
