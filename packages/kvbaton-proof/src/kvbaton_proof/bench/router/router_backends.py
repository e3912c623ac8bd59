"""The workers behind a router that is measured: one process that answers as P on one port and as D on another.

Laws: it computes nothing. Every answer is fixed bytes, so that what a request costs is the router's cost. It counts
what it was asked for, and how often D was shown P's ticket: a router that skips P, or loses what P said, is found out.

A stream is 16 events in four writes some milliseconds apart, so that a router has to pass it on in pieces. While D
holds streams (`GET /hold`, until `GET /release`) each of them gets its first event and no more.
"""

from __future__ import annotations

import asyncio
import sys

import msgspec

from kvbaton_proof.bench.kit.piped_children import Parent

HOST = "127.0.0.1"
BACKLOG = 4096
HEAD_BYTES_MAX, BODY_BYTES_MAX = 1 << 14, 1 << 20
TICKET = b"t1." + b"kvbaton-bench-router-" * 14 + b"end"
EVENTS = 16  # in a stream, and [DONE] after them
WRITES = 4
GAP_S = 0.003
TEXT = b" hello world"
_HEAD = b'"object":"text_completion","created":1,"model":"m"'
_ANSWER = (
    b'{"id":"cmpl-x",%s,"choices":[{"index":0,"text":"%s","logprobs":null,"finish_reason":"length"}],'
    b'"usage":{"prompt_tokens":10,"completion_tokens":16,"total_tokens":26}' % (_HEAD, TEXT)
)
_PARAMS = b'{"do_remote_prefill":true,"do_remote_decode":false,"mode":"pull","ticket":"%s"}' % TICKET
_EVENT = (
    b'data: {"id":"cmpl-x",%s,"choices":[{"index":0,"text":" w","logprobs":null,"finish_reason":null,'
    b'"stop_reason":null,"prompt_token_ids":null,"token_ids":null}]}\n\n' % _HEAD
)
"""As vLLM writes it."""
_EVENT_IDS = _EVENT.replace(b'"token_ids":null}', b'"token_ids":[1917]}')
PROMPT_TOKENS = 1020
_PROMPT_IDS = b'"prompt_token_ids":[%s]' % b",".join(b"%d" % (7000 + at) for at in range(PROMPT_TOKENS))
_FIRST_IDS = _EVENT_IDS.replace(b'"prompt_token_ids":null', _PROMPT_IDS)


class Counts(msgspec.Struct):
    """What was asked for so far; the counters only grow."""

    prefills: int = 0
    decodes: int = 0
    handed_over: int = 0  # decodes that came with P's ticket


def answer(body: bytes, status: bytes = b"200 OK") -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


