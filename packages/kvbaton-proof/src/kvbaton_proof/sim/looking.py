"""One world, looked at: what it objects to, whatever form that takes.

With a mutant on, product code may raise where the simulation calls it itself, or never return; the clean tree does
neither, so both are seen for what they are: the death of an engine, and a hang.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import msgspec

from kvbaton_proof.sim.promises import DEATH, HANG
from kvbaton_proof.sim.run import run_seed

SEED_CPU_S = 6.0
"""A world takes a tenth of a second; one that takes so long does not come to its end."""
SAID_CHARS_MAX = 200


class Seen(msgspec.Struct, frozen=True):
    """What a world objects to."""

    promise: str
    what: str


class _Endless(BaseException):
    """The world used up its time. Not an `Exception`: no `except` of the product may swallow it."""


def look(seed: int) -> Seen | None:
    """Run one world; what it objects to, if anything."""
    try:
        with _limited(SEED_CPU_S):
            result = run_seed(seed)
    except _Endless:
        return Seen(HANG, "the world did not come to its end")
    except Exception as error:  # noqa: BLE001 - whatever it is, the clean tree does not raise it
        return Seen(DEATH, f"{type(error).__name__}: {error}"[:SAID_CHARS_MAX])
    if result.holds:
        return None
    said = result.what.strip().splitlines()
    return Seen(result.promise, (said[-1] if said else "")[:SAID_CHARS_MAX])


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Break off what uses more processor time than this (main thread only, as signals are)."""

    def over(number: int, frame: FrameType | None) -> None:
        raise _Endless

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
