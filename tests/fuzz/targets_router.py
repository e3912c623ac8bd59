"""What workers say to the router, through the real HTTP parser and the real front."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import msgspec
from guided import Target
from mutators import Shape

from kvbaton.api import sse
from kvbaton.api.api_errors import ApiError
from kvbaton.api.bodies import BodyKind
from kvbaton.api.http import http_client, http_types
from kvbaton.api.params import FIELD
from kvbaton.protocol.ids import WorkerId
from kvbaton.router.flow import kv_params, worker_calls, worker_leg
from kvbaton.router.flow.hops import Hops
from kvbaton.router.flow.owned_streams import OwnedStreams
from kvbaton.router.openai_api import OpenAiApi
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.router_stats import LABELS_MAX, RouterStats, count
from kvbaton.router.workers.directory import ListedEngine

JSON, PACK = msgspec.json.encode, msgspec.msgpack.encode
SETTINGS = RouterSettings(answer_bytes_max=1 << 20)
WORKER = ListedEngine(WorkerId("d0"), "decode", "http://10.0.0.1:80")
REPLY_MAX = 8


@functools.cache
def loop() -> asyncio.AbstractEventLoop:
    made = asyncio.new_event_loop()
    made.set_debug(False)
    return made


# --- answers that are joined


class _Pair:
    class decode:
        name = "d0"

    def __str__(self) -> str:
        return "p0/d0"


class Spoken:
    """A worker's answer, as the flow would give it; of a stream also its events."""

    headers: Sequence[http_types.Header] = ((b"content-type", b"application/json"), (b"x-worker", b"d\xff\r\n0"))
    route = _Pair()
    mode = "pull"
    handoff = ""
    prompt_tokens = 1
    chunks = 0

    def __init__(self, body: bytes) -> None:
        self.body = body
        self.events = self
        self._relay: sse.Relay | None = None

    def prefill_since(self, begun: float) -> tuple[float, float] | None:
        return None

    def tell_tokens(self, count: int) -> None:
        assert count >= 0

    async def more(self) -> bytes:
        if self._relay is None:
            self._relay = sse.Relay()
            whole = self._relay.feed(self.body)
            if whole:
                return whole
        if not self._relay.ended:
            raise ApiError(502, "went away", type="worker_error", code="worker_died")
        return b""

    async def aclose(self) -> None: ...


class Nonsense:
    """A flow whose workers say what they are told to."""

    def __init__(self, answers: Sequence[bytes]) -> None:
        self._answers = list(answers) or [b""]

    async def serve(self, call: Any) -> Spoken:
        said = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        try:
            return Spoken(said if call.stream else kv_params.without_params(said))
        except (ValueError, RecursionError):
            raise ApiError(502, "not a JSON object", type="worker_error", code="bad_answer") from None


class Script(msgspec.Struct, array_like=True):
    """What a client asks and what its two workers answer."""

    kind: int
    stream: bool
    answers: list[bytes]


async def _front(kind: BodyKind, body: bytes, answers: Sequence[bytes]) -> None:
    stats = RouterStats()
    flow: Any = Nonsense(answers)
    streams = OwnedStreams(flow, None, SETTINGS, stats, can_sign=False)  # type: ignore[arg-type]
    front = OpenAiApi(flow, streams, SETTINGS, stats, asyncio.Event())
    request = http_types.Request("POST", kind.value, [], body)
    handlers = {BodyKind.COMPLETION: front.completions, BodyKind.CHAT: front.chat, BodyKind.RESPONSES: front.responses}
    try:
        answer = await handlers[kind](request)
        if isinstance(answer, http_types.Answer):
            if kind is not BodyKind.RESPONSES:  # else one part, and the answer goes on as it came
                assert isinstance(msgspec.json.decode(answer.body), dict)
            http_types.whole_bytes(answer, True, True, False)
        else:
            async with contextlib.aclosing(answer.source) as events:
                async for event in events:
                    assert event.endswith((b"\n\n", b"\r\n\r\n"))
            head = http_types.stream_head(answer.headers, True, True)
            assert head.count(b"\r\n\r\n") == 1 and head.endswith(b"\r\n\r\n")
    except ApiError as error:
        assert 400 <= error.status < 600 and len(error.message) < 4000
        http_types.whole_bytes(http_types.error_answer(error), True, True, False)
    assert stats.in_flight == 0 and sum(stats.ends.values()) == 1 and "broken" not in stats.ends, stats.ends


def joined(data: bytes) -> None:
    """Two workers' answers: one for the client, or an `ApiError` that says that a worker talks nonsense."""
    try:
        script = msgspec.msgpack.decode(data, type=Script)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return
    kind = list(BodyKind)[script.kind % 3]
    fields: dict[str, Any] = {"stream": script.stream, "n": 2, "stream_options": {"include_usage": True}}
    fields |= (
        {"input": "a"}
        if kind is BodyKind.RESPONSES
        else {"prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    )
    loop().run_until_complete(_front(kind, JSON(fields), script.answers[:REPLY_MAX]))


def answer_seeds() -> list[bytes]:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 1}}
    whole = JSON({"id": "x", "choices": [{"index": 0, "text": "a"}], "usage": usage})
    stream = sse.event({"id": "x", "choices": [{"index": 0, "text": "a"}]}) + sse.event({"choices": [], "usage": usage})
    typed = sse.typed_event({"type": "response.completed", "response": {}})
    failed = sse.event({"error": {"message": "m", "type": "t", "code": 400}})
    return [
        PACK([0, False, [whole, whole]]),
        PACK([1, True, [stream + sse.DONE, stream + failed]]),
        PACK([0, True, [stream + sse.DONE, stream + sse.DONE]]),
        PACK([2, True, [typed]]),
        PACK([1, False, [whole, b"[]"]]),
    ]


