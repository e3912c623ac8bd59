"""Breakpoints in workers: the conductor is notified when one of them reaches a named moment, and holds it there.

A worker of a chaos run (`worker_main`) dials this socket, gets the moment to look for, reports when it has reached it
and waits, for a second at most, until it may resume. That second is what the conductor has to kill or stop somebody.

Law: no worker waits for the conductor for longer than `HOLD_S`, and the conductor never waits without a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from kvbaton_proof.chaos.fault_catalogue import Moment

HOLD_S = 1.0
LINE_BYTES_MAX = 4096


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Look for a moment of a handoff of which `member` is one side; "": of any."""

    number: int
    moment: Moment
    member: str


class Resume(msgspec.Struct, frozen=True, tag=True):
    """Wait no longer, and look no longer."""

    number: int


class Clock(msgspec.Struct, frozen=True, tag=True):
    """From now on the wall clock is off by so much."""

    off_s: float


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a worker."""

    name: str


class Reached(msgspec.Struct, frozen=True, tag=True):
    """It is at the moment, and waits."""

    number: int
    name: str
    what: str  # it is about to do


ToWorker = Watch | Resume | Clock
to_worker = msgspec.json.Decoder(ToWorker)
_from_worker = msgspec.json.Decoder(Hello | Reached)


@dataclass(slots=True)
class BreakpointServer:
    """The conductor's end. Of one event loop; open it with `listen`."""

    path: Path
    _lines: dict[str, asyncio.StreamWriter] = field(default_factory=dict)
    _waiting: dict[int, asyncio.Future[Reached]] = field(default_factory=dict)
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _server: asyncio.Server | None = None

    async def listen(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path), limit=LINE_BYTES_MAX)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._lines.values():
            writer.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    @contextlib.asynccontextmanager
    async def caught(self, moment: Moment, member: str, within_s: float) -> AsyncIterator[Reached | None]:
        """A worker at `moment` of one of `member`'s handoffs ("": of any), which waits there while the context lasts.

        None: nobody was, in this time.
        """
        number = next(self._numbers)
        reached: asyncio.Future[Reached] = asyncio.get_running_loop().create_future()
        self._waiting[number] = reached
        self._send_all(Watch(number, moment, member))
        try:
            yield await _or_none(reached, within_s)
        finally:
            del self._waiting[number]
            self._send_all(Resume(number))

    def step_clock(self, name: str, off_s: float) -> bool:
        """Put a worker's wall clock off; False when there is no line to it."""
        return self._send(name, Clock(off_s))

    def _send_all(self, message: ToWorker) -> None:
        for name in list(self._lines):
            self._send(name, message)

    def _send(self, name: str, message: ToWorker) -> bool:
        writer = self._lines.get(name)
        if writer is None or writer.is_closing():
            return False
        writer.write(msgspec.json.encode(message) + b"\n")
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        try:
            while line := await reader.readline():
                message = _from_worker.decode(line)
                if isinstance(message, Hello):
                    name = message.name
                    self._lines[name] = writer
                elif (waiting := self._waiting.get(message.number)) is not None and not waiting.done():
                    waiting.set_result(message)
        except (OSError, ValueError, msgspec.MsgspecError):  # it was killed in the middle of a message
            pass
        finally:
            if self._lines.get(name) is writer:
                del self._lines[name]
            writer.close()


async def _or_none(reached: asyncio.Future[Reached], within_s: float) -> Reached | None:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(reached, within_s)
    return None
