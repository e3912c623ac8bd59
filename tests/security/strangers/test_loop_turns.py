"""A worker or a client that has the router look at much cannot make all others wait: its loop goes round meanwhile.

Law under test: one turn of the loop costs tens of milliseconds of its own thread's time at most, whatever a D sends in
a stream and whatever a body asks for. That is measured, and not what clients wait on a machine that is busy otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvbaton.api.http import http_server
from kvbaton.api.params import Mode
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import Router, router_app
from kvbaton.router.flow.worker_calls import OPENING_EVENTS_MAX
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory
from tests.router.fake_workers import KEY, QUICK

TURN_S_MAX = 0.15
"""Of the loop's own time: three times what a turn takes with the largest body on a slow machine."""
ASKERS = 16
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
CREATED = b'event: response.created\ndata: {"type":"response.created","response":{}}\n\n'
TOKEN = b'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
LEASED = {"do_remote_prefill": True, "do_remote_decode": False, "ticket": "t", "mode": "pull"}

SAID = [{"role": "user", "content": "a"}]

Talk = Callable[[socket.socket], None]


class LoopTurns:
    """How long turns of the loop take, in its own thread's time."""

    def __init__(self) -> None:
        self.slowest_s = 0.0
        self._loop = asyncio.get_running_loop()
        self._at = time.thread_time()
        self._turn()

    def _turn(self) -> None:
        now = time.thread_time()
        self.slowest_s = max(self.slowest_s, now - self._at)
        self._at = now
        self._loop.call_soon(self._turn)


@contextlib.contextmanager
def listening(talk: Talk) -> Iterator[str]:
    """A worker that is no part of the loop: each connection has a thread, which reads one request after the other."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as listener:

        def serve(conn: socket.socket) -> None:
            with contextlib.suppress(OSError), conn, conn.makefile("rb") as reader:
                while reader.readline():
                    size = 0
                    while (line := reader.readline().lower()) not in (b"\r\n", b""):
                        size = int(line[15:]) if line.startswith(b"content-length:") else size
                    while size and (got := len(reader.read(min(size, 1 << 20)))):
                        size -= got
                    talk(conn)

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

        accepting = threading.Thread(target=accept, daemon=True)
        accepting.start()
        yield "http://{}:{}".format(*listener.getsockname())
        listener.shutdown(socket.SHUT_RDWR)
        accepting.join(10)


def says(answer: dict[str, Any]) -> Talk:
    data = json.dumps(answer).encode()
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(data)
    return lambda conn: conn.sendall(head + data)


def endless(first: bytes, piece: bytes, over: threading.Event) -> Talk:
    """A stream of the same events until somebody has had enough."""

    def talk(conn: socket.socket) -> None:
        conn.sendall(STREAM + first)
        while not over.is_set():
            conn.sendall(piece)
        raise ConnectionAbortedError

    return talk


@contextlib.asynccontextmanager
async def router(decode: Talk, **settings: Any) -> AsyncIterator[tuple[Router, str]]:
    with listening(says({"choices": [], "kv_transfer_params": LEASED})) as p0, listening(decode) as d0:
        named = (("p0", "prefill", p0), ("d0", "decode", d0))
        listed = [ListedEngine(WorkerId(name), role, url, Incarnation(5)) for name, role, url in named]  # type: ignore[arg-type]
        chosen = msgspec.structs.replace(QUICK, decode_retries=0, **settings)
        async with (
            router_app(StaticDirectory(listed), chosen, KEY, lambda *_: None) as app,
            http_server.serving(app, "127.0.0.1", 0) as url,
        ):
            yield app, url


def post(url: str, path: str, body: bytes, read_bytes: int = 1 << 20) -> tuple[int, bytes]:
    """In a thread of its own: what is asked for costs the loop nothing on the client's side."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=50)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.read(read_bytes)
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("path", "body", "event"),
    [
        ("/v1/responses", {"input": "abc"}, CREATED),
        ("/v1/messages", {"messages": SAID, "max_tokens": 4}, b'data:{"type":"ping"}\n\n'),
        ("/v1/chat/completions", {"messages": SAID}, CREATED),
        ("/v1/completions", {"prompt": "abc"}, b'data:{"type":"response.queued"}\r\r' * 99 + b"\n\n"),
    ],
)
async def test_a_d_whose_response_only_ever_begins_is_refused_after_some_events(
    path: str, body: dict[str, Any], event: bytes
) -> None:
    """16 requests to such a D: one turn of the loop took 341 ms of its time, and others waited 2.4 s for /health."""
    over = threading.Event()
    async with router(endless(b"", event * 2000, over)) as (_, url):
        turns = LoopTurns()
        data = json.dumps({"model": "m", "stream": True, **body}).encode()
        answers = await asyncio.gather(*(asyncio.to_thread(post, url, path, data) for _ in range(ASKERS)))
        over.set()
        for status, told in answers:
            error = json.loads(told)["error"]
            assert (status, error["code"]) == (502, "bad_answer") if "code" in error else status == 502
            assert "events of its stream before the first of its answer" in error["message"]
        assert turns.slowest_s < TURN_S_MAX, turns.slowest_s


