"""Operator signals for a running command: Ctrl-C and SIGTERM end it in order, and are logged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from kvbaton.processes.operator_errors import StoppedError

log = logging.getLogger(__name__)

T = TypeVar("T")


@contextlib.contextmanager
def told_to_stop() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C and SIGTERM set, while the context lasts."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _stop, stop, number)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _stop(stop: asyncio.Event, number: signal.Signals) -> None:
    log.info("[stopping] %s: stopping%s", number.name, " at once" if stop.is_set() else "")
    stop.set()


async def unless_stopped(work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T:
    """The result of `work`; StoppedError, with the work cancelled and cleaned up, if the operator stopped it first."""
    working, stopped = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopped), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise StoppedError
    finally:
        for task in (working, stopped):
            task.cancel()
        await asyncio.wait((working, stopped))
