"""Tests that are coroutines, each on a loop of its own, with a bound.

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

PATIENCE_S = 110.0
"""Only a hang takes so long: processes start slowly on a busy machine."""
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


def _run_bounded(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, PATIENCE_S))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    runs: Run = given.get("run") or given.get("run_once") or _run_bounded
    runs(pyfuncitem.obj(**given))
    return True
