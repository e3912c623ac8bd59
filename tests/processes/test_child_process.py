"""Processes that a command starts: awaited with a deadline, told of when they die, ended with what they started."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from kvbaton.processes import child_process
from kvbaton.processes.child_process import Child, ChildError, Program, end, ready, start
from kvbaton.processes.operator_control import unless_stopped
from kvbaton.processes.operator_errors import StoppedError
from kvbaton_proof.rig.servers import with_news

SLEEPS = "import time; print('up', flush=True); time.sleep(60)"
STUBBORN = f"import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); {SLEEPS}"
TWO = f"import os, sys; os.fork() or print('pid', os.getpid(), flush=True); {SLEEPS}"


def program(code: str) -> Program:
    return Program("p0", "prefill", [sys.executable, "-c", code], stop=signal.SIGTERM)


def with_child(code: str, log: Path, use: Callable[[Child], Awaitable[None]]) -> None:
    async def run() -> None:
        child = await start(program(code), log)
        try:
            await use(child)
        finally:
            await end([child], within_s=1.0)
        assert not child.is_alive

    asyncio.run(run())


def until_logged(child: Child, word: str) -> Callable[[], Awaitable[list[str]]]:
    async def missing() -> list[str]:
        return [] if any(word in line for line in child.last_lines()) else [child.name]

    return missing


@pytest.mark.parametrize("code", [SLEEPS, STUBBORN], ids=["willing", "stubborn"])
def test_a_child_is_asked_and_then_made_to_end(code: str, tmp_path: Path) -> None:
    async def use(child: Child) -> None:
        await ready(until_logged(child, "up"), [child], 20.0, lambda _: None)

    with_child(code, tmp_path / "log", use)


def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    pids: list[int] = []

    async def use(child: Child) -> None:
        await ready(until_logged(child, "pid "), [child], 20.0, lambda _: None)
        pids.append(int(next(line.split()[1] for line in child.last_lines() if line.startswith("pid "))))

    with_child(TWO, tmp_path / "log", use)
    deadline = time.monotonic() + 10.0
    while Path(f"/proc/{pids[0]}/stat").exists():
        with open(f"/proc/{pids[0]}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_also_when_whoever_ends_it_is_cancelled(tmp_path: Path) -> None:
    """The rest of a group that ignores what it is asked has two seconds, and no more for a second Ctrl-C."""
    rest = f"import os, sys; os.fork() and os._exit(0); print('pid', os.getpid(), flush=True); {STUBBORN}"

    async def use(child: Child) -> None:
        await ready(until_logged(child, "pid "), [child], 20.0, lambda _: None)
        ending = asyncio.create_task(end([child], within_s=1.0))
        await asyncio.sleep(0.3)
        ending.cancel()
        await asyncio.wait([ending])
        pid = int(next(line.split()[1] for line in child.last_lines() if line.startswith("pid ")))
        deadline = time.monotonic() + 1.0
        while _runs(pid):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)

    with_child(rest, tmp_path / "log", use)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def test_a_death_ends_the_wait_with_what_was_logged_last_and_is_told(tmp_path: Path) -> None:
    deaths: asyncio.Queue[Child] = asyncio.Queue()
    child = await start(program("import sys; print('no such model'); sys.exit(3)"), tmp_path / "log", deaths=deaths)
    with pytest.raises(ChildError, match=r"p0 \(pid \d+\) exited with status 3 before .*: no such model"):
        await ready(until_logged(child, "up"), [child], 20.0, lambda _: None)
    assert await asyncio.wait_for(deaths.get(), 5.0) is child
    await end([child])


def test_a_wait_has_a_deadline_tells_how_far_it_is_and_stops_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "NEWS_S", 0.1)
    said: list[str] = []

    async def never() -> list[str]:
        raise ConnectionRefusedError

    async def use(child: Child) -> None:
        await ready(until_logged(child, "up"), [child], 20.0, said.append)
        with pytest.raises(ChildError, match=r"p0 did not serve within 0 s; .*p0: up"):
            await ready(never, [child], 0.4, said.append)
        stop = asyncio.Event()
        stop.set()
        with pytest.raises(StoppedError):
            await ready(never, [child], 20.0, said.append, stop=stop)

    with_child(SLEEPS, tmp_path / "log", use)
    assert said[-1].endswith("p0 is starting: up")


async def test_work_ends_with_its_result_or_with_the_operators_word() -> None:
    stop = asyncio.Event()
    assert await unless_stopped(asyncio.sleep(0, 7), stop) == 7
    stop.set()
    with pytest.raises(StoppedError):
        await unless_stopped(asyncio.sleep(60), stop)


def test_a_long_wait_is_told_of_and_its_error_comes_through() -> None:
    told: list[float] = []

    async def failing() -> None:
        while len(told) < 2:
            await asyncio.sleep(0.01)
        raise ChildError("p0 is gone")

    with pytest.raises(ChildError, match="p0 is gone"):
        asyncio.run(with_news(failing(), told.append, every_s=0.02))
    assert told == sorted(told) and told[0] > 0
