"""Several things under way at once, of which the first failure ends all.

Law: nothing started here outlives the call: on an error, a cancellation or a closed iterator every task is cancelled
and awaited before control returns.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from kvbaton.api.api_errors import ApiError, bare

T = TypeVar("T")
QUEUED_MAX = 4
"""Items of joined streams that wait for a slow reader; then the streams wait, each with one that is counted as held."""


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel and wait until each has ended; their results and errors are dropped."""
    tasks = list(tasks)
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
    for task in tasks:
        error = None if task.cancelled() else task.exception()  # taken, so that asyncio does not report it as lost
        if isinstance(error, ApiError):
            bare(error)


async def all_of(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Results in order; the first error cancels the rest and is raised as it is."""
    if len(work) == 1:
        return [await work[0]]
    tasks = [asyncio.create_task(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        return [task.result() for task in sorted(done, key=tasks.index)] if len(done) == len(tasks) else _raise(done)
    finally:
        await cancel(tasks)


def _raise(done: Iterable[asyncio.Task[Any]]) -> Any:
    for task in done:
        task.result()
    raise AssertionError("asyncio.wait returned early without an error")


async def interleave(streams: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Items of all streams as they come, each with its stream's number; the first error ends all."""
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(QUEUED_MAX)
    tasks = [asyncio.create_task(_pump(number, stream, queue)) for number, stream in enumerate(streams)]
    open_count = len(tasks)
    try:
        while open_count:
            news = await queue.get()
            if isinstance(news, BaseException):
                raise news
            if news is None:
                open_count -= 1
            else:
                yield news
    finally:
        await cancel(tasks)
        while not queue.empty():  # an error in it knows the frame that knows the queue
            queue.get_nowait()


async def _pump(
    number: int, stream: AsyncGenerator[T, None], queue: asyncio.Queue[tuple[int, T] | BaseException | None]
) -> None:
    end: BaseException | None = None
    try:
        async with contextlib.aclosing(stream):
            async for item in stream:
                await queue.put((number, item))
    except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
        end = error
    try:
        await queue.put(end)
    finally:
        end = None  # an error knows this frame, which must not know it for longer: it has seen a whole request
