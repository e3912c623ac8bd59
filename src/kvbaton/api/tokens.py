"""Authenticates the router at a worker's HTTP port: by a token that only holders of the cluster's keys can derive.

Laws: a token is for one worker and is worth nothing elsewhere; it is made from the key that signs tickets, so it is
renewed with it, and one of any key that verifies is good. It travels in plain text: it keeps strangers out, not whoever
listens on the network (that takes TLS before the worker). What monitoring reads answers everybody: counters and gauges.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
from collections.abc import Callable, Sequence

from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.http_types import Request

HEADER = "X-Kvbaton-Token"
_HEADER = HEADER.lower().encode()
NOT_THE_ROUTER = "not_the_router"
OPEN_PATHS = frozenset({"/health", "/metrics", "/stats"})

Keys = Callable[[], Sequence[bytes]]


def token(key: bytes, worker: str) -> str:
    """What a router that holds `key` shows to `worker`."""
    made = hmac.new(key, b"kvbaton-http\0" + worker.encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(made[:24]).decode()


def is_good(shown: str, keys: Sequence[bytes], worker: str) -> bool:
    said = shown.encode(errors="replace")  # a header may hold any bytes
    return any(hmac.compare_digest(said, token(key, worker).encode()) for key in keys)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it; a name other than localhost may be anywhere."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def guard(worker: str, keys: Keys) -> Callable[[Request], None]:
    """Raises `ApiError` unless a token for `worker` is shown. `keys` are asked for at every request: they change."""

    def check(request: Request) -> None:
        if request.path not in OPEN_PATHS and not is_good(request.header(_HEADER) or "", keys(), worker):
            said = f"{HEADER}: missing or not this worker's; send the request to the cluster's router"
            raise ApiError(401, said, type="authentication_error", code=NOT_THE_ROUTER)

    return check
