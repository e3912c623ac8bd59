"""OpenAI-compatible endpoints for clients: each body checked once, each answer that of one engine.

Laws: a body that stands for one request goes on as the bytes that came; only one that stands for several is taken apart
and joined. A stream goes on as the bytes that came. Whatever ends a client's request (answer, error, deadline, the
client itself) ends both of its legs. Of D's headers only those that the API knows reach the client: the others are
about D's own connection, or would have the client or a proxy do as D likes.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Sequence
from typing import TypeVar

import msgspec

from kvbaton.api import responses, sse, tokens
from kvbaton.api.access_log import ServedFacts
from kvbaton.api.api_errors import ApiError, bad_field, read_error
from kvbaton.api.bodies import Body, BodyKind, parse
from kvbaton.api.gather import all_of, interleave
from kvbaton.api.http.http_types import Answer, Events, Header, Request
from kvbaton.api.merge import AnswerPart, Joiner, join, read, split
from kvbaton.api.params import Mode
from kvbaton.observe.metrics.metric_types import Histogram
from kvbaton.router import router_flights
from kvbaton.router.flow.attempt import RoutedCall
from kvbaton.router.flow.kv_params import Written
from kvbaton.router.flow.owned_streams import OwnedStreams
from kvbaton.router.flow.reply import BegunAnswer, Reply
from kvbaton.router.flow.request_admission import UnderWay, check_request, check_steering, hold_body
from kvbaton.router.flow.request_flow import Flow
from kvbaton.router.flow.worker_calls import RANK_HEADER
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.router_stats import RouterStats

_COUNT = re.compile(rb'"(?:completion_tokens|output_tokens)"\s*:\s*([0-9]{1,9})')


_Served = TypeVar("_Served")


class StreamMeter:
    """One streamed answer. `tokens` are the events that bear one, mostly one each."""

    __slots__ = ("_at", "_between", "tokens")

    def __init__(self, between: Histogram) -> None:
        self._between = between
        self._at: float | None = None
        self.tokens = 0

    def came(self, data: bytes) -> int:
        """How many of these whole events bear a token."""
        chunks = sse.token_chunks(data)
        if chunks:
            now = time.monotonic()
            if self._at is not None:
                self._between.observe(now - self._at)
            self._at = now
            self.tokens += chunks
        return chunks


def answer_size(body: bytes) -> int:
    """Tokens of a whole answer, by the last usage in it; 0 where it has none."""
    found = _COUNT.findall(body, max(0, len(body) - 4096))
    return int(found[-1]) if found else 0


PARTS_BYTES_MAX = 128 << 20
"""Of one body, once for each of its choices."""
JOINED_AT_ONCE = 64
"""Events of several streams that become one, before anybody else has a turn."""
MODE_HEADER = "x-kvbaton-mode"
PAIR_HEADER = "x-kvbaton-pair"
_MODE_HEADER = MODE_HEADER.encode()

_HOP = frozenset(
    [
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection", b"te",
        b"trailer", b"transfer-encoding", b"upgrade", b"host", b"content-length", b"content-type", b"expect",
    ]
)  # fmt: skip
"""Headers that are about one connection or one body."""
_ODD = (AttributeError, KeyError, TypeError, ValueError, OverflowError, RecursionError)
"""What joining raises where a worker's JSON is not an answer."""
_NO_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_TOKEN = tokens.HEADER.lower().encode()  # the router's own to show
NOT_TO_WORKERS = _HOP | {
    b"accept-encoding", b"content-encoding", b"cookie", b"x-request-id", b"traceparent", _MODE_HEADER, _TOKEN,
    RANK_HEADER.lower(),  # the router chooses ranks, one on each side
    b"origin", b"referer", b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site", b"sec-fetch-user",
}  # fmt: skip
_TELL = {BodyKind.RESPONSES: responses.error_event, BodyKind.MESSAGES: sse.typed_error_event}
"""How the error that ends a stream is told, where it is not OpenAI's object alone."""
_SHAPING_ALONE = frozenset({"prompt_logprobs", "echo", "prompt_embeds", "use_beam_search", "best_of"})
_TO_CLIENTS = frozenset({b"openai-model", b"openai-organization", b"openai-processing-ms", b"openai-version"})
_TO_CLIENTS_BEGIN = b"x-ratelimit-"


