"""One HTTP call to one worker: the place where network errors become the router's.

Laws: whatever a worker does (refuse, die, hang, talk nonsense, or without end) leaves as one `LegError` that says
whether another worker may be asked; leaving a leg early closes its connection, which aborts the request in that worker.
What a worker may say is bounded by what it was asked, and counted as held for whoever asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

import msgspec

from kvbaton.api import sse
from kvbaton.api.api_errors import ApiError, bare, out_of_time
from kvbaton.api.http import http_client, http_types
from kvbaton.api.http.answer_reader import BYTES_FREE
from kvbaton.api.http.client_quotas import Tab
from kvbaton.api.http.http_client import Exchange, Origin, Pool
from kvbaton.api.http.http_types import Header
from kvbaton.protocol.ids import PeerId
from kvbaton.router.flow.hops import Hops
from kvbaton.router.flow.worker_leg import Leg, LegError, WorkerAnswer, crowded_out, refusal, status_in, told
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import OWN, ListedEngine

COMMENTS_BYTES_MAX = 64 << 10
"""Of a stream, before its first event."""
OPENING_BYTES_MAX = 2 * sse.EVENT_BYTES_MAX
"""Of events that only say that a response began, each of which repeats its instructions."""
OPENING_EVENTS_MAX = 64
"""Of those: two or three, and what keeps a connection alive while a long prompt is computed."""
RANK_HEADER = b"X-data-parallel-rank"
"""By which vLLM's server knows which of its ranks is meant; it refuses one that it does not have."""


class Legs:
    """Sends legs over pooled connections. Use within `async with Legs.open(...)`."""

    def __init__(self, pool: Pool, settings: RouterSettings, hops: Hops) -> None:
        self._pool = pool
        self._hop = hops.header
        self._settings = settings
        self._open: dict[PeerId, set[Exchange]] = {}
        self.token: Callable[[ListedEngine], Header | None] = lambda _: None  # shows a worker who asks
        self.key: Header | None = None  # what workers want from all who ask; those that announced themselves get none

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: RouterSettings, hops: Hops | None = None) -> AsyncIterator[Legs]:
        hops = hops or Hops()
        pool = Pool(settings.connect_s)
        pool.is_own = hops.is_own
        try:
            yield cls(pool, settings, hops)
        finally:
            pool.close()

    async def whole(self, leg: Leg, timeout_s: float | None = None) -> WorkerAnswer:
        """A 200 answer, read to its end."""
        try:
            exchange = await self._pool.exchange(*self._asked(leg))
            tab = leg.tab and leg.tab.another()
            self._opened(leg, exchange, tab, timeout_s)
            try:
                await exchange.head()
                status = exchange.status
                if status == 200 and _is_stream(exchange):  # else it would be read up to the bound of an answer
                    raise http_types.GarbageError("answered with events, and was asked for no stream")
                data = await exchange.whole(leg.bytes_max(status, self._settings.answer_bytes_max))
                if status != 200:
                    raise self._refused(leg, exchange, data)
                if leg.tab is not None and tab is not None and leg.side == "decode":
                    leg.tab.absorb(tab)  # until it has gone to the client
                return WorkerAnswer(data, exchange.headers)
            finally:
                self._close(leg, exchange)
        except http_types.WireError as error:
            raise told(leg, error, timeout_s) from None

    async def stream(self, leg: Leg, deadline: float, timeout_s: float | None = None) -> EventStream:
        """An open stream whose first event came within `timeout_s`, else `first_byte_s`. The caller closes it."""
        timeout_s = self._settings.first_byte_s if timeout_s is None else timeout_s
        try:
            exchange = await self._pool.exchange(*self._asked(leg))
            self._opened(leg, exchange, leg.tab and leg.tab.another(), timeout_s)
            stream = EventStream(self, msgspec.structs.replace(leg, body=None), exchange, deadline)
            try:
                await exchange.head()
                if exchange.status != 200:
                    data = await exchange.whole(leg.bytes_max(exchange.status, self._settings.answer_bytes_max))
                    raise self._refused(leg, exchange, data)
                await stream.begin()
            except BaseException:
                stream.close()
                raise
            return stream
        except http_types.WireError as error:
            raise told(leg, error, timeout_s) from None

    async def either(self, leg: Leg, deadline: float, timeout_s: float) -> WorkerAnswer | EventStream:
        """A whole answer or an open stream, as the worker answers; it has `timeout_s` to begin with it."""
        try:
            exchange = await self._pool.exchange(*self._asked(leg))
            tab = leg.tab and leg.tab.another()
            self._opened(leg, exchange, tab, timeout_s)
            stream = EventStream(self, msgspec.structs.replace(leg, body=None), exchange, deadline)
            try:
                await exchange.head()
                if exchange.status == 200 and _is_stream(exchange):
                    await stream.begin()
                    return stream
                exchange.expire_in(max(deadline - asyncio.get_running_loop().time(), 0))
                data = await exchange.whole(leg.bytes_max(exchange.status, self._settings.answer_bytes_max))
                if exchange.status != 200:
                    raise self._refused(leg, exchange, data)
                if leg.tab is not None and tab is not None:
                    leg.tab.absorb(tab)
            except BaseException:
                stream.close()
                raise
            stream.close()
            return WorkerAnswer(data, exchange.headers)
        except http_types.WireError as error:
            raise told(leg, error, timeout_s) from None

    async def get(
        self,
        worker: ListedEngine,
        path: str,
        headers: Sequence[Header] = (),
        tab: Tab | None = None,
        timeout_s: float | None = None,
    ) -> bytes:
        """What a worker says under `path`; for questions that cost nothing, within `probe_s` unless told otherwise."""
        leg = Leg("decode", worker, path, headers, None, tab)
        answer = await self.whole(leg, self._settings.probe_s if timeout_s is None else timeout_s)
        return answer.data

    def drop(self, peer: PeerId) -> int:
        """Break off everything under way with a worker that is no longer listed; returns how much that was."""
        found = list(self._open.get(peer, ()))
        for exchange in found:
            exchange.abort()
        return len(found)

    def _asked(self, leg: Leg) -> tuple[Origin, bytes]:
        """Where a leg goes, and as which bytes."""
        worker = leg.worker
        try:
            place = http_client.origin(worker.url)
        except ValueError as error:
            raise http_types.UnreachableError(str(error)) from None
        headers = (*leg.headers, self._hop)
        shown = self.token(worker)
        if shown is not None:
            headers = (*headers, shown)
        if worker.dp_size > 1:
            headers = (*headers, (RANK_HEADER, b"%d" % worker.dp_rank))
        if self.key is not None and worker.dialect == OWN:
            headers = (*headers, self.key)
        method = "GET" if leg.body is None else "POST"
        return place, http_client.request_bytes(method, place, leg.path, headers, leg.body, leg.content_type)

    def _opened(self, leg: Leg, exchange: Exchange, tab: Tab | None, timeout_s: float | None) -> None:
        """From here on `_close` is owed. `tab` counts what is held of the answer."""
        exchange.count_by(tab)
        if timeout_s is not None:
            exchange.expire_in(timeout_s)
        peer = leg.worker.peer
        held = self._open.get(peer)
        if held is None:
            held = self._open[peer] = set()
        held.add(exchange)

    def _refused(self, leg: Leg, exchange: Exchange, data: bytes) -> LegError:
        if exchange.status == 401 and self.key is not None:  # no client's fault: its key goes no further than this
            return leg.failed(502, "does not take the key of --worker-api-key-file", "worker_failed", lost=True)
        return refusal(leg, exchange.status, data, http_client.header(exchange.headers, b"retry-after"))

    def _close(self, leg: Leg, exchange: Exchange) -> None:
        peer = leg.worker.peer
        held = self._open.get(peer)
        if held is not None:
            held.discard(exchange)
            if not held:
                del self._open[peer]
        exchange.close()


