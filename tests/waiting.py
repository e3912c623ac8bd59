"""Waiting for what a test expects: the one way to do so, with a deadline that only a hang reaches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

PATIENCE_S = 60.0


def until(look: Callable[[], Any], within_s: float = PATIENCE_S, told: Callable[[], object] = lambda: "") -> Any:
    """What `look` gives, once that is something; AssertionError, with what `told` says, where it never is."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s {told()}"
        time.sleep(0.01)
    return found


async def soon(look: Callable[[], Any], within_s: float = PATIENCE_S) -> Any:
    """The same beside a loop that goes on."""
    deadline = time.monotonic() + within_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s"
        await asyncio.sleep(0.005)
    return found