def alone_reason(body: Body) -> str:
    """Why an answer must be computed by one engine from the prompt's first token; "" if it need not."""
    fields = body.fields
    if _SHAPING_ALONE.isdisjoint(fields):
        return ""
    if fields.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if fields.get("echo") and (fields.get("logprobs") is not None or fields.get("max_tokens") == 0):
        return "echo"
    if fields.get("prompt_embeds") is not None:
        return "prompt_embeds"
    best_of = fields.get("best_of")  # checked only where it means something
    if fields.get("use_beam_search") or (isinstance(best_of, int) and best_of > body.n):
        return "search"
    return ""


class OpenAiApi:
    """What clients call."""

    def __init__(
        self,
        flow: Flow,
        streams: OwnedStreams,
        settings: RouterSettings,
        stats: RouterStats,
        draining: asyncio.Event,
        hidden: frozenset[bytes] = NOT_TO_WORKERS,
    ) -> None:
        self._flow = flow
        self._streams = streams
        self._settings = settings
        self._stats = stats
        self.draining = draining
        self._hidden = hidden  # headers that stay here
        self._trace_share = settings.trace_sample if settings.trace else 0.0
        self._modes_default = (settings.mode, *(mode for mode in settings.modes_allowed if mode is not settings.mode))

    def completions(self, request: Request) -> Awaitable[Answer | Events]:
        return self._answer(request, BodyKind.COMPLETION)

    def chat(self, request: Request) -> Awaitable[Answer | Events]:
        return self._answer(request, BodyKind.CHAT)

    def responses(self, request: Request) -> Awaitable[Answer | Events]:
        return self._answer(request, BodyKind.RESPONSES)

    async def messages(self, request: Request) -> Answer | Events:
        """Anthropic's."""
        return await self._answer(request, BodyKind.MESSAGES)

    async def _answer(self, request: Request, kind: BodyKind) -> Answer | Events:
        try:
            body, parts, calls = self._understood(request, kind)
        except ApiError as error:
            self._stats.ended(error.code or str(error.status), error.status)
            raise
        headers: dict[str, str] = {}
        if not body.stream:
            with UnderWay(self._stats, self._settings.in_flight_max, len(calls)):
                if len(calls) == 1:
                    return Answer(await self._body(calls[0], headers, request.served), headers=headers)
                return Answer(await self._joined_whole(parts, calls, headers, request.served), headers=headers)
        if len(calls) == 1:
            events = self._events(calls[0], headers, request.served, 1)
        else:
            events = self._joined(body, parts, calls, headers, request.served)
        return Events(events, headers, calls[0].deadline, _TELL.get(kind, sse.error_event))

    def _understood(self, request: Request, kind: BodyKind) -> tuple[Body, Sequence[AnswerPart], list[RoutedCall]]:
        check_request(request, self._settings, self.draining)
        body = parse(kind, request.body)
        check_steering(body.fields)
        if body.fields.get("previous_response_id") is not None:
            raise bad_field("previous_response_id", "answers are not kept here; send the conversation as input")
        alone = alone_reason(body)
        parts = (AnswerPart(0, 0, 0, body.fields),) if alone else split(body)
        if len(parts) > self._settings.in_flight_max:
            raise bad_field("n", f"{len(parts)} answers to one body, at most {self._settings.in_flight_max} at once")
        if body.n > 1 and body.n * len(request.body) > PARTS_BYTES_MAX:
            raise bad_field(
                "n", f"{body.n} times a body of {len(request.body)} bytes, at most {PARTS_BYTES_MAX} together"
            )
        hold_body(request, body.n)
        return body, parts, self._calls(request, body, parts, alone)

    def _calls(self, request: Request, body: Body, parts: Sequence[AnswerPart], alone: str) -> list[RoutedCall]:
        name = request.id
        modes = self._modes(request.header(_MODE_HEADER))
        headers = passed(request, self._hidden)
        trace, begins = router_flights.begun(request.headers, self._trace_share)
        deadline = asyncio.get_running_loop().time() + self._settings.deadline_s
        if len(parts) == 1:
            fields, whole, tab = body.fields, request.body, request.tab
            return [
                RoutedCall(
                    body.kind, fields, headers, modes, body.stream, deadline, name, whole, alone, trace, begins, tab,
                    len(whole),
                )
            ]  # fmt: skip
        names = [f"{name}-{part.index}" for part in parts]
        written: list[Written] = [{} for _ in range(parts[-1].prompt_index + 1)]
        return [
            RoutedCall(
                body.kind,
                part.fields,
                headers,
                modes,
                body.stream,
                deadline,
                own,
                None,
                "",
                trace,
                begins and not n,
                request.tab,
                len(request.body),
                written[part.prompt_index],
            )
            for n, (part, own) in enumerate(zip(parts, names, strict=True))  # the first is the root of the others
        ]

    def _modes(self, wanted: str | None) -> tuple[Mode, ...]:
        if wanted is None:
            return self._modes_default
        allowed = self._settings.modes_allowed
        if wanted not in [str(mode) for mode in allowed]:
            raise bad_field(MODE_HEADER, f"got {wanted[:40]!r}, expected one of {', '.join(allowed)}")
        return (Mode(wanted),)

    async def _first_byte(self, served: Awaitable[_Served]) -> _Served:
        """An answer, from its first byte on; counted as waiting until then."""
        waits = self._stats.waits
        waits.waiting += 1
        try:
            return await served
        finally:
            waits.waiting -= 1

    async def _joined_whole(
        self, parts: Sequence[AnswerPart], calls: Sequence[RoutedCall], headers: dict[str, str], served: ServedFacts
    ) -> bytes:
        bodies = await all_of([self._body(call, headers, served) for call in calls])
        answers = []
        try:
            for body in bodies:
                answers.append(read(body))
                await asyncio.sleep(0)  # each may be as long as an answer may be
            return msgspec.json.encode(join(parts, answers))
        except _ODD as error:
            raise _odd_answer(error) from None

    async def _body(self, call: RoutedCall, headers: dict[str, str], served: ServedFacts) -> bytes:
        reply = await self._first_byte(self._flow.serve(call))
        try:
            self._note(headers, served, reply)
            served.output_tokens += (size := answer_size(reply.body))
            self._ended(call, reply, size)
            return reply.body
        finally:
            await reply.aclose()

    async def _events(
        self, call: RoutedCall, headers: dict[str, str], served: ServedFacts, counted: int = 0
    ) -> AsyncGenerator[bytes, None]:
        """One call's stream."""
        with UnderWay(self._stats, self._settings.in_flight_max, counted):
            begun = call.deadline - self._settings.deadline_s
            stream = await self._first_byte(self._streams.open(call))
            try:
                first = stream.served
                self._note(headers, served, first)
                waited_s = asyncio.get_running_loop().time() - begun
                self._stats.waits.note(first.mode, waited_s, first.prefill_since(begun), first.handoff)
                meter = StreamMeter(self._stats.waits.between.of((first.mode,)))
                tokens, mode = self._stats.waits.tokens, f"chunks:{first.mode}"
                while data := await stream.more():
                    chunks = meter.came(data)
                    stream.count(chunks)
                    tokens[mode] += chunks
                    served.output_tokens += chunks
                    yield data
                self._ended(call, stream.reply, meter.tokens)
            except ApiError as error:
                stream.failed(error)
                raise
            finally:
                await stream.aclose()

    async def _joined(
        self,
        body: Body,
        parts: Sequence[AnswerPart],
        calls: Sequence[RoutedCall],
        headers: dict[str, str],
        served: ServedFacts,
    ) -> AsyncGenerator[bytes, None]:
        """Several calls' streams as one."""
        with UnderWay(self._stats, self._settings.in_flight_max, len(calls)):
            joiner = Joiner()
            streams = [self._events(call, headers, served) for call in calls]
            async with contextlib.aclosing(interleave(streams)) as merged:
                async for number, data in merged:
                    async for events in self._rejoined(joiner, parts[number], data):
                        yield events
            if body.include_usage:
                yield _usage_event(joiner)
            yield sse.DONE

    async def _rejoined(self, joiner: Joiner, part: AnswerPart, data: bytes) -> AsyncGenerator[bytes, None]:
        """Some events at a time: taking one apart costs a hundred times what passing it on does."""
        payloads = sse.payloads(data)
        while some := list(itertools.islice(payloads, JOINED_AT_ONCE)):
            events = b"".join(_rejoin(joiner, part, payload) for payload in some if payload != b"[DONE]")
            if events:
                yield events
            if len(some) == JOINED_AT_ONCE:
                await asyncio.sleep(0)

    def _ended(self, call: RoutedCall, reply: Reply, output_tokens: int) -> None:
        took_s = asyncio.get_running_loop().time() - (call.deadline - self._settings.deadline_s)
        reply.tell_tokens(output_tokens)
        self._stats.waits.ended(reply.mode, took_s, reply.prompt_tokens, output_tokens, reply.handoff)

    def _note(self, headers: dict[str, str], served: ServedFacts, reply: BegunAnswer) -> None:
        """What the client is told besides the answer: what the API knows of D's headers, and who served."""
        served.by(str(reply.route), reply.mode, reply.prompt_tokens)
        for name, value in reply.headers:
            if name in _TO_CLIENTS or name.startswith(_TO_CLIENTS_BEGIN):
                headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        if self._settings.show_pair:
            known, pair = headers.get(PAIR_HEADER), str(reply.route)
            headers[PAIR_HEADER] = pair if known is None else f"{known},{pair}"


