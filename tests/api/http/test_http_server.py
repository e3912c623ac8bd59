"""`door` against clients that do anything: each request gets one answer, in order, and nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import random
import re
import socket
import struct
import warnings
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from kvbaton.api import request_ids
from kvbaton.api.api_errors import ApiError, PortInUseError, bad_field, full
from kvbaton.api.http import http_server
from kvbaton.api.http.client_quotas import ClientQuotas
from kvbaton.api.http.http_server import UNREAD_BYTES_MAX
from kvbaton.api.http.http_types import (
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    Answer,
    Events,
    Handler,
    Request,
    Site,
    json_answer,
)
from kvbaton.api.http.request_reader import AHEAD_MAX
from kvbaton.api.request_ids import clients_request_id
from tests.async_tests import Run
from tests.router.fake_workers import until

Source = AsyncGenerator[bytes, None]
NAMED = b"X-Request-Id: drawn\r\n"
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n" + NAMED
PLAIN_STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
STREAM = PLAIN_STREAM + NAMED
GET = b"GET /echo HTTP/1.1\r\nHost: a\r\n\r\n"
BODY_BYTES_MAX = 1000


@pytest.fixture(autouse=True)
def same_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are compared byte by byte."""
    monkeypatch.setattr(request_ids.secrets, "token_hex", lambda _: "drawn")


class Stage:
    """A site whose handlers a test names; each of its requests is noted."""

    body_bytes_max = BODY_BYTES_MAX
    body_s = 60.0
    connections_max = 1024

    def __init__(self, **handlers: Handler) -> None:
        self.seen: list[Request] = []
        self.room = ClientQuotas()
        self._handlers = {f"/{name}": handler for name, handler in handlers.items()}

    def handler(self, method: str, path: str) -> Handler:
        if path not in ("/echo", "/", *self._handlers):
            raise ApiError(404, f"{method} {path}: no such path", code="not_found")
        return self._noted(self._handlers.get(path, self._echo))

    def admit(self, request: Request) -> None:
        """Everybody."""

    def answer_headers(self, request: Request) -> Mapping[str, str]:
        return {}

    def listens(self, address: Sequence[Any]) -> None:
        """It asks nobody, itself least of all."""

    def refresh(self) -> None:
        """Nothing changes."""

    def name_of(self, given: str) -> str:
        return clients_request_id(given)

    def misread(self, fault: ApiError) -> None:
        """Nobody counts them."""

    def _noted(self, handler: Handler) -> Handler:
        def noting(request: Request) -> Awaitable[Answer | Events]:
            self.seen.append(request)
            return handler(request)

        return noting

    async def _echo(self, request: Request) -> Answer:
        return Answer(request.body or request.method.encode())


