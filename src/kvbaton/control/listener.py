"""The side on which others call: one bound socket, and the way back to everyone who has spoken on it.

Laws: a frame belongs to the worker whose key opened its connection, whatever the frame says. The way back is the
connection on which that worker spoke last; when it is gone, it is forgotten. No message ends the listener: what has
an odd shape is counted and dropped.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Collection

import zmq

from kvbaton.control.addressing import ControlError, check_bind, is_ipv6
from kvbaton.control.sockets import NOBLOCK_MORE, Heard, Socket, SocketPlane, ZapGate, has_frame
from kvbaton.protocol.ids import WorkerId

ROUTE_BYTES = 5  # what libzmq mints: a zero and 32 bits. A peer that chose its own could be mistaken for one that left


class Sent(enum.Enum):
    QUEUED = "queued"
    LOST = "lost"  # the connection is full
    NO_WAY = "no way"


class Listener:
    """A bound endpoint and its routes."""

    def __init__(self, plane: SocketPlane, bind: str) -> None:
        self._plane = plane
        self._routes: dict[WorkerId, tuple[bytes, str]] = {}
        self._addresses: dict[WorkerId, str] = {}  # where each route came from
        self.gate = ZapGate(plane)
        self.socket = plane.server(ipv6=is_ipv6(bind))
        self.gate.watch(self.socket)
        try:
            self.socket.bind(check_bind(bind))
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ControlError(_explained(bind, error)) from None
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")

    @property
    def polled(self) -> tuple[Socket, Socket, Socket]:
        return self.socket, self.gate.questions, self.gate.knocks

    def reply(self, worker: WorkerId, frame: bytes) -> Sent:
        """Send on the connection that `worker` opened, if there is one."""
        route = self._routes.get(worker)
        if route is None:
            return Sent.NO_WAY
        try:
            self.socket.send(route[0], NOBLOCK_MORE)
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return Sent.LOST
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            del self._routes[worker]
            return Sent.NO_WAY
        return Sent.QUEUED

    def take_peers(self) -> None:
        """Whoever is no longer on the list has no way in, and there is no way back to it."""
        self.gate.take_peers()
        gone = [worker for worker, (_, key) in self._routes.items() if key not in self._plane.peers.get(worker, ())]
        self.forget(gone)

    def drain(self, found: list[Heard], frames_max: int) -> None:
        """Append up to `frames_max` frames, each with its authenticated sender."""
        bytes_max = self._plane.limits.frame_bytes_max
        for _ in range(frames_max):
            if not has_frame(self.socket):
                return
            parts = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            if len(parts) != 2 or len(parts[0]) != ROUTE_BYTES or not 0 < len(parts[1]) <= bytes_max:
                self._plane.counters["malformed"] += 1
                continue
            sender = self.gate.sender(parts[1])
            if sender is None:
                self._plane.counters["refused"] += 1
                continue
            worker, key = sender
            if self._plane.hears(worker):
                self._take_route(worker, parts[0].bytes, key, parts[1])
                found.append((worker, parts[1].bytes, key))

    def address_of(self, worker: WorkerId) -> str:
        """From which address a worker last spoke here, without its port; "" if it has not."""
        return self._addresses.get(worker, "")

    def _take_route(self, worker: WorkerId, route: bytes, key: str, frame: zmq.Frame) -> None:
        if self._routes.get(worker) == (route, key):
            return
        self._routes[worker] = route, key
        try:
            self._addresses[worker] = str(frame.get("Peer-Address"))
        except zmq.ZMQError:  # no such property
            self._addresses.pop(worker, None)

    def forget(self, workers: Collection[WorkerId]) -> None:
        """These moved or changed keys: their old connections are no way back."""
        for worker in workers:
            self._routes.pop(worker, None)
            self._addresses.pop(worker, None)

    def close(self) -> None:
        self.gate.close(self.socket)
        self.socket.close()


def _explained(bind: str, error: zmq.ZMQError | ValueError) -> str:
    if isinstance(error, ValueError):
        return f"control address: {error}"
    if error.errno == errno.EADDRINUSE:
        return f"control address {bind} is in use; stop the process that holds it, or give another port (0: a free one)"
    if error.errno in (errno.ENODEV, errno.EADDRNOTAVAIL):
        return f"control address {bind} is not one of this host's; give a local address, such as tcp://127.0.0.1:0"
    return f"control address {bind} cannot be bound ({error}); give a local address, such as tcp://127.0.0.1:0"