PREFILL = answer(_ANSWER + b',"kv_transfer_params":' + _PARAMS + b"}")
DECODE = answer(_ANSWER + b"}")
FINE = answer(b'{"status":"ok","object":"list","data":[{"id":"m","object":"model","created":1,"owned_by":"bench"}]}')
NO_LENGTH = answer(b'{"error":{"message":"content-length is needed"}}', b"411 Length Required")
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_PIECE = chunk(_EVENT * (EVENTS // WRITES))
_LAST = chunk(_EVENT * (EVENTS // WRITES) + b"data: [DONE]\n\n") + b"0\r\n\r\n"
STREAM = (STREAM_HEAD + _PIECE, *[_PIECE] * (WRITES - 2), _LAST)
_PIECE_IDS = chunk(_EVENT_IDS * (EVENTS // WRITES))
STREAM_IDS = (
    STREAM_HEAD + chunk(_FIRST_IDS + _EVENT_IDS * (EVENTS // WRITES - 1)), *[_PIECE_IDS] * (WRITES - 2),
    chunk(_EVENT_IDS * (EVENTS // WRITES) + b"data: [DONE]\n\n") + b"0\r\n\r\n",
)  # fmt: skip
"""For a request that wants the ids of its tokens."""
FIRST_EVENT = STREAM_HEAD + chunk(_EVENT)
THE_REST = chunk(_EVENT * (EVENTS - 1) + b"data: [DONE]\n\n") + b"0\r\n\r\n"


class Desk:
    """What both ports share."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.holding = False
        self.held: list[asyncio.WriteTransport] = []  # as many as there are connections, at most
        self._streams: list[tuple[asyncio.WriteTransport, tuple[bytes, ...], int]] = []  # and the number of the next

    def get(self, path: bytes) -> bytes:
        if path == b"/counts":
            return answer(msgspec.json.encode(self.counts))
        if path == b"/hold":
            self.holding = True
        elif path == b"/release":
            self.holding = False
            for transport in self.held:
                transport.write(THE_REST)
            self.held.clear()
        return FINE

    def stream(self, transport: asyncio.WriteTransport, pieces: tuple[bytes, ...]) -> None:
        """The first piece now, the others one by one. A timer for all: of many, uvloop let some wait for a second."""
        transport.write(pieces[0])
        if not self._streams:
            asyncio.get_running_loop().call_later(GAP_S, self._go_on)
        self._streams.append((transport, pieces, 1))

    def _go_on(self) -> None:
        due, self._streams = self._streams, []
        for transport, pieces, number in due:
            if not transport.is_closing():
                transport.write(pieces[number])
                if number + 1 < len(pieces):
                    self._streams.append((transport, pieces, number + 1))
        if self._streams:
            asyncio.get_running_loop().call_later(GAP_S, self._go_on)


class Backend(asyncio.Protocol):
    """One connection of a router, to P or to D."""

    def __init__(self, desk: Desk, role: str) -> None:
        self._desk = desk
        self._is_prefill = role == "P"
        self._buffer = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer + data if self._buffer else data
        while buffer:
            end = buffer.find(b"\r\n\r\n")
            if end < 0:
                break
            start = end + 4
            length = content_length(buffer[:start])
            if length is None or length > BODY_BYTES_MAX:
                self._transport.write(NO_LENGTH)
                self._transport.close()
                return
            if len(buffer) < start + length:
                break
            self._serve(buffer[: start + length], start)
            buffer = buffer[start + length :]
        self._buffer = buffer
        if len(buffer) > HEAD_BYTES_MAX + BODY_BYTES_MAX:
            self._transport.close()

    def _serve(self, request: bytes, body_at: int) -> None:
        desk = self._desk
        if request.startswith(b"GET "):
            self._transport.write(desk.get(request.split(b" ", 2)[1]))
        elif self._is_prefill:
            desk.counts.prefills += 1
            self._transport.write(PREFILL)
        else:
            desk.counts.decodes += 1
            desk.counts.handed_over += TICKET in request
            if request.find(b'"stream":true', body_at) < 0 and request.find(b'"stream": true', body_at) < 0:
                self._transport.write(DECODE)
            elif desk.holding:
                self._transport.write(FIRST_EVENT)
                desk.held.append(self._transport)
            else:
                wants_ids = request.find(b'"return_token_ids":true', body_at) >= 0
                desk.stream(self._transport, STREAM_IDS if wants_ids else STREAM)


def content_length(head: bytes) -> int | None:
    """Of a request's body: 0 where a GET says nothing, None where it cannot be known."""
    lower = head.lower()
    at = lower.find(b"\r\ncontent-length:")
    if at < 0:
        return 0 if lower.startswith(b"get ") else None
    digits = lower[at + 17 : lower.find(b"\r\n", at + 17)].strip()
    return int(digits) if digits.isdigit() else None


async def serve() -> None:
    """Listen on two free ports, tell them in one line, and serve until standard input ends."""
    loop, desk = asyncio.get_running_loop(), Desk()
    prefill = await loop.create_server(lambda: Backend(desk, "P"), HOST, 0, backlog=BACKLOG)
    decode = await loop.create_server(lambda: Backend(desk, "D"), HOST, 0, backlog=BACKLOG)
    ports = [server.sockets[0].getsockname()[1] for server in (prefill, decode)]
    Parent().answer({"prefill": ports[0], "decode": ports[1]})
    gone = asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), gone.set)  # it is never written to: readable means that its other end is gone
    await gone.wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(serve())
