"""Who may come in: answers libzmq's question about each connection (ZAP, RFC 27) from a list of public keys.

Laws: a connection whose key is on the list is let in, and libzmq attaches that key to each of its frames; any other is
refused. A frame's sender is whoever holds that key *now*, so a key taken off the list is mute at once, connected or
not. The gate is bound before the listener, since libzmq admits everyone where nobody answers. It is asked and answered
on the loop's own thread: pyzmq's authenticator would add a thread with an event loop that one exception ends. Where
members may join, an unknown key may be known a moment later: it is refused for now (300), and its holder tries again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import zmq
from zmq.utils import z85

from kvbaton.control.sockets import Socket, SocketPlane
from kvbaton.observe.codes.saying import worth_saying
from kvbaton.protocol.ids import WorkerId

log = logging.getLogger(__name__)

ANSWERS_PER_TURN_MAX = 64
KEY_BYTES = 32
_EVENTS = "inproc://kvbaton.connections"


class ZapGate:
    """The answering end, and a count of all who knocked."""

    def __init__(self, plane: SocketPlane) -> None:
        self._plane = plane
        self._names: dict[str, WorkerId] = {}
        self.questions: Socket = plane.context.socket(zmq.ROUTER)
        self.questions.setsockopt(zmq.LINGER, 0)
        self.questions.bind("inproc://zeromq.zap.01")
        self.knocks: Socket = plane.context.socket(zmq.PAIR)
        self.knocks.setsockopt(zmq.LINGER, 0)
        self.knocks.setsockopt(zmq.RCVHWM, 0)  # libzmq's I/O thread would block on a full one; an event is 30 bytes
        self.take_peers()

    def take_peers(self) -> None:
        """Let in whom the plane's list names, from now on."""
        self._names = {key: name for name, keys in self._plane.peers.items() for key in keys}

    def sender(self, frame: zmq.Frame) -> tuple[WorkerId, str] | None:
        """Whose connection a frame came on, and its key; None when that is no longer on the list."""
        try:
            key = str(frame.get("User-Id"))
        except zmq.ZMQError:  # no such property: not a frame that came through this gate
            return None
        worker = self._names.get(key)
        return None if worker is None else (worker, key)

    def watch(self, listener: Socket) -> None:
        """Count connections that `listener` accepts, authenticated or not."""
        listener.monitor(_EVENTS, zmq.EVENT_ACCEPTED)
        self.knocks.connect(_EVENTS)

    def tend(self) -> None:
        """Answer what was asked and count who knocked."""
        _each(self.questions, self._answer)
        _each(self.knocks, self._count)

    def close(self, listener: Socket) -> None:
        listener.disable_monitor()
        self.knocks.close()
        self.questions.close()

    def _count(self, _: list[bytes]) -> None:
        self._plane.counters["connections"] += 1

    def _answer(self, question: list[bytes]) -> None:
        """Frames: route, empty, version, request id, domain, address, identity, mechanism, credentials."""
        if len(question) < 4:
            return
        curve = len(question) == 9 and question[7] == b"CURVE" and len(question[8]) == KEY_BYTES
        key = z85.encode(question[8]) if curve else b""
        if key and self._admits(key.decode()):
            self._plane.counters["admitted"] += 1
            answer = (b"200", b"OK", key)
        else:
            self._refuse(question[5] if len(question) > 5 else b"?")
            answer = (b"300" if curve and self._plane.members_join else b"400", b"unknown key", b"")
        self.questions.send_multipart([*question[:2], b"1.0", question[3], *answer, b""])

    def _admits(self, key: str) -> bool:
        return key in self._names

    def _refuse(self, address: bytes) -> None:
        self._plane.counters["refused"] += 1
        if worth_saying(self._plane.counters["refused"]):
            log.warning("[stranger-refused] refused %s: its key is not in our key directory", address.decode())


def _each(socket: Socket, handle: Callable[[list[bytes]], None]) -> None:
    for _ in range(ANSWERS_PER_TURN_MAX):
        try:
            message = socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return
        handle(message)
