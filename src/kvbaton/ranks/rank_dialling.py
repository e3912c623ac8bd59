"""The sockets of an engine to its ranks: one context, one poll and one thread, but a key pair per rank.

Each rank minted the engine's keys for itself, and a `ZmqControl` has one identity; so its parts are combined here with
one identity per rank. Laws as there: only the loop's thread touches sockets, any thread may call `wake`; only `wait`
waits; a frame belongs to the rank whose key the connection has proven.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from kvbaton.control.dialler import Dialler
from kvbaton.control.keyring import Keyring
from kvbaton.control.sockets import Context, Heard, SocketPlane
from kvbaton.control.waker import Waker
from kvbaton.ranks.rank_messages import ENGINE, RankInvitation, rank_name
from kvbaton.ranks.rank_stream import LIMITS

FRAMES_PER_RANK_MAX = 64
"""Taken in one turn, so that all ranks are served."""


class RankDialler:
    """Connections to all ranks; opened on first use, kept up by libzmq."""

    def __init__(self, invitations: Sequence[RankInvitation], clock: Callable[[], float]) -> None:
        self.counters: Counter[str] = Counter()  # as `ZmqControl.counters`
        self._context = Context()
        self._poller = zmq.Poller()
        self._waker = Waker()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._lines = {each.rank: self._line(each, clock) for each in invitations}

    def send(self, rank: int, frame: bytes) -> None:
        """Queue a frame; if the queue is full it is lost and counted."""
        self._lines[rank].send(rank_name(rank), frame)

    def receive(self) -> list[tuple[int, bytes]]:
        """Received frames, each with the rank that sent it."""
        events: dict[object, int] = dict(self._poller.poll(0))
        found: list[tuple[int, bytes]] = []
        for rank, line in self._lines.items():
            frames: list[Heard] = []
            for worker in list(line.readable(events)):
                line.drain(worker, frames, FRAMES_PER_RANK_MAX)
            found.extend((rank, frame) for _, frame, _ in frames)
        self.counters["frames_in"] += len(found)
        return found

    def wait(self, timeout_s: float | None) -> None:
        """Sleep until a frame can be read, `wake` is called, or `timeout_s` has passed."""
        events = dict(self._poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        if self._waker.fd in events:
            self._waker.clear()

    def wake(self) -> None:
        """End the current wait, or else the next. From any thread."""
        self._waker.wake()

    def close(self) -> None:
        """Waits at most `linger_s` for queued frames. Idempotent."""
        if self._context.closed:
            return
        for line in self._lines.values():
            line.close()
        self._context.term()
        self._waker.close()

    def __del__(self) -> None:
        if hasattr(self, "_lines") and not sys.is_finalizing():
            self.close()

    def _line(self, invitation: RankInvitation, clock: Callable[[], float]) -> Dialler:
        rank = rank_name(invitation.rank)
        peers = {ENGINE: invitation.engine_public, rank: invitation.rank_public}
        keyring = Keyring(ENGINE, invitation.engine_public, invitation.engine_secret, peers, ())
        plane = SocketPlane(keyring, LIMITS, clock, self._context, self._poller, self.counters)
        line = Dialler(plane, watches=False)  # a rank's link knows by itself when it is lost
        line.set_directory({rank: (invitation.endpoint, invitation.rank_public)})
        return line
