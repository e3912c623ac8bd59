"""The side on which we call: one connection per peer that we have something to tell, made on first use.

Laws: a connection speaks only with the holder of the key that our key directory gives for that worker, so what comes
back on it is that worker's; an address under any other key is not dialled. When a worker's address or key changes, the
old connection is closed. While a key is rotated there are two, and a worker that does not answer is tried under each in
turn, for longer each time: one that is far or busy must have the time to answer under the right one. A connection that
takes no more frames and has been silent for a while is replaced: libzmq gives up for good on a server that refused the
key or spoke another protocol, and a restarted peer would stay out of reach. So is one on which nothing came back for
`silence_s` and then not to the next question either: something between that keeps connections open may carry nothing.

What TCP says of a line is watched too: a peer's silence is no evidence, only a refused connection is, which the peer's
own host answers when no process listens. A line that had an authenticated connection is refused at the first attempt
after that broke off: its process has ended. One that had none gets `REFUSAL_S`, since its address may be an earlier
life's and news of the next on the way. Nothing that a third party sends to the peer or to us makes a host refuse a
connection to a process that listens.

The side on which others call: one bound socket, and the way back to everyone who has spoken on it.

Laws: a frame belongs to the worker whose key opened its connection, whatever the frame says. The way back is the
connection on which that worker spoke last; when it is gone, it is forgotten. No message ends the listener: what has
an odd shape is counted and dropped.
"""

from __future__ import annotations

import enum
import errno
import logging
import secrets
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbaton.control.addressing import ControlError, check_bind
from kvbaton.control.sockets import NOBLOCK_MORE, Heard, Socket, SocketPlane, ZapGate, has_frame, is_ipv6
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.ids import WorkerId

REFUSAL_S = 2.0
_EVENTS = zmq.EVENT_CONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED


class LineWatch:
    """The watch over one socket that connects to one address; closed with it."""

    def __init__(self, plane: SocketPlane, socket: Socket) -> None:
        self._clock = plane.clock
        self._refusal_s = REFUSAL_S
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
                self._refusal_s = 0.0
            return False
        now = self._clock()
        if self._refused_since is None:
            self._refused_since = now
        return now - self._refused_since >= self._refusal_s


log = logging.getLogger(__name__)

PATIENCE_S_MAX = 30.0

Address = tuple[str, str]
"""Endpoint and public key; an empty key stands for whatever our key directory gives for that worker."""


@dataclass(slots=True)
class _Line:
    socket: Socket
    watch: LineWatch | None
    address: Address  # with the key under which it was dialled
    quiet_since: float  # when it was dialled, or last heard
    patience_s: float  # how long an answer may take before another key is tried
    asked_at: float | None = None  # when something was first sent since then
    doubted_at: float | None = None  # when something was sent although nothing had come for `silence_s`


