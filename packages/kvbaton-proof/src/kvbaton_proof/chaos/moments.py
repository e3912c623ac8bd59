"""The conductor's control of its workers: it is notified when one of them reaches a named moment, and holds it there.

A worker of a chaos run (`worker_main`) dials this socket, is told which moment to look for, says when it is there and
waits, for a second at most, until it is let go. That second is what the conductor has to kill or stop somebody.

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
    """Look for a moment of a handoff of which `who` is one side; "": of any."""

    number: int
    moment: Moment
    who: str


class Go(msgspec.Struct, frozen=True, tag=True):
    """Wait no longer, and look no longer."""

    number: int


class Clock(msgspec.Struct, frozen=True, tag=True):
    """From now on the wall clock is off by so much."""

    off_s: float


Order = Watch | Go | Clock


class Here(msgspec.Struct, frozen=True, tag=True):
    """The first thing that a worker says."""

    name: str


class At(msgspec.Struct, frozen=True, tag=True):
    """It is there, and waits."""

    number: int
    what: str  # what it is about to do


Word = Here | At

orders = msgspec.json.Decoder(Order)
_words = msgspec.json.Decoder(Word)


class Reached(msgspec.Struct, frozen=True):
    """Who is at the moment, and what it is about to do."""

    name: str
    what: str


@dataclass(slots=True)
class Hand:
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
    async def caught(self, moment: Moment, who: str, within_s: float) -> AsyncIterator[Reached | None]:
        """Whoever is at `moment` of one of `who`'s handoffs ("": of any), and waits there while the context lasts.

        None: nobody was, in this time.
        """
        number = next(self._numbers)
        found: asyncio.Future[Reached] = asyncio.get_running_loop().create_future()
        self._waiting[number] = found
        self._tell_all(Watch(number, moment, who))
        try:
            yield await _or_none(found, within_s)
        finally:
            del self._waiting[number]
            self._tell_all(Go(number))

    def step_clock(self, name: str, off_s: float) -> bool:
        """Put a worker's wall clock off; False when there is no line to it."""
        return self._tell(name, Clock(off_s))

    def _tell_all(self, order: Order) -> None:
        for name in list(self._lines):
            self._tell(name, order)

    def _tell(self, name: str, order: Order) -> bool:
        writer = self._lines.get(name)
        if writer is None or writer.is_closing():
            return False
        writer.write(msgspec.json.encode(order) + b"\n")
        return True

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        name = ""
        try:
            while line := await reader.readline():
                word = _words.decode(line)
                if isinstance(word, Here):
                    name = word.name
                    self._lines[name] = writer
                elif (found := self._waiting.get(word.number)) is not None and not found.done():
                    found.set_result(Reached(name, word.what))
        except (OSError, ValueError, msgspec.MsgspecError):  # it was killed in mid-word
            pass
        finally:
            if self._lines.get(name) is writer:
                del self._lines[name]
            writer.close()


async def _or_none(found: asyncio.Future[Reached], within_s: float) -> Reached | None:
    with contextlib.suppress(TimeoutError):
        return await asyncio.wait_for(found, within_s)
    return None
