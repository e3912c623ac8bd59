"""Builds records from the ledger's marks, keeps the latest, and notifies listeners.

Laws: memory is bounded, and failures are kept apart, so that successes do not evict them. A record is reported once,
when nothing more can happen to its handoff: it has ended and is at rest, and its engine has taken it or had time to.
Nothing here blocks for longer than a copy of a short list; a listener that raises affects only itself.

The node's thread calls `take`; all else may be called from any thread.
"""

from __future__ import annotations

import threading
import zlib
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbaton.observe.flight.flight_records import (
    DELIVERED,
    FLIGHTS_MAX,
    MOMENTS_MAX,
    NAME_CHARS_MAX,
    REPORT_BYTES_MAX,
    TEXT_CHARS_MAX,
    Flight,
    FlightReport,
    FlightSeat,
    Moment,
    encode,
)
from kvbaton.protocol.effects import Begun, Ended, Mark, Side, Step
from kvbaton.protocol.ids import PeerId, RequestId

KEPT_MAX = 2048
FAILED_KEPT_MAX = 256
OPEN_MAX = 32_768
"""Under way; beyond it the oldest are forgotten, as when their end was never said."""
TAKEN_S = 2.0
"""An engine that has not taken its report by then is not waited for: it aborted the request, or it is stuck."""
LOOK_S = 0.1
TAKEN = "taken"
TOLD_PER_REPORT = 100
"""Beyond it a share is told. Failures always are, as far as they fit."""
LEVEL_MAX = 10
PEERS_MAX = 8
_SEATS = {Side.PREFILL: FlightSeat.PREFILL, Side.DECODE: FlightSeat.DECODE}

OnFlight = Callable[[Flight], None]
Before = Callable[[int], Sequence[Moment]]
"""What is known of a lease, by its number, from before it began."""


def _nothing(_: int) -> Sequence[Moment]:
    return ()


def is_shared(handoff: str, level: int) -> bool:
    """Whether this handoff is among one in 2**level. Every process decides the same, and the shares are nested."""
    return zlib.crc32(handoff.encode()) % (1 << level) == 0


@dataclass(slots=True)
class _OpenFlight:
    """A handoff in flight on this side."""

    side: Side
    begun: Begun
    moments: list[Moment] = field(default_factory=list)
    peers: list[str] = field(default_factory=list)
    pushed: bool = False
    ended: Ended | None = None
    ended_at: float = 0.0
    taken: bool = False  # or there is nothing to take


