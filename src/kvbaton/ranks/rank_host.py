"""The rank's end of a rank link: carries out the engine process's commands on the transports of the worker process.

    host = RankHost(rank, {"tcp": transport})     # memory is registered already
    host.start(); hand_to_engine(host.invitation.encode())

Laws: one thread, asleep in the kernel when idle; only it touches the transports from `start` on, and `stop` closes
them. Commands are carried out in order, except that a copy for which a transport has no room waits without delaying
what can end it (cancel, disconnect, fence, close). Every exception of a transport becomes news. The rank's store, if
any, is driven by the same thread and closed before the transports. One engine is served: the first holder of the
invitation to speak, for the lifetime of this host. Its keys are minted for it and never leave memory except in the
invitation. An engine in this process, as vLLM with one worker, takes the transports (`give`) instead of sending
commands: from then on they belong to its node, and this host only closes them when it stops, if the node has not. The
store stays with this host. Frames and turns are carried by `rank_carrying`.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import islice
from weakref import WeakValueDictionary

import msgspec

from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import LeaseId
from kvbaton.ranks.rank_messages import (
    NEWS_BATCH_MAX,
    TRANSPORTS_MAX,
    News,
    Progressed,
    RankInvitation,
    decode_command,
    encode_news,
    rank_name,
)
from kvbaton.ranks.rank_planes import HostedPlane
from kvbaton.ranks.rank_store_link import MakeRankStore, RankStoreHost
from kvbaton.ranks.rank_store_messages import RankStoreCommand
from kvbaton.ranks.rank_stream import SOCKETS, Carrier, Clock, Stream
from kvbaton.transports.core.transport import Transport

log = logging.getLogger(__name__)

LEASES_MAX = 4096
"""Whose progress waits to be sent. Of one lease only the latest is kept; a lease beyond the bound is not reported, and
its handoff then ends by its deadline."""

REFUSALS_S = 1.0
"""So often, at most, the engine is told who was turned away. Nobody wakes for it: a ping comes every other second."""

STOP_S = 10.0

_HERE: WeakValueDictionary[str, RankHost] = WeakValueDictionary()
"""The hosts of this process by the key in their invitation."""
os.register_at_fork(after_in_child=_HERE.clear)  # a child has neither their threads nor their connections


class RankHost:
    """Serves one rank's transports to the engine. Construct, `start`, hand over the invitation; `stop` at the end."""

    def __init__(
        self,
        rank: int,
        transports: Mapping[str, Transport],
        host: str = "127.0.0.1",
        clock: Clock = time.monotonic,
        store: MakeRankStore | None = None,
        carrier: Carrier = SOCKETS,
    ) -> None:
        if not 0 < len(transports) <= TRANSPORTS_MAX:
            raise ValueError(f"transports: {len(transports)} given, 1..{TRANSPORTS_MAX} expected")
        self._planes = {name: HostedPlane(name, transport) for name, transport in transports.items()}
        self._store = RankStoreHost(store) if store is not None else None
        self._line = carrier.listen(rank, host, clock)
        self._clock = clock
        self._stream = Stream()
        self.leases_max, self.batch_max = LEASES_MAX, NEWS_BATCH_MAX
        self._progress: dict[LeaseId, Progress] = {}
        self._refusals_at = -math.inf  # when to read the refusal counters next
        self._lock = threading.Lock()  # of `_progress`
        self._serving = threading.Lock()  # held through each turn, so that transports are given between two
        self._given: dict[str, HostedPlane] = {}
        self._tell = self._line.wake  # wakes the consumer of progress
        self.counters: Counter[str] = Counter()  # malformed, unknown_transport, no_store, progress_lost
        self._thread = carrier.loop(f"kvbaton-{rank_name(rank)}", self._line, self._turn, self._finish, clock)
        able = {name: transport.capabilities for name, transport in transports.items()}
        has_store = store is not None
        self.invitation = RankInvitation(rank, self._line.endpoint, *self._line.keys, able, has_store=has_store)
        _HERE[self.invitation.rank_public] = self

    def start(self) -> None:
        for plane in self._planes.values():
            plane.transport.set_waker(self._line.wake)
        if self._store is not None:
            self._store.set_waker(self._line.wake)
        self._thread.start()

    def give(
        self, invitation: RankInvitation, session: int, tell: Callable[[], None]
    ) -> Mapping[str, HostedPlane] | None:
        """The transports, for an engine of this process that uses `session` for everything else; once.

        None for other keys than were minted here, and when an engine is served already. `tell` is called when there is
        progress to take, from any thread.
        """
        with self._serving:
            if invitation != self.invitation or self._stream.session or self._thread.is_stopping:
                return None
            self._stream.session, self._tell = session, tell
            self._given, self._planes = self._planes, {}
            return self._given

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Close the transports and the link; False when that took longer than `timeout_s`."""
        return self._thread.stop(timeout_s)

    def progressed(self, lease: LeaseId, progress: Progress) -> None:
        """Tell the engine how far this rank's device is. From any thread; never waits, never raises."""
        with self._lock:
            if lease in self._progress or len(self._progress) < self.leases_max:
                self._progress[lease] = progress
            else:
                self.counters["progress_lost"] += 1
        self._tell()

    def take_progress(self) -> list[Progressed]:
        """For the owner of the transports: the device's progress since the last call."""
        with self._lock:
            found = [Progressed(lease, progress) for lease, progress in self._progress.items()]
            self._progress.clear()
        return found

    @property
    def strangers(self) -> int:
        """Connections that were not the engine's."""
        return self._line.strangers

    @property
    def stream_counters(self) -> Counter[str]:
        return self._stream.counters

    # --- the loop's thread

    def _turn(self, now: float) -> float | None:
        with self._serving:
            return self._serve(now)

    def _serve(self, now: float) -> float | None:
        for frame in self._line.receive():
            self._take(frame, now)
        again = [at for plane in self._planes.values() if (at := plane.turn(now)) is not None]
        if self._store is not None:
            self._store.turn()
        self._send(now)
        return min(again, default=None)

    def _take(self, frame: bytes, now: float) -> None:
        try:
            body = self._stream.take(frame, now)
            if body is None:
                return
            command = decode_command(body)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._count("malformed", f"a frame that cannot be decoded: {error}")
            return
        if isinstance(command, RankStoreCommand):
            self._order(command)
            return
        plane = self._planes.get(command.transport)
        if plane is None:
            self._count("unknown_transport", f"no transport {command.transport!r} for {type(command).__name__}")
            return
        plane.carry_out(command)

    def _order(self, command: RankStoreCommand) -> None:
        if self._store is None:
            self._count("no_store", f"no shared store for {type(command).__name__}")
        else:
            self._store.carry_out(command)

    def _send(self, now: float) -> None:
        news: list[News] = []
        look = now >= self._refusals_at and self._stream.is_open  # otherwise unauthenticated peers grow the send queue
        if look:
            self._refusals_at = now + REFUSALS_S
        for plane in self._planes.values():
            if look:
                plane.note_refusals()
            news.extend(plane.take_news())
        if self._store is not None:
            news.extend(self._store.take_news())
        if self._progress and self._stream.session and self._stream.is_open and not self._given:
            news.extend(self._some_progress())
        for start in range(0, len(news), self.batch_max):
            self._stream.add(encode_news(news[start : start + self.batch_max]))
        for frame in self._stream.due(now) if self._stream.session else ():
            self._line.send(frame)  # lost without a connection; sent again when there is one

    def _some_progress(self) -> list[News]:
        with self._lock:
            leases = list(islice(self._progress, self.batch_max))
            found: list[News] = [Progressed(lease, self._progress.pop(lease)) for lease in leases]
            if self._progress:
                self._line.wake()
        return found

    def _finish(self) -> None:
        try:
            with self._serving:
                if self._store is not None:
                    self._store.close()
                for plane in self._given.values():
                    plane.shut()  # the node drains what ended
                for plane in self._planes.values():
                    plane.close()
                self._send(self._clock())
        finally:
            self._line.close()

    def _count(self, what: str, detail: str) -> None:
        self.counters[what] += 1
        if worth_saying(self.counters[what]):
            log.error("[rank-fault] rank %d: %s", self.invitation.rank, detail)


def host_of(invitation: RankInvitation) -> RankHost | None:
    """The host that made this invitation, if it is in this process."""
    return _HERE.get(invitation.rank_public)
