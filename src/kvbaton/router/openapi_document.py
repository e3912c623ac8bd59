"""`/openapi.json`: a worker's own description of its API, cut down to what the router answers; else one from the table.

Law: nothing that a worker says reaches the document but under a path of `route_table`; the size of it all is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kvbaton import __version__
from kvbaton.api import shapes
from kvbaton.router.route_table import BY_PATH, ServerRoute, Treatment

_NESTING_MAX = 64


class _Document(msgspec.Struct):
    openapi: str = "3.1.0"
    paths: dict[str, dict[str, msgspec.Raw]] = {}
    components: msgspec.Raw = msgspec.Raw(b"{}")


def document(worker: bytes, more: Iterable[str] = ()) -> dict[str, Any]:
    """`worker`: what one says, b"" if none does. `more`: paths that the router has besides those of a vLLM server."""
    told = _read(worker)
    paths = {
        route.path: _methods(route, told.paths.get(route.path, {})) for route in BY_PATH.values() if _is_here(route)
    }
    own = ServerRoute("", ("GET",), Treatment.ANSWERED, "the router's own, for operators")
    paths |= {path: _methods(own, {}) for path in more if path not in paths}
    info = {
        "title": "kvbaton router",
        "version": __version__,
        "description": "A vLLM server's API, answered by a cluster of prefill and decode workers.",
    }
    return {"openapi": told.openapi[:20], "info": info, "paths": paths, "components": told.components}


def _read(worker: bytes) -> _Document:
    if not worker or shapes.too_costly(worker, _NESTING_MAX):
        return _Document()
    try:
        worker.decode()  # fields that nobody reads go on as they came
        found = msgspec.json.decode(worker, type=_Document)
        msgspec.json.decode(bytes(found.components))  # it goes on as it came, so it must be JSON
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _Document()
    return found


def _is_here(route: ServerRoute) -> bool:
    return route.treatment is not Treatment.REFUSED


def _methods(route: ServerRoute, told: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    plain = {"summary": route.note, "responses": {"200": {"description": "OK"}}}
    return {name: told.get(name, plain) for name in map(str.lower, route.methods)}
