"""Access control of operators' pages, and the page of flights.

Laws: a page that tells of single requests is shown to this machine, by any of its addresses, and to whoever shows an
operator's key, unless the operator says otherwise. For this machine's sake alone a name in `Host` other than localhost
is refused, since a web page elsewhere could have it resolve to this machine; a proxy that speaks for others is not this
machine, nor is a page of another origin in its browser. A key needs none of that: no browser sends it by itself.
Nothing here changes anything; every wait has a deadline.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from kvbaton.api import screening
from kvbaton.api.api_errors import ApiError, bad_field
from kvbaton.api.http.http_types import Answer, Events, Handler, Request, json_answer
from kvbaton.observe.dashboard.state import FILES, REASONS
from kvbaton.observe.flight.collector import LAST_MAX, Gathering
from kvbaton.observe.flight.flight_records import FlightSeat
from kvbaton.observe.flight.journey import FIND_CHARS_MIN, Journey
from kvbaton.observe.flight.worker_reports import share_of
from kvbaton.router.front_access import ApiKeys, FrontKeys
from kvbaton.router.router_settings import OperatorPages

LAST = 20
ID_CHARS_MAX = 256
ASK_S = 1.0
"""For which a worker's answer is waited for when its record is not here."""
LOOK_S = 0.02
FIELDS_MAX = 8
_PROXIED = (b"forwarded", b"x-forwarded-", b"x-real-ip", b"via", b"x-client-ip", b"true-client-ip", b"cf-connecting-")
"""How headers of proxies begin. One that adds none cannot be told from this machine: --operator-pages off then."""
_BLANK = frozenset({*FILES, REASONS})
"""The dashboard as it is packaged. It tells nothing of this cluster, and is what a browser asks for a key with."""
_NO_KEYS = FrontKeys(ApiKeys(), ApiKeys())

Show = Callable[[str, int, Sequence[str]], bool]
"""Has a worker (name, life) tell of these ids at once; False if it cannot be asked. Never blocks."""


def guarded(handler: Handler, pages: OperatorPages, keys: FrontKeys = _NO_KEYS) -> Handler:
    """The handler for those who may see it; 403 for all others."""

    async def answer(request: Request) -> Answer | Events:
        refusal = why_not(request, pages, keys)
        if refusal:
            raise ApiError(403, f"{request.path}: {refusal}", type="permission_error", code="operators_only")
        return await handler(request)

    return answer


def why_not(request: Request, pages: OperatorPages, keys: FrontKeys = _NO_KEYS) -> str:
    """Why this page is not shown to whoever asks, with what to do; "" if it is."""
    if pages is OperatorPages.OPEN:
        return ""
    if pages is OperatorPages.OFF:
        return "operator pages are off; start the router with --operator-pages auto or open"
    if keys.operators and (request.path in _BLANK or keys.is_operator(request)):
        return ""
    if not _is_here(request) or any(name.startswith(_PROXIED) for name, _ in request.headers):
        if keys.operators:
            return (
                "served to the router's own machine, elsewhere with an operator's key: send Authorization: Bearer KEY"
            )
        return (
            "served only to the router's own machine; open it there, or start the router with --operator-key-file FILE "
            "and show one of its keys, or with --operator-pages open"
        )
    hosts = [value for name, value in request.headers if name == b"host"]
    if len(hosts) != 1 or not _is_plain_host(hosts[0].decode("latin-1")):
        return (
            "Host: expected an address or localhost; use http://127.0.0.1, or an operator's key (--operator-key-file)"
        )
    host = [hosts[0].decode("latin-1").strip().lower()]
    if not all(screening.is_same(origin.strip().lower(), host) for origin in request.values("origin")):
        return "Origin: not for pages of other origins, whatever --allow-origin says; or --operator-pages open"
    return ""


_IN_PODMAN = os.path.exists("/run/.containerenv")
"""There, without root, a forwarder of the host speaks for every client from the container's own address."""


def _is_here(request: Request) -> bool:
    """Whether it comes from this machine: both ends of a connection of a host to itself have the same address, and
    the kernel drops what comes from elsewhere under an address of its own."""
    return _is_loopback(request.peer) or (not _IN_PODMAN and request.peer == request.near != "")


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return (mapped or found).is_loopback


