"""What every request for an engine passes before a worker is asked: the state of the router, its bounds, steering.

Laws: no client says where KV comes from, in whatever path, depth or spelling of the body. A request is counted while it
is under way, and once by how it ended.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from kvbaton.api import bodies, screening
from kvbaton.api.api_errors import ApiError, bad_field, full, unavailable
from kvbaton.api.http.http_types import Request
from kvbaton.api.params import FIELD
from kvbaton.api.request_ids import holds_addresses
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.router_stats import RouterStats

ENCODER_FIELD = "ec_transfer_params"
BODY_COPIES = 4
CONTAINER_BYTES = 256
"""What a list or an object takes besides the bytes that it came as."""
FREE_BYTES = 4 << 10
"""A body of no more is not counted again once it was read."""
LARGE_BYTES = 256 << 10
"""A body of more takes its turn."""
_STEERING = frozenset({FIELD, ENCODER_FIELD, "vllm_xargs", "request_id"})
_SCREENED = frozenset({b"content-encoding", b"transfer-encoding", b"origin", b"sec-fetch-site"})
_STEERING_IN_FORMS = re.compile(rb"_transfer_params|xargs|[;\s]name\s*\*", re.IGNORECASE)


def check_request(request: Request, settings: RouterSettings, draining: asyncio.Event) -> None:
    """Before its body is looked at."""
    if draining.is_set():
        raise unavailable("this router is stopping; ask another", "draining")
    if not _SCREENED.isdisjoint(request.names):
        screening.check(request.values, settings.origins_allowed)


def hold_body(request: Request, copies: int = 1) -> None:
    """Count what a body takes while it is under way: itself and what it is parsed to, and what each leg is sent."""
    data = request.body
    if len(data) <= FREE_BYTES:
        return
    containers = min(data.count(b"[") + data.count(b"{"), bodies.CONTAINERS_MAX)
    if not request.tab.hold(BODY_COPIES * copies * len(data) + CONTAINER_BYTES * containers):
        raise request.tab.room.full("request")


def check_steering(fields: Mapping[str, Any]) -> None:
    """Refuse what a worker would read as the router's word on where KV comes from, in the fields of a known body."""
    if _STEERING.isdisjoint(fields):
        return
    if fields.get(FIELD) is not None:
        raise bad_field(FIELD, "the router sets this; leave it out")
    if fields.get(ENCODER_FIELD) is not None:
        raise bad_field(ENCODER_FIELD, "this router hands no encoder caches over; leave it out")
    more = fields.get("vllm_xargs")  # vLLM copies these to where the parameters go
    for inner in (FIELD, ENCODER_FIELD):
        if isinstance(more, dict) and inner in more:
            raise bad_field(f"vllm_xargs.{inner}", "no client says where KV or encoder caches come from; leave it out")
    name = fields.get("request_id")  # the id of a response, and of others where no header names one
    if isinstance(name, str) and holds_addresses(name):
        raise bad_field("request_id", "holds addresses of workers, which the router sets; choose another")


def check_steering_anywhere(data: bytes, fields: Mapping[str, Any]) -> None:
    """The same for a body whose shape only the worker knows: no object within may have such a field."""
    check_steering(fields)
    if b"_transfer_params" not in data and b"\\u" not in data:
        return
    todo: list[Any] = [fields]
    while todo:
        each = todo.pop()
        if isinstance(each, dict):
            for name in (FIELD, ENCODER_FIELD):
                if each.get(name) is not None:
                    raise bad_field(name, "the router sets this, wherever it stands; leave it out")
            each = each.values()
        todo += [one for one in each if isinstance(one, dict | list)]


def check_form(data: bytes) -> None:
    """The same for a form, which nobody here parses: what could be the name of such a field is refused as it stands."""
    found = _STEERING_IN_FORMS.search(data)
    if found is not None:
        said = found[0].decode(errors="replace").strip()
        raise bad_field("body", f"a form with {said!r} in it is not passed on: it might steer where KV comes from")


class LargeBodies:
    """They are looked at and written one in a turn of the loop, whether of one client or of many. One per router."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def turn(self, size: int) -> None:
        if size > LARGE_BYTES:
            async with self._lock:
                await asyncio.sleep(0)


class UnderWay:
    """A context: a request's calls are let in if there is room, and how it ended is counted. None: a part of one."""

    __slots__ = ("_calls", "_most", "_stats")

    def __init__(self, stats: RouterStats, in_flight_max: int, calls: int = 1) -> None:
        self._stats = stats
        self._most = in_flight_max
        self._calls = calls

    def __enter__(self) -> None:
        if self._calls and not self._stats.enter(self._calls, self._most):
            error = full(f"{self._stats.under_way} requests are under way, at most {self._most}")
            self._stats.ended(error.code or str(error.status), error.status)
            raise error

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._calls:
            return
        self._stats.leave(self._calls)
        if error is None:
            self._stats.ended("ok", 200)
        elif isinstance(error, ApiError):
            self._stats.ended(error.code or str(error.status), error.status)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit | ConnectionError):
            self._stats.ended("client_gone", 0)
        else:
            self._stats.ended("broken", 500)
