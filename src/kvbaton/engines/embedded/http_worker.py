"""One worker's HTTP server: OpenAI's and Anthropic's endpoints over any backend that turns a prompt into tokens.

Law: closing the iterator that `TokenBackend.generate` gave is the one way to abort, and it happens for every end that
the client or the router brings about. A refusal before the first token is an HTTP status, one after it an event. A P
that leased KV for a request that is refused is told (`disown`), so that it keeps nothing in vain.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import msgspec

from kvbaton import __version__
from kvbaton.api import answers, anthropic_shape, responses, sse
from kvbaton.api.answers import AnswerShape, Token
from kvbaton.api.anthropic_shape import MessageShape
from kvbaton.api.api_errors import RETRY_AFTER_S, ApiError
from kvbaton.api.bodies import Body, BodyKind, parse
from kvbaton.api.gather import all_of, interleave
from kvbaton.api.http.http_types import Answer, Events, Request, json_answer, metrics_answer
from kvbaton.api.http.path_site import PathSite, reads, takes_body
from kvbaton.api.merge import Joiner, join
from kvbaton.api.params import FIELD, ForeignLookup, TransferParams, tickets_in, together
from kvbaton.api.responses import ResponseShape
from kvbaton.engines.embedded.server_plan import (
    EventShape,
    GenerateRequest,
    ModelCard,
    PlannedJob,
    counted,
    detokenized,
    plan,
    tokenized,
)
from kvbaton.observe.metrics.exposition import Family
from kvbaton.observe.metrics.handoff_metrics import HandoffMetrics
from kvbaton.observe.metrics.process_metrics import render_worker
from kvbaton.protocol.errors import MEANING, Blame, Reason


class StopFilter:
    """Cuts one answer's text."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.met = ""

    def feed(self, text: str) -> tuple[str, bool]:
        """What may be told now, and whether a stop text was met (then all that follows is to be dropped)."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            at, self.met = min(found)
            self._held = ""
            return text[:at], True
        keep = self._open_end(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def rest(self) -> str:
        """What was held back, when the answer has ended otherwise."""
        held, self._held = self._held, ""
        return held

    def _open_end(self, text: str) -> int:
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


__all__ = [
    "Finished",
    "GenerateRequest",
    "ModelCard",
    "RefusedError",
    "Token",
    "TokenBackend",
    "TransferParams",
    "worker_app",
]  # fmt: skip

BODY_BYTES_MAX = 4 << 20
_TURNED_AWAY = {429: Reason.BUSY, 503: Reason.DRAINING}
"""By status, what P is told; all else is the request's own fault."""
_USAGE = {AnswerShape: answers.usage, ResponseShape: responses.usage, MessageShape: anthropic_shape.usage}
_decode_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_CALLERS_FAULT = frozenset(str(reason) for reason, (blame, _) in MEANING.items() if blame is Blame.CALLER)


class Finished(msgspec.Struct, frozen=True):
    """The last item of a generator."""

    reason: Literal["stop", "length"]
    cached_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None


Refused = Literal["invalid", "full", "stopping", "handoff", "broken"]
_STATUS: Mapping[Refused, tuple[int, str, int | None]] = {
    "invalid": (400, "invalid_request_error", None),  # the caller must change the request
    "full": (429, "overloaded_error", RETRY_AFTER_S),
    "stopping": (503, "service_unavailable_error", RETRY_AFTER_S),
    "handoff": (500, "handoff_failed", None),
    "broken": (500, "internal_error", None),
}


