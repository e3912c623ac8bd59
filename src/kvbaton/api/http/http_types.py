"""HTTP requests and responses, as values and as the bytes of HTTP/1.1.

Law: no header of an answer can hold another: line breaks within one become blanks.

How an exchange with a worker can fail: each class says how far it got, and so who may be asked or blamed next.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any, Protocol

import msgspec

from kvbaton.api import sse
from kvbaton.api.access_log import ServedFacts
from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.client_quotas import ClientQuotas, Tab
from kvbaton.api.request_ids import clients_request_id
from kvbaton.observe.metrics import exposition

HEADERS_MAX = 128
HEADERS_BYTES_MAX = 64 << 10
"""Of a request, and of a worker's answer."""

REQUEST_ID = b"x-request-id"
UNREAD_STREAM_S = 600.0
"""A client that takes nothing of its stream for this long is cut off, where the stream has no deadline. Longer than a
router's deadline: until then it is the router's client that does not read, and no fault of anybody's."""

Header = tuple[bytes, bytes]

_encode = msgspec.json.Encoder().encode
_STATUS = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_JSON = b"Content-Type: application/json\r\n"


class Request:
    """One request, read to its end. Names of headers are in lower case.

    `query` is what followed the question mark, as it came; `peer` the address of whoever is connected, `near` the one
    that it is connected to, "" if unknown.
    `tab` counts what is held for it, the answer included, until that has gone. `id` names it to clients and workers.
    `status` is that of its answer, 0 until there is one; `error` the code that ended a stream; `served` is for the log.
    """

    __slots__ = (
        "body", "error", "headers", "id", "method", "names", "near", "path", "peer", "query", "served", "status", "tab",
    )  # fmt: skip

    def __init__(
        self,
        method: str,
        path: str,
        headers: list[Header],
        body: bytes,
        query: str = "",
        peer: str = "",
        tab: Tab | None = None,
        near: str = "",
        name_of: Callable[[str], str] = clients_request_id,
    ) -> None:
        self.method = method
        self.path = path
        self.headers = headers
        self.names = {name for name, _ in headers}
        self.body = body
        self.query = query
        self.peer = peer
        self.near = near
        self.tab = ClientQuotas().tab() if tab is None else tab
        self.id = name_of(self.header(REQUEST_ID) or "")
        self.status = 0
        self.error = ""
        self.served = ServedFacts()

    def header(self, name: bytes) -> str | None:
        if name not in self.names:
            return None
        for known, value in self.headers:
            if known == name:
                return value.decode("latin-1")
        return None

    def values(self, name: str) -> list[str]:
        """All that came under this name."""
        wanted = name.encode()
        if wanted not in self.names:
            return []
        return [value.decode("latin-1") for known, value in self.headers if known == wanted]


def address_of(end: Any) -> str:
    """Of one end of a connection, as its socket tells it; "" where that is no address."""
    return str(end[0]) if isinstance(end, tuple) and end else ""


def url_of(address: Sequence[Any], *, is_tls: bool = False) -> str:
    """Of a socket's own address."""
    host, port = address[:2]
    return f"{'https' if is_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


class Answer(msgspec.Struct, frozen=True):
    """A whole answer."""

    body: bytes
    status: int = 200
    headers: Mapping[str, str] = {}
    content_type: str = "application/json"


class Events(msgspec.Struct, frozen=True):
    """A stream of events. What fails before the first is an answer like any other, what fails later is told in it.

    `headers` may be filled until the first event has come. A client that has not read by the deadline is cut off;
    without one, a client that reads nothing for a long time.
    """

    source: AsyncGenerator[bytes, None]
    headers: Mapping[str, str] = {}
    deadline: float | None = None
    tell: Callable[[ApiError], bytes] = sse.error_event

    def unread_by(self, now: float) -> float:
        """When a client that has read nothing since `now` is cut off."""
        return now + UNREAD_STREAM_S if self.deadline is None else self.deadline


Handler = Callable[[Request], Awaitable[Answer | Events]]


class Site(Protocol):
    """The application behind an HTTP server."""

    @property
    def connections_max(self) -> int: ...
    @property
    def body_bytes_max(self) -> int: ...
    @property
    def body_s(self) -> float: ...
    @property
    def room(self) -> ClientQuotas: ...
    def name_of(self, given: str) -> str:
        """A request's id: the one that its client gave, where that may be used."""

    def admit(self, request: Request) -> None:
        """Raises `ApiError` if the client may not ask this."""

    def handler(self, method: str, path: str) -> Handler:
        """Who answers; `ApiError` if nobody does."""

    def answer_headers(self, request: Request) -> Mapping[str, str]:
        """What every answer to this has besides its own headers, errors too."""

    def listens(self, address: Sequence[Any]) -> None:
        """Connections come in at a socket's own address from now on."""

    def refresh(self) -> None:
        """Look for files that have changed; about once a second. Never raises, never waits."""

    def misread(self, fault: ApiError) -> None:
        """A connection ends with this fault: what it sent was no request, too much, or too late."""


