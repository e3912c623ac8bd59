"""A liar's HTTP server: its responses to a router that uses it as a worker.

Laws: it never gives an answer that could be taken for a right one: as a P, its answers hold no KV that anybody can
read; as a D, it refuses, stalls or breaks off before the first word. Only a thief, whom nobody should ask anything,
answers: with a text that is no model's. Bounded in connections, in bytes and in time.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import secrets
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api.params import FIELD, target_params
from kvbaton.api.params import Mode as TransferMode
from kvbaton.api.tokens import HEADER
from kvbaton.engines.embedded import tokenizer
from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, TransferId, handoff_id
from kvbaton.protocol.wire.ticket import Ticket, seal, unseal

CONNECTIONS_MAX = 128
BODY_BYTES_MAX = 16 << 20
HUGE_BYTES = 64 << 20
PARAMETERS_BYTES = 10_000_000
HOLD_S = 20.0
"""The longest that one question is left without its end: longer than the router waits for anything."""
CLOSE_S = 2.0
ASKED_MAX = 4096
TICKET_S = 60.0

TOKEN_HEADER = HEADER.lower().encode()
STOLEN = "stolen"
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
_EVENTS = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_BUSY = b'{"error":{"message":"not now","type":"overloaded","code":"busy"}}'
ODD = (
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 7\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\n{}",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{}",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-length: 2\r\n\r\n2\r\n{}\r\n0\r\n\r\n",
    b"HTTP/1.1 999 \r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 1000,
    b"HTTP/9.9 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 20_000 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nx: " + b"y" * 1_000_000,
    b"HTTP/1.1 101 Switching Protocols\r\nupgrade: websocket\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\n{}",
    b"\xff" * 4096,
    b"\r\n" * 4096,
    _HEAD + b"content-length: 4096\r\n\r\n" + b"[" * 4096,
    _HEAD + b"content-length: 2\r\n\r\n{}{}{}",
)
"""Answers of status 200 among them are no JSON object, or one without any use."""


class Question(msgspec.Struct, frozen=True):
    """What the router asked for."""

    prompt: str
    salt: str
    ticket: str
    at: float
    token: str = ""  # that opens the door of who should have been asked


Answer = Callable[["Door", Question], AsyncIterator[bytes]]


class Door:
    """Listens in a thread of its own until it is closed. `answer` is how it answers; see `ANSWERS`."""

    def __init__(self, host: str, me: PeerId, ticket_key: bytes, rng: random.Random) -> None:
        self.answer = "refuse"
        self.count = 0  # answered by a lie
        self.me = me
        self.ticket_key = ticket_key
        self.rng = rng
        self.asked: deque[Question] = deque(maxlen=ASKED_MAX)
        self.tokens: Remembered[str, int] = Remembered(ASKED_MAX)  # of prompts, by the handoff that they are of
        self._host = host
        self._port = 0
        self._open = 0
        self._ends = asyncio.Event()
        self._listens = threading.Event()
        self._thread = threading.Thread(target=self._run, name="liar-door", daemon=True)
        self._thread.start()
        if not self._listens.wait(10.0):
            raise OSError(f"nothing listens at {host}")

    @property
    def prompts(self) -> int:
        """That have come, of all questions that it remembers."""
        return sum(bool(each.prompt) for each in list(self.asked))

    @property
    def address(self) -> str:
        return f"{self._host}:{self._port}"

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ends.set)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        asyncio.run(self._listen())

    async def _listen(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._come, self._host, 0)
        self._port = server.sockets[0].getsockname()[1]
        self._listens.set()
        await self._ends.wait()
        server.close()

    async def _come(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open += 1
        try:
            if self._open <= CONNECTIONS_MAX:
                async with asyncio.timeout(HOLD_S):
                    while await self._one(reader, writer):
                        pass
        except (OSError, TimeoutError, ValueError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            self._open -= 1
            writer.transport.abort()

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One question and its answer; whether the connection goes on."""
        head = await reader.readuntil(b"\r\n\r\n")
        length = next((line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), b":0")
        size = int(length.partition(b":")[2])
        body = await reader.readexactly(min(size, BODY_BYTES_MAX))
        if not head.startswith(b"POST"):
            writer.write(_HEAD + b"content-length: 15\r\n\r\n" + b'{"status":"ok"}')
            await writer.drain()
            return True
        question = msgspec.structs.replace(_question(body), token=_token(head))
        self.asked.append(question)
        if question.ticket:
            self._note(question.ticket, question)
        name = self.answer
        if name != "refuse":
            self.count += 1
        async with contextlib.aclosing(ANSWERS[name](self, question)) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                writer.write(piece)
                await writer.drain()
        return name == "refuse"

    def ticket(self, question: Question) -> str:
        """One that leads D to the liar, as any P may sign it."""
        handoff = handoff_id(TransferId(secrets.token_hex(16)))
        life, lease = Incarnation(self.me.incarnation), LeaseId(1 + self.rng.getrandbits(30))
        ticket = seal(Ticket(handoff, self.me.worker, time.time() + TICKET_S, life, lease), self.ticket_key)
        self._note(ticket, question)
        return ticket

    def _note(self, ticket: str, question: Question) -> None:
        with contextlib.suppress(ProtocolError):
            handoff = unseal(ticket, (self.ticket_key,), time.time()).handoff
            self.tokens.put(handoff, len(tokenizer.encode(question.prompt)))


