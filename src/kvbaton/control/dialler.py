"""The side on which we call: one connection per peer that we have something to tell, made on first use.

Laws: a connection speaks only with the holder of the key that our key directory gives for that worker, so what comes
back on it is that worker's; an address under any other key is not dialled. When a worker's address or key changes, the
old connection is closed. A connection that takes no more frames and has been silent for a while is replaced: libzmq
gives up for good on a server that refused the key or spoke another protocol, and a restarted peer would stay out of
reach.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import zmq

from kvbaton.control.base import is_ipv6, worth_saying
from kvbaton.control.sockets import Plane, Socket
from kvbaton.protocol.ids import WorkerId

log = logging.getLogger(__name__)

Address = tuple[str, str]
"""Endpoint and public key."""


@dataclass(slots=True)
class _Line:
    socket: Socket
    address: Address
    quiet_since: float  # when it was dialled, or last heard


class Dialler:
    """Connections that this side opened, least recently used first."""

    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._directory: Mapping[WorkerId, Address] = {}
        self._lines: OrderedDict[WorkerId, _Line] = OrderedDict()

    def set_directory(self, directory: Mapping[WorkerId, Address]) -> list[WorkerId]:
        """Take a new directory; returns the workers that it moved."""
        before, self._directory = self._directory, directory
        for worker in sorted(directory):
            if self._plane.peers.get(worker) != directory[worker][1] and before.get(worker) != directory[worker]:
                self._plane.counters["mismatched"] += 1
                log.warning("directory: %s has another key than in our key directory; load that again", worker)
        self.take_peers()
        return [worker for worker, address in directory.items() if before.get(worker, address) != address]

    def take_peers(self) -> None:
        """Hang up on whoever is no longer listed as we dialled it."""
        for worker, line in list(self._lines.items()):
            if self._address(worker) != line.address:
                self._hang_up(worker)

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        """Queue a frame, or lose it where the queue is full; False when no such worker is listed."""
        address = self._address(worker)
        if address is None:
            return False
        try:
            queued = self._queue(worker, address, frame)
        except zmq.ZMQError as error:  # such as: this process has no descriptors left
            queued = False
            if worth_saying(self._plane.counters["lost"] + 1):
                log.error("%s cannot be dialled at %s: %s", worker, address[0], error)
        self._plane.counters["frames_out" if queued else "lost"] += 1
        return True

    def readable(self, events: Mapping[object, int]) -> Iterator[WorkerId]:
        return (worker for worker, line in self._lines.items() if line.socket in events)

    def drain(self, worker: WorkerId, found: list[tuple[WorkerId, bytes]], frames_max: int) -> None:
        """Append up to `frames_max` frames that came on the line to `worker`."""
        line = self._lines[worker]
        line.quiet_since = self._plane.clock()
        for _ in range(frames_max):
            try:
                parts = line.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(parts) != 1 or not 0 < len(parts[0]) <= self._plane.limits.frame_bytes_max:
                self._plane.counters["malformed"] += 1
                continue
            found.append((worker, parts[0]))

    def close(self) -> None:
        for worker in list(self._lines):
            self._hang_up(worker, linger_s=self._plane.limits.linger_s)

    def _queue(self, worker: WorkerId, address: Address, frame: bytes) -> bool:
        """Whether the line to `worker` took the frame; the line may have to be dialled, or dialled again, for it."""
        line = self._lines.get(worker) or self._dial(worker, address)
        self._lines.move_to_end(worker)
        if _queued(line.socket, frame):
            return True
        if self._plane.clock() - line.quiet_since < self._plane.limits.redial_s:
            return False
        self._plane.counters["redialled"] += 1
        self._hang_up(worker)
        return _queued(self._dial(worker, address).socket, frame)

    def _address(self, worker: WorkerId) -> Address | None:
        address = self._directory.get(worker)
        return address if address is not None and self._plane.peers.get(worker) == address[1] else None

    def _dial(self, worker: WorkerId, address: Address) -> _Line:
        if len(self._lines) >= self._plane.limits.peers_dialled_max:
            self._plane.counters["hung_up"] += 1
            self._hang_up(next(iter(self._lines)))
        endpoint, key = address
        socket = self._plane.client(key, ipv6=is_ipv6(endpoint))
        socket.connect(endpoint)
        self._plane.poller.register(socket, zmq.POLLIN)
        line = self._lines[worker] = _Line(socket, address, self._plane.clock())
        return line

    def _hang_up(self, worker: WorkerId, linger_s: float = 0.0) -> None:
        socket = self._lines.pop(worker).socket
        self._plane.poller.unregister(socket)
        socket.close(linger=int(linger_s * 1000))


def _queued(socket: Socket, frame: bytes) -> bool:
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True
