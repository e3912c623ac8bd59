"""Sockets as this project uses them: encrypted, bounded, never blocking, and quick to notice that a host is dead.

Laws: every option that bounds or protects a socket is set here, before it is bound or connected. No heartbeats of
libzmq's: its timer writes to a connection that was reset while its queue was full, and an assertion there ends the
process (4.3.5, `!_io_error`). Dead hosts are noticed by TCP, and peers that do not answer by the dialler.

Who may come in: answers libzmq's question about each connection (ZAP, RFC 27) from a list of public keys.

Laws: a connection whose key is on the list is let in, and libzmq attaches that key to each of its frames; any other is
refused. A frame's sender is whoever holds that key *now*, so a key taken off the list is mute at once, connected or
not. The gate is bound before the listener, since libzmq admits everyone where nobody answers. It is asked and answered
on the loop's own thread: pyzmq's authenticator would add a thread with an event loop that one exception ends. Where
members may join, an unknown key may be known a moment later: it is refused for now (300), and its holder tries again.

One thread that takes turns: do what is due, sleep until something comes or the next deadline, repeat.

Laws: an exception out of a turn is a bug and never ends the thread; it is logged, counted, and followed by a pause, so
that it does not spin. Idle, the thread sleeps in the kernel. Whatever `finish` closes is closed on this thread, the
only one that used it.

Wakes a thread that sleeps in a poll, from any other thread. Many calls before it looks cost one wake-up.

Law: what a caller queued before `wake` is seen by the sleeper's next turn. So `clear` empties the descriptor first and
lowers the flag after; the other way round, a call in between would be lost for good.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import zmq
from zmq.utils import z85

from kvbaton.control.addressing import ControlLimits
from kvbaton.control.keyring import Keyring
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.bounded import Buckets
from kvbaton.protocol.ids import WorkerId


class Waker:
    """One descriptor to poll for reading, and the means to make it readable."""

    __slots__ = ("_lock", "_raised", "fd")

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._raised = False
        self._lock = threading.Lock()

    def wake(self) -> None:
        """From any thread, also after `close`."""
        if self._raised:
            return
        with self._lock:  # or the descriptor could be closed, and be someone else's, between look and write
            if self.fd >= 0:
                self._raised = True
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """By the sleeper, after the descriptor was readable and before it looks at its queues."""
        try:
            os.eventfd_read(self.fd)
        except BlockingIOError:
            pass
        finally:
            self._raised = False

    def close(self) -> None:
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
                self.fd = -1


PAUSE_S = 0.05
TURN_S_MIN = 0.001  # a deadline that stays in the past is a bug; it costs at most a thousand turns a second


class Sleeper(Protocol):
    """Something a thread can sleep on."""

    def wait(self, timeout_s: float | None) -> None:
        """Return when there is something to do, or after `timeout_s`."""

    def wake(self) -> None:
        """End the wait that is under way, or else the next. From any thread."""


class LoopThread:
    """Runs `turn(now)`, which answers when it is next due (None: not before something comes), until stopped."""

    def __init__(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.faults = 0
        self._sleeper = sleeper
        self._turn = turn
        self._finish = finish
        self._clock = clock
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """End the thread after its current turn; False when that took longer than `timeout_s`."""
        started = self._thread.ident is not None
        first = not self._stopping.is_set()
        self._stopping.set()
        if not started:
            if first:
                self._guard(self._finish)
            return True
        self._sleeper.wake()
        if self.is_current:
            return True
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._stopping.is_set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            if not self._guard(self._once):
                self._stopping.wait(PAUSE_S)
        self._guard(self._finish)

    def _once(self) -> None:
        due = self._turn(self._clock())
        self._sleeper.wait(None if due is None else max(due - self._clock(), TURN_S_MIN))

    def _guard(self, action: Callable[[], None]) -> bool:
        try:
            action()
        except Exception:  # a bug in one turn must not end service to everybody
            self.faults += 1
            if worth_saying(self.faults):
                log.exception("[thread-fault] %s: fault %d; continuing", self._thread.name, self.faults)
            return False
        return True


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


log = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"

Heard = tuple[WorkerId, bytes, str]
"""Who said something, what it was, and the public key that its connection has proven."""

NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)  # flags of zmq's own kind take longer to join than a frame to send
_READABLE = int(zmq.POLLIN)

CURVE_OVERHEAD_BYTES = 64  # libzmq counts its 33 bytes of envelope against ZMQ_MAXMSGSIZE
PROBES_MAX = 3
RECONNECT_MS_MIN, RECONNECT_MS_MAX = 50, 1000


class Context(zmq.Context["zmq.Socket[bytes]"]):
    """A context that is closed by its owner, never by the garbage collector.

    pyzmq's `__del__` terminates it, which waits for sockets that the collector may be about to close only after it: a
    control plane dropped in a reference cycle then hangs the thread that collects. Seen with pyzmq 27.3; `gc.collect()`
    in `test_zmq` shows when this can go.
    """

    def __del__(self) -> None:
        pass


def is_ipv6(endpoint: str) -> bool:
    return "[" in endpoint


def has_frame(socket: Socket) -> bool:
    """Whether a whole frame can be taken; asked sooner than tried, which ends in an exception."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


