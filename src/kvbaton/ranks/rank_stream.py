"""A stream of frames over a lossy control plane: each frame arrives once and in order, or is still in flight.

Both ends number their frames and say, with every frame, how far they have received. Frames are lost only with their
connection or at a full queue; an end that learns that the other lacks frames sent a while ago sends them again. Pure:
time is an argument, and the owner of the sockets asks `due` what to send.

Laws: never more than `WINDOW_FRAMES_MAX` numbered frames are sent and unacknowledged, and a queue of the control plane
holds `QUEUED_MAX` of them, so a numbered frame is never lost at a full queue. What waits behind the window is bounded
by its producer. One session only: frames of another are refused, so no other process can take the place of either end.
Nor can a new process that was given the old one's place: it does not take over a session in which frames were already
received, and an end that knows less than it acknowledged before is not the same one (`heard`).

The carrier of a rank link: the two ends (`rank_link`, `rank_host`) decide, the carrier delivers and wakes.

In production that is `rank_sockets` (ZeroMQ and threads), in the simulator a seeded channel under its clock
(`sim.rank_channel`); the ends are the same code.

Laws: a line may lose frames, but never alters or misattributes one; frames of one connection are delivered in order. No
call waits except `Sleeper.wait` and `Arrival.wait_for`. A loop calls `turn` and `finish` one at a time, `finish` once
and last; an exception of `turn` does not end it.

Rank links over ZeroMQ, one thread per end: no decisions here.

Laws: keys are minted for each line and never leave memory except in the invitation. Only the loop's thread touches
sockets, any thread may call `wake`; only `wait` waits; a frame belongs to the rank whose key the connection has proven.
"""

from __future__ import annotations

import ipaddress
import math
import secrets
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

import msgspec
import zmq

from kvbaton.control.addressing import ControlLimits, check_endpoint
from kvbaton.control.dialler import Dialler
from kvbaton.control.keyring import Keyring
from kvbaton.control.sockets import Context, Heard, LoopThread, Sleeper, SocketPlane, Waker
from kvbaton.control.zmq import ZmqControl
from kvbaton.ranks.rank_messages import ENGINE, FRAME_BYTES_MAX, RankInvitation, rank_name

if TYPE_CHECKING:
    from kvbaton.ranks.rank_messages import RankInvitation


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


WINDOW_FRAMES_MAX = 1024
QUEUED_MAX = 4 * WINDOW_FRAMES_MAX  # room for pings and for what is sent again
ANSWER_FRAMES = WINDOW_FRAMES_MAX // 4  # received since our last acknowledgement
ANSWER_BYTES = 8 << 20
RESEND_S = 1.0
ENVELOPE_BYTES = 64

LIMITS = ControlLimits(
    frame_bytes_max=FRAME_BYTES_MAX + ENVELOPE_BYTES,
    frames_queued_max=QUEUED_MAX,
    frames_per_s_max=math.inf,  # both ends are this engine's own
    silence_s=30.0,  # a rank that is stopped or busy for half a minute keeps its connection; see `PING_S`
)


class StreamEnvelope(msgspec.Struct, frozen=True, array_like=True):
    """One frame. Number 0 carries only the acknowledgement."""

    session: int
    number: int
    received: int
    asks: bool = False
    body: bytes = b""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(StreamEnvelope)


