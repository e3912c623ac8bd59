"""What both HTTP servers share, a worker's (`api.http`, aiohttp's) and a router's own (`router.http`): loop and port.

Law: nothing here imports aiohttp, which takes a router a quarter of its start.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from kvbaton.api.api_errors import PortInUseError

KEEPALIVE_S = 75.0
"""Longer than any client of ours keeps an idle connection (15 s), so that no request meets a closing one."""
SHUTDOWN_S = 2.0
BACKLOG = 1024
REQUEST_ID = "X-Request-Id"

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a server's main on uvloop, which does the same with less."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def port_error(host: str, port: int, error: OSError) -> PortInUseError:
    """What an operator is told of a port that cannot be had."""
    if error.errno == errno.EADDRINUSE:
        return PortInUseError(f"port {port} on {host} is in use; choose another (0 takes a free one)")
    return PortInUseError(f"cannot listen on {host} port {port}: {error.strerror or error}")
