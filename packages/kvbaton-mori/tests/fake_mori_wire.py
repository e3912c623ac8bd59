"""The network of the fake mori: batches in flight between engines of this process, and ways to make it fail.

Law: bytes land when a status is polled for the second time (as with mori's XGMI backend; code that is right with that
is right with RDMA, which has its own thread) or when a test calls `deliver`, and not otherwise. A batch lands whether
or not it is still wanted: there is no cancel. Batches in one queue land in order, and once one has failed, so do all
that follow between the same two engines.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

DEPTH = 8192
OK, INVALID_ARGS, RDMA_OP = 0, 11, 13
LOST = "transport retry counter exceeded"
FLUSHED = "Work Request Flushed Error"

Row = tuple[int, int, int]
"""Two addresses, target and source, and a number of bytes."""


class Told(Protocol):
    """The status of a batch, as its network sees it."""

    def _tell(self, code: int, message: str) -> None: ...


@dataclass(slots=True, eq=False)
class Flight:
    """A batch that was posted. It knows its status by address only, as mori does: it keeps nothing alive."""

    pair: tuple[str, str]
    queue: int
    uid: int
    rows: list[Row]
    status: weakref.ref[Told]
    asked: bool = False  # the first look finds it under way
    silent: bool = False  # posted before its batch was refused: lands, and tells nobody


@dataclass(slots=True)
class Wire:
    """What is in flight, what was seen, and what is to go wrong."""

    depth: int = DEPTH  # rows that one queue pair holds
    stalled: bool = False  # nothing lands, nothing fails
    dead: set[str] = field(default_factory=set)  # engines that are gone without a word
    broken: set[tuple[str, str]] = field(default_factory=set)
    answers: deque[tuple[int, str]] = field(default_factory=deque)  # for the next posts, instead of taking them
    fates: deque[tuple[int, str]] = field(default_factory=deque)  # for the next flights that would land
    flights: list[Flight] = field(default_factory=list)
    polls: int = 0
    posts: list[tuple[int, int]] = field(default_factory=list)  # number and rows of each batch that was taken
    refusals: int = 0  # for a full queue
    dropped: list[int] = field(default_factory=list)  # numbers of batches whose status was gone while mori held it
    lock: threading.RLock = field(default_factory=threading.RLock)

    def post(self, pair: tuple[str, str], uid: int, rows: Sequence[Row], queues: int, status: Told) -> tuple[int, str]:
        """Take a batch, or say why not; (-1, "") when it is in flight."""
        with self.lock:
            if self.answers:
                return self.answers.popleft()
            share = -(-len(rows) // queues)
            for index in range(queues):
                part, queue = list(rows[index * share : (index + 1) * share]), (index + uid) % queues
                used = sum(len(each.rows) for each in self.flights if (each.pair, each.queue) == (pair, queue))
                if used + len(part) > self.depth:
                    for flight in self.flights:
                        flight.silent |= flight.status() is status
                    self.refusals += 1
                    return RDMA_OP, f"SQ full (batch): ep={queue} depth={used} requested={len(part)} max={self.depth}"
                if part:
                    self.flights.append(Flight(pair, queue, uid, part, weakref.ref(status, self._note_drop)))
            self.posts.append((uid, len(rows)))
            return -1, ""

    def progress(self, status: Told) -> None:
        """Somebody asks after a batch."""
        with self.lock:
            self.polls += 1
            if not self.stalled:
                for flight in [flight for flight in self.flights if flight.status() is status]:
                    if flight.asked:
                        self._land_after_silent(flight)
                    flight.asked = True

    def deliver(self) -> None:
        """Let everything land that is in flight, whoever asks for it, even on a stalled network."""
        with self.lock:
            for flight in list(self.flights):
                self._land(flight)

    def forget(self, key: str) -> None:
        """An engine closes: its queue pairs are gone, and what they had in flight lands no more."""
        with self.lock:
            self.dead.add(key)
            self.flights = [flight for flight in self.flights if flight.pair[0] != key]

    def _land_after_silent(self, flight: Flight) -> None:
        ahead = self.flights[: self.flights.index(flight)]
        for each in ahead:
            if each.silent and (each.pair, each.queue) == (flight.pair, flight.queue):
                self._land(each)
        self._land(flight)

    def _land(self, flight: Flight) -> None:
        self.flights.remove(flight)
        code, message = self.fates.popleft() if self.fates and not flight.silent else (OK, "success")
        if flight.pair in self.broken:
            code, message = RDMA_OP, FLUSHED
        elif flight.pair[1] in self.dead:
            code, message = RDMA_OP, LOST
        if code == OK:
            for target, source, size in flight.rows:
                ctypes.memmove(target, source, size)
        else:
            self.broken.add(flight.pair)
        status = flight.status()
        if status is None or flight.silent:
            return
        if code != OK or not any(other.status() is status for other in self.flights):
            status._tell(code, message)

    def _note_drop(self, reference: weakref.ref[Told]) -> None:
        with self.lock:
            self.dropped += [flight.uid for flight in self.flights if flight.status is reference]
