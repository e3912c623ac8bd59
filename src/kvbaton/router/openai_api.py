"""OpenAI-compatible endpoints for clients: each body checked once, each answer that of one engine.

Laws: a body that stands for one request goes on as the bytes that came; only one that stands for several is taken apart
and joined. A stream goes on as the bytes that came. Whatever ends a client's request (answer, error, deadline, the
client itself) ends both of its legs. Of D's headers only those that the API knows reach the client: the others are
about D's own connection, or would have the client or a proxy do as D likes.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api import request_ids, responses, screening, shapes, sse, tokens
from kvbaton.api.api_errors import ApiError, bad_field, full, read_error, unavailable
from kvbaton.api.bodies import Body, BodyKind, parse
from kvbaton.api.gather import all_of, interleave
from kvbaton.api.http import REQUEST_ID, checked_request_id
from kvbaton.api.merge import AnswerPart, Joiner, join, read, split
from kvbaton.api.params import FIELD, Mode
from kvbaton.router import router_flights
from kvbaton.router.attempt import RoutedCall
from kvbaton.router.http.http_types import Answer, Events, Header, Request
from kvbaton.router.reply import Reply
from kvbaton.router.request_flow import Flow
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.router_stats import RouterStats, count

PARTS_BYTES_MAX = 128 << 20
"""Of one body, once for each of its choices."""
BODY_COPIES = 4
CONTAINER_BYTES = 256
"""What a list or an object takes besides the bytes that it came as."""
FREE_BYTES = 4 << 10
"""A body of no more is not counted again once it was read."""
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
_NOT_TO_WORKERS = _HOP | {
    b"accept-encoding", b"content-encoding", b"cookie", b"x-request-id", b"traceparent", _MODE_HEADER, _TOKEN,
    b"origin", b"referer", b"sec-fetch-dest", b"sec-fetch-mode", b"sec-fetch-site", b"sec-fetch-user",
}  # fmt: skip
_TO_CLIENTS = frozenset({b"openai-model", b"openai-organization", b"openai-processing-ms", b"openai-version"})
_TO_CLIENTS_BEGIN = b"x-ratelimit-"
_SCREENED = frozenset({b"content-encoding", b"transfer-encoding", b"origin", b"sec-fetch-site"})


def alone_reason(body: Body) -> str:
    """Why an answer must be computed by one engine from the prompt's first token; "" if it need not."""
    fields = body.fields
    if fields.get("prompt_logprobs") is not None:
        return "prompt_logprobs"
    if fields.get("echo") and fields.get("logprobs") is not None:
        return "echo"
    if fields.get("prompt_embeds") is not None:
        return "prompt_embeds"
    best_of = fields.get("best_of")  # checked only where it means something
    if fields.get("use_beam_search") or (isinstance(best_of, int) and best_of > body.n):
        return "search"
    return ""


