"""The engine's thread, seen from the event loop: requests in, tokens out, aborts by closing the iterator.

Laws: only the engine's thread touches the engine; the loop queues requests and is called back once per step. With
nothing to compute the thread sleeps until a request, or news at the doorway, wakes it. Every iterator ends: by
`Finished`, by `RefusedError`, or because the thread stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_request import (
    EngineRequest,
    FullError,
    Output,
    RejectedError,
    RequestStatus,
    Sampling,
)
from kvbaton.engines.embedded.http_worker import Finished, RefusedError, Token
from kvbaton.engines.embedded.server_plan import GenerateRequest, ModelCard
from kvbaton.node.doorway import Doorway
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import Family
from kvbaton.observe.metrics.handoff_metrics import Histograms
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.ids import RequestId
from kvbaton.protocol.wire.ticket import check_history

log = logging.getLogger(__name__)

SLEEP_S = 0.5
"""At most this long without a look around; news wake the thread at once."""
MODEL_NAME = "kvbaton-tiny"

Outcome = Output | RefusedError
_WELL = (RequestStatus.STOPPED, RequestStatus.LENGTH)


@dataclass(slots=True)
class _Timing:
    prompt_tokens: int
    came_at: float
    token_at: float | None = None
    is_queued: bool = True


class EngineTimes:
    """How long requests take: queueing, first token, between tokens, in all; and how many tokens there are.

    Law: written by the engine's thread, read by any; what is remembered of a request goes when the request ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._requests: dict[RequestId, _Timing] = {}
        self._queue = Histograms(metric_names.ENGINE_QUEUE_SECONDS)
        self._first = Histograms(metric_names.ENGINE_FIRST_TOKEN_SECONDS)
        self._between = Histograms(metric_names.ENGINE_INTER_TOKEN_SECONDS)
        self._whole = Histograms(metric_names.ENGINE_REQUEST_SECONDS)
        for each in (self._queue, self._first, self._between, self._whole):
            each.of(())  # on the page from the start
        self._prompt_tokens = 0
        self._output_tokens = 0

    def came(self, request: EngineRequest) -> None:
        self._requests[request.request_id] = _Timing(len(request.prompt), self._clock())

    def stepped(self, running: Iterable[RequestId], outputs: Iterable[Output]) -> None:
        """After a step: who has a place in it, and what came of it."""
        now = self._clock()
        with self._lock:
            for name in running:
                self._begun(name, now)
            for output in outputs:
                self._told(output, now)

    def families(self) -> list[Family]:
        with self._lock:
            tokens = [
                Family(metric_names.ENGINE_PROMPT_TOKENS, {(): self._prompt_tokens}),
                Family(metric_names.ENGINE_OUTPUT_TOKENS, {(): self._output_tokens}),
            ]
            return [*tokens, *(each.family() for each in (self._queue, self._first, self._between, self._whole))]

    def _begun(self, name: RequestId, now: float) -> None:
        timing = self._requests.get(name)
        if timing is not None and timing.is_queued:
            timing.is_queued = False
            self._queue.observe((), now - timing.came_at)
            self._prompt_tokens += timing.prompt_tokens

    def _told(self, output: Output, now: float) -> None:
        timing = self._requests.get(output.request_id)
        if timing is None:
            return
        self._begun(output.request_id, now)
        if output.token is not None:
            self._output_tokens += 1
            if timing.token_at is None:
                self._first.observe((), now - timing.came_at)
            else:
                self._between.observe((), now - timing.token_at)
            timing.token_at = now
        if output.status is not None:
            del self._requests[output.request_id]
            if output.status in _WELL:
                self._whole.observe((), now - timing.came_at)


