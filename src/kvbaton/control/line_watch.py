"""What TCP says of a connection that we opened: whether anything still listens where it leads.

Laws: a peer's silence is no evidence here, only a refused connection is, which the peer's own host answers when no
process listens. A line that had an authenticated connection is refused at the first attempt after that broke off: its
process has ended. One that had none gets `PATIENCE_S`, since its address may be an earlier life's and news of the next
on the way. Nothing that a third party sends to the peer or to us makes a host refuse a connection to a process that
listens.
"""

from __future__ import annotations

import secrets

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbaton.control.sockets import Socket, SocketPlane, has_frame

PATIENCE_S = 2.0
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class LineWatch:
    """Of one socket that connects to one address; closed with it."""

    def __init__(self, plane: SocketPlane, socket: Socket) -> None:
        self._clock = plane.clock
        self._patience_s = PATIENCE_S
        self._refused_since: float | None = None
        where = f"inproc://kvbaton.line.{secrets.token_hex(8)}"
        self.events: Socket = plane.context.socket(zmq.PAIR)
        try:
            self.events.setsockopt(zmq.LINGER, 0)
            self.events.setsockopt(zmq.RCVHWM, 0)  # libzmq's thread waits for room otherwise
            socket.monitor(where, int(_EVENTS))
            self.events.connect(where)
        except zmq.ZMQError:
            self.events.close(linger=0)
            raise

    def is_refused(self) -> bool:
        """Whether, by what has happened since it was last asked, nothing listens there."""
        found = False
        while has_frame(self.events):
            found = self._take(parse_monitor_message(self.events.recv_multipart(zmq.NOBLOCK))["event"])
        return found

    def _take(self, event: int) -> bool:
        if event != zmq.EVENT_CLOSED:  # an attempt that came to nothing
            self._refused_since = None
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._patience_s = 0.0
            return False
        now = self._clock()
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= self._patience_s
