"""Deadlines of requests: who is late is told so, who is cancelled stays cancelled, and one timer serves them all."""

from __future__ import annotations

import asyncio

import pytest

from kvbaton.router.flow.choosing import Deadline, Deadlines
from tests.async_tests import Run

FAR_S = 600.0


async def late(deadlines: Deadlines, after_s: float) -> str:
    """How a task ends that would wait for ever."""
    try:
        with Deadline(deadlines, deadlines.loop.time() + after_s):
            await asyncio.get_running_loop().create_future()
    except TimeoutError:
        task = asyncio.current_task()
        assert task is not None and not task.cancelling()
        return "late"
    return "never"


async def test_each_is_late_by_its_own_deadline_and_the_others_are_not(run: Run) -> None:
    deadlines = Deadlines()
    far = asyncio.create_task(late(deadlines, FAR_S))
    await asyncio.sleep(0)
    assert (
        await asyncio.gather(*(late(deadlines, after_s) for after_s in (0.02, 0.0, 0.0002, 0.0, 0.0101)))
        == ["late"] * 5
    )
    assert not far.done()
    far.cancel()
    with pytest.raises(asyncio.CancelledError):
        await far
    deadlines.close()


async def test_who_ends_in_time_is_not_cancelled_later(run: Run) -> None:
    deadlines = Deadlines()
    for _ in range(3):
        with Deadline(deadlines, deadlines.loop.time() + 0.01):
            pass
    assert await late(deadlines, 0.03) == "late"  # by when the timer of those has run out
    with pytest.raises(KeyError), Deadline(deadlines, deadlines.loop.time() + FAR_S):
        raise KeyError


async def test_a_task_that_is_cancelled_too_stays_cancelled(run: Run) -> None:
    deadlines = Deadlines()
    task = asyncio.create_task(late(deadlines, FAR_S))
    await asyncio.sleep(0)
    (kept,) = deadlines._kept
    deadlines.forget(kept)
    kept.pass_by()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    deadlines.close()
