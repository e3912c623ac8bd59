"""Where workers announce themselves in the plain formats: one bound socket, on its own thread.

Laws: the socket only hears; nothing is sent, and no connection is remembered. A bad message is counted, logged by its
field (ever more rarely) and skipped; it never ends the listener. A flood costs a bounded share of a core: so many
messages are heard in a window of time and no more, while TCP holds the senders back. libzmq takes connections in turns,
so one of them cannot drown the others.

Who announced itself, as pure code: announcements and time go in; what is listed comes out.

Laws: a worker's latest word replaces the one before at once, and other words at the same address are another life.
Those who are listed are one fleet: whoever differs is refused, alone, until nobody of the other kind is left; so no
mode outlives its workers. Silence makes a worker suspect and then gone, but only silence that we were awake to hear.
Nothing is kept of a worker that is gone, of a connection, or of a refusal.
"""

from __future__ import annotations

import errno
import logging
import math
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import zmq

from kvbaton.control.addressing import ControlError, check_bind
from kvbaton.control.plain.announcements import (
    MESSAGE_BYTES_MAX,
    Announcement,
    Fleet,
    PlainFault,
    Role,
    decode,
    payload_of,
)
from kvbaton.control.sockets import Context, LoopThread, Socket, Waker, is_ipv6
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.ids import Incarnation

INTERVAL_S = 3.0  # between announcements, with vLLM's workers and with ours
WORKERS_MAX = 256
TICK_S_MAX = 1.0


class PlainSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long silence is forgiven, and who may come."""

    suspect_s: float = 7.0  # two announcements missed; a suspect gets no new requests if there is anyone else
    evict_s: float = 15.0
    workers_max: int = WORKERS_MAX  # who is listed stays, newcomers are refused
    fleet: Fleet | None = None  # None: that of whoever came first

    def __post_init__(self) -> None:
        if not (0 < self.suspect_s < self.evict_s and math.isfinite(self.evict_s)):
            raise ValueError(f"expected 0 < suspect_s < evict_s, got {self.suspect_s} and {self.evict_s}")
        if not 0 < self.workers_max <= WORKERS_MAX:
            raise ValueError(f"workers_max: got {self.workers_max}, expected 1..{WORKERS_MAX}")

    @property
    def tick_s(self) -> float:
        """How long we may look away; beyond it we slept."""
        return min(TICK_S_MAX, self.suspect_s / 4)


class AnnouncedWorker(msgspec.Struct, frozen=True):
    """A worker in one of its lives. The number of a life is ours: announcements have none."""

    announcement: Announcement
    incarnation: Incarnation
    suspect: bool = False


@dataclass(slots=True)
class _Heard:
    listed: AnnouncedWorker
    at: float


class PlainRoster:
    """Who is here. `revision` rises with every change."""

    def __init__(self, settings: PlainSettings, draw: Callable[[], Incarnation], now: float) -> None:
        """`draw` gives the number of a new life."""
        self.settings = settings
        self.revision = 0
        self._draw = draw
        self._looked_at = now
        self._heard: dict[tuple[Role, str], _Heard] = {}

    def __len__(self) -> int:
        return len(self._heard)

    def announce(self, announcement: Announcement, now: float) -> bool:
        """A worker is there; whether that is news. `PlainFault` names the field for which it is not listed.

        A listed worker that now says what cannot be listed is no longer what its entry says: the entry goes.
        """
        current = self._heard.get(announcement.key)
        if current is not None and current.listed.announcement == announcement:
            current.at = now
            if current.listed.suspect:
                self._change(current, suspect=False)
            return False
        if current is not None:
            self._remove(announcement.key)
        self._admit(announcement)
        self._heard[announcement.key] = _Heard(AnnouncedWorker(announcement, self._draw()), now)
        self.revision += 1
        return True

    def on_time(self, now: float) -> tuple[AnnouncedWorker, ...]:
        """Let silence have its consequences: who is gone. What we slept through ourselves is nobody's silence."""
        slept_s = max(0.0, now - self._looked_at - self.settings.tick_s)
        self._looked_at = now
        gone = []
        for key, heard in list(self._heard.items()):
            heard.at = min(now, heard.at + slept_s)
            silent_s = now - heard.at
            if silent_s >= self.settings.evict_s:
                gone.append(heard.listed)
                self._remove(key)
            elif silent_s >= self.settings.suspect_s and not heard.listed.suspect:
                self._change(heard, suspect=True)
        return tuple(gone)

    def next_deadline(self) -> float | None:
        """At the latest in half a tick, or sleeping could not be told from waiting; None while nobody is listed."""
        return self._looked_at + self.settings.tick_s / 2 if self._heard else None

    def entries(self) -> tuple[AnnouncedWorker, ...]:
        """Everybody, ordered by role and address."""
        return tuple(heard.listed for _, heard in sorted(self._heard.items()))

    def _admit(self, newcomer: Announcement) -> None:
        expected = self.settings.fleet or _fleet(heard.listed for heard in self._heard.values())
        if expected is not None and newcomer.fleet is not expected:
            why = "this router was started for" if self.settings.fleet else "the listed workers announce"
            raise PlainFault("transfer_mode", f"got {newcomer.fleet.transfer_mode}, {why} {expected.transfer_mode}")
        if len(self._heard) >= self.settings.workers_max:
            raise PlainFault("workers", f"{len(self._heard)} are listed, the maximum")

    def _change(self, heard: _Heard, *, suspect: bool) -> None:
        heard.listed = msgspec.structs.replace(heard.listed, suspect=suspect)
        self.revision += 1

    def _remove(self, key: tuple[Role, str]) -> None:
        del self._heard[key]
        self.revision += 1


def _fleet(listed: Iterable[AnnouncedWorker]) -> Fleet | None:
    """That of any of them: all have the same."""
    return next((entry.announcement.fleet for entry in listed), None)


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