class Recorder:
    """One process's records, in both roles."""

    def __init__(self, me: PeerId) -> None:
        self.on_flight: list[OnFlight] = []
        self.counters: Counter[str] = Counter()
        self._me = me
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[Side, int], _OpenFlight] = OrderedDict()
        self._closing: dict[tuple[Side, int], _OpenFlight] = {}  # those that are over, or only wait to be taken
        self._ready: list[tuple[Side, int]] = []  # of those, which wait for nothing more
        self._looked_at = 0.0
        self._untaken: dict[RequestId, tuple[Side, int]] = {}
        self._kept: deque[Flight] = deque(maxlen=KEPT_MAX)
        self._failed: deque[Flight] = deque(maxlen=FAILED_KEPT_MAX)
        self._untold: deque[Flight] = deque(maxlen=KEPT_MAX)
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._level = 0

    # --- the node's thread

    def take(
        self,
        marks: Sequence[Mark],
        taken: Sequence[tuple[RequestId, float]],
        now: float,
        wall_offset_s: float,
        before: Before = _nothing,
    ) -> None:
        """The marks since the last call. `taken` and `before`, what came before a lease, are by the wall clock, all
        else by the node's."""
        if not (marks or taken or self._closing):
            return  # as in most turns
        with self._lock:
            for mark in marks:
                self._note(mark, wall_offset_s, before)
            for request, at in taken:
                self._note_taken(request, at)
            over = self._over(now + wall_offset_s)
        for flight in over:
            for listener in self.on_flight:
                try:
                    listener(flight)
                except Exception:  # noqa: BLE001 - whoever listens must not stop the node
                    self.counters["listener_faults"] += 1

    def next_look(self, now: float) -> float | None:
        """When to call `take` again although nothing has happened: an engine takes its reports at its own pace."""
        return now + LOOK_S if self._closing else None

    # --- any thread

    def last(self, count: int, *, failed: bool = False) -> list[Flight]:
        """The newest that are over, newest first."""
        with self._lock:
            kept = list(self._failed if failed else self._kept)
        return kept[: -count - 1 : -1] if count > 0 else []

    def under_way(self) -> list[Flight]:
        """Oldest first; also those that have ended but are not at rest, or were not taken by their engine yet."""
        with self._lock:
            return [self._flight(key, each) for key, each in self._open.items()]

    def find(self, text: str) -> list[Flight]:
        """All that are known of a handoff, by its id, the beginning of it, or this engine's id of the request."""
        return self._find([text])

    def _find(self, texts: Sequence[str]) -> list[Flight]:
        """In one pass, and with the lock only for a copy: the node's thread waits for it."""
        begins = tuple(text for text in texts if text)
        exact = frozenset(begins)
        with self._lock:
            kept, opened = (*self._kept, *self._failed), list(self._open.items())
        known = {id(each): each for each in kept if each.request in exact or each.handoff.startswith(begins)}
        named = [
            key for key, each in opened if each.begun.request in exact or each.begun.handoff.startswith(begins)
        ]  # fmt: skip
        with self._lock:
            live = [self._flight(key, each) for key in named if (each := self._open.get(key)) is not None]
        return [*known.values(), *live]

    def show(self, ids: Sequence[str]) -> None:
        """These were requested: they go with the next report, whether they are over or not."""
        with self._lock:
            for text in ids:
                self._asked[text] = None
                if len(self._asked) > FLIGHTS_MAX:
                    self._asked.popitem(last=False)

    def report(
        self, at: float, gauges: Mapping[str, float], links: Mapping[str, str], version: str = "", host: str = ""
    ) -> bytes:
        """The next report: new or requested records, as many as fit."""
        with self._lock:
            asked, self._asked = list(self._asked), OrderedDict()
            fresh = list(self._untold)
            self._untold.clear()
            self._level = _next_level(self._level, len(fresh))
            level = self._level
        told = [each for each in fresh if each.failed]
        told += [each for each in fresh if not each.failed and is_shared(each.handoff, level)]
        told += self._find(asked) if asked else []
        kept = told[:FLIGHTS_MAX]
        missed = len(told) - len(kept)
        while True:
            data = encode(FlightReport(at, dict(gauges), dict(links), tuple(kept), 2.0**-level, missed, version, host))
            if len(data) <= REPORT_BYTES_MAX or not kept:
                return data
            missed += len(kept) - len(kept) // 2
            kept = kept[: len(kept) // 2]

    # --- within the lock

    def _note(self, mark: Mark, wall_offset_s: float, before: Before) -> None:
        key = (mark.side, mark.key)
        if isinstance(mark.what, Begun):
            opened = self._open[key] = _OpenFlight(mark.side, mark.what, taken=mark.side is Side.PREFILL)
            if mark.side is Side.PREFILL:
                opened.moments += before(mark.key)
            if mark.what.peer:
                opened.peers.append(mark.what.peer)
            if len(self._open) > OPEN_MAX:
                self._forget(next(iter(self._open)))
        each = self._open.get(key)
        if each is None:  # its beginning was lost with too many others
            self.counters["marks_lost"] += 1
            return
        at = mark.at + wall_offset_s
        if len(each.moments) < MOMENTS_MAX - 1:  # one place is for `taken`
            each.moments.append(Moment(mark.step, at, mark.detail[:TEXT_CHARS_MAX]))
        if mark.step is Step.OFFERED:
            each.pushed = True
        elif mark.step is Step.SEATED and mark.detail not in each.peers and len(each.peers) < PEERS_MAX:
            each.peers.append(mark.detail)
        elif mark.step is Step.ALLOCATED:
            self._untaken[each.begun.request] = key
        elif mark.step is Step.RESTED:
            self._closing[key] = each
            if each.taken:
                self._ready.append(key)
        if isinstance(mark.what, Ended):
            each.ended, each.ended_at = mark.what, at
            each.taken = each.taken or not any(moment.step == Step.ALLOCATED for moment in each.moments)

    def _note_taken(self, request: RequestId, at: float) -> None:
        key = self._untaken.pop(request, None)
        each = self._open.get(key) if key is not None else None
        if each is not None:
            each.taken = True
            each.moments.append(Moment(TAKEN, at))
            if key in self._closing:
                self._ready.append(key)

    def _over(self, wall: float) -> list[Flight]:
        """All that are ready; those that no engine takes are checked only now and then, since there may be many."""
        ready, self._ready = self._ready, []
        if not 0 <= wall - self._looked_at < LOOK_S:
            self._looked_at = wall
            ready += [key for key, each in self._closing.items() if not _waits(each, wall)]
        found: list[Flight] = []
        for key in ready:
            each = self._closing.get(key)
            if each is None:
                continue
            flight = self._flight(key, each)
            self._forget(key)
            self._kept.append(flight)
            self._untold.append(flight)
            if flight.failed:
                self._failed.append(flight)
            found.append(flight)
        return found

    def _forget(self, key: tuple[Side, int]) -> None:
        each = self._open.pop(key)
        self._closing.pop(key, None)
        if self._untaken.get(each.begun.request) == key:
            del self._untaken[each.begun.request]

    def _flight(self, key: tuple[Side, int], each: _OpenFlight) -> Flight:
        begun, ended = each.begun, each.ended
        end = ""
        if ended is not None:
            end = DELIVERED if ended.end.delivered else str(ended.end.reason)
        mode = "push" if begun.push or each.pushed else "stream" if begun.deferred else "pull"
        return Flight(
            seat=_SEATS[each.side],
            worker=self._me.worker,
            incarnation=f"{self._me.incarnation:016x}",
            handoff=begun.handoff[:NAME_CHARS_MAX],
            request=begun.request[:NAME_CHARS_MAX],
            peers=tuple(each.peers),
            mode=mode,
            transport=ended.transport if ended is not None else "",
            tokens=begun.tokens,
            blocks=ended.blocks if ended is not None else 0,
            bytes=ended.bytes if ended is not None else 0,
            retries=ended.retries if ended is not None else 0,
            moments=tuple(sorted(each.moments, key=_at)),
            end=end,
            detail=ended.end.detail[:TEXT_CHARS_MAX] if ended is not None else "",
            trace=begun.trace[:NAME_CHARS_MAX],
        )


def _at(moment: Moment) -> float:
    return moment.at


def _waits(each: _OpenFlight, wall: float) -> bool:
    """Whether its engine may still take it. A little before its end is the jitter of two clocks; more: one was set."""
    return not each.taken and -TAKEN_S < wall - each.ended_at < TAKEN_S


def _next_level(level: int, count: int) -> int:
    """The share that is reported, so that about `TOLD_PER_REPORT` are."""
    while level < LEVEL_MAX and count >> level > TOLD_PER_REPORT:
        level += 1
    while level > 0 and count >> (level - 1) <= TOLD_PER_REPORT // 2:
        level -= 1
    return level
