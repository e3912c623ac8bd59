"""One exchange with a server, over a connection of its own: for commands that look at a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.api.http.http_client import Pool, origin, request_bytes
from kvbaton.api.http.http_types import WireError

CONNECT_S = 10.0
BODY_BYTES_MAX = 64 << 20
NO_HEADERS: Mapping[str, str] = {}


class WholeAnswer(msgspec.Struct, frozen=True):
    """A whole answer."""

    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


async def fetch(url: str, within_s: float, body: Any = None, headers: Mapping[str, str] = NO_HEADERS) -> WholeAnswer:
    """GET, or POST with `body` as JSON; `OSError` if no whole answer came in time."""
    place = origin(url)
    data = None if body is None else msgspec.json.encode(body)
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    sent = request_bytes("GET" if data is None else "POST", place, "", [*lines, (b"Connection", b"close")], data)
    with contextlib.closing(Pool(CONNECT_S)) as pool:
        try:
            exchange = await pool.exchange(place, sent)
            with contextlib.closing(exchange):
                exchange.expire_in(within_s)
                await exchange.head()
                return WholeAnswer(exchange.status, await exchange.whole(BODY_BYTES_MAX))
        except WireError as error:
            raise OSError(f"{url}: {type(error).__name__}: {error}") from None