class Client:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def say(self, *pieces: bytes) -> None:
        """Send the pieces, each in a turn of the loop of its own."""
        for piece in pieces:
            self.writer.write(piece)
            await self.writer.drain()
            await asyncio.sleep(0)

    async def expect(self, data: bytes) -> None:
        """The very next bytes."""
        async with asyncio.timeout(20):
            try:
                assert await self.reader.readexactly(len(data)) == data
            except asyncio.IncompleteReadError as short:
                assert short.partial == data

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """One whole answer: status, headers with names in lower case, body."""
        async with asyncio.timeout(20):
            first, *lines = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")[:-2]
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            return int(first.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))

    async def refusal(self) -> tuple[int, str]:
        """An error, after which the connection is closed: status and code."""
        status, headers, body = await self.answer()
        assert headers["connection"] == "close"
        await self.end()
        error = json.loads(body)["error"]
        assert error["request_id"] == headers["x-request-id"] != ""
        return status, error["code"]

    async def rest(self) -> bytes:
        """All until the connection is closed."""
        async with asyncio.timeout(20):
            return await self.reader.read()

    async def end(self) -> None:
        """The connection is closed, and nothing more was said."""
        with contextlib.suppress(ConnectionError):
            assert await self.rest() == b""

    def reset(self) -> None:
        """Close in a way that the server sees as an error."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    def close(self) -> None:
        self.writer.close()


class Town:
    """A door, and those who come to it."""

    def __init__(self, url: str) -> None:
        self.url = url
        found = re.fullmatch(r"http://\[?(.+?)\]?:(\d+)", url)
        assert found is not None
        self.address = found[1], int(found[2])
        self._clients: list[Client] = []

    async def client(self, host: str | None = None) -> Client:
        """`host`: from where, of the addresses of this machine."""
        local = None if host is None else (host, 0)
        self._clients.append(Client(*await asyncio.open_connection(*self.address, local_addr=local)))
        return self._clients[-1]

    def close(self) -> None:
        for client in self._clients:
            client.close()


@contextlib.asynccontextmanager
async def town(site: Site, host: str = "127.0.0.1") -> AsyncIterator[Town]:
    async with contextlib.AsyncExitStack() as stack, http_server.serving(site, host, 0) as url:
        found = Town(url)
        stack.callback(found.close)  # clients are still there when the door closes
        yield found
    left = asyncio.all_tasks() - {asyncio.current_task()}
    assert not [task for task in left if task.get_coro().__qualname__.startswith(("_Connection", "Door"))]  # type: ignore[union-attr]


@contextlib.asynccontextmanager
async def one_door(stage: Stage | None = None) -> AsyncIterator[tuple[Town, Stage]]:
    site = stage or Stage()
    async with town(site) as found:
        yield found, site


def post(body: bytes, *headers: bytes, path: bytes = b"/echo", version: bytes = b"1.1") -> bytes:
    lines = [b"POST %b HTTP/%b" % (path, version), b"Host: a", *headers, b"Content-Length: %d" % len(body)]
    return b"\r\n".join((*lines, b"", body))


def streaming(
    source: Callable[[], Source], headers: Mapping[str, str] | None = None, within_s: float = 20.0
) -> Handler:
    async def handler(_: Request) -> Events:
        return Events(source(), {} if headers is None else headers, asyncio.get_running_loop().time() + within_s)

    return handler


def whole(body: bytes, connection: bytes = b"") -> bytes:
    return OK + connection + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


# --- answers


async def test_a_whole_answer_is_exact_and_the_connection_serves_on(run: Run) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(post(b"one", b"X-Thing:  spaced "))
        await client.expect(whole(b"one"))
        await client.say(b"GET /echo?x=/y HTTP/1.1\r\nHost: a\r\n\r\n")
        await client.expect(whole(b"GET"))
        assert [(each.method, each.path, each.body) for each in stage.seen] == [
            ("POST", "/echo", b"one"),
            ("GET", "/echo", b""),
        ]
        assert (stage.seen[0].header(b"x-thing") or "").strip() == "spaced"


async def test_head_gets_the_length_without_the_body(run: Run) -> None:
    async with one_door() as (town, _):
        client = await town.client()
        await client.say(b"HEAD /echo HTTP/1.1\r\nHost: a\r\n\r\n" + GET)
        await client.expect(OK + b"Content-Length: 4\r\n\r\n" + whole(b"GET"))
        await client.say(b"HEAD /none HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        said = await client.rest()
        assert said.startswith(b"HTTP/1.1 404 Not Found\r\n") and said.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("version", "connection", "said"),
    [
        (b"1.1", b"close", b"Connection: close\r\n"),
        (b"1.1", b"Close", b"Connection: close\r\n"),
        (b"1.0", b"x", b"Connection: close\r\n"),
        (b"1.1", b"keep-alive", b""),
        (b"1.0", b"keep-alive", b"Connection: keep-alive\r\n"),
    ],
)
async def test_a_connection_is_kept_as_the_client_wishes(
    run_once: Run, version: bytes, connection: bytes, said: bytes
) -> None:
    async with one_door() as (town, _):
        client = await town.client()
        await client.say(post(b"a", b"Connection: " + connection, version=version))
        await client.expect(whole(b"a", said))
        if said == b"Connection: close\r\n":
            await client.end()
        else:
            await client.say(GET)
            await client.expect(whole(b"GET"))


async def test_a_stream_is_chunked_and_ends_explicitly(run: Run) -> None:
    async def events() -> Source:
        yield b"data: 1\n\n"
        yield b""
        yield b"data: twelve\n\n"

    async with one_door(Stage(stream=streaming(events, {"X-A": "b"}))) as (town, _):
        client = await town.client()
        await client.say(post(b"", path=b"/stream") + GET)
        head = PLAIN_STREAM + b"X-A: b\r\n" + NAMED + b"Transfer-Encoding: chunked\r\n\r\n"
        await client.expect(head + b"9\r\ndata: 1\n\n\r\ne\r\ndata: twelve\n\n\r\n0\r\n\r\n" + whole(b"GET"))


@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_an_old_client_gets_a_stream_without_chunks_that_ends_with_the_connection(
    run_once: Run, connection: bytes
) -> None:
    async def events() -> Source:
        yield b"data: 1\n\n"
        yield b"data: 2\n\n"

    async with one_door(Stage(stream=streaming(events))) as (town, _):
        client = await town.client()
        await client.say(b"POST /stream HTTP/1.0\r\nConnection: " + connection + b"\r\n\r\n")
        assert await client.rest() == STREAM + b"Connection: close\r\n\r\ndata: 1\n\ndata: 2\n\n"


async def test_an_empty_stream_is_a_stream(run: Run) -> None:
    async def events() -> Source:
        for each in list[bytes]():
            yield each

    async with one_door(Stage(stream=streaming(events))) as (town, _):
        client = await town.client()
        await client.say(post(b"", path=b"/stream") + GET)
        await client.expect(STREAM + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + whole(b"GET"))


async def test_headers_of_a_stream_may_be_filled_until_its_first_event(run_once: Run) -> None:
    headers: dict[str, str] = {}

    async def events() -> Source:
        headers["X-Late"] = "yes"
        yield b"data: 1\n\n"

    async with one_door(Stage(stream=streaming(events, headers))) as (town, _):
        client = await town.client()
        await client.say(post(b"", b"Connection: close", path=b"/stream"))
        assert b"\r\nX-Late: yes\r\n" in await client.rest()


@pytest.mark.parametrize("value", ["a\r\nX-Evil: 1", "a\nX-Evil: 1", "a\rX-Evil: 1", "a\r\n\r\nbody"])
async def test_no_header_can_hold_another(run_once: Run, value: str) -> None:
    async def handler(_: Request) -> Answer:
        return json_answer({}, headers={"X-A": value, "X-B": "b"})

    async def events() -> Source:
        yield b"data: 1\n\n"

    async with one_door(Stage(odd=handler, stream=streaming(events, {"X-A": value, "X-B": "b"}))) as (town, _):
        for path in (b"/odd", b"/stream"):
            client = await town.client()
            await client.say(post(b"", b"Connection: close", path=path))
            lines = (await client.rest()).partition(b"\r\n\r\n")[0].split(b"\r\n")
            names = {line.partition(b":")[0] for line in lines[1:]}
            assert names >= {b"X-A", b"X-B"} and b"X-Evil" not in names
            assert not any(b"\n" in line or b"\r" in line for line in lines)


# --- handlers that fail


async def test_whatever_a_handler_raises_is_one_answer_and_the_connection_lives(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    faults: list[BaseException] = [
        ValueError("secret"),
        ConnectionResetError("a worker's, not the client's"),
        TimeoutError(),
        RecursionError(),
        asyncio.CancelledError(),
        full("no room"),
    ]

    async def handler(_: Request) -> Answer:
        raise faults.pop(0)

    async def events() -> Source:
        raise faults.pop(0)
        yield b""

    with caplog.at_level(logging.CRITICAL):
        async with one_door(Stage(whole=handler, stream=streaming(events))) as (town, _):
            client = await town.client()
            before = list(faults)
            for path in (b"/whole", b"/stream"):
                faults[:] = before
                told = []
                while faults:
                    await client.say(post(b"", path=path))
                    status, headers, body = await client.answer()
                    assert headers["content-type"] == "application/json" and b"secret" not in body
                    told.append((status, json.loads(body)["error"]["code"]))
                assert told == [(500, "internal")] * 5 + [(429, "full")]
            assert headers["retry-after"] == "1"


@pytest.mark.parametrize("fault", [bad_field("x", "odd"), ValueError("secret"), ConnectionResetError()])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_what_fails_in_mid_stream_is_told_in_it(run: Run, fault: Exception, version: bytes) -> None:
    async def events() -> Source:
        yield b"data: 1\n\n"
        raise fault

    async with one_door(Stage(stream=streaming(events))) as (town, _):
        client = await town.client()
        await client.say(post(b"", b"Connection: close", path=b"/stream", version=version))
        body = (await client.rest()).partition(b"\r\n\r\n")[2]
        if version == b"1.1":
            assert body.startswith(b"9\r\ndata: 1\n\n\r\n") and body.endswith(b"\n\n\r\n0\r\n\r\n")
        else:
            assert body.startswith(b"data: 1\n\ndata: {") and body.endswith(b"}\n\n")
        error = json.loads(body[body.rindex(b"data: ") + 6 :].partition(b"\n\n")[0])["error"]
        assert error["code"] == ("invalid_value" if isinstance(fault, ApiError) else "internal")
        assert error["request_id"] == "drawn"


async def test_after_a_failure_in_mid_stream_the_connection_serves_on(run: Run) -> None:
    async def events() -> Source:
        yield b"data: 1\n\n"
        raise full("no more")

    async with one_door(Stage(stream=streaming(events))) as (town, _):
        client = await town.client()
        await client.say(post(b"", path=b"/stream") + GET)
        await client.reader.readuntil(b"\r\n0\r\n\r\n")
        await client.expect(whole(b"GET"))


async def test_an_answer_that_cannot_be_written_cuts_the_connection_and_is_logged(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    async def nothing(_: Request) -> Any:
        return None

    def tell(_: ApiError) -> bytes:
        raise ValueError("cannot tell")

    async def events() -> Source:
        yield b"data: 1\n\n"
        raise full("no more")

    async def handler(_: Request) -> Events:
        return Events(events(), {}, asyncio.get_running_loop().time() + 20, tell)

    with caplog.at_level(logging.ERROR):
        async with one_door(Stage(nothing=nothing, stream=handler)) as (town, _):
            for path, end in ((b"/nothing", b""), (b"/stream", b"data: 1\n\n\r\n")):
                client = await town.client()
                await client.say(post(b"", path=path))
                said = b""
                with contextlib.suppress(ConnectionError):
                    while data := await client.reader.read(1000):
                        said += data
                assert said.endswith(end) and said.count(b"HTTP/1.1") == bool(end)
    assert [record.name for record in caplog.records].count(http_server.__name__) == 2


# --- requests sent ahead


async def test_requests_sent_at_once_are_answered_in_order(run: Run) -> None:
    gate = asyncio.Event()

    async def slow(request: Request) -> Answer:
        await gate.wait()
        return Answer(b"slow" + request.body)

    async def events() -> Source:
        yield b"data: 1\n\n"

    async with one_door(Stage(slow=slow, stream=streaming(events))) as (town, stage):
        client = await town.client()
        await client.say(post(b"1", path=b"/slow") + post(b"", path=b"/stream") + post(b"3"))
        await until(lambda: stage.seen)
        await client.say(post(b"4", path=b"/slow")[:-9], post(b"4", path=b"/slow")[-9:] + GET)
        gate.set()
        await client.expect(
            whole(b"slow1") + STREAM + b"Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n"
        )
        await client.expect(whole(b"3") + whole(b"slow4") + whole(b"GET"))
        assert len(stage.seen) == 5


@pytest.mark.parametrize("more", [0, 1, 2, 5000])
async def test_more_requests_at_once_than_allowed_are_refused_after_the_others_were_answered(
    run: Run, more: int
) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(GET * (AHEAD_MAX + 1 + more))
        await client.expect(whole(b"GET") * (AHEAD_MAX + 1))
        if more:
            assert await client.refusal() == (400, "bad_request")
        else:
            await client.say(GET)
            await client.expect(whole(b"GET"))
        assert len(stage.seen) == AHEAD_MAX + 1 + (not more)


async def test_what_is_sent_while_a_request_is_answered_is_bounded_and_read_later(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    accept = http_server.HttpServer.connection
    monkeypatch.setattr(http_server.HttpServer, "connection", lambda self: made.append(accept(self)) or made[-1])
    gate = asyncio.Event()

    async def slow(_: Request) -> Answer:
        await gate.wait()
        return Answer(b"slow")

    async with one_door(Stage(slow=slow)) as (town, stage):
        client = await town.client()
        await client.say(post(b"", path=b"/slow"))
        await until(lambda: stage.seen)
        size = 64 << 20  # more than the kernel buffers
        stage.body_bytes_max = size
        sending = asyncio.create_task(client.say(post(b"x" * size), GET))
        await until(lambda: made[0]._backlog.unparsed_bytes > UNREAD_BYTES_MAX)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert made[0]._backlog.unparsed_bytes <= UNREAD_BYTES_MAX + (256 << 10)
        assert not sending.done()
        gate.set()
        await client.expect(whole(b"slow"))
        status, _, body = await client.answer()
        assert (status, len(body)) == (200, size)
        await client.expect(whole(b"GET"))
        await sending


async def test_a_bad_request_behind_good_ones_is_refused_in_its_turn(run: Run) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(GET + GET + b"nonsense\r\n\r\n" + GET)
        await client.expect(whole(b"GET") * 2)
        assert await client.refusal() == (400, "bad_request")
        assert len(stage.seen) == 2


async def test_what_follows_a_request_to_close_is_not_answered(run: Run) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n" + GET)
        await client.expect(whole(b"GET", b"Connection: close\r\n"))
        await client.end()
        assert len(stage.seen) == 1


async def test_a_client_that_sends_on_without_reading_fills_no_memory(run: Run) -> None:
    """Whole answers wait for the client too: else each request sent ahead would add one to the heap."""
    body = b"x" * (8 << 20)  # more than the kernel buffers

    async def large(_: Request) -> Answer:
        return Answer(body)

    async with one_door(Stage(large=large)) as (town, stage):
        client = await town.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.say(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n" * 10)
        await until(lambda: stage.seen)
        for _ in range(50):
            await asyncio.sleep(0.001)
        assert len(stage.seen) == 1
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        for _ in range(10):
            assert len((await client.answer())[2]) == len(body)


# --- bodies and headers


async def test_a_request_may_come_byte_by_byte(run: Run) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        data = post(b"hello", b"X-Long-Name: and its value")
        await client.say(*[data[at : at + 1] for at in range(len(data))])
        await client.expect(whole(b"hello"))
        assert stage.seen[0].header(b"x-long-name") == "and its value"


async def test_a_chunked_body_may_be_split_anywhere_and_its_trailers_are_no_headers(run_once: Run) -> None:
    data = (
        b"POST /echo HTTP/1.1\r\nHost: a\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5;ext=1\r\nhello\r\n1\r\n,\r\n6\r\n world\r\n0\r\nX-A: 2\r\nX-Request-Id: evil\r\n\r\n"
    )
    async with one_door() as (town, stage):
        client = await town.client()
        for at in range(1, len(data)):
            await client.say(data[:at], data[at:])
            await client.expect(whole(b"hello, world"))
        await client.say(*[data[at : at + 1] for at in range(len(data))])
        await client.expect(whole(b"hello, world"))
        for request in stage.seen:
            assert request.headers == [(b"host", b"a"), (b"x-a", b"1"), (b"transfer-encoding", b"chunked")]


async def test_a_client_that_asks_is_told_to_go_on_once(run: Run) -> None:
    async with one_door() as (town, _):
        client = await town.client()
        data = post(b"hello", b"Expect: 100-Continue", b"Expect: 100-continue")
        await client.say(data[:-5])
        await client.expect(b"HTTP/1.1 100 Continue\r\n\r\n")
        await client.say(data[-5:])
        await client.expect(whole(b"hello"))
        await client.say(data)  # one that does not wait need not be told
        await client.expect(whole(b"hello"))
        await client.say(GET + data[:-5])  # behind another
        await client.expect(whole(b"GET") + b"HTTP/1.1 100 Continue\r\n\r\n")
        await client.say(data[-5:])
        await client.expect(whole(b"hello"))
        old = data.replace(b"HTTP/1.1", b"HTTP/1.0")
        await client.say(old[:-5], old[-5:])
        await client.expect(whole(b"hello", b"Connection: close\r\n"))


async def test_a_client_that_asks_is_not_told_to_send_what_is_too_large(run: Run) -> None:
    async with one_door() as (town, _):
        client = await town.client()
        await client.say(post(b"x" * (BODY_BYTES_MAX + 1), b"Expect: 100-continue")[: -BODY_BYTES_MAX - 1])
        assert await client.refusal() == (413, "body_too_large")


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body_that_is_too_large_is_refused_and_the_client_learns_it_though_it_sends_on(
    run: Run, chunked: bool
) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        size = 8 << 20
        head = b"POST /echo HTTP/1.1\r\nHost: a\r\n"
        if chunked:
            data = head + b"Transfer-Encoding: chunked\r\n\r\n" + (b"400\r\n" + b"x" * 1024 + b"\r\n") * (size >> 10)
        else:
            data = head + b"Content-Length: %d\r\n\r\n" % size + b"x" * size
        sending = asyncio.create_task(client.say(*[data[at : at + 65536] for at in range(0, len(data), 65536)]))
        await sending  # all of it: a reset would fail this
        assert await client.refusal() == (413, "body_too_large")
        assert stage.seen == []


async def test_a_body_at_the_bound_passes(run_once: Run) -> None:
    async with one_door() as (town, _):
        client = await town.client()
        await client.say(post(b"x" * BODY_BYTES_MAX))
        await client.expect(whole(b"x" * BODY_BYTES_MAX))
        pieces = b"".join(b"1\r\nx\r\n" for _ in range(BODY_BYTES_MAX))
        await client.say(
            b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n"
        )
        await client.expect(whole(b"x" * BODY_BYTES_MAX))


LONG = b"x" * (HEADERS_BYTES_MAX + 1)
CHUNKED = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n"


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(
    "data",
    [
        b"GET /echo?" + LONG + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A: " + LONG + b"\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\n" + LONG + b": 1\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\n"
        + b"".join(b"X-%d: %b\r\n" % (at, LONG[:7000]) for at in range(10))
        + b"\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"X-A: 1\r\n" * (HEADERS_MAX + 1) + b"\r\n",
        GET[:-2] + b"X-A: " + LONG,
        CHUNKED + b"0\r\nX-Trailer: " + LONG * 6,  # what comes with a piece of the body is not counted
        CHUNKED + b"1;ext=" + LONG * 6,
        b"GET /echo HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: upgrade\r\nX-A: " + LONG + b"\r\n\r\n",
    ],
    ids=["url", "value", "name", "sum", "count", "endless", "trailer", "extension", "upgrade"],
)
async def test_headers_are_bounded(run: Run, data: bytes, split: bool) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(*([data[at : at + 4000] for at in range(0, len(data), 4000)] if split else [data]))
        assert await client.refusal() == (431, "headers_too_large")
        assert stage.seen == []


async def test_headers_at_the_bound_pass_and_a_long_body_is_not_taken_for_headers(run_once: Run) -> None:
    async with one_door() as (town, stage):
        stage.body_bytes_max = 1 << 20
        client = await town.client()
        await client.say(b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"X-A: 1\r\n" * (HEADERS_MAX - 1) + b"\r\n")
        await client.expect(whole(b"GET"))
        body = b"x" * (HEADERS_BYTES_MAX * 3)
        await client.say(post(body) * 2, GET)
        await client.expect(whole(body) * 2 + whole(b"GET"))


@pytest.mark.parametrize(
    "data",
    [
        b"nonsense\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"post /echo HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /echo HTTP/1.2\r\n\r\n",
        b"GET /ec\x00ho HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /a b HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /echo HTTP/1.1\n\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A: b\rc\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A: b\nX-B: c\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A: b\x00c\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A: b\r\n folded\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nX A: b\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A : b\r\n\r\n",
        b"GET /echo HTTP/1.1\r\nHost: a\r\n: b\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 5\r\n\r\nhello",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: " + b"0" * 5000 + b"1\r\n\r\nx",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n0x5\r\nhello\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"POST /echo HTTP/1.1\r\nHost: a\r\nUpgrade: h2c\r\nConnection: upgrade\r\n"
        b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_not_http_is_refused_and_never_handled(run: Run, data: bytes) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(data)
        assert await client.refusal() == (400, "bad_request")
        assert stage.seen == []


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (b"http://elsewhere/echo", "/echo"),
        (b"http://elsewhere:1/echo?a=b://c/d", "/echo"),
        (b"http://elsewhere", "/"),
        (b"http://elsewhere?/echo", "/"),
        (b"/echo?http://x/y", "/echo"),
        (b"//echo", "//echo"),
        (b"/./echo", "/./echo"),
        (b"/%65cho", "/%65cho"),
        (b"/echo/", "/echo/"),
        (b"*", "*"),
    ],
)
async def test_a_target_may_name_its_host_and_is_not_interpreted_otherwise(
    run_once: Run, target: bytes, path: str
) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(b"GET " + target + b" HTTP/1.1\r\nHost: a\r\n\r\n")
        status, _, body = await client.answer()
        if path in ("/echo", "/"):
            assert status == 200 and stage.seen[0].path == path
        else:
            assert status == 404 and path in json.loads(body)["error"]["message"]


@pytest.mark.parametrize("protocol", [b"h2c", b"websocket"])
async def test_one_who_asks_for_another_protocol_is_answered_in_this_one_once(run: Run, protocol: bytes) -> None:
    """A body behind such headers is a body: the parser would take it for the other protocol."""
    more = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: " + protocol, b"HTTP2-Settings: AAMAAABk")
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(post(GET, *more) + GET)
        await client.expect(whole(GET) + whole(b"GET"))
        data = post(b"hello", *more, path=b"/echo?x")
        await client.say(*[data[at : at + 1] for at in range(len(data))])
        await client.expect(whole(b"hello"))
        await client.say(b"GET /echo HTTP/1.1\r\nHost: a\r\n" + b"\r\n".join(more) + b"\r\n\r\n" + data + GET)
        await client.expect(whole(b"GET") + whole(b"hello") + whole(b"GET"))
        assert [each.body for each in stage.seen] == [GET, b"", b"hello", b"", b"hello", b""]
        assert stage.seen[0].header(b"http2-settings") == "AAMAAABk"


async def test_a_tunnel_is_refused(run_once: Run) -> None:
    async with one_door() as (town, stage):
        client = await town.client()
        await client.say(GET + b"CONNECT example.com:443 HTTP/1.1\r\nHost: a\r\n\r\n" + GET)
        await client.expect(whole(b"GET"))
        assert await client.refusal() == (405, "method_not_allowed")
        assert len(stage.seen) == 1


# --- clients that are slow


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "SWEEP_S", 0.01)


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Connections that the server has forgotten."""
    found: list[Any] = []
    forget = http_server.HttpServer.forget
    monkeypatch.setattr(http_server.HttpServer, "forget", lambda self, each: (forget(self, each), found.append(each)))
    return found


