"""Requests that come back to the router that made them, and routers in a row.

A worker may be another router, and a list may name this router as a worker of its own. Laws: whatever a router asks
bears its mark, and those of the routers before it; one that bears the receiver's own mark, or more than `HOPS_MAX`, is
refused. A connection to an address that this router listens on is closed before anything is sent.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.http_types import Header, Request

HEADER = "x-kvbaton-via"
NAME = HEADER.encode()
HOPS_MAX = 4
"""Routers that a request may have passed."""


class Hops:
    """Of one router, all its processes together."""

    def __init__(self, seed: bytes = b"") -> None:
        """Processes with the same seed are one router."""
        self._mark = blake2b(seed or secrets.token_bytes(16), digest_size=8, person=b"kvbaton hops").hexdigest()
        self.header: Header = (NAME, self._mark.encode())
        self._listening: list[tuple[str, int]] = []

    def check(self, request: Request) -> None:
        """`ApiError` (508) for a request that goes round."""
        if NAME not in request.names:
            return
        passed = [mark.strip() for value in request.values(HEADER) for mark in value.split(",")]
        if self._mark in passed:
            said = "this router asked itself: its own address is listed as a worker; see /workers"
        elif len(passed) >= HOPS_MAX:
            said = f"{HEADER}: {len(passed)} routers have passed this on, at most {HOPS_MAX} may; see their /workers"
        else:
            return
        raise ApiError(508, said, type="service_unavailable_error", code="request_loop")

    def listens(self, address: Sequence[Any]) -> None:
        """This router accepts connections at a socket's own address."""
        self._listening.append((str(address[0]), int(address[1])))

    def is_own(self, near: Sequence[Any], far: Sequence[Any]) -> bool:
        """Whether a connection with these two ends leads back here."""
        return any(
            far[1] == port and (far[0] == host or (_is_any(host) and _is_here(near[0], far[0])))
            for host, port in self._listening
        )


def _is_any(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_unspecified


def _is_here(near: str, far: str) -> bool:
    """Whether the far end is of this machine: one that it is reached from, or that only it can reach."""
    return near == far or ipaddress.ip_address(far.partition("%")[0]).is_loopback
