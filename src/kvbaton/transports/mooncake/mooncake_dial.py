"""Reaches a peer: with its own engine, which has found the peer's mark where the peer said it would be.

Law: an engine is returned only after it has read the right mark; otherwise it is closed, and nothing is left behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from kvbaton.transports.mooncake.mooncake_endpoint import MARK_BYTES, MooncakeEndpoint
from kvbaton.transports.mooncake.mooncake_engine import MooncakeEngine, SliceState, address_of

POLL_S = 0.0001
POLL_S_MAX = 0.01


class DialFailed(Exception):
    """Why a peer could not be reached."""


def dial(
    make: Callable[[], MooncakeEngine], there: MooncakeEndpoint, dial_s: float, given_up: Callable[[], bool]
) -> MooncakeEngine:
    """Waits for the peer, up to `dial_s` once it has answered at all: see `MooncakeEngine.start_read`."""
    try:
        engine = make()
    except OSError as error:
        raise DialFailed(str(error)) from error
    try:
        _check_mark(engine, there, dial_s, given_up)
    except BaseException:
        engine.close()
        raise
    return engine


def _check_mark(engine: MooncakeEngine, there: MooncakeEndpoint, dial_s: float, given_up: Callable[[], bool]) -> None:
    deadline = time.monotonic() + dial_s
    mark = memoryview(bytearray(MARK_BYTES))
    number = engine.start_read(there.session, address_of(mark), there.mark_address, MARK_BYTES)
    state = SliceState.MOVING if number else SliceState.FAILED
    wait_s = POLL_S
    try:
        while state is SliceState.MOVING:
            if time.monotonic() > deadline or given_up():
                raise DialFailed(f"{there.owner} did not answer within {dial_s} s")
            time.sleep(wait_s)
            wait_s = min(POLL_S_MAX, 2 * wait_s)
            state = engine.state(number)
    finally:
        if state is SliceState.MOVING:
            engine.close()  # while `mark` is still there for it to land in
    if state is SliceState.FAILED:
        raise DialFailed(f"cannot reach {there.owner} at {there.session}")
    if mark != there.mark:
        raise DialFailed(f"the process at {there.session} is not {there.owner}")
