"""What a server's main runs on, and what an operator reads of a port that cannot be had."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Coroutine
from typing import Any, TypeVar

import uvloop

from kvbaton.api.api_errors import PortInUseError

BACKLOG = 1024

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