class OpenAiApi:
    """What clients call."""

    def __init__(self, flow: Flow, settings: RouterSettings, stats: RouterStats, draining: asyncio.Event) -> None:
        self._flow = flow
        self._settings = settings
        self._stats = stats
        self.draining = draining
        self._trace_share = settings.trace_sample if settings.trace else 0.0
        self._modes_default = (settings.mode, *(mode for mode in settings.modes_allowed if mode is not settings.mode))

    async def completions(self, request: Request) -> Answer | Events:
        return await self._answer(request, BodyKind.COMPLETION)

    async def chat(self, request: Request) -> Answer | Events:
        return await self._answer(request, BodyKind.CHAT)

    async def responses(self, request: Request) -> Answer | Events:
        return await self._answer(request, BodyKind.RESPONSES)

    async def _answer(self, request: Request, kind: BodyKind) -> Answer | Events:
        try:
            body, parts, calls = self._understood(request, kind)
        except ApiError as error:
            self._stats.ended(error.code or str(error.status), error.status)
            raise
        headers = {REQUEST_ID: calls[0].name if len(calls) == 1 else calls[0].name.rpartition("-")[0]}
        if not body.stream:
            with self._under_way(len(calls)):
                return Answer(await self._whole(parts, calls, headers), headers=headers)
        several = len(calls) > 1
        events = self._joined(body, parts, calls, headers) if several else self._events(calls[0], headers, 1)
        tell = responses.error_event if kind is BodyKind.RESPONSES else sse.error_event
        return Events(events, headers, calls[0].deadline, tell)

    def _understood(self, request: Request, kind: BodyKind) -> tuple[Body, Sequence[AnswerPart], list[RoutedCall]]:
        if self.draining.is_set():
            raise unavailable("this router is stopping; ask another", "draining")
        if any(name in _SCREENED for name, _ in request.headers):
            screening.check(request.values, self._settings.origins_allowed)
        body = parse(kind, request.body)
        if body.fields.get(FIELD) is not None:
            raise bad_field(FIELD, "the router sets this; leave it out")
        _check_steering(body.fields)
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
        if len(request.body) > FREE_BYTES and not request.tab.hold(_cost(request.body, body.n)):
            raise request.tab.room.full("request")
        return body, parts, self._calls(request, body, parts, alone)

    def _calls(self, request: Request, body: Body, parts: Sequence[AnswerPart], alone: str) -> list[RoutedCall]:
        name = request.header(b"x-request-id") or ""
        name = checked_request_id("" if _holds_addresses(name) else name)
        modes = self._modes(request.header(_MODE_HEADER))
        headers = passed(request.headers, _NOT_TO_WORKERS)
        trace, begins = router_flights.begun(request.headers, self._trace_share)
        deadline = asyncio.get_running_loop().time() + self._settings.deadline_s
        if len(parts) == 1:
            fields, whole, tab = body.fields, request.body, request.tab
            return [
                RoutedCall(
                    body.kind, fields, headers, modes, body.stream, deadline, name, whole, alone, trace, begins, tab
                )
            ]
        names = [f"{name}-{part.index}" for part in parts]
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

    async def _whole(self, parts: Sequence[AnswerPart], calls: Sequence[RoutedCall], headers: dict[str, str]) -> bytes:
        bodies = await all_of([self._body(call, headers) for call in calls])
        if len(bodies) == 1:
            return bodies[0]
        try:
            return msgspec.json.encode(join(parts, [read(body) for body in bodies]))
        except _ODD as error:
            raise _odd_answer(error) from None

    async def _body(self, call: RoutedCall, headers: dict[str, str]) -> bytes:
        reply = await self._flow.serve(call)
        try:
            self._note(headers, reply)
            return reply.body
        finally:
            await reply.aclose()

    async def _events(self, call: RoutedCall, headers: dict[str, str], counted: int = 0) -> AsyncGenerator[bytes, None]:
        """One call's stream, untouched."""
        with self._under_way(counted):
            begun = call.deadline - self._settings.deadline_s
            reply = await self._flow.serve(call)
            try:
                self._note(headers, reply)
                waited_s = asyncio.get_running_loop().time() - begun
                self._stats.waits.note(reply.mode, waited_s, reply.prefill_since(begun), reply.handoff)
                try:
                    async with contextlib.aclosing(reply.events()) as events:
                        async for data in events:
                            yield data
                except ApiError as error:
                    count(self._stats.failures, error.code or "none", "mid_stream")
                    raise
            finally:
                await reply.aclose()

    async def _joined(
        self, body: Body, parts: Sequence[AnswerPart], calls: Sequence[RoutedCall], headers: dict[str, str]
    ) -> AsyncGenerator[bytes, None]:
        """Several calls' streams as one."""
        with self._under_way(len(calls)):
            joiner = Joiner()
            streams = [self._events(call, headers) for call in calls]
            async with contextlib.aclosing(interleave(streams)) as merged:
                async for number, data in merged:
                    events = b"".join(self._rejoined(joiner, parts[number], data))
                    if events:
                        yield events
            if body.include_usage:
                yield _usage_event(joiner)
            yield sse.DONE

    def _rejoined(self, joiner: Joiner, part: AnswerPart, data: bytes) -> Iterator[bytes]:
        for payload in sse.payloads(data):
            if payload == b"[DONE]":
                continue
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
                event = b"" if merged is None else sse.event(merged)
            except _ODD as error:
                raise _odd_answer(error) from None
            yield event

    def _note(self, headers: dict[str, str], reply: Reply) -> None:
        """What the client is told besides the answer: what the API knows of D's headers, and who served."""
        for name, value in reply.headers:
            if name.lower() in _TO_CLIENTS or name.lower().startswith(_TO_CLIENTS_BEGIN):
                headers.setdefault(name.decode("latin-1"), value.decode("latin-1"))
        if self._settings.show_pair:
            known, pair = headers.get(PAIR_HEADER), str(reply.route)
            headers[PAIR_HEADER] = pair if known is None else f"{known},{pair}"

    @contextlib.contextmanager
    def _under_way(self, calls: int) -> Iterator[None]:
        """Let a request's calls in if there is room, and count how it ended. None: the part of a request."""
        stats = self._stats
        if not calls:
            yield
            return
        outcome, status = "broken", 500
        try:
            if stats.in_flight + calls > self._settings.in_flight_max:
                raise full(f"{stats.in_flight} requests are under way, at most {self._settings.in_flight_max}")
            stats.in_flight += calls
            try:
                yield
            finally:
                stats.in_flight -= calls
            outcome, status = "ok", 200
        except ApiError as error:
            outcome, status = error.code or str(error.status), error.status
            raise
        except (asyncio.CancelledError, GeneratorExit, ConnectionError):
            outcome, status = "client_gone", 0
            raise
        finally:
            stats.ended(outcome, status)


