"""How long requests take in an engine: queueing, first token, between tokens, in all; and how many tokens there are.

Law: written by the engine's thread, read by any; what is remembered of a request goes when the request ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from kvbaton.engines.embedded.engine_request import EngineRequest, Output, RequestStatus
from kvbaton.observe.metrics import metric_names
from kvbaton.observe.metrics.exposition import Family
from kvbaton.observe.metrics.handoff_metrics import Histograms
from kvbaton.protocol.ids import RequestId

_WELL = (RequestStatus.STOPPED, RequestStatus.LENGTH)


@dataclass(slots=True)
class _Timing:
    prompt_tokens: int
    came_at: float
    token_at: float | None = None
    is_queued: bool = True


class EngineTimes:
    """Give it what comes and what each step made of it."""

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
