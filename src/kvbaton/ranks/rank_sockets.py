"""Rank links over ZeroMQ, one thread per end: no decisions here.

Laws: keys are minted for each line and never leave memory except in the invitation. Only the loop's thread touches
sockets, any thread may call `wake`; only `wait` waits; a frame belongs to the rank whose key the connection has proven.
"""

from __future__ import annotations

import ipaddress
import math
import secrets
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import zmq

from kvbaton.control.addressing import check_endpoint
from kvbaton.control.dialler import Dialler
from kvbaton.control.keyring import Keyring
from kvbaton.control.sockets import Context, Heard, LoopThread, Sleeper, SocketPlane, Waker
from kvbaton.control.zmq import ZmqControl
from kvbaton.ranks.rank_messages import ENGINE, RankInvitation, rank_name
from kvbaton.ranks.rank_stream import LIMITS, Arrival, Clock


class RankListener:
    """One rank's end: a `ZmqControl` that accepts only the holder of its invitation."""

    def __init__(self, rank: int, host: str, clock: Clock) -> None:
        (engine_public, engine_secret), (public, secret) = (_mint(), _mint())
        keyring = Keyring(rank_name(rank), public, secret, {ENGINE: engine_public, rank_name(rank): public}, ())
        self._control = ZmqControl(keyring, _bind(host), LIMITS, clock)
        self.keys = public, engine_public, engine_secret
        self.endpoint = self._control.endpoint
        self.wait, self.wake, self.close = self._control.wait, self._control.wake, self._control.close

    @property
    def strangers(self) -> int:
        return self._control.strangers

    def send(self, frame: bytes) -> None:
        self._control.send(ENGINE, frame)

    def receive(self) -> list[bytes]:
        return [frame for _, frame in self._control.receive()]


class Sockets:
    """Implements `rank_carrying.Carrier`."""

    def session(self) -> int:
        return secrets.randbits(62) + 1

    def dial(self, invitations: Sequence[RankInvitation], clock: Clock) -> RankDialler:
        return RankDialler(invitations, clock)

    def listen(self, rank: int, host: str, clock: Clock) -> RankListener:
        return RankListener(rank, host, clock)

    def loop(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Clock,
    ) -> LoopThread:
        return LoopThread(name, sleeper, turn, finish, clock)

    def arrival(self) -> Arrival:
        return threading.Condition()


SOCKETS = Sockets()


def _mint() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


def _bind(host: str) -> str:
    """The listening address: numeric, so that the engine can connect to it as it is."""
    address = ipaddress.ip_address(host)
    where = f"[{host}]" if address.version == 6 else host
    check_endpoint(f"tcp://{where}:1")
    return f"tcp://{where}:0"


FRAMES_PER_RANK_MAX = 64
"""Taken in one turn, so that all ranks are served."""


class RankDialler:
    """Connections to all ranks; opened on first use, kept up by libzmq. One context, one poll and one thread.

    Each rank minted the engine's keys for itself, and a `ZmqControl` has one identity; so its parts are combined here
    with one identity per rank.
    """

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