class EngineThread:
    """Runs one engine."""

    def __init__(self, engine: Engine, doorway: Doorway | None = None) -> None:
        self.engine = engine
        self.faults = 0
        self.times = EngineTimes()
        self._doorway = doorway
        self._notes: deque[tuple[str, Any]] = deque()
        self._news = threading.Event()
        self._stopping = False
        self._ended: RefusedError | None = None  # why no request will be answered any more; the event loop's
        self.on_death: Callable[[], None] = lambda: None  # called on the event loop
        self._listeners: dict[RequestId, asyncio.Queue[Outcome]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="kvbaton-engine", daemon=True)
        if doorway is not None:
            doorway.wake_engine = self._news.set

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Whether the thread has ended within `timeout_s`: from then on the engine is the caller's."""
        self._stopping = True
        self._news.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def running(self) -> bool:
        return self._thread.is_alive() and not self._stopping

    # --- from the event loop

    def add(self, request: EngineRequest) -> asyncio.Queue[Outcome]:
        queue: asyncio.Queue[Outcome] = asyncio.Queue()
        self._listeners[request.request_id] = queue
        if self._ended is not None:
            queue.put_nowait(self._ended)
        self._note("add", request)
        return queue

    def forget(self, request: RequestId) -> None:
        """The client is gone: abort the request if it still exists."""
        self._listeners.pop(request, None)
        self._note("abort", request)

    def _note(self, kind: str, value: Any) -> None:
        self._notes.append((kind, value))
        self._news.set()

    def _tell(self, outcomes: Sequence[tuple[RequestId, Outcome]]) -> None:
        for request, outcome in outcomes:
            queue = self._listeners.get(request)
            if queue is not None:
                queue.put_nowait(outcome)

    def _end_all(self, why: RefusedError, died: bool) -> None:
        """All current and future listeners are told: on the event loop, so that none is missed."""
        self._ended = why
        for queue in self._listeners.values():
            queue.put_nowait(why)
        if died:
            self.on_death()

    # --- the engine's thread

    def _run(self) -> None:
        why, died = RefusedError("stopping", "this worker is stopping"), False
        try:
            while not self._stopping:
                self._news.clear()
                told = self._turn()
                if told:
                    self._on_loop(self._tell, told)
                elif self.engine.tokens_last_step == 0:
                    self._news.wait(SLEEP_S)
        except Exception:  # an engine that raises is dead: tell all listeners and stop serving
            self.faults += 1
            self._stopping = died = True
            why = RefusedError("broken", "the engine died")
            log.exception("[engine-died] the engine died")
        self._on_loop(self._end_all, why, died)

    def _on_loop(self, act: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed: no listener is left
            self._loop.call_soon_threadsafe(act, *arguments)

    def _turn(self) -> list[tuple[RequestId, Outcome]]:
        told: list[tuple[RequestId, Outcome]] = []
        while self._notes:
            kind, value = self._notes.popleft()
            if kind == "abort":
                self.engine.abort(value)
                continue
            try:
                self.engine.add_request(value)
                self.times.came(value)
            except RejectedError as error:
                refusal: Literal["full", "invalid"] = "full" if isinstance(error, FullError) else "invalid"
                told.append((value.request_id, RefusedError(refusal, str(error))))
        if self.engine.has_work():
            outputs = self.engine.step()
            self.times.stepped([each.request_id for each in self.engine.scheduler.running], outputs)
            told += [(output.request_id, output) for output in outputs]
        else:
            self.engine.tokens_last_step = 0
        return told


class EngineBackend:
    """Implements `server.Backend` over an engine thread."""

    def __init__(self, thread: EngineThread, doorway: Doorway | None, stats: Callable[[], Mapping[str, Any]]) -> None:
        self._thread = thread
        self._doorway = doorway
        self._stats = stats

    def models(self) -> Sequence[ModelCard]:
        return (ModelCard(MODEL_NAME, self._thread.engine.config.model.context_tokens_max),)

    def ready(self) -> bool:
        return self._thread.running

    def stats(self) -> Mapping[str, Any]:
        return self._stats()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Token | Finished, None]:
        if not self._thread.running:
            raise RefusedError("stopping", "this worker is stopping")
        self._check_ticket(request)
        self._check_history(request)
        is_source = request.handoff is not None and request.handoff.do_remote_decode
        begun = () if is_source else _begun(request)
        if begun and (reason := _over(request)) is not None:
            for token in begun:
                yield token
            yield Finished(reason)
            return
        asked = _engine_request(request, None if self._doorway is None else self._doorway.config.wall())
        queue = self._thread.add(asked)
        try:
            while True:
                outcome = await queue.get()
                if isinstance(outcome, RefusedError):
                    raise outcome
                if outcome.token is not None:
                    for token in begun:  # with the first news, so that a refusal comes before any text
                        yield token
                    begun = ()
                if outcome.token is not None and outcome.text:
                    yield Token(outcome.text, outcome.logprobs, (outcome.token,))
                if outcome.status is not None:
                    yield _finished(outcome)
                    return
        finally:
            self._thread.forget(asked.request_id)

    def _check_ticket(self, request: GenerateRequest) -> None:
        """A ticket that this cluster did not sign is the caller's fault, and refused at once. Late ones are policy."""
        params = request.handoff
        if params is None or params.ticket is None:
            return
        if self._doorway is None:
            raise RefusedError("handoff", "this worker supports no handoffs", str(Reason.NO_TRANSPORT))
        try:
            self._doorway.open_ticket(params.ticket)
        except ProtocolError as error:
            if error.reason is not Reason.TICKET_EXPIRED:
                raise RefusedError("handoff", str(error), str(error.reason), "kv_transfer_params.ticket") from None

    def _check_history(self, request: GenerateRequest) -> None:
        """Only a router says how an answer begins: what a client says of it is refused."""
        told = None if request.handoff is None else request.handoff.history
        if told is None:
            return
        if self._doorway is None:
            raise RefusedError("handoff", "this worker supports no handoffs", str(Reason.NO_TRANSPORT))
        config = self._doorway.config
        try:
            check_history(told.proof, told.tokens, config.me.worker, config.ticket_keys, config.wall())
        except ProtocolError as error:
            raise RefusedError("handoff", str(error), str(error.reason), "kv_transfer_params.history") from None


