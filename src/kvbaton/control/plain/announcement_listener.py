"""Where workers announce themselves in the plain formats: one bound socket, on its own thread.

Laws: the socket only hears; nothing is sent, and no connection is remembered. A bad message is counted, logged by its
field (ever more rarely) and skipped; it never ends the listener. A flood costs a bounded share of a core: so many
messages are heard in a window of time and no more, while TCP holds the senders back. libzmq takes connections in turns,
so one of them cannot drown the others.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable

import zmq

from kvbaton.control.addressing import ControlError, check_bind, is_ipv6
from kvbaton.control.plain.announced_roster import AnnouncedWorker, PlainRoster, PlainSettings
from kvbaton.control.plain.announcements import MESSAGE_BYTES_MAX, PlainFault, decode, payload_of
from kvbaton.control.poll_loop import LoopThread
from kvbaton.control.sockets import Context, Socket
from kvbaton.control.waker import Waker
from kvbaton.observe.codes.saying import worth_saying
from kvbaton.protocol.ids import Incarnation

log = logging.getLogger(__name__)

WINDOW_S = 0.05
MESSAGES_PER_WINDOW_MAX = 256  # 5,000 a second; 256 workers send 85
QUEUED_MAX = 8  # messages per connection; each worker sends one in three seconds
HANDSHAKE_S = 10.0
CLOSE_S = 2.0

Workers = tuple[AnnouncedWorker, ...]


class PlainListener:
    """Binds at once (`ControlError` if it cannot), hears from `start` on.

    Counters: `messages` (all that came), of them `bad` (no announcement) and `refused` (one that may not be listed),
    `listed` (new lives) and `evicted` (workers that fell silent).
    """

    def __init__(
        self,
        bind: str,
        *,
        settings: PlainSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`bind` is a `tcp://HOST:PORT`; port 0 asks for a free one."""
        self.counters: Counter[str] = Counter()
        self._said: Counter[tuple[str, str]] = Counter()
        self._roster = PlainRoster(settings or PlainSettings(), _draw, clock())
        self._workers: Workers = ()
        self._published = self._roster.revision
        self._window_ends = -math.inf
        self._left = 0  # how many may still be heard in this window
        self._door = _Door(bind)
        self._thread = LoopThread("kvbaton-plain", self._door, self._turn, self._door.close, clock)

    @property
    def endpoint(self) -> str:
        """Where it listens, with the port it got."""
        return self._door.endpoint

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    def start(self) -> None:
        self._thread.start()

    def workers(self) -> Workers:
        """Who is listed now, by role and address; the same tuple until that changes. From any thread."""
        return self._workers

    def close(self) -> bool:
        """Hear no more. False when the thread did not end in time. Idempotent."""
        return self._thread.stop(CLOSE_S)

    def _turn(self, now: float) -> float | None:
        if now >= self._window_ends:
            self._window_ends, self._left = now + WINDOW_S, MESSAGES_PER_WINDOW_MAX
        while self._left and (frames := self._door.hear()) is not None:
            self._left -= 1
            self._on_message(frames[1:], now)
        self._door.deaf = not self._left
        for gone in self._roster.on_time(now):
            self.counters["evicted"] += 1
            self._say("evicted", "", f"{gone.announcement} stopped announcing itself and is no longer listed")
        if self._published != self._roster.revision:
            self._published = self._roster.revision
            self._workers = self._roster.entries()
        return self._window_ends if self._door.deaf else self._roster.next_deadline()

    def _on_message(self, frames: list[bytes], now: float) -> None:
        self.counters["messages"] += 1
        try:
            announcement = decode(payload_of(frames))
        except PlainFault as fault:
            self.counters["bad"] += 1
            self._say("bad", fault.field, f"a plain announcement was ignored: {fault}")
            return
        try:
            news = self._roster.announce(announcement, now)
        except PlainFault as fault:
            self.counters["refused"] += 1
            self._say("refused", fault.field, f"{announcement} is not listed: {fault}")
            return
        if news:
            self.counters["listed"] += 1
            self._say("listed", "", f"{announcement} is listed ({announcement.fleet}, {announcement.zmq_address})")

    def _say(self, kind: str, field: str, text: str) -> None:
        """Fields are ours, so there are few; what they hold is not, and was shortened and escaped."""
        self._said[kind, field] += 1
        if worth_saying(self._said[kind, field]):
            if kind == "listed":
                log.info("%s", text)
            else:
                log.warning("[plain-refused] %s", text)


class _Door:
    """The socket, and what its thread sleeps on."""

    def __init__(self, bind: str) -> None:
        self.deaf = False  # whoever knocks does not end a wait
        self._waker = Waker()
        self._context = Context()
        self._socket: Socket = self._context.socket(zmq.ROUTER)
        try:
            self._open(bind)
        except (zmq.ZMQError, ValueError) as error:
            self.close()
            raise ControlError(_explained(bind, error)) from None
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self._pause, self._poller = zmq.Poller(), zmq.Poller()
        for poller in (self._pause, self._poller):
            poller.register(self._waker.fd, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)

    def hear(self) -> list[bytes] | None:
        """The next message: its route, and what was said. None when there is none."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def wait(self, timeout_s: float | None) -> None:
        poller = self._pause if self.deaf else self._poller
        events = dict(poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        if self._waker.fd in events:
            self._waker.clear()

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()
        self._waker.close()

    def _open(self, bind: str) -> None:
        for option, value in (
            (zmq.RCVHWM, QUEUED_MAX),
            (zmq.SNDHWM, 1),
            (zmq.MAXMSGSIZE, MESSAGE_BYTES_MAX),  # of one frame; whoever sends more is hung up on
            (zmq.LINGER, 0),
            # P2pNccl's workers choose their identity; without this one that restarted is not heard before the
            # connection of its life before is known to be dead.
            (zmq.ROUTER_HANDOVER, 1),
            (zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000)),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
            (zmq.TCP_KEEPALIVE_INTVL, 5),
            (zmq.TCP_KEEPALIVE_CNT, 3),
            (zmq.IPV6, int(is_ipv6(bind))),
        ):
            self._socket.setsockopt(option, value)
        self._socket.bind(check_bind(bind))


def _draw() -> Incarnation:
    return Incarnation(secrets.randbits(63) or 1)


def _explained(bind: str, error: zmq.ZMQError | ValueError) -> str:
    if isinstance(error, ValueError):
        return f"plain discovery address: {error}"
    if error.errno == errno.EADDRINUSE:
        return f"plain discovery address {bind} is in use; stop its holder, or give another port (0: a free one)"
    return f"plain discovery address {bind} cannot be bound ({error}); give one of this host, as tcp://127.0.0.1:0"
