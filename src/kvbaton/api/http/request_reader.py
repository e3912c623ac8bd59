"""Requests of one client's connection as they come in: the parser's state, and what waits to be answered.

Laws: nothing that a client sends grows without bound: headers, body, requests sent ahead. What is wrong is noted once,
as the fault that the connection ends with after it has answered what came before. Nothing here writes or waits.
"""

from __future__ import annotations

from collections import deque

import httptools

from kvbaton.api import screening
from kvbaton.api.api_errors import ApiError, too_large
from kvbaton.api.http.client_quotas import Tab
from kvbaton.api.http.http_types import (
    HEADERS_BYTES_MAX,
    HEADERS_MAX,
    REQUEST_ID,
    Header,
    Request,
    Site,
    path_of,
    query_of,
    too_many_headers,
)

AHEAD_MAX = 16
"""Requests that a client may send before the answer to an earlier one."""

Ready = tuple[Request, bool, bool, int]
"""A request that was read to its end, whether it keeps the connection, whether it is of HTTP/1.1, and its bytes."""


class Backlog:
    """What a client sent ahead of an answer: requests, and bytes that are not parsed before their turn."""

    __slots__ = ("answering_bytes", "bytes", "near", "peer", "ready", "tab", "unparsed", "unparsed_bytes")

    def __init__(self, tab: Tab, peer: str = "") -> None:
        self.tab = tab  # counts what was read and is not answered, and what was answered and not read
        self.peer = peer
        self.near = ""  # this end's own address
        self.ready: deque[Ready] = deque()
        self.bytes = 0  # of those that are ready
        self.answering_bytes = 0  # of the one that is being answered
        self.unparsed: list[bytes] = []
        self.unparsed_bytes = 0

    def put(self, ready: Ready) -> None:
        self.ready.append(ready)
        self.bytes += ready[3]

    def pop(self) -> Ready:
        found = self.ready.popleft()
        self.answering_bytes = found[3]
        self.bytes -= found[3]
        return found

    def keep(self, data: bytes) -> None:
        self.unparsed.append(data)
        self.unparsed_bytes += len(data)

    def take_unparsed(self) -> bytes:
        data = b"".join(self.unparsed)
        self.unparsed.clear()
        self.unparsed_bytes = 0
        return data

    def drop(self) -> None:
        """What was sent ahead will not be answered."""
        self.ready.clear()
        self.unparsed.clear()
        self.bytes = self.unparsed_bytes = 0


class RequestReader:
    """Parses what a connection is fed into its backlog. `close` it with the connection."""

    __slots__ = (
        "_backlog", "_body", "_head_bytes", "_headers", "_parser", "_site", "_url", "fault", "frame_bytes",
        "has_head", "is_over", "owes_continue", "reading_since",
    )  # fmt: skip

    def __init__(self, backlog: Backlog, site: Site) -> None:
        self.fault: ApiError | None = None  # what is wrong with the request that is being read
        self.reading_since: float | None = None
        self.is_over = False
        self._backlog = backlog
        self._site = site
        self._parser: httptools.HttpRequestParser | None = httptools.HttpRequestParser(self)  # until it is over
        self.reset()

    def reset(self) -> None:
        self.has_head = False
        self.owes_continue = False
        self.frame_bytes = 0  # of what is not body: the head, or what came since the last piece of the body
        self._url = b""
        self._headers: list[Header] = []
        self._body: bytes | bytearray = b""
        self._head_bytes = 0

    def close(self) -> None:
        self.is_over = True
        self._parser = None  # it and this refer to each other
        self.reset()

    @property
    def held_bytes(self) -> int:
        """Of the request that is being read."""
        return self.frame_bytes + self._head_bytes + len(self._body)

    def feed(self, data: bytes, now: float) -> None:
        """Parse; what is wrong with it is `fault` afterwards."""
        self.frame_bytes += len(data)
        if self.reading_since is None:
            self.reading_since = now
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"request: not HTTP/1.1 ({error})", code="bad_request"))
        if self.frame_bytes > HEADERS_BYTES_MAX:
            self._refuse(too_many_headers())

    def _parse(self, data: bytes) -> None:
        # A request to change the protocol (h2c, WebSocket) stops the parser for good. It is answered as if it had not
        # asked, which HTTP allows: a new parser reads it once more, without the header that asked.
        while self.fault is None and self._parser is not None:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                method, version = self._parser.get_method(), self._parser.get_http_version().encode()
                if method == b"CONNECT":
                    self._refuse(ApiError(405, "CONNECT: this is not a proxy", code="method_not_allowed"))
                    return
                head = [b"%b %b HTTP/%b\r\n" % (method, self._url, version)]
                head += [b"%b: %b\r\n" % header for header in self._headers if header[0] != b"upgrade"]
                data = b"".join((*head, b"\r\n", data[upgrade.args[0] :]))
                self._parser = httptools.HttpRequestParser(self)
                self.reset()

    def _refuse(self, fault: ApiError) -> None:
        if self.fault is None:
            given = next((value.decode("latin-1") for name, value in self._headers if name == REQUEST_ID), "")
            self.fault = fault.told_to(path_of(self._url), self._site.name_of(given))

    # --- the parser's callbacks

    def on_url(self, url: bytes) -> None:
        self._url += url
        if len(self._url) > HEADERS_BYTES_MAX:
            self._refuse(too_many_headers())

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.has_head:  # a trailer, which nobody here reads
            return
        self._headers.append((name.lower(), value))
        if len(self._headers) > HEADERS_MAX:
            self._refuse(too_many_headers())

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.has_head = True
        size = len(self._url)
        for name, value in self._headers:
            size += len(name) + len(value)
            if name == b"expect" and value.lower() == b"100-continue":
                self.owes_continue = self._parser.get_http_version() == "1.1"
            elif name == b"content-length" and int(value) > self._site.body_bytes_max:
                self._refuse(too_large(self._site.body_bytes_max))
        self._head_bytes = size
        if size > HEADERS_BYTES_MAX:
            self._refuse(too_many_headers())
        try:
            hosts = [value for name, value in self._headers if name == b"host"]
            screening.check_host(hosts, is_new=self._parser.get_http_version() == "1.1")
        except ApiError as error:
            self._refuse(error)

    def on_body(self, data: bytes) -> None:
        self.frame_bytes = 0
        if len(self._body) + len(data) > self._site.body_bytes_max:
            self._refuse(too_large(self._site.body_bytes_max))
        elif not self._body:
            self._body = data
        else:  # of many small pieces a list would be a hundred times as large
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data

    def on_message_complete(self) -> None:
        parser, backlog = self._parser, self._backlog
        assert parser is not None
        if parser.should_upgrade():  # `_parse` sees to it
            return
        if len(backlog.ready) > AHEAD_MAX:
            self._refuse(ApiError(400, f"request: more than {AHEAD_MAX} sent ahead", code="bad_request"))
        if self.fault is None:
            method = parser.get_method().decode("ascii")
            query = query_of(self._url) if b"?" in self._url else ""
            tab = backlog.tab.another()
            path, body, name_of = path_of(self._url), bytes(self._body), self._site.name_of
            request = Request(method, path, self._headers, body, query, backlog.peer, tab, backlog.near, name_of)
            size = self._head_bytes + len(self._body)
            backlog.put((request, parser.should_keep_alive(), parser.get_http_version() == "1.1", size))
        self.reading_since = None
        self.reset()