def _begun(request: GenerateRequest) -> list[Token]:
    """The answer's beginning, told anew; of log probabilities the place alone, for the router has what was told."""
    told = [token for token in request.history if token != tokenizer.EOS]
    if request.logprobs is None:
        return [Token(tokenizer.decode(told), ids=tuple(told))] if told else []
    return [Token(tokenizer.decode([token]), ((token, 0.0),), (token,)) for token in told]


def _over(request: GenerateRequest) -> Literal["stop", "length"] | None:
    """How an answer has ended of which all is in its history."""
    if request.history[-1] == tokenizer.EOS:
        return "stop"
    return "length" if len(request.history) >= request.max_tokens else None


def _engine_request(request: GenerateRequest, arrived_at: float | None) -> EngineRequest:
    sampling = Sampling(
        max_tokens=request.max_tokens,
        min_tokens=request.min_tokens,
        ignore_eos=request.ignore_eos,
        temperature=request.temperature,
        seed=request.seed,
        logprobs=request.logprobs,
    )
    name, handoff = RequestId(request.request_id), request.handoff
    prompt, history = request.prompt, request.history
    if handoff is not None and handoff.do_remote_decode:
        prompt, history = (*prompt, *history[:-1]), ()  # it is all prompt here, but what nobody has the KV of
    return EngineRequest(name, prompt, sampling, request.cache_salt, handoff, request.said, arrived_at, history)


def _finished(output: Output) -> Finished:
    if output.status is RequestStatus.ERROR:
        raise RefusedError("handoff", output.reason, output.reason.partition(":")[0])
    if output.status is RequestStatus.REFUSED:
        raise RefusedError("full", output.reason, output.reason.partition(":")[0])
    if output.status is RequestStatus.ABORTED:
        raise RefusedError("stopping", "the request was aborted")
    reason = "stop" if output.status is RequestStatus.STOPPED else "length"
    return Finished(reason, output.cached_tokens, output.handoff)  # type: ignore[arg-type]