async def large(_: Request) -> Answer:
    """More than the kernel buffers."""
    return Answer(b"x" * (8 << 20))


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("begun", [b"G", b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A: 1\r\n", GET + b"POST"])
async def test_headers_that_do_not_come_are_not_waited_for(
    run: Run, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    async with one_door() as (town, _):
        client = await town.client()
        if begun.startswith(GET):
            await client.say(GET)
            await client.expect(whole(b"GET"))
        monkeypatch.setattr(http_server, "HEAD_S", 0.05)
        await client.say(begun.removeprefix(GET))
        assert await client.refusal() == (408, "headers_timeout")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "begun",
    [
        post(b"hello")[:-1],
        post(b"hello")[:-5],
        b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n",
    ],
)
async def test_a_body_that_does_not_come_is_not_waited_for(run: Run, begun: bytes) -> None:
    async with one_door() as (town, stage):
        stage.body_s = 0.05
        client = await town.client()
        await client.say(begun)
        assert await client.refusal() == (408, "body_timeout")
        assert stage.seen == []


@pytest.mark.usefixtures("quick")
async def test_an_idle_connection_is_closed_without_a_word(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    async with one_door() as (town, _):
        silent, served = await town.client(), await town.client()
        await served.say(GET)
        await served.expect(whole(b"GET"))
        monkeypatch.setattr(http_server, "KEEPALIVE_S", 0.05)
        await served.end()
        await silent.end()


@pytest.mark.usefixtures("quick")
async def test_a_handler_may_take_longer_than_any_client(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEPALIVE_S", "HEAD_S"):
        monkeypatch.setattr(http_server, name, 0.02)
    looked = 0
    overdue = http_server._Connection.overdue

    def looking(self: Any, now: float) -> bool:
        nonlocal looked
        looked += 1
        return self.is_busy and overdue(self, now + 1000)  # before its request it is rightly overdue

    monkeypatch.setattr(http_server._Connection, "overdue", looking)

    async def slow(_: Request) -> Answer:
        before = looked
        await until(lambda: looked > before + 3)
        return Answer(b"slow")

    async with one_door(Stage(slow=slow)) as (town, stage):
        stage.body_s = 0.02
        client = await town.client()
        await client.say(post(b"", path=b"/slow") + post(b"", path=b"/slow"))
        await client.expect(whole(b"slow") * 2)


@pytest.mark.usefixtures("quick")
async def test_a_refused_client_that_sends_on_for_ever_is_cut_off(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "LINGER_S", 0.05)
    async with one_door() as (town, _):
        client = await town.client()
        await client.say(b"nonsense\r\n\r\n")
        with pytest.raises(ConnectionError):
            async with asyncio.timeout(20):
                while True:
                    await client.say(b"x" * 1000)


async def test_a_client_that_does_not_read_stops_its_stream_and_is_cut_off_at_the_deadline(run: Run) -> None:
    pulled = 0
    closed: list[float] = []

    async def events() -> Source:
        nonlocal pulled
        try:
            while True:
                yield b"x" * 65536
                pulled += 1
        finally:
            closed.append(asyncio.get_running_loop().time())

    async with one_door(Stage(stream=streaming(events, within_s=0.6))) as (town, _):
        client = await town.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        begun = asyncio.get_running_loop().time()
        await client.say(post(b"", path=b"/stream"))
        await until(lambda: closed)
        assert closed[0] - begun > 0.5
        assert pulled < 1000  # what the kernel buffers
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        said = b""
        with contextlib.suppress(ConnectionError):
            while data := await client.reader.read(1 << 20):
                said = said[-10:] + data
        assert not said.endswith(b"0\r\n\r\n")


async def test_a_client_that_reads_late_gets_all_of_its_stream(run: Run) -> None:
    pulled = 0

    async def events() -> Source:
        nonlocal pulled
        for _ in range(200):
            yield b"x" * 65536
            pulled += 1

    async with one_door(Stage(stream=streaming(events))) as (town, _):
        client = await town.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.say(b"POST /stream HTTP/1.0\r\n\r\n")
        await until(lambda: pulled)
        client.writer.transport.resume_reading()  # type: ignore[attr-defined]
        assert len((await client.rest()).partition(b"\r\n\r\n")[2]) == 200 * 65536


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("connection", [b"close", b"keep-alive"])
async def test_a_client_that_does_not_read_its_whole_answer_is_cut_off(
    run: Run, monkeypatch: pytest.MonkeyPatch, lost: list[Any], connection: bytes
) -> None:
    """Closing alone would wait for it for ever, and count it as a connection."""
    monkeypatch.setattr(http_server, "UNREAD_S", 0.05)

    async with one_door(Stage(large=large)) as (town, _):
        client = await town.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.say(b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: " + connection + b"\r\n\r\n")
        await until(lambda: lost)


ANSWERED = b"GET /large HTTP/1.1\r\nHost: a\r\nConnection: "
STREAMED = b"GET /streamed HTTP/1.0\r\nConnection: keep-alive\r\n\r\n"
CLOSING = b"GET /streamed HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
NONSENSE = b"nonsense\r\n\r\n"


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "said",
    [
        ANSWERED + b"close\r\n\r\n",
        ANSWERED + b"keep-alive\r\n\r\n",
        STREAMED * 3,
        STREAMED + NONSENSE,
        CLOSING * 2,
        CLOSING + NONSENSE,
    ],
)
async def test_a_closed_connection_that_waits_for_its_reader_is_swept(
    run: Run, monkeypatch: pytest.MonkeyPatch, lost: list[Any], said: bytes
) -> None:
    """Less than a full buffer may be left when an answer is done, and still never be read. One with requests, or a
    fault, behind its last answer was never looked at again."""
    monkeypatch.setattr(http_server, "KEEPALIVE_S", 0.5)
    monkeypatch.setattr(http_server._Connection, "pause_writing", lambda _: None)  # as if it were not full

    async def events() -> Source:
        yield b"x" * (8 << 20)

    async with one_door(Stage(large=large, streamed=streaming(events))) as (town, _):
        client = await town.client()
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await client.say(said)
        await until(lambda: lost)


# --- clients that go


class Held:
    """Handlers that wait until they are cancelled, and note how they ended."""

    def __init__(self) -> None:
        self.ends: list[str] = []
        self.begun = 0

    async def whole(self, _: Request) -> Answer:
        self.begun += 1
        await self._wait("whole")
        raise AssertionError

    async def first(self, _: Request) -> Events:
        return Events(self._first(), {}, asyncio.get_running_loop().time() + 20)

    async def _first(self) -> Source:
        self.begun += 1
        await self._wait("first")
        yield b""

    async def later(self, _: Request) -> Events:
        return Events(self._later(), {}, asyncio.get_running_loop().time() + 20)

    async def _later(self) -> Source:
        yield b"data: 1\n\n"
        self.begun += 1
        await self._wait("later")

    async def _wait(self, name: str) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            for _ in range(5):  # releasing takes a while, and must not be cut short
                await asyncio.sleep(0)
            self.ends.append(name)

    def stage(self) -> Stage:
        return Stage(whole=self.whole, first=self.first, later=self.later)


@pytest.mark.parametrize("how", ["close", "reset", "half"])
@pytest.mark.parametrize("path", ["whole", "first", "later"])
async def test_a_client_that_goes_cancels_its_handler_which_comes_to_its_end(run: Run, path: str, how: str) -> None:
    held = Held()
    async with one_door(held.stage()) as (town, stage):
        client = await town.client()
        await client.say(post(b"", path=b"/" + path.encode()) + GET)
        await until(lambda: held.begun)
        if how == "half":  # cannot be told from one that closed
            client.writer.write_eof()
        else:
            (client.close if how == "close" else client.reset)()
        await until(lambda: held.ends)
        assert held.ends == [path]
        assert len(stage.seen) == 1  # what it sent ahead is not handled
        other = await town.client()
        await other.say(GET)
        await other.expect(whole(b"GET"))


async def test_a_client_that_goes_while_its_stream_waits_for_it_ends_the_stream(run: Run) -> None:
    closed: list[bool] = []

    async def events() -> Source:
        try:
            while True:
                yield b"x" * 65536
        finally:
            await asyncio.sleep(0)
            closed.append(True)

    async with one_door(Stage(stream=streaming(events))) as (town, stage):
        for how in ("half", "reset"):
            closed.clear()
            stage.seen.clear()
            client = await town.client()
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.say(post(b"", path=b"/stream"))
            await until(lambda: stage.seen)
            for _ in range(20):
                await asyncio.sleep(0.001)
            if how == "half":
                client.writer.write_eof()
            else:
                client.reset()
            await until(lambda: closed)


async def test_a_stream_that_ignores_being_cancelled_is_not_pulled_for_nobody(run: Run) -> None:
    pulled = 0
    closed: list[bool] = []

    async def events() -> Source:
        nonlocal pulled
        try:
            while True:
                yield b"data: 1\n\n"
                pulled += 1
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
        finally:
            closed.append(True)

    async with one_door(Stage(stream=streaming(events))) as (town, _):
        client = await town.client()
        await client.say(post(b"", path=b"/stream"))
        await until(lambda: pulled)
        client.reset()
        await until(lambda: closed)
        assert pulled == 1


async def test_a_handler_that_ignores_being_cancelled_answers_nobody(run: Run) -> None:
    ended: list[bool] = []

    async def stubborn(_: Request) -> Answer:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        ended.append(True)
        return Answer(b"late")

    async with one_door(Stage(stubborn=stubborn)) as (town, stage):
        client = await town.client()
        await client.say(post(b"", path=b"/stubborn") + GET)
        await until(lambda: stage.seen)
        client.reset()
        await until(lambda: ended)
        assert len(stage.seen) == 1


async def test_clients_that_reset_at_any_moment_leave_the_door_open(run: Run) -> None:
    data = [b"", b"G", GET, b"nonsense\r\n\r\n", GET + b"nonsense\r\n\r\n", post(b"x" * 9999), GET * 50, CHUNKED]
    async with one_door() as (town, _):
        for turns in range(4):
            for each in data:
                client = await town.client()
                client.writer.write(each)
                for _ in range(turns):
                    await asyncio.sleep(0)
                client.reset()
        client = await town.client()
        await client.say(GET)
        await client.expect(whole(b"GET"))


async def test_a_refusal_to_one_who_has_just_reset_escapes_nowhere(run_once: Run) -> None:
    """`shutdown` fails on a socket that was reset meanwhile; asyncio lets that out of `write_eof`."""

    class Broken(asyncio.Transport):
        aborted = False

        def is_closing(self) -> bool:
            return self.aborted

        def write(self, data: bytes | bytearray | memoryview) -> None:
            assert data.startswith(b"HTTP/1.1 400 ")

        def get_write_buffer_size(self) -> int:
            return 0

        def write_eof(self) -> None:
            raise OSError(107, "Transport endpoint is not connected")

        def abort(self) -> None:
            self.aborted = True

    connection = http_server.HttpServer(Stage()).connection()
    connection.connection_made(Broken())
    connection.data_received(b"nonsense\r\n\r\n")
    connection.connection_lost(None)


# --- the door itself


@pytest.fixture
def three_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Stage, "connections_max", 3)


async def asked(client: Client) -> Client:
    await client.say(GET)
    await client.expect(whole(b"GET"))
    return client


@pytest.mark.usefixtures("three_at_once")
async def test_at_the_bound_the_oldest_connection_that_is_not_being_answered_goes(run: Run) -> None:
    gate = asyncio.Event()

    async def held(_: Request) -> Answer:
        await gate.wait()
        return Answer(b"held")

    async with one_door(Stage(held=held)) as (town, stage):
        busy = await town.client()
        await busy.say(post(b"", path=b"/held"))
        await until(lambda: stage.seen)
        first, second = await asked(await town.client()), await asked(await town.client())
        await asked(first)  # so the second is the oldest now
        third = await asked(await town.client())
        await second.end()
        for client in (first, third):
            await asked(client)
        gate.set()
        await busy.expect(whole(b"held"))
        assert stage.room.turned_away == {"idle": 1}


@pytest.mark.usefixtures("three_at_once")
@pytest.mark.parametrize("begun", [b"", b"GET / HT", b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\nx"])
async def test_one_that_sends_a_byte_at_a_time_is_no_safer_than_an_idle_one(run: Run, begun: bytes) -> None:
    async with one_door() as (town, _):
        slow = await town.client()
        await slow.say(begun)
        others = [await asked(await town.client()) for _ in range(2)]
        await slow.say(b"T")
        others.append(await asked(await town.client()))
        await slow.end()
        for client in others:
            await asked(client)


@pytest.mark.usefixtures("three_at_once")
async def test_one_that_does_not_read_its_answer_gives_way_too(run: Run) -> None:
    async with one_door(Stage(large=large)) as (town, stage):
        deaf = await town.client()
        deaf.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await deaf.say(post(b"", path=b"/large"))
        await until(lambda: stage.seen and stage.room.bytes)
        for _ in range(3):
            await asked(await town.client())
        await until(lambda: not stage.room.bytes)
        assert stage.room.turned_away == {"idle": 1}


@pytest.mark.usefixtures("three_at_once")
async def test_where_all_are_being_answered_a_new_one_is_cut_off_and_room_comes_back(run: Run) -> None:
    gate = asyncio.Event()

    async def held(_: Request) -> Answer:
        await gate.wait()
        return Answer(b"held")

    async with one_door(Stage(held=held)) as (town, stage):
        busy = [await town.client() for _ in range(3)]
        for client in busy:
            await client.say(post(b"", path=b"/held"))
        await until(lambda: len(stage.seen) == 3)
        await (await town.client()).end()
        assert stage.room.turned_away == {"new": 1}
        gate.set()
        for client in busy:
            await client.expect(whole(b"held"))
        await asked(await town.client())


async def test_an_address_with_more_than_its_share_makes_room_for_itself(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "connections_max", 8)
    async with one_door() as (town, stage):
        client = await asked(await town.client("127.0.0.2"))  # the oldest of all
        strangers = [await town.client() for _ in range(30)]
        await until(lambda: stage.room.turned_away["idle"] == 23)
        await asked(client)
        await asked(strangers[-1])
        await asked(await town.client("127.0.0.3"))


# --- how much is held


async def test_bodies_that_are_never_finished_fill_no_more_than_their_share(run: Run) -> None:
    """A stranger with 400 of them, of 4 MiB each, took 1.6 GiB of a router, which it never gave back."""
    size = 64 << 10
    async with one_door() as (town, stage):
        stage.body_bytes_max, stage.room = size, ClientQuotas(16 * size)
        begun = b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size
        chunked = b"POST /echo HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n" % size
        strangers = [await town.client() for _ in range(12)]
        for number, stranger in enumerate(strangers):
            await stranger.say((chunked if number % 2 else begun) + b"x" * (size - 1))
        await until(lambda: stage.room.refused)
        assert stage.room.bytes <= 8 * size
        told = {await stranger.refusal() for stranger in strangers if stranger.reader._buffer}  # type: ignore[attr-defined]
        assert told == {(503, "no_room")}
        client = await town.client("127.0.0.2")  # another address has room
        await client.say(post(b"y" * size))
        await client.expect(whole(b"y" * size))
        probe = await town.client()
        await probe.say(GET)  # and a small question is always answered
        await probe.expect(whole(b"GET"))
        for stranger in strangers:
            stranger.reset()
        await until(lambda: stage.room.bytes == 0)
        assert stage.room.refused["request"] >= 3


@pytest.mark.parametrize("what", ["ahead", "head"])
async def test_whatever_a_client_sends_is_counted_until_it_is_gone(run: Run, what: str) -> None:
    gate = asyncio.Event()

    async def held(_: Request) -> Answer:
        await gate.wait()
        return Answer(b"held")

    async with one_door(Stage(held=held)) as (town, stage):
        stage.room = ClientQuotas(100_000)
        clients = [await town.client() for _ in range(4)]
        for client in clients:
            if what == "ahead":
                await client.say(post(b"", path=b"/held"))
                await until(lambda: len(stage.seen) == clients.index(client) + 1)  # noqa: B023
                await client.say(post(b"x" * 900) * 40)
            else:
                await client.say(b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A: " + b"x" * 40_000)
        await until(lambda: stage.room.refused["request"] >= 2)
        assert 0 < stage.room.bytes <= 50_000
        gate.set()
        if what == "ahead":
            for client in clients:
                await client.expect(whole(b"held"))
        for client in clients:
            client.reset()
        await until(lambda: stage.room.bytes == 0)


async def test_an_answer_is_counted_until_it_was_read(run: Run) -> None:
    async with one_door(Stage(large=large)) as (town, stage):
        stage.room = ClientQuotas(30 << 20)
        deaf = [await town.client() for _ in range(3)]
        for number, client in enumerate(deaf):
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            await client.say(post(b"", path=b"/large"))
            await until(lambda: len(stage.seen) == number + 1)  # noqa: B023
        await until(lambda: stage.room.refused["answer"])
        assert stage.room.bytes == 8 << 20
        deaf[2].writer.transport.resume_reading()  # type: ignore[attr-defined]
        status, _, body = await deaf[2].answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "no_room")
        assert "--held-bytes-max" in json.loads(body)["error"]["message"]
        deaf[0].reset()
        deaf[1].reset()
        await until(lambda: stage.room.bytes == 0)


def test_a_connection_that_ends_is_free_without_the_garbage_collector(run: Run) -> None:
    found: list[weakref.ref[Any]] = []

    async def fails(_: Request) -> Answer:
        raise full("no room")

    async def events() -> Source:
        yield b"data: 1\n\n"
        raise full("no room")

    async def story(town: Town, stage: Stage) -> None:
        made = http_server._Connection.connection_made

        def noted(self: Any, transport: Any) -> None:
            found.append(weakref.ref(self))
            made(self, transport)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(http_server._Connection, "connection_made", noted)
            said = (
                b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 900\r\n\r\nx",
                b"GET /echo HTTP/1.1\r\nHost: a\r\nX-A",
                GET,
                post(b"x"),
                post(b"", path=b"/fails"),
                post(b"", path=b"/stream"),
                b"nonsense\r\n\r\n",
                b"GET /echo HTTP/1.1\r\nHost: a\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
            )
            for data in said:
                client = await town.client()
                await client.say(data)
                await asyncio.sleep(0.01)
                client.reset()
            await until(lambda: len(found) == len(said))
        await until(lambda: not any(each() for each in found))

    gc.collect()
    gc.disable()
    try:

        async def scene() -> None:
            async with one_door(Stage(fails=fails, stream=streaming(events))) as (found, stage):
                await story(found, stage)

        run(scene())
    finally:
        gc.enable()


async def test_a_port_that_is_taken_is_told_with_what_to_do(run: Run) -> None:
    async with one_door() as (town, stage):
        with pytest.raises(PortInUseError, match=rf"port {town.address[1]} on 127.0.0.1 is in use; choose another"):
            async with http_server.serving(stage, *town.address):
                raise AssertionError


async def test_the_door_may_be_on_ipv6(run: Run) -> None:
    async with town(Stage(), "::1") as found:
        assert found.url == f"http://[::1]:{found.address[1]}"
        client = await found.client()
        await client.say(GET)
        await client.expect(whole(b"GET"))


async def test_closing_lets_what_is_under_way_end_and_says_so(run: Run) -> None:
    gate = asyncio.Event()

    async def slow(_: Request) -> Answer:
        await gate.wait()
        return Answer(b"slow")

    stage = Stage(slow=slow)
    serving = http_server.serving(stage, "127.0.0.1", 0)
    found = Town(await serving.__aenter__())
    idle, busy = await found.client(), await found.client()
    await idle.say(GET)
    await idle.expect(whole(b"GET"))
    await busy.say(post(b"", path=b"/slow") + GET)
    await until(lambda: len(stage.seen) == 2)
    closing = asyncio.create_task(serving.__aexit__(None, None, None))
    await idle.end()
    with pytest.raises(OSError):
        await found.client()
    gate.set()
    await busy.expect(whole(b"slow", b"Connection: close\r\n"))
    await busy.end()
    await closing
    found.close()
    assert len(stage.seen) == 2


def test_closing_ends_all_that_is_under_way_in_a_bounded_time_and_leaves_nothing(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "SHUTDOWN_S", 0.2)

    async def scene() -> None:
        held = Held()
        begun = asyncio.get_running_loop().time()
        before = asyncio.all_tasks()
        async with town(held.stage()) as found:
            gone = await found.client()
            for client, path in [
                (gone, b"/whole"),
                *[(await found.client(), path) for path in (b"/whole", b"/first", b"/later", b"/later")],
            ]:
                await client.say(post(b"", path=path) + GET)
            await (await found.client()).say(post(b"hello")[:-1])
            await (await found.client()).say(b"nonsense\r\n\r\n")
            await until(lambda: held.begun == 5)
            gone.reset()
        assert sorted(held.ends) == ["first", "later", "later", "whole", "whole"]
        assert asyncio.get_running_loop().time() - begun < 15
        assert asyncio.all_tasks() == before

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(scene())
        gc.collect()


async def test_a_handler_that_will_not_end_does_not_hold_the_door(
    run: Run, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(http_server, "SHUTDOWN_S", 0.1)
    gate = asyncio.Event()
    tasks: list[asyncio.Task[Any] | None] = []

    async def stubborn(_: Request) -> Answer:
        tasks.append(asyncio.current_task())
        while not gate.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await gate.wait()
        return Answer(b"")

    stage = Stage(stubborn=stubborn)
    async with http_server.serving(stage, "127.0.0.1", 0) as url:
        found = Town(url)
        await (await found.client()).say(post(b"", path=b"/stubborn"))
        await until(lambda: stage.seen)
    found.close()
    gate.set()
    assert tasks[0] is not None
    await tasks[0]
    assert "1 handlers have not finished" in caplog.text


class Paper(asyncio.Transport):
    """A transport that only notes what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.said = b""
        self.closed = self.ended = False

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return self.closed

    def write(self, data: bytes | bytearray | memoryview) -> None:
        assert not self.ended
        self.said += data

    def write_eof(self) -> None:
        self.ended = True

    def close(self) -> None:
        self.closed = True

    abort = close


GOOD = [
    GET,
    post(b"hello"),
    CHUNKED + b"0\r\nX-Trailer: 1\r\n\r\n",
    post(b"abc", b"Upgrade: h2c", b"Connection: Upgrade"),
    post(b"ab", b"Expect: 100-continue"),
    b"GET http://x/echo HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
]
ODD = [b"\r\n", b"\0", b"x" * 3000, b"\n", b"Upgrade: a\r\nConnection: upgrade\r\n", b"Content-Length: 9\r\n", b""]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("spoilt", [False, True])
async def test_each_request_is_answered_once_however_it_is_cut_and_spoilt(
    run_once: Run, seed: int, spoilt: bool
) -> None:
    rng = random.Random(seed)

    async def one() -> None:
        requests = [rng.choice(GOOD) for _ in range(rng.randint(1, 8))]
        data = bytearray(b"".join(requests))
        for _ in range(rng.randint(1, 4) if spoilt else 0):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 9)] = rng.choice(ODD)
        stage, paper = Stage(), Paper()
        connection = http_server.HttpServer(stage).connection()
        connection.connection_made(paper)
        while data and not paper.closed:
            size = rng.choice([1, 3, 17, 100, 10_000])
            connection.data_received(bytes(data[:size]))
            del data[:size]
            for _ in range(rng.randrange(3)):
                await asyncio.sleep(0)
        for _ in range(AHEAD_MAX + 10):
            await asyncio.sleep(0)
        connection.connection_lost(None)
        answers = len(re.findall(rb"HTTP/1\.1 [2-5]", paper.said))
        if spoilt:
            handled = answers - paper.said.count(b"HTTP/1.1 404 ")
            assert handled in (len(stage.seen), len(stage.seen) + 1)  # the last may be a refusal
        else:
            assert answers == len(stage.seen) == len(requests)

    for _ in range(100):
        await one()
