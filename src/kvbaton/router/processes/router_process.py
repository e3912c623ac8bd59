"""One child as its parent sees it, through all its lives: its process, the link to it, what it told last.

Law: what an ended life counted is kept, what it had under way is not. A question is answered within its time, by what
the child says or by nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Mapping

from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.flight_records import Flight
from kvbaton.processes.child_process import Child, Program, end, start
from kvbaton.router.processes import shared_counts
from kvbaton.router.processes.process_link import (
    CountedFigures,
    FiguresTold,
    FromChild,
    FromParent,
    ProcessLink,
    TellFigures,
    read_from_child,
)

CHILD_ARGV = (sys.executable, "-m", "kvbaton.router.processes.router_child")


def _own_script() -> list[str]:
    """The script that this program is run from, if it is one: it may have added policies, which a child needs too."""
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None) or ""
    return [path] if path.endswith(".py") and main.__spec__ is None else []


class _TryElsewhere:
    """A request under way at a child, as it told last."""

    __slots__ = ("_flight",)

    def __init__(self, flight: Flight) -> None:
        self._flight = flight

    def flight(self) -> Flight:
        return self._flight


class RouterProcess:
    """One place among the processes."""

    def __init__(self, index: int, gathering: Gathering, heard: Callable[[RouterProcess, FromChild], None]) -> None:
        self.index = index
        self.level = 0  # as its records tell
        self.life = 0  # how often it was started
        self.ready = asyncio.Event()
        self.child: Child | None = None
        self._gathering = gathering
        self._heard = heard
        self._link: ProcessLink | None = None
        self._past = CountedFigures()  # of lives that are over
        self._counted = CountedFigures()
        self._live: list[_TryElsewhere] = []
        self._silent_looks = 0
        self._questions: dict[int, asyncio.Future[None]] = {}
        self._numbers = itertools.count(1)

    @property
    def figures(self) -> tuple[CountedFigures, CountedFigures]:
        """Of its earlier lives, and of this one."""
        return self._past, self._counted

    async def start(
        self, descriptors: Iterable[int], env: Mapping[str, str], first: Callable[[], Iterable[FromParent]]
    ) -> None:
        """A process, told `first`; whether it serves is told by `ready`."""
        self.life += 1
        ours, theirs = socket.socketpair()
        try:
            argv = [*CHILD_ARGV, str(theirs.fileno()), *_own_script()]
            program = Program(f"router process {self.index}", "router", argv, env=env, stop=signal.SIGINT)
            passed = (theirs.fileno(), *descriptors)
            self.child = await start(program, None, stdin=asyncio.subprocess.DEVNULL, pass_fds=passed)
        finally:
            theirs.close()
        ours.setblocking(False)
        self._link = await ProcessLink.over(ours, self._received, lambda: None)
        for message in first():  # as it is now: what changed before there was a link was told to nobody
            self._link.send(message)

    async def ended(self) -> None:
        """Returns when its process is gone, and what it held is let go."""
        assert self.child is not None
        await self.child.process.wait()
        self._let_go()

    async def stop(self) -> None:
        if self.child is not None:
            await end([self.child])
        self._let_go()

    def is_silent(self, looks: int) -> bool:
        """Whether it serves and has said nothing in this many looks, this one among them."""
        self._silent_looks = self._silent_looks + 1 if self.ready.is_set() else 0
        return self._silent_looks > looks

    def send(self, message: FromParent) -> None:
        if self._link is not None:
            self._link.send(message)

    async def ask(self, within_s: float) -> None:
        """Have it tell its figures now."""
        if self._link is None or not self.ready.is_set():
            return
        number = next(self._numbers)
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        self._link.send(TellFigures(number))
        try:
            async with asyncio.timeout(within_s):
                await answer
        except TimeoutError:
            return
        finally:
            del self._questions[number]

    def _received(self, data: bytes) -> None:
        self._silent_looks = 0
        message = read_from_child(data)
        if not isinstance(message, FiguresTold):
            self._heard(self, message)
            return
        self._counted = message.counted
        if message.number:
            self._watch(message.live)
        answer = self._questions.get(message.number)
        if answer is not None and not answer.done():
            answer.set_result(None)

    def _watch(self, live: Iterable[Flight]) -> None:
        for each in self._live:
            self._gathering.unwatch(each)
        self._live = [_TryElsewhere(flight) for flight in live]
        for each in self._live:
            self._gathering.watch(each)

    def _let_go(self) -> None:
        self.ready.clear()
        self.level = 0
        self._watch(())
        self._past = shared_counts.together([self._past, shared_counts.at_rest(self._counted)])
        self._counted = CountedFigures()
        for answer in self._questions.values():
            if not answer.done():
                answer.set_result(None)
        if self._link is not None:
            self._link.close()
            self._link = None