def _token(head: bytes) -> str:
    lines = (line.partition(b":") for line in head.split(b"\r\n"))
    return next((value.strip().decode() for name, _, value in lines if name.lower() == TOKEN_HEADER), "")


def _question(body: bytes) -> Question:
    try:
        fields = msgspec.json.decode(body)
        params = fields.get(FIELD) or {}
        prompt, salt, ticket = fields.get("prompt"), fields.get("cache_salt"), params.get("ticket")
    except (msgspec.DecodeError, AttributeError):
        prompt = salt = ticket = None
    texts = [each if isinstance(each, str) else "" for each in (prompt, salt, ticket)]
    return Question(texts[0], texts[1], texts[2], time.monotonic())


def _whole(body: bytes) -> bytes:
    return _HEAD + b"content-length: %d\r\n\r\n" % len(body) + body


def _completion(params: Mapping[str, Any]) -> bytes:
    return msgspec.json.encode({"id": "lie", "choices": [{"index": 0, "text": "lie"}], FIELD: params})


# --- answers


async def _refuse(_: Door, __: Question) -> AsyncIterator[bytes]:
    yield b"HTTP/1.1 503 Busy\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(_BUSY) + _BUSY


async def _come_to_me(door: Door, question: Question) -> AsyncIterator[bytes]:
    """The prompt is said to be computed: D may come for its KV."""
    yield _whole(_completion(target_params(TransferMode.PULL, door.ticket(question))))


async def _steal(door: Door, question: Question) -> AsyncIterator[bytes]:
    """As a P and as a D: a text that no model said, and a ticket that leads nowhere."""
    params = target_params(TransferMode.PULL, door.ticket(question))
    yield _whole(msgspec.json.encode({"id": "lie", "choices": [{"index": 0, "text": STOLEN}], FIELD: params}))


async def _hold(_: Door, __: Question) -> AsyncIterator[bytes]:
    """Nothing, for as long as a question is held."""
    await asyncio.sleep(HOLD_S)
    yield b""


async def _hang_up(door: Door, _: Question) -> AsyncIterator[bytes]:
    if door.rng.random() < 0.5:
        await asyncio.sleep(HOLD_S)
    yield b""


async def _comments(_: Door, __: Question) -> AsyncIterator[bytes]:
    yield _EVENTS
    while True:
        yield b"%x\r\n%b\r\n" % (4000, b": still here\n\n".ljust(3999, b":") + b"\n")
        await asyncio.sleep(0.002)


async def _events(_: Door, __: Question) -> AsyncIterator[bytes]:
    """An answer that begins, and begins again."""
    event = b'event: response.created\ndata: {"type":"response.created","response":{"id":"lie","output":[]}}\n\n' * 512
    yield _EVENTS
    while True:
        yield b"%x\r\n%b\r\n" % (len(event), event)
        await asyncio.sleep(0)


async def _drip(_: Door, __: Question) -> AsyncIterator[bytes]:
    yield _HEAD + b"content-length: 1000000\r\n\r\n"
    while True:
        yield b" "
        await asyncio.sleep(0.05)


async def _huge(door: Door, _: Question) -> AsyncIterator[bytes]:
    piece = b" " * (1 << 20)
    chunked = door.rng.random() < 0.5
    yield _HEAD + (b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: %d\r\n\r\n" % HUGE_BYTES)
    for _number in range(HUGE_BYTES >> 20):
        yield b"%x\r\n%b\r\n" % (len(piece), piece) if chunked else piece


async def _parameters(door: Door, question: Question) -> AsyncIterator[bytes]:
    ticket = door.ticket(question)
    odd: tuple[Any, ...] = (
        {**target_params(TransferMode.PULL, ticket), "more": "x" * PARAMETERS_BYTES},
        target_params(TransferMode.PULL, "x" * PARAMETERS_BYTES),
        {
            **target_params(TransferMode.PULL, ticket),
            "remote_host": "127.0.0.1",
            "remote_port": 1,
            "remote_block_ids": [0],
        },
        target_params(TransferMode.PULL, question.ticket or "A" * 200),
        {"do_remote_prefill": True, "do_remote_decode": True, "ticket": ticket},
        [[[[[1]]]]],
        "ticket",
    )
    yield _whole(_completion(door.rng.choice(odd)))


async def _odd(door: Door, _: Question) -> AsyncIterator[bytes]:
    yield door.rng.choice(ODD)
    await asyncio.sleep(door.rng.choice((0.0, 1.0)))


ANSWERS: Mapping[str, Answer] = {
    "refuse": _refuse,
    "come-to-me": _come_to_me,
    "steal": _steal,
    "hold": _hold,
    "hang-up": _hang_up,
    "comments": _comments,
    "drip": _drip,
    "events": _events,
    "huge": _huge,
    "parameters": _parameters,
    "odd": _odd,
}