def _rejoin(joiner: Joiner, part: AnswerPart, payload: bytes) -> bytes:
    """An event of one part as the client shall see it; b"" where there is nothing to see."""
    try:
        chunk = read(payload)
    except _ODD as error:
        is_json = isinstance(error, msgspec.ValidationError) or not isinstance(error, _NO_JSON)
        if is_json:
            raise _odd_answer(error) from None
        raise ApiError(502, "a worker sent an event that is not JSON", type="worker_error") from None
    if "error" in chunk:
        raise read_error(502, payload)
    try:
        merged = joiner.chunk(part, chunk)
        return b"" if merged is None else sse.event(merged)
    except _ODD as error:
        raise _odd_answer(error) from None


def _usage_event(joiner: Joiner) -> bytes:
    try:
        return sse.event(joiner.usage_chunk())
    except _ODD as error:
        raise _odd_answer(error) from None


def _odd_answer(error: Exception) -> ApiError:
    said = f"a worker answered something that cannot be joined with other answers ({type(error).__name__})"
    return ApiError(502, said, type="worker_error", code="bad_answer")


def passed(request: Request, but: frozenset[bytes]) -> list[Header]:
    """The headers that go on: all but some, and but those that `Connection` names as its own."""
    found = [header for header in request.headers if header[0] not in but]
    for words in request.values("connection"):
        if words.lower() not in ("keep-alive", "close"):
            named = {word.strip().lower().encode("latin-1") for word in words.split(",")}
            found = [header for header in found if header[0] not in named]
    return found
