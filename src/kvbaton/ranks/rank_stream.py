"""A stream of frames over a lossy control plane: each frame arrives once and in order, or is still in flight.

Both ends number their frames and say, with every frame, how far they have received. Frames are lost only with their
connection or at a full queue; an end that learns that the other lacks frames sent a while ago sends them again. Pure:
time is an argument, and the owner of the sockets asks `due` what to send.

Laws: never more than `WINDOW_FRAMES_MAX` numbered frames are sent and unacknowledged, and a queue of the control plane
holds `QUEUED_MAX` of them, so a numbered frame is never lost at a full queue. What waits behind the window is bounded
by its producer. One session only: frames of another are refused, so no other process can take the place of either end.
Nor can a new process that was given the old one's place: it does not take over a session in which frames were already
received, and an end that knows less than it acknowledged before is not the same one (`heard`).
"""

from __future__ import annotations

import math
from collections import Counter, deque

import msgspec

from kvbaton.control.addressing import ControlLimits
from kvbaton.ranks.rank_messages import FRAME_BYTES_MAX

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