class Dialler:
    """Connections that this side opened, least recently used first."""

    def __init__(self, plane: SocketPlane, *, watches: bool = True) -> None:
        """`watches`: whoever polls asks `take_refused` too, or the events of lines would keep it awake."""
        self._plane = plane
        self._watches = watches
        self._directory: Mapping[WorkerId, Address] = {}
        self._lines: OrderedDict[WorkerId, _Line] = OrderedDict()

    def set_directory(self, directory: Mapping[WorkerId, Address]) -> list[WorkerId]:
        """Take a new directory; returns the workers that it moved."""
        before, self._directory = self._directory, directory
        for worker in sorted(directory):
            if not self._keys(worker) and before.get(worker) != directory[worker]:
                self._plane.counters["mismatched"] += 1
                log.warning("[key-mismatched] directory: %s has another key than our directory; load it again", worker)
        self.take_peers()
        return [worker for worker, address in directory.items() if before.get(worker, address) != address]

    def take_peers(self) -> None:
        """Hang up on whoever is no longer listed as we dialled it."""
        for worker, line in list(self._lines.items()):
            if line.address not in [(self._directory[worker][0], key) for key in self._keys(worker)]:
                self._hang_up(worker)

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        """Queue a frame, or lose it where the queue is full; False when no such worker is listed."""
        keys = self._keys(worker)
        if not keys:
            return False
        try:
            queued = self._queue(worker, self._directory[worker][0], keys, frame)
        except zmq.ZMQError as error:  # such as: this process has no descriptors left
            queued = False
            if worth_saying(self._plane.counters["lost"] + 1):
                log.error("[dial-failed] %s cannot be dialled at %s: %s", worker, self._directory[worker][0], error)
        self._plane.counters["frames_out" if queued else "lost"] += 1
        return True

    def readable(self, events: Mapping[object, int]) -> Iterator[WorkerId]:
        return (worker for worker, line in self._lines.items() if line.socket in events)

    def take_refused(self, events: dict[object, int]) -> list[WorkerId]:
        """Workers where nothing listens any more; takes what `events` says of it."""
        watched = [(worker, line.watch) for worker, line in self._lines.items() if line.watch is not None]
        return [worker for worker, watch in watched if events.pop(watch.events, 0) and watch.is_refused()]

    def drain(self, worker: WorkerId, found: list[Heard], frames_max: int) -> None:
        """Append up to `frames_max` frames that came on the line to `worker`."""
        line = self._lines[worker]
        line.quiet_since, line.asked_at, line.doubted_at = self._plane.clock(), None, None
        line.patience_s = self._plane.limits.redial_s
        for _ in range(frames_max):
            if not has_frame(line.socket):
                return
            parts = line.socket.recv_multipart(zmq.NOBLOCK)
            if len(parts) != 1 or not 0 < len(parts[0]) <= self._plane.limits.frame_bytes_max:
                self._plane.counters["malformed"] += 1
            elif self._plane.hears(worker):
                found.append((worker, parts[0], line.address[1]))

    def close(self) -> None:
        for worker in list(self._lines):
            self._hang_up(worker, linger_s=self._plane.limits.linger_s)

    def _queue(self, worker: WorkerId, endpoint: str, keys: tuple[str, ...], frame: bytes) -> bool:
        """Whether the line to `worker` took the frame; the line may have to be dialled, or dialled again, for it."""
        line = self._lines.get(worker) or self._dial(worker, (endpoint, keys[0]))
        self._lines.move_to_end(worker)
        if self._may_have_other_key(line, keys):
            patience_s = min(1.5 * line.patience_s, PATIENCE_S_MAX)
            line = self._redial(worker, (endpoint, keys[(keys.index(line.address[1]) + 1) % len(keys)]))
            line.patience_s = patience_s
        elif len(keys) == 1 and self._may_be_cut_off(line):
            line = self._redial(worker, line.address)
        if not _queued(line.socket, frame):
            if self._plane.clock() - line.quiet_since < self._plane.limits.redial_s:
                return False
            line = self._redial(worker, line.address)
            if not _queued(line.socket, frame):
                return False
        if line.asked_at is None:
            line.asked_at = self._plane.clock()
        return True

    def _may_have_other_key(self, line: _Line, keys: tuple[str, ...]) -> bool:
        """Whether a worker whose key is being rotated has not answered for so long that it may be using the other."""
        if len(keys) == 1 or line.asked_at is None:
            return False
        return self._plane.clock() - line.asked_at >= line.patience_s

    def _may_be_cut_off(self, line: _Line) -> bool:
        """Whether a question went unanswered, and one long after it too; not every frame is a question."""
        now, limits = self._plane.clock(), self._plane.limits
        if line.asked_at is None or now - line.asked_at < limits.silence_s:
            return False
        if line.doubted_at is None:
            line.doubted_at = now
        return now - line.doubted_at >= limits.redial_s

    def _redial(self, worker: WorkerId, address: Address) -> _Line:
        self._plane.counters["redialled"] += 1
        self._hang_up(worker)
        return self._dial(worker, address)

    def _keys(self, worker: WorkerId) -> tuple[str, ...]:
        """Under which keys a listed worker may be dialled, the likeliest first: what the directory says, if we know it.

        A directory that names a key says which one the worker uses; one that names none leaves it to be found out.
        """
        listed = self._directory.get(worker)
        known = self._plane.peers.get(worker, ())
        if listed is None or not listed[1]:
            return known if listed is not None else ()
        return listed[1:] if listed[1] in known else ()

    def _dial(self, worker: WorkerId, address: Address) -> _Line:
        if len(self._lines) >= self._plane.limits.peers_dialled_max:
            self._plane.counters["hung_up"] += 1
            self._hang_up(next(iter(self._lines)))
        endpoint, key = address
        socket = self._plane.client(key, ipv6=is_ipv6(endpoint))
        try:
            # Not while a key is rotated: what a line under the wrong one meets with says nothing of the worker.
            watch = LineWatch(self._plane, socket) if self._watches and len(self._keys(worker)) == 1 else None
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        socket.connect(endpoint)
        line = self._lines[worker] = _Line(socket, watch, address, self._plane.clock(), self._plane.limits.redial_s)
        for each in _polled(line):
            self._plane.poller.register(each, zmq.POLLIN)
        return line

    def _hang_up(self, worker: WorkerId, linger_s: float = 0.0) -> None:
        line = self._lines.pop(worker)
        for each in _polled(line):
            self._plane.poller.unregister(each)
        line.socket.close(linger=int(linger_s * 1000))
        if line.watch is not None:
            line.watch.events.close(linger=0)


def _polled(line: _Line) -> list[Socket]:
    return [line.socket] if line.watch is None else [line.socket, line.watch.events]


def _queued(socket: Socket, frame: bytes) -> bool:
    try:
        socket.send(frame, zmq.NOBLOCK)
    except zmq.Again:
        return False
    return True


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