class Stream:
    """One end. `session` 0 adopts that of the first frame."""

    def __init__(self, session: int = 0) -> None:
        self.session = session
        self.counters: Counter[str] = Counter()  # refused, repeated, resent, gaps
        self.heard = 0  # frames that prove that the other end is alive
        self.window_max, self.answer_frames = WINDOW_FRAMES_MAX, ANSWER_FRAMES
        self._waiting: deque[bytes] = deque()
        self._flight: deque[bytes] = deque()  # sent and unanswered; the first has number `_answered + 1`
        self._unsent = 0  # of those in flight, the last so many: never sent, or to be sent again
        self._answered = 0
        self._moved_at = 0.0  # when the front of the flight was last sent or answered
        self._received = 0
        self._told = 0
        self._untold_bytes = 0
        self._owes = False
        self._asks = False

    @property
    def backlog(self) -> int:
        """Frames that the other end is not known to have."""
        return len(self._waiting) + len(self._flight)

    @property
    def is_open(self) -> bool:
        """Whether a frame added now is sent now."""
        return not self._waiting and len(self._flight) < self.window_max

    def add(self, body: bytes) -> None:
        """Send this after everything added before."""
        self._waiting.append(body)

    def ask(self) -> None:
        """Make the other end acknowledge."""
        self._asks = True

    def take(self, frame: bytes, now: float) -> bytes | None:
        """A received frame; its body if it is the next. Raises `msgspec.MsgspecError` when it is not a frame."""
        envelope = _decoder.decode(frame)
        if not self.session and not envelope.received:
            self.session = envelope.session
        if not self.session or envelope.session != self.session:
            self.counters["refused"] += 1
            return None
        self.heard += envelope.received >= self._answered
        self._note_answer(envelope.received, now)
        self._owes |= envelope.asks
        if not envelope.number:
            return None
        if envelope.number != self._received + 1:
            self.counters["repeated" if envelope.number <= self._received else "gaps"] += 1
            self._owes = True
            return None
        self._received += 1
        self._untold_bytes += len(envelope.body)
        return envelope.body

    def due(self, now: float) -> list[bytes]:
        """The frames to hand to the control plane now, in order."""
        while self._waiting and len(self._flight) < self.window_max:
            self._flight.append(self._waiting.popleft())
            self._unsent += 1
        if self._unsent and self._unsent == len(self._flight):
            self._moved_at = now
        first = len(self._flight) - self._unsent
        bodies = [self._flight[index] for index in range(first, len(self._flight))]
        frames = [self._frame(self._answered + 1 + first + index, body) for index, body in enumerate(bodies)]
        self._unsent = 0
        if not frames and self._answer_is_due():
            frames.append(self._frame(0, b""))
        if frames:
            self._told, self._untold_bytes, self._owes, self._asks = self._received, 0, False, False
        return frames

    def _answer_is_due(self) -> bool:
        untold = self._received - self._told
        return self._owes or self._asks or untold >= self.answer_frames or self._untold_bytes >= ANSWER_BYTES

    def _frame(self, number: int, body: bytes) -> bytes:
        return _encoder.encode(StreamEnvelope(self.session, number, self._received, self._asks, body))

    def _note_answer(self, received: int, now: float) -> None:
        sent = len(self._flight) - self._unsent
        fresh = min(received - self._answered, sent)
        if fresh > 0:
            for _ in range(fresh):
                self._flight.popleft()
            self._answered += fresh
            self._moved_at = now
        elif fresh == 0 and sent and now - self._moved_at >= RESEND_S:
            self.counters["resent"] += sent
            self._unsent = len(self._flight)


Clock = Callable[[], float]


class Lines(Sleeper, Protocol):
    """The engine's ends of the lines to all of its ranks."""

    counters: Counter[str]

    def send(self, rank: int, frame: bytes) -> None:
        """Queue a frame; if the queue is full it is lost and counted."""

    def receive(self) -> Sequence[tuple[int, bytes]]:
        """Received frames, each with the rank that sent it."""

    def close(self) -> None: ...


class RankLine(Sleeper, Protocol):
    """One rank's end of the line to its engine."""

    endpoint: str
    keys: tuple[str, str, str]
    """This rank's public key, and the engine's public and secret one: for the invitation."""

    @property
    def strangers(self) -> int:
        """Connections that were not the engine's."""

    def send(self, frame: bytes) -> None:
        """Lost if there is no connection."""

    def receive(self) -> Sequence[bytes]: ...

    def close(self) -> None: ...


class CarrierLoop(Protocol):
    """Turns of one end."""

    @property
    def is_stopping(self) -> bool: ...

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> bool:
        """After its current turn; False when that took longer."""


class Arrival(Protocol):
    """A lock, and a wait for another thread's result, during which the lock is free."""

    def __enter__(self) -> object: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None, /
    ) -> None: ...

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool: ...

    def notify_all(self) -> None: ...


class Carrier(Protocol):
    """The factory of all of these."""

    def session(self) -> int:
        """The number of a new stream: not 0, and unguessable."""

    def dial(self, invitations: Sequence[RankInvitation], clock: Clock) -> Lines: ...

    def listen(self, rank: int, host: str, clock: Clock) -> RankLine:
        """With keys minted for it. ValueError when the engine cannot connect to `host`."""

    def loop(
        self,
        name: str,
        sleeper: Sleeper,
        turn: Callable[[float], float | None],
        finish: Callable[[], None],
        clock: Clock,
    ) -> CarrierLoop: ...

    def arrival(self) -> Arrival: ...