def _cost(data: bytes, copies: int) -> int:
    """What a body takes while it is under way: itself and what it is parsed to, and what each leg is sent."""
    containers = min(data.count(b"[") + data.count(b"{"), shapes.CONTAINERS_MAX)
    return BODY_COPIES * copies * len(data) + CONTAINER_BYTES * containers


def _check_steering(fields: Mapping[str, Any]) -> None:
    """Refuse what a worker would read as the router's word on where KV comes from."""
    if fields.get("ec_transfer_params") is not None:
        raise bad_field("ec_transfer_params", "this router hands no encoder caches over; leave it out")
    more = fields.get("vllm_xargs")  # vLLM copies these to where the parameters go
    if isinstance(more, dict) and FIELD in more:
        raise bad_field(f"vllm_xargs.{FIELD}", "the router sets this; leave it out")
    name = fields.get("request_id")  # the id of a response, and of others where no header names one
    if isinstance(name, str) and _holds_addresses(name):
        raise bad_field("request_id", "holds addresses of workers, which the router sets; choose another")


def _holds_addresses(name: str) -> bool:
    """Whether a worker might read addresses from this id; those of D alone keep the client's."""
    try:
        return request_ids.parse(name) is not None
    except request_ids.RequestIdError:
        return True


def _usage_event(joiner: Joiner) -> bytes:
    try:
        return sse.event(joiner.usage_chunk())
    except _ODD as error:
        raise _odd_answer(error) from None


def _odd_answer(error: Exception) -> ApiError:
    said = f"a worker answered something that cannot be joined with other answers ({type(error).__name__})"
    return ApiError(502, said, type="worker_error", code="bad_answer")


def passed(headers: Sequence[Header], but: frozenset[bytes]) -> list[Header]:
    """Those that go on: all but some, and but those that `Connection` names as its own."""
    found = [header for header in headers if header[0].lower() not in but]
    if len(found) == len(headers):
        return found
    for name, value in headers:
        if name.lower() == b"connection" and value.lower() not in (b"keep-alive", b"close"):
            named = {word.strip().lower() for word in value.split(b",")}
            found = [header for header in found if header[0].lower() not in named]
    return found