def bare_answer(data: bytes) -> None:
    """What P hands over, and what D answers: read, or the two errors that the flow takes for nonsense."""
    with contextlib.suppress(ValueError, RecursionError):
        found = kv_params.handover(data)
        if found is not None:
            msgspec.json.decode(kv_params.decode_body(b'{"prompt":"a"}', {"prompt": "a"}, found[0]))
    with contextlib.suppress(ValueError, RecursionError):
        assert FIELD not in msgspec.json.decode(kv_params.without_params(data))
    stats = RouterStats()
    for status in (400, 429, 500):
        error = worker_leg.refusal(worker_leg.Leg("decode", WORKER, "/v1/completions", (), b""), status, data, None)
        assert 400 <= error.fault.status < 600 and len(error.fault.message) < 2400
        count(stats.failures, f"decode:{error.fault.code}")
    assert worker_leg.status_in(data) in range(400, 600) and len(stats.failures) <= LABELS_MAX


def bare_seeds() -> list[bytes]:
    return [
        JSON(
            {"id": "x", "choices": [], "kv_transfer_params": {"do_remote_prefill": True, "ticket": "t", "other": [1]}}
        ),
        JSON({"choices": [{"text": "a"}]}),
        JSON({"error": {"message": "m", "type": "t", "code": "c", "param": "kv_transfer_params.ticket"}}),
        JSON({"object": "error", "message": "m", "code": 404}),
        JSON({"error": "m"}),
    ]


# --- bytes that are to be HTTP


class Line:
    """A transport whose other end is the input."""

    def __init__(self) -> None:
        self._closing = False

    def is_closing(self) -> bool:
        return self._closing

    def abort(self) -> None:
        self._closing = True

    def write(self, data: bytes) -> None: ...
    def pause_reading(self) -> None: ...
    def resume_reading(self) -> None: ...
    def get_write_buffer_size(self) -> int:
        return 0


class Answering(http_client.Pool):
    """A pool of connections to one worker that has said everything already and then hung up."""

    def __init__(self, chunks: Sequence[bytes]) -> None:
        super().__init__(1.0)
        self._chunks = chunks

    async def _connect(self, place: http_client.Origin) -> http_client.Exchange:
        made = http_client.Exchange(self, place)
        made.connection_made(Line())  # type: ignore[arg-type]
        self.loop.call_soon(self._speak, made)
        return made

    def _speak(self, exchange: http_client.Exchange) -> None:
        for chunk in self._chunks:
            exchange.data_received(chunk)
        exchange.connection_lost(None)


async def _leg(chunks: Sequence[bytes]) -> None:
    deadline = asyncio.get_running_loop().time() + 60
    leg = worker_leg.Leg("decode", WORKER, "/v1/completions", (), b"{}")
    for streams in (False, True):
        pool = Answering(chunks)
        sender = worker_calls.Legs(pool, SETTINGS, Hops())
        with contextlib.suppress(worker_leg.LegError):
            if streams:
                stream = await sender.stream(leg, deadline, 60.0)
                try:
                    with contextlib.suppress(ApiError):
                        async for events in stream.events():
                            assert isinstance(events, bytes)
                        assert stream.ended
                finally:
                    stream.close()
            else:
                answer = await sender.whole(leg, 60.0)
                assert len(answer.data) <= SETTINGS.answer_bytes_max
                assert all(b"\n" not in value and b"\r" not in value for _, value in answer.headers)
        assert not sender._open, "a leg is left open"
        pool.close()


def http(data: bytes) -> None:
    """Whatever a worker puts on the wire: an answer, or one `LegError` or `ApiError`; no leg is left open."""
    try:
        chunks = msgspec.msgpack.decode(data, type=list[bytes])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        chunks = [data]
    loop().run_until_complete(_leg(chunks[:16]))


def http_seeds() -> list[bytes]:
    body = JSON({"choices": []})
    event = sse.event({"id": "x"}) + sse.DONE
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n" + http_types.chunk(event) + b"0\r\n\r\n"
    return [
        PACK([head + b"Content-Length: %d\r\n\r\n" % len(body), body]),
        PACK([chunked]),
        PACK([b"HTTP/1.1 100 Continue\r\n\r\n", head + b"\r\n", event]),
        PACK([b"HTTP/1.1 503 Busy\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}"]),
        PACK([b"HTTP/1.0 200 OK\r\n\r\n", sse.error_event(ApiError(400, "m", code="400"))]),
    ]


TARGETS = (
    Target("worker_answers", joined, answer_seeds, Shape.MSGPACK, 1200),
    Target("worker_json", bare_answer, bare_seeds, Shape.JSON, 1500),
    Target("worker_http", http, http_seeds, Shape.MSGPACK, 1000),
)