@dataclass(slots=True)
class SocketPlane:
    """What the sockets of one control plane share."""

    keyring: Keyring
    limits: ControlLimits = field(default_factory=ControlLimits)
    clock: Callable[[], float] = time.monotonic
    context: Context = field(default_factory=Context)
    poller: zmq.Poller = field(default_factory=zmq.Poller)
    counters: Counter[str] = field(default_factory=Counter)
    peers: Mapping[WorkerId, tuple[str, ...]] = field(init=False)  # who may come in and be dialled, by public keys
    quota: Buckets[WorkerId] = field(init=False)  # of frames that are heard

    def __post_init__(self) -> None:
        self.take(self.keyring.peers, self.keyring.also)
        self.quota = Buckets(self.limits.frames_per_s_max, self.limits.frames_burst_max)

    def take(self, peers: Mapping[WorkerId, str], also: Mapping[WorkerId, tuple[str, ...]]) -> None:
        """From now on these are who there is; while a peer's key is rotated it has two."""
        self.peers = {worker: (key, *also.get(worker, ())) for worker, key in peers.items()}

    @property
    def members_join(self) -> bool:
        """Whether somebody who is unknown now may be a member in a moment."""
        return bool(self.keyring.admission)

    def hears(self, worker: WorkerId) -> bool:
        """Whether a frame of that worker is within what one may send; what is not is counted, and said of each once."""
        if self.quota.take(worker, self.clock()):
            return True
        self.counters["over_quota"] += 1
        if self.quota.is_first_refusal(worker):
            log.warning("[peer-flooding] %s sends over %g frames a second; more is dropped", worker, self.quota.per_s)
        return False

    def open(self, kind: int, *, ipv6: bool) -> Socket:
        """A socket with our key and bounds, not yet bound or connected."""
        socket: Socket = self.context.socket(kind)
        limits, probe_s = self.limits, max(1, int(self.limits.silence_s / PROBES_MAX))
        for option, value in (
            (zmq.SNDHWM, limits.frames_queued_max),
            (zmq.RCVHWM, limits.frames_queued_max),
            (zmq.MAXMSGSIZE, limits.frame_bytes_max + CURVE_OVERHEAD_BYTES),
            (zmq.LINGER, int(limits.linger_s * 1000)),
            (zmq.HANDSHAKE_IVL, int(limits.handshake_s * 1000)),
            (zmq.TCP_MAXRT, int(limits.silence_s * 1000)),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, probe_s),
            (zmq.TCP_KEEPALIVE_INTVL, probe_s),
            (zmq.TCP_KEEPALIVE_CNT, PROBES_MAX),
            (zmq.IPV6, int(ipv6)),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keyring.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keyring.secret.encode())
        return socket

    def server(self, *, ipv6: bool) -> Socket:
        """A ROUTER that admits only whom this plane's gate lets in."""
        socket = self.open(zmq.ROUTER, ipv6=ipv6)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvbaton")
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a dead route says so, instead of swallowing the frame
        return socket

    def client(self, server_key: str, *, ipv6: bool) -> Socket:
        """A DEALER that talks only to the holder of `server_key`."""
        socket = self.open(zmq.DEALER, ipv6=ipv6)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS_MIN)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        return socket
