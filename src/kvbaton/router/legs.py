"""One HTTP request to one worker: the place where aiohttp's errors become the router's.

Law: whatever a worker does (refuse, die, hang, talk nonsense) leaves as one `LegError` that says whether another worker
may be asked; leaving a leg early closes its connection, which aborts the request in that worker.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from typing import Any, Literal

import aiohttp
import msgspec

from kvbaton.api import sse
from kvbaton.api.errors import RETRY_AFTER_S, ApiError, out_of_time, read_error
from kvbaton.router.directory import Worker
from kvbaton.router.settings import RouterSettings

Side = Literal["prefill", "decode"]
KEEPALIVE_S = 15.0
_BUSY = (429, 503)
_HANDOFF_FAILED = "handoff_failed"


class LegError(Exception):
    """A worker did not do its part."""

    def __init__(self, side: Side, worker: Worker, fault: ApiError, *, final: bool = False, lost: bool = False) -> None:
        super().__init__(fault.message)
        self.side: Side = side
        self.worker = worker
        self.fault = fault  # what the client is told if nobody else is asked
        self.final = final  # the request itself is at fault: others would say the same
        self.lost = lost  # nothing was heard of the worker, so it is suspect

    @property
    def is_handoff(self) -> bool:
        """Whether D says that the handoff failed, for which P may be as much to blame."""
        return self.fault.type == _HANDOFF_FAILED


class Leg(msgspec.Struct, frozen=True):
    """One request to be sent."""

    side: Side
    worker: Worker
    path: str
    headers: Mapping[str, str]
    body: bytes | None

    def failed(self, status: int, what: str, code: str, *, lost: bool = False) -> LegError:
        message = f"{self.side} worker {self.worker.name} {what}"
        return LegError(self.side, self.worker, ApiError(status, message, type="worker_error", code=code), lost=lost)


class Legs:
    """Sends legs over pooled connections. Use within `async with Legs.open(...)`."""

    def __init__(self, session: aiohttp.ClientSession, settings: RouterSettings) -> None:
        self._session = session
        self._settings = settings

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, settings: RouterSettings) -> AsyncIterator[Legs]:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)  # in_flight_max is the bound
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_s)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, auto_decompress=True, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            yield cls(session, settings)

    async def whole(self, leg: Leg, timeout_s: float | None = None) -> bytes:
        """The body of a 200 answer."""
        with _translated(leg, timeout_s):
            async with asyncio.timeout(timeout_s), self._send(leg) as response:
                data = await self._read(leg, response)
                _check_status(leg, response, data)
                return data

    async def stream(self, leg: Leg, deadline: float) -> EventStream:
        """An open stream whose first event has arrived; the caller closes it."""
        timeout_s = self._settings.first_byte_s
        with _translated(leg, timeout_s):
            async with asyncio.timeout(timeout_s):
                response = await self._send(leg)
                try:
                    if response.status != 200:
                        _check_status(leg, response, await self._read(leg, response))
                    stream = EventStream(leg, response, deadline)
                    await stream.begin()
                except BaseException:
                    response.close()
                    raise
                return stream

    async def get(self, worker: Worker, path: str) -> bytes:
        """What a worker says under `path`; for questions that cost nothing."""
        return await self.whole(Leg("decode", worker, path, {}, None), self._settings.connect_s)

    def _send(self, leg: Leg) -> aiohttp.client._RequestContextManager:
        method = "GET" if leg.body is None else "POST"
        url = leg.worker.url + leg.path
        return self._session.request(method, url, data=leg.body, headers=leg.headers, allow_redirects=False)

    async def _read(self, leg: Leg, response: aiohttp.ClientResponse) -> bytes:
        pieces, size = [], 0
        async for piece in response.content.iter_any():
            size += len(piece)
            if size > self._settings.answer_bytes_max:
                raise leg.failed(502, f"answered more than {self._settings.answer_bytes_max} bytes", "bad_answer")
            pieces.append(piece)
        return b"".join(pieces)


@contextlib.contextmanager
def _translated(leg: Leg, timeout_s: float | None) -> Iterator[None]:
    try:
        yield
    except aiohttp.ServerTimeoutError:
        raise leg.failed(504, "cannot be reached in time", "worker_unreachable", lost=True) from None
    except TimeoutError:
        raise leg.failed(504, f"gave no answer within {timeout_s} s", "worker_timeout", lost=True) from None
    except aiohttp.ClientConnectorError as error:
        raise leg.failed(502, f"cannot be reached ({error.strerror})", "worker_unreachable", lost=True) from None
    except (aiohttp.ClientError, OSError) as error:
        what = f"went away before its answer was complete ({type(error).__name__})"
        raise leg.failed(502, what, "worker_died", lost=True) from None


class EventStream:
    """D's events after the first has come. Ends with `[DONE]` or with an `ApiError` that says why not."""

    def __init__(self, leg: Leg, response: aiohttp.ClientResponse, deadline: float) -> None:
        self._leg = leg
        self._response = response
        self._deadline = deadline
        self._relay = sse.Relay()
        self._first = b""
        self.ended = False

    async def begin(self) -> None:
        """Wait for the first event; one that tells an error is a refusal like any other."""
        while not self._first:
            data = await self._response.content.readany()
            if not data:
                raise self._leg.failed(502, "ended its stream before the first event", "bad_answer")
            self._first = self._feed(data)
        first = next(sse.payloads(self._first), b"")
        if first.startswith(b'{"error"'):
            raise _refusal(self._leg, _status_in(first), first, None)

    async def events(self) -> AsyncGenerator[bytes, None]:
        """Bytes of whole events, as they come."""
        yield self._first
        while True:
            try:
                async with asyncio.timeout_at(self._deadline):
                    data = await self._response.content.readany()
            except TimeoutError:
                raise out_of_time("the request's deadline passed in mid-stream") from None
            except (aiohttp.ClientError, OSError) as error:
                raise self._broke(type(error).__name__) from None
            if not data:
                break
            if whole := self._feed(data):
                yield whole
        if not self._relay.ended:
            raise self._broke("no [DONE]")
        self.ended = True

    def close(self) -> None:
        """Closes the connection too, unless the stream came to its end: that is what aborts D."""
        if self.ended:
            self._response.release()
        else:
            self._response.close()

    def _feed(self, data: bytes) -> bytes:
        try:
            return self._relay.feed(data)
        except sse.TooLongError as error:
            raise self._leg.failed(502, f"sent {error}", "bad_answer").fault from None

    def _broke(self, what: str) -> ApiError:
        return self._leg.failed(502, f"went away in mid-stream ({what})", "worker_died").fault