def _is_plain_host(host: str) -> bool:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    if name.lower() == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class FlightsQuery(msgspec.Struct, frozen=True):
    """What was asked for."""

    last: int = LAST
    failed: bool = False
    find: str = ""

    @classmethod
    def parse(cls, query: str) -> FlightsQuery:
        """`last=N&failed=1&id=X`; `ApiError` names the field that is wrong."""
        try:
            fields = parse_qsl(query, keep_blank_values=True, max_num_fields=FIELDS_MAX)
        except ValueError:
            raise bad_field("query", f"more than {FIELDS_MAX} fields") from None
        last, failed, find = LAST, False, ""
        for name, value in fields:
            if name == "last":
                if not (value.isascii() and value.isdigit() and len(value) < 10 and 1 <= int(value) <= LAST_MAX):
                    raise bad_field("last", f"got {value[:40]!r}, expected 1 to {LAST_MAX}")
                last = int(value)
            elif name == "failed":
                if value not in ("0", "1", ""):
                    raise bad_field("failed", f"got {value[:40]!r}, expected 0 or 1")
                failed = value != "0"
            elif name == "id":
                if not value or len(value) > ID_CHARS_MAX:
                    raise bad_field("id", f"{len(value)} characters, expected 1 to {ID_CHARS_MAX}")
                find = value
            else:
                raise bad_field(name[:40], "unknown; there are last, failed and id")
        return cls(last, failed, find)


class FlightsPage:
    """`GET /flights`."""

    def __init__(self, gathering: Gathering, show: Show | None = None) -> None:
        self._gathering = gathering
        self._show = show
        self._turn = asyncio.Lock()  # viewers one after the other: each takes time from requests

    async def answer(self, request: Request) -> Answer | Events:
        wanted = FlightsQuery.parse(request.query)
        found = await self.journeys(wanted)
        told: dict[str, Any] = {"journeys": found}
        prompts = share_of(self._gathering.workers())
        if prompts.tokens or prompts.resets:
            told["prompts"] = prompts
        async with self._turn:
            return await asyncio.to_thread(json_answer, told, headers={"Cache-Control": "no-store"})

    async def journeys(self, wanted: FlightsQuery) -> list[Journey]:
        """What is known, and what workers can still tell of it: they report twice a second, so the newest may lack."""
        found = await self._look(wanted)
        if self._show is None or _is_whole(found) or not (found or wanted.find):
            return found
        asked = self._ask(wanted.find, found, self._show)
        loop = asyncio.get_running_loop()
        until = loop.time() + ASK_S
        # two reports: the first may have been on its way before the question came
        heard = 0
        while (left := {name: self._gathering.reports_of(name) - count for name, count in asked.items()}) and (
            min(left.values()) < 2
        ):
            if heard != (heard := sum(left.values())) and _is_whole(await self._look(wanted)):
                break
            if loop.time() >= until:
                break
            await asyncio.sleep(LOOK_S)
        return await self._look(wanted)

    async def _look(self, wanted: FlightsQuery) -> list[Journey]:
        """On a thread: of many journeys it takes tens of milliseconds, and requests must not wait for a viewer."""
        async with self._turn:
            return await asyncio.to_thread(self._gathering.journeys, wanted.last, wanted.failed, wanted.find)

    def _ask(self, text: str, found: Sequence[Journey], show: Show) -> Mapping[str, int]:
        """Ask whoever may know more; returns them with how often each has spoken before."""
        if text:
            self._gathering.ask_for(text)
        lacking = [journey.handoff for journey in found if journey.handoff and _unfinished(journey)]
        ids = list(dict.fromkeys([*([text] if text else []), *lacking]))
        here = dict(self._gathering.reporters())
        if found:
            names = {name for journey in found for name in _unfinished(journey)}
            here = {name: life for name, life in here.items() if name in names}
        elif len(text) < FIND_CHARS_MIN:
            return {}
        spoken = {name: self._gathering.reports_of(name) for name in here}
        return {name: spoken[name] for name, life in here.items() if show(name, life, ids)}


def _is_whole(found: Sequence[Journey]) -> bool:
    return bool(found) and not any(_unfinished(journey) for journey in found)


def _unfinished(journey: Journey) -> list[str]:
    """Workers whose record of it is not here, or does not tell how it ended."""
    lanes = (
        lane.worker for lane in journey.lanes if lane.seat is not FlightSeat.ROUTER and not lane.end and not lane.gone
    )
    return [*(missing.worker for missing in journey.missing if missing.worker), *lanes]
