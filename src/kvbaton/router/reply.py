"""D's answer from its first byte on, and what must end with it.

Law: whoever has a reply closes it, and that ends all that the request still holds: its load, both legs, its record.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvbaton.api.gather import cancel
from kvbaton.router.attempt import Route
from kvbaton.router.http.http_client import Header
from kvbaton.router.router_flights import OK, Trip
from kvbaton.router.worker_calls import Answer, EventStream
from kvbaton.router.workers.worker_load import Load

if TYPE_CHECKING:
    from kvbaton.router.request_flow import Flow


class Reply:
    """D's answer from its first byte on. Whoever has it calls `aclose`."""

    def __init__(
        self,
        flow: Flow,
        route: Route,
        decoding: Answer | EventStream,
        load: Load,
        trip: Trip,
        source: asyncio.Task[Any] | None = None,
        unused: Callable[[], None] = lambda: None,
        prefilled: Sequence[float] = (),
    ) -> None:
        self.route = route
        self.handoff = trip.handoff
        self._prefilled = prefilled  # when P was asked, and when it had answered
        self._flow = flow
        self._decoding = decoding
        self._load = load
        self._trip = trip
        self._source = source  # P's leg, where it may outlast D's first byte
        self._unused = unused  # gives its ticket back

    @property
    def headers(self) -> Sequence[Header]:
        return self._decoding.headers

    @property
    def mode(self) -> str:
        return "alone" if self.route.prefill is None else str(self.route.mode)

    def prefill_since(self, begun: float) -> tuple[float, float] | None:
        """How long after `begun` P was asked and had answered, infinite if it has not yet; None without P."""
        times = [at - begun for at in self._prefilled] + [math.inf]
        return (times[0], times[1]) if self._prefilled else None

    @property
    def body(self) -> bytes:
        """A whole answer."""
        assert isinstance(self._decoding, Answer), "a stream has no body"
        return self._decoding.data

    def events(self) -> AsyncGenerator[bytes, None]:
        assert isinstance(self._decoding, EventStream), "a whole answer has no events"
        return self._decoding.events()

    async def aclose(self) -> None:
        self._load.give()
        ended = True
        if isinstance(self._decoding, EventStream):
            ended = self._decoding.ended
            if not ended:
                self._trip.broke(self._decoding.fault or asyncio.CancelledError())
            self._flow.streamed(self.route.decode, self._decoding)
            self._decoding.close()
        self._trip.over(OK)
        if self._source is None:
            return
        if ended or self._source.done():
            self._flow.settle(self._source, self._unused)
        else:
            try:
                await cancel([self._source])
            finally:
                self._unused()