async def test_a_stream_that_keeps_its_connection_alive_while_a_prompt_is_computed_passes() -> None:
    ping = b'data: {"type":"ping"}\n\n'
    opening = CREATED + (OPENING_EVENTS_MAX - 1) * ping
    rest = b'data: {"type":"response.completed"}\n\n'

    def talk(conn: socket.socket) -> None:
        conn.sendall(STREAM + opening)
        time.sleep(0.05)
        conn.sendall(rest)
        raise ConnectionAbortedError

    async with router(talk) as (_, url):
        body = b'{"model":"m","stream":true,"input":"abc"}'
        assert await asyncio.to_thread(post, url, "/v1/responses", body) == (200, opening + rest)


@pytest.mark.parametrize("event", [TOKEN, b"data:{}\n\n", b'data:{"usage":{}}\n\n'], ids=["tokens", "empty", "usage"])
@pytest.mark.parametrize("n", [1, 4])
async def test_a_d_that_sends_events_without_end_leaves_the_loop_to_others(event: bytes, n: int) -> None:
    """Streams of several choices are taken apart: one turn of the loop took 1,184 ms of its time."""
    over = threading.Event()
    async with router(endless(TOKEN, event * 8000, over), deadline_s=2.0, first_byte_s=2.0) as (_, url):
        turns = LoopTurns()
        body = json.dumps({"model": "m", "stream": True, "prompt": "abc", "n": n}).encode()
        status, _ = await asyncio.to_thread(post, url, "/v1/completions", body)
        over.set()
        assert status == 200
        assert turns.slowest_s < TURN_S_MAX, turns.slowest_s


@pytest.mark.parametrize("mode", [Mode.PULL, Mode.PUSH])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_body_that_asks_for_31_answers_to_4_mb_leaves_the_loop_to_others(mode: Mode, stream: bool) -> None:
    """It was written 62 times, 31 of them in one turn of the loop, which took 475 ms of its time."""
    choice = {"index": 0, "text": "a", "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    whole = says({"id": "c", "object": "text_completion", "choices": [choice], "usage": usage})

    def streamed(conn: socket.socket) -> None:
        conn.sendall(STREAM + TOKEN + b"data: [DONE]\n\n")
        raise ConnectionAbortedError

    assert len('a "b"\n') * 460_000 > 2.7e6
    async with router(streamed if stream else whole, mode=mode) as (app, url):
        body = {"model": "m", "prompt": 'a "b"\n' * 460_000, "n": 31, "max_tokens": 4, "stream": stream}
        data = json.dumps(body).encode()
        turns = LoopTurns()
        status, told = await asyncio.to_thread(post, url, "/v1/completions", data)
        assert status == 200, told[:200]
        assert told.count(b'"text":"a"') == 31
        assert turns.slowest_s < TURN_S_MAX, turns.slowest_s
        assert app.room.bytes == 0