def json_answer(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Answer:
    return Answer(_encode(value), status, headers or {})


def metrics_answer(request: Request, render: Callable[[bool], str]) -> Answer:
    """Metrics in the format that `request` asks for; `render` gets whether that is OpenMetrics."""
    openmetrics = exposition.wants_openmetrics(request.header(b"accept"))
    return Answer(render(openmetrics).encode(), content_type=exposition.content_type(openmetrics))


def error_answer(error: ApiError) -> Answer:
    return json_answer(error.body, error.status, error.headers)


NO_HEADERS: Mapping[str, str] = {}


def whole_bytes(
    answer: Answer, keeps: bool, is_new: bool, is_head: bool, more: Mapping[str, str] = NO_HEADERS
) -> bytes:
    """A whole answer as it goes out."""
    status = _STATUS.get(answer.status) or f"HTTP/1.1 {answer.status} Unknown\r\n".encode()
    is_json = answer.content_type == "application/json"
    parts = [status, _JSON if is_json else f"Content-Type: {answer.content_type}\r\n".encode()]
    parts.append(header_lines({**answer.headers, **more} if more else answer.headers))
    if not keeps:
        parts.append(b"Connection: close\r\n")
    elif not is_new:
        parts.append(b"Connection: keep-alive\r\n")
    parts.append(b"Content-Length: %d\r\n\r\n" % len(answer.body))
    if not is_head:
        parts.append(answer.body)
    return b"".join(parts)


def last_words(fault: ApiError) -> bytes:
    """The answer to what could not be read as a request, after which nothing on its connection can be."""
    fault.told_to("", clients_request_id(""))  # where what was read of it has no id
    return whole_bytes(error_answer(fault), False, True, False, {"X-Request-Id": fault.request_id})


def stream_head(headers: Mapping[str, str], keeps: bool, is_new: bool, more: Mapping[str, str] = NO_HEADERS) -> bytes:
    """All that stands before the first event."""
    parts = [_STATUS[200], b"Content-Type: text/event-stream\r\nCache-Control: no-cache\r\n"]
    parts.append(header_lines({**headers, **more} if more else headers))
    if is_new:
        parts.append(b"Transfer-Encoding: chunked\r\n")
    parts.append(b"\r\n" if keeps else b"Connection: close\r\n\r\n")
    return b"".join(parts)


def header_lines(headers: Mapping[str, str]) -> bytes:
    text = "".join([f"{name}: {value}\r\n" for name, value in headers.items()])
    if text.count("\n") != len(headers) or text.count("\r") != len(headers):  # a line break within one
        text = "".join([" ".join(f"{name}: {value}".splitlines()) + "\r\n" for name, value in headers.items()])
    return text.encode("latin-1", "replace")


def path_of(url: bytes) -> str:
    """The path of a target, which may name its host first; without what follows a question mark."""
    if url[:1] != b"/" and b"://" in url:
        url = b"/" + url.partition(b"://")[2].partition(b"?")[0].partition(b"/")[2]
    return url.partition(b"?")[0].decode("latin-1")


def query_of(url: bytes) -> str:
    """What follows the question mark of a target."""
    return url.partition(b"?")[2].partition(b"#")[0].decode("latin-1")


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data) if data else b""


def too_many_headers() -> ApiError:
    said = f"headers: more than {HEADERS_MAX}, or than {HEADERS_BYTES_MAX} bytes"
    return ApiError(431, said, param="headers", code="headers_too_large")


class WireError(Exception):
    """An exchange that did not come to its end."""


class UnreachableError(WireError):
    """There is no connection: nothing was sent."""


class StaleError(WireError):
    """A connection that had been idle was closed by the worker as the request went out: no fault of anybody."""


class BrokenError(WireError):
    """The worker closed the connection in the middle of an exchange."""


class LateError(WireError):
    """The time that was given to the exchange has passed."""


class GarbageError(WireError):
    """What came is not HTTP, or more of it than is allowed."""


class NoRoomError(WireError):
    """The router has no memory or no descriptor left for it: no fault of the worker's, unless its answer is huge."""

    def __init__(self, message: str, answered_bytes: int = 0) -> None:
        super().__init__(message)
        self.answered_bytes = answered_bytes