class RefusedError(Exception):
    """Raised by a backend instead of an answer. `code` is a `Reason` where `kind` is "handoff"."""

    def __init__(self, kind: Refused, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.kind: Refused = kind
        self.code = code
        self.param = param


class TokenBackend(Protocol):
    """An engine, seen from the event loop. No method blocks."""

    def models(self) -> Sequence[ModelCard]:
        """The models it serves; the first is the default."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[Token | Finished, None]:
        """Tokens as they are made, then one `Finished`; or `RefusedError`. Closing it aborts the request."""

    def ready(self) -> bool:
        """Whether requests are accepted now."""

    def stats(self) -> Mapping[str, Any]:
        """Counters (`*_total`) and gauges, flat or one level deep."""


Disown = Callable[[str, Reason], None]


def worker_app(
    backend: TokenBackend,
    body_bytes_max: int = BODY_BYTES_MAX,
    lookup: ForeignLookup | None = None,
    handoffs: HandoffMetrics | None = None,
    disown: Disown = lambda ticket, reason: None,
    times: Callable[[], Sequence[Family]] = tuple,
) -> PathSite:
    """The application that serves `backend`; listen with `kvbaton.api.http.http_server.serving`.

    With a `lookup` it also understands routers that know nothing of tickets; `handoffs` appear among its metrics.
    `disown` gets the tickets of refused requests; it must not block. `times` are further metrics.
    """
    return _Server(backend, body_bytes_max, lookup, handoffs, disown, times).site


class _Server:
    def __init__(
        self,
        backend: TokenBackend,
        body_bytes_max: int,
        lookup: ForeignLookup | None,
        handoffs: HandoffMetrics | None,
        disown: Disown,
        times: Callable[[], Sequence[Family]],
    ) -> None:
        self._backend = backend
        self._lookup = lookup
        self._handoffs = handoffs
        self._disown = disown
        self._times = times
        self._created_unix_s = int(time.time())
        routes = {
            **{kind.value: takes_body(partial(self._answer, kind)) for kind in BodyKind},
            "/v1/messages/count_tokens": takes_body(self._count_tokens),
            "/tokenize": takes_body(self._tokenize),
            "/detokenize": takes_body(self._detokenize),
            "/v1/models": reads(self._models),
            "/version": reads(self._version),
            "/health": reads(self._health),
            "/ping": {"GET": self._health, "POST": self._health},
            "/metrics": reads(self._metrics),
            "/stats": reads(self._stats),
        }
        self.site = PathSite(routes, body_bytes_max)

    async def _count_tokens(self, request: Request) -> Answer:
        return json_answer(counted(request.body, self._backend.models()))

    async def _tokenize(self, request: Request) -> Answer:
        return json_answer(tokenized(request.body, self._backend.models()))

    async def _detokenize(self, request: Request) -> Answer:
        return json_answer(detokenized(request.body))

    async def _version(self, _: Request) -> Answer:
        return json_answer({"version": __version__})

    async def _models(self, _: Request) -> Answer:
        cards = [
            {
                "id": each.id,
                "object": "model",
                "created": self._created_unix_s,
                "owned_by": "kvbaton",
                "max_model_len": each.context_tokens_max,
            }
            for each in self._backend.models()
        ]
        return json_answer({"object": "list", "data": cards})

    async def _health(self, _: Request) -> Answer:
        ready = self._backend.ready()
        return json_answer({"status": "ok" if ready else "unavailable"}, 200 if ready else 503)

    async def _metrics(self, request: Request) -> Answer:
        figures, times = self._figures(), self._times()
        return metrics_answer(request, lambda openmetrics: render_worker(figures, self._handoffs, openmetrics, times))

    async def _stats(self, _: Request) -> Answer:
        return json_answer(self._figures())

    def _figures(self) -> Mapping[str, Any]:
        return {**self._backend.stats(), "http_malformed_total": self.site.malformed}

    async def _answer(self, kind: BodyKind, request: Request) -> Answer | Events:
        """OpenAI's endpoints, and Anthropic's."""
        try:
            return await self._answered(request, kind)
        except ApiError as error:
            self._refused(request.body, error)
            raise

    def _refused(self, data: bytes, error: ApiError) -> None:
        for ticket in _tickets(data):
            self._disown(ticket, _TURNED_AWAY.get(error.status, Reason.BAD_MESSAGE))

    async def _answered(self, request: Request, kind: BodyKind) -> Answer | Events:
        body = parse(kind, request.body)
        jobs = plan(body, request.id, self._backend.models(), self._lookup)
        if body.stream and isinstance(shape := jobs[0].shape, EventShape):
            return Events(self._unless_refused(request, self._typed_events(jobs[0], shape)), tell=shape.failed)
        if body.stream:
            return Events(self._unless_refused(request, self._events(body, jobs)))
        whole = await all_of([self._whole(job) for job in jobs])
        answer = join([job.part for job in jobs], whole)
        if len(jobs) > 1 and (params := together([each.get(FIELD) for each in whole])) is not None:
            answer[FIELD] = params
        return json_answer(answer)

    async def _unless_refused(
        self, request: Request, events: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """The same events; what fails before the first one is a refusal."""
        is_answered = False
        try:
            async with contextlib.aclosing(events):
                async for event in events:
                    is_answered = True
                    yield event
        except ApiError as error:
            if not is_answered:
                self._refused(request.body, error)
            raise

    async def _events(self, body: Body, jobs: Sequence[PlannedJob]) -> AsyncGenerator[bytes, None]:
        joiner = Joiner()
        async with contextlib.aclosing(interleave([self._chunks(job) for job in jobs])) as chunks:
            async for number, chunk in chunks:
                merged = joiner.chunk(jobs[number].part, chunk)
                if merged is not None:
                    yield sse.event({**merged, FIELD: chunk[FIELD]} if FIELD in chunk else merged)
        if body.include_usage:
            yield sse.event(joiner.usage_chunk())
        yield sse.DONE

    async def _chunks(self, job: PlannedJob) -> AsyncGenerator[dict[str, Any], None]:
        shape = job.shape
        assert isinstance(shape, AnswerShape), "the others are not told in chunks"
        opening = shape.opening()
        count = 0
        async with contextlib.aclosing(self._told(job)) as told:
            async for item in told:
                if opening is not None:
                    yield opening
                    opening = None
                if isinstance(item, Token):
                    count += _count(item)
                    yield shape.token(item)
                else:
                    rest, finished = item
                    params = finished.kv_transfer_params
                    yield shape.ending(rest, finished.reason) | ({} if params is None else {FIELD: dict(params)})
                    yield shape.usage_chunk(_usage(job, count, finished))

    async def _typed_events(self, job: PlannedJob, shape: EventShape) -> AsyncGenerator[bytes, None]:
        events = shape.opening()  # told with the first token, so that a refusal before it is still a status
        count = 0
        async with contextlib.aclosing(self._told(job)) as told:
            async for item in told:
                if isinstance(item, Token):
                    count += _count(item)
                    events += shape.token(item)
                else:
                    rest, finished = item
                    events += shape.ending(rest, finished.reason, _usage(job, count, finished))
                if events:
                    yield b"".join(map(sse.typed_event, events))
                    events = []

    async def _whole(self, job: PlannedJob) -> dict[str, Any]:
        tokens: list[Token] = []
        rest, finished = "", Finished("stop")
        async with contextlib.aclosing(self._told(job)) as told:
            async for item in told:
                if isinstance(item, Token):
                    tokens.append(item)
                else:
                    rest, finished = item
        text = "".join(token.text for token in tokens) + rest
        answer = job.shape.whole(tokens, text, finished.reason, _usage(job, sum(map(_count, tokens)), finished))
        if finished.kv_transfer_params is not None:
            answer[FIELD] = dict(finished.kv_transfer_params)
        return answer

    async def _told(self, job: PlannedJob) -> AsyncGenerator[Token | tuple[str, Finished], None]:
        """Tokens with the text that may be sent, then (text held back, how it ended)."""
        stops = StopFilter(job.stops)
        try:
            async with contextlib.aclosing(self._backend.generate(job.request)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        yield stops.rest(), event
                        return
                    text, met = stops.feed(event.text)
                    yield Token(text, event.logprobs, event.ids)
                    if met:
                        if isinstance(job.shape, MessageShape):
                            job.shape.met = stops.met
                        yield "", Finished("stop")
                        return
        except RefusedError as error:
            raise _api_error(error) from None
        raise _api_error(RefusedError("broken", "the engine ended the request without saying how"))


def _tickets(data: bytes) -> list[str]:
    """Those of a body that was refused, which need not be one."""
    try:
        return tickets_in(msgspec.json.decode(_decode_fields(data).get(FIELD, b"null")))
    except (msgspec.DecodeError, RecursionError):
        return []


def _api_error(error: RefusedError) -> ApiError:
    status, kind, retry_after_s = _STATUS[error.kind]
    if error.kind == "handoff" and error.code in _CALLERS_FAULT:
        status = 400
    return ApiError(status, str(error), type=kind, code=error.code, param=error.param, retry_after_s=retry_after_s)


def _count(token: Token) -> int:
    return len(token.ids) or 1


def _usage(job: PlannedJob, count: int, finished: Finished) -> dict[str, Any]:
    tell = _USAGE[type(job.shape)]
    return tell(len(job.request.prompt), count, finished.cached_tokens)