def _check_status(leg: Leg, response: aiohttp.ClientResponse, data: bytes) -> None:
    if response.status != 200:
        raise _refusal(leg, response.status, data, response.headers.get("Retry-After"))


def _refusal(leg: Leg, status: int, data: bytes, retry_after: str | None) -> LegError:
    """A worker's own error: the client's fault passes as it is, all else is told as the worker's."""
    fault = read_error(status, data)
    if 400 <= status < 500 and status not in (408, *_BUSY) and fault.type != _HANDOFF_FAILED:
        return LegError(leg.side, leg.worker, fault, final=True)
    busy = status in _BUSY
    if busy:
        fault.retry_after_s = int(retry_after) if retry_after and retry_after.isdigit() else RETRY_AFTER_S
    known = fault.type not in ("unknown_error", "")
    message = f"{leg.side} worker {leg.worker.name} answered {status}: {fault.message}"
    told = ApiError(
        status if busy else 502,
        message,
        type=fault.type if known else "worker_error",
        code=fault.code or "worker_failed",
        retry_after_s=fault.retry_after_s,
    )
    return LegError(leg.side, leg.worker, told)


def _status_in(payload: bytes) -> int:
    """The status that vLLM puts into the error event of a stream that it has begun with 200."""
    code = read_error(500, payload).code
    return int(code) if code is not None and code.isdigit() and 400 <= int(code) < 600 else 500


def decoded(leg: Leg, data: bytes) -> dict[str, Any]:
    """A worker's answer as an object."""
    try:
        answer = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        raise leg.failed(502, "answered something that is not JSON", "bad_answer") from None
    if not isinstance(answer, dict):
        raise leg.failed(502, f"answered a JSON {type(answer).__name__}, not an object", "bad_answer")
    return answer
