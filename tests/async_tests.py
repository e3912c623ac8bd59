"""Tests that are coroutines, each on a loop of its own; the time-out of a test bounds it, as it does any other.

One that names the fixture `run` is run on each kind of loop, one that names `run_once` on asyncio's alone; either fails
also by an exception that leaves a callback of its loop.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import pytest
import uvloop

PATIENCE_S = 60.0
"""Of those two: only a hang takes so long."""
LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.SelectorEventLoop,
    "uvloop": uvloop.new_event_loop,
}
Run = Callable[[Coroutine[Any, Any, None]], None]


def run_on(loop: str, work: Coroutine[Any, Any, None]) -> None:
    """An exception that leaves a callback of the loop fails it."""
    escaped: list[dict[str, Any]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: escaped.append(context))
        await asyncio.wait_for(work, PATIENCE_S)

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(bounded())
    assert not escaped, escaped


@pytest.fixture(params=LOOPS)
def run(request: pytest.FixtureRequest) -> Run:
    return partial(run_on, request.param)


@pytest.fixture
def run_once() -> Run:
    return partial(run_on, "asyncio")


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    runs: Callable[..., Any] = given.get("run") or given.get("run_once") or asyncio.run
    runs(pyfuncitem.obj(**given))
    return True
