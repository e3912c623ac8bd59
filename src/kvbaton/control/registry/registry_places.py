"""Where the registries of a cluster are: `tcp://a:7700,registry-b@tcp://b:7700`.

Law: one text, one meaning, wherever it is given: a worker's or vLLM's `registry`, `--registry` of each command.
"""

from __future__ import annotations

from kvbaton.control.addressing import check_endpoint
from kvbaton.protocol.ids import WorkerId, is_worker_id

REGISTRIES_MAX = 8
REGISTRY_NAME = "router"
"""In the key directory, where none is given: a router has a registry inside."""

RegistryPlace = tuple[WorkerId, str]
"""A registry's name in the key directory, and its endpoint."""


def registry_places(text: str, name: str = REGISTRY_NAME) -> tuple[RegistryPlace, ...]:
    """The registries of a list with commas; `name` is that of those without one. ValueError says what is wrong."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > REGISTRIES_MAX:
        raise ValueError(f"{len(parts)} registries, at most {REGISTRIES_MAX}")
    found = [_place(part, name) for part in parts]
    endpoints = [endpoint for _, endpoint in found]
    for endpoint in endpoints:
        if endpoints.count(endpoint) > 1:
            raise ValueError(f"{endpoint} is given twice; give each registry once")
    return tuple(found)


def _place(text: str, default: str) -> RegistryPlace:
    name, at, endpoint = text.rpartition("@")
    if at and not is_worker_id(name):
        raise ValueError(f"{name[:80]!r} is no name; expected NAME@tcp://host:port, or tcp://host:port")
    return WorkerId(name if at else default), check_endpoint(endpoint, names=True)
