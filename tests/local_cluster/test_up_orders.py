"""Orders to start workers of `kvbaton up` again, and Ctrl-C while one is carried out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from kvbaton.cli.up import _watch
from kvbaton.local_cluster.restart_orders import offer, order

NAMES = ("p0", "p1")


class Room:
    """A cluster whose workers take for ever to start again."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.deaths: asyncio.Queue[Any] = asyncio.Queue()
        self.begun: list[str] = []
        self.broken_off: list[str] = []
        self.on_restart: Callable[[], object] = lambda: None
        offer(directory, NAMES)
        for name in NAMES:
            order(str(directory / "keys"), name)

    async def restart(self, name: str) -> None:
        self.begun.append(name)
        self.on_restart()
        try:
            await asyncio.Event().wait()
        finally:
            self.broken_off.append(name)


def carried_out(work: Callable[[asyncio.Event], Coroutine[Any, Any, None]]) -> None:
    async def within() -> None:
        await asyncio.wait_for(work(asyncio.Event()), 10)

    asyncio.run(within())


def test_ctrl_c_breaks_off_a_restart_and_the_next_one_does_not_begin(tmp_path: Path) -> None:
    async def work(stop: asyncio.Event) -> None:
        room = Room(tmp_path)
        room.on_restart = stop.set
        await _watch(room, stop)  # type: ignore[arg-type]
        assert (room.begun, room.broken_off) == (["p0"], ["p0"])

    carried_out(work)


def test_an_order_that_comes_with_ctrl_c_ends_no_worker_that_still_has_requests(tmp_path: Path) -> None:
    async def work(stop: asyncio.Event) -> None:
        room = Room(tmp_path)
        watching = asyncio.create_task(_watch(room, stop))  # type: ignore[arg-type]
        await asyncio.sleep(0)  # it looks for the first time
        stop.set()
        await watching
        assert room.begun == []

    carried_out(work)