def _is_stream(exchange: Exchange) -> bool:
    kind = http_client.header(exchange.headers, b"content-type") or ""
    return kind.partition(";")[0].strip().lower() == sse.CONTENT_TYPE


@dataclasses.dataclass(slots=True)
class _Patience:
    """With a D that tells nothing."""

    seconds: float
    put_off: Callable[[], float]
    left_s: float


class EventStream:
    """D's events after the first has come. Ends as its kind of stream ends, or with an `ApiError` that says why not."""

    __slots__ = (
        "_deadline", "_exchange", "_first", "_is_left", "_leg", "_legs", "_patience", "_relay", "_tab", "broke",
        "ended", "fault", "headers", "watch",
    )  # fmt: skip

    def __init__(self, legs: Legs, leg: Leg, exchange: Exchange, deadline: float) -> None:
        self.headers: Sequence[Header] = ()
        self.ended = False
        self.broke = False  # by the worker's fault
        self.fault: ApiError | None = None  # what the client was told instead of the rest
        self._legs = legs
        self._leg = leg
        self._exchange: Exchange | None = exchange
        self._deadline = deadline
        self._relay = sse.Relay()
        self._tab = leg.tab and leg.tab.another()
        self._first = b""
        self._is_left = False
        self._patience: _Patience | None = None
        self.watch: Callable[[bytes], bytes] | None = None  # sees events, and says what of them is the client's

    async def begin(self) -> None:
        """Wait for the first event; one that tells an error is a refusal like any other."""
        assert self._exchange is not None
        self.headers = self._exchange.headers
        opening: list[bytes] = []
        size = comments = events = 0
        while True:
            data = await self._exchange.read()
            if not data:
                raise self._leg.failed(502, "ended its stream before the first event", "bad_answer")
            fresh = self._feed(data, size)
            opening.append(fresh)
            if fresh and not sse.only_opens(fresh, OPENING_EVENTS_MAX):
                break
            size += len(fresh)
            found = fresh.count(b"data:")
            events += found
            comments += 0 if found else len(fresh)
            if comments > COMMENTS_BYTES_MAX or size > OPENING_BYTES_MAX or events > OPENING_EVENTS_MAX:
                said = f"sent {size} bytes and {events} events of its stream before the first of its answer"
                raise self._leg.failed(502, said, "bad_answer")
        self._first = b"".join(opening)
        first = sse.first_error(fresh)
        if first:
            raise refusal(self._leg, status_in(first), first, None)
        self._exchange.expire_in(self._deadline - asyncio.get_running_loop().time())

    async def more(self) -> bytes:
        """Bytes of whole events, as they come; b"" at the end."""
        assert self._exchange is not None
        first, self._first = self._first, b""
        if first and (shown := self._shown(first)):
            return shown
        while True:
            try:
                exchange, patience = self._exchange, self._patience
                if patience is None:
                    data = await exchange.read()
                else:
                    now = asyncio.get_running_loop().time
                    begun = now()
                    exchange.wait_until(min(begun + patience.left_s, self._deadline), patience.put_off)
                    data = await exchange.read()
                    exchange.wait_until(self._deadline)  # a client that reads slowly is no silence of D's
                    waited = sse.only_comments(data)
                    patience.left_s = max(patience.left_s - now() + begun, 0.0) if waited else patience.seconds
                whole = self._feed(data)
            except http_types.WireError as error:
                bare(error)
                if isinstance(error, http_types.LateError):
                    if asyncio.get_running_loop().time() < self._deadline:
                        raise self._broke("silent while it owed an event", "worker_timeout") from None
                    raise self._failed(out_of_time("the request's deadline passed in mid-stream")) from None
                raise self._broke(str(error)) from None
            except LegError as error:
                raise self._failed(error.fault) from None
            if whole and (shown := self._shown(whole)):
                return shown
            if not data:
                break
        if not self._relay.ended:
            raise self._broke("its stream is incomplete")
        self.ended = True
        return b""

    async def events(self) -> AsyncGenerator[bytes, None]:
        """The same, to be iterated over."""
        while data := await self.more():
            yield data

    def expect_within(self, seconds: float, put_off: Callable[[], float]) -> None:
        """Break where D tells nothing for so long while it is listened to; as `Exchange.wait_until`.

        A comment is nothing: what keeps a connection open may come from a front whose engine stands still.
        """
        self._patience = _Patience(seconds, put_off, seconds)

    def break_off(self) -> None:
        """Whoever listens hears that it broke, by no fault of D's."""
        self._is_left = True
        if self._exchange is not None:
            self._exchange.abort()

    def gave_up(self) -> None:
        """D has said that it goes no further: no end of its answer."""
        self.ended, self.broke = False, True
        self.fault = self._leg.failed(502, "gave up in mid-stream", "worker_died").fault

    def close(self) -> None:
        """Closes the connection too, unless the stream came to its end: that is what aborts D. Idempotent."""
        exchange, self._exchange = self._exchange, None
        if self._tab is not None:
            self._tab.close()
        self.fault = None  # it knows the frames that know this
        if exchange is not None:
            self._legs._close(self._leg, exchange)

    def _shown(self, events: bytes) -> bytes:
        return events if self.watch is None else self.watch(events)

    def _feed(self, data: bytes, more: int = 0) -> bytes:
        """`more`: bytes that wait for the first event."""
        try:
            whole = self._relay.feed(data)
        except sse.TooLongError as error:
            raise self._leg.failed(502, f"sent {error}", "bad_answer") from None
        held = self._relay.held + more
        tab, counted = self._tab, held if held > BYTES_FREE else 0
        if tab is not None and tab.bytes != counted and not tab.hold(counted):
            said = f"sent {held} bytes of its stream, for which the router has no room"
            raise crowded_out(self._leg, http_types.NoRoomError(said, held))
        return whole

    def _broke(self, what: str, code: str = "worker_died") -> ApiError:
        self.broke = not self._is_left
        return self._failed(self._leg.failed(502, f"disconnected in mid-stream ({what})", code).fault)

    def _failed(self, fault: ApiError) -> ApiError:
        self.fault = fault
        return fault


def close_late(target: asyncio.Task[WorkerAnswer | EventStream]) -> None:
    """A stream that opened when nobody wanted it any more."""
    if not target.cancelled() and target.exception() is None and isinstance(stream := target.result(), EventStream):
        stream.close()
