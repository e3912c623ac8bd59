"""A stream of frames on the bench (`rank_stream`), against a model that only counts.

The other end is made up: it is mostly honest, and says now and then what nobody said: numbers that came already or are
far ahead, more or less received than there was, another session, and what is no frame.

Laws of the model: frames are numbered from 1 in the order in which they were added; at most a window of them is
unanswered. What was sent and is unanswered is sent again, all of it, when the other end is heard not to have come on
for `RESEND_S`. An answer of its own is sent where the other end asked, sent what came already or too early, or is owed
one for frames or bytes. Who knows less than was said before is not heard.
"""

from __future__ import annotations

import random
from collections import Counter

import msgspec

from kvbaton.ranks.rank_stream import ANSWER_BYTES, RESEND_S, Stream, StreamEnvelope
from kvbaton_proof.sim.rank_models.rank_bench import Raised, outcome, same

STEPS = 70
WINDOW, ANSWERS = 5, 3
LARGE = 0.2  # of all benches have one body with as many bytes as are answered at once, or one less


class _Model:
    def __init__(self, session: int) -> None:
        self.session = session
        self.bodies: list[bytes] = []  # ever added
        self.numbered = 0  # of them
        self.sent = 0  # of those: sent, and not to be sent again
        self.answered = 0
        self.moved_at = 0.0
        self.received = 0
        self.untold_frames = self.untold_bytes = 0
        self.owes = self.asks = False
        self.heard = 0
        self.counters: Counter[str] = Counter()

    def take(self, came: StreamEnvelope, now: float) -> bytes | None:
        if self.session == 0 and came.received == 0:
            self.session = came.session
        if self.session == 0 or came.session != self.session:
            self.counters["refused"] += 1
            return None
        if came.received >= self.answered:
            self.heard += 1
        known = min(came.received, self.sent)
        if known > self.answered:
            self.answered, self.moved_at = known, now
        elif known == self.answered and self.sent > self.answered and now - self.moved_at >= RESEND_S:
            self.counters["resent"] += self.sent - self.answered
            self.sent = self.answered
        if came.asks:
            self.owes = True
        if came.number == 0:
            return None
        if came.number <= self.received:
            self.counters["repeated"] += 1
            self.owes = True
            return None
        if came.number > self.received + 1:
            self.counters["gaps"] += 1
            self.owes = True
            return None
        self.received += 1
        self.untold_frames += 1
        self.untold_bytes += len(came.body)
        return came.body

    def due(self, now: float) -> list[StreamEnvelope]:
        self.numbered = max(self.numbered, min(len(self.bodies), self.answered + WINDOW))
        if self.sent == self.answered < self.numbered:
            self.moved_at = now
        numbers = range(self.sent + 1, self.numbered + 1)
        said = [(number, self.bodies[number - 1]) for number in numbers]
        self.sent = self.numbered
        owed = self.untold_frames >= ANSWERS or self.untold_bytes >= ANSWER_BYTES
        if not said and (self.owes or self.asks or owed):
            said = [(0, b"")]
        frames = [StreamEnvelope(self.session, number, self.received, self.asks, body) for number, body in said]
        if frames:
            self.untold_frames = self.untold_bytes = 0
            self.owes = self.asks = False
        return frames


def bench_stream(rng: random.Random) -> None:
    session = rng.choice((0, 7))
    stream, model = Stream(session), _Model(session)
    stream.window_max, stream.answer_frames = WINDOW, ANSWERS
    now, large_at = 0.0, rng.randrange(STEPS) if rng.random() < LARGE else STEPS
    for step in range(STEPS):
        now += rng.choice((0, 0, 0, 0.25, 0.5, RESEND_S))
        kind = rng.random()
        if step >= large_at:
            large_at = STEPS
            _settle(stream, model, now)
            _come_large(rng, stream, model, now)
        elif kind < 0.04:
            _settle(stream, model, now)
            for _ in range(ANSWERS):
                _come(stream, model, _next(model), now)
                _send(stream, model, now)
        elif kind < 0.25:
            _add(rng, stream, model)
        elif kind < 0.3:
            stream.ask()
            model.asks = True
        elif kind < 0.33:
            _nonsense(rng, stream, now)
        elif kind < 0.4:
            for _ in range(rng.randrange(1, ANSWERS + 1)):
                _come(stream, model, _next(model), now)
            _send(stream, model, now)
        elif kind < 0.75:
            _come(stream, model, _frame(rng, model), now)
        else:
            _send(stream, model, now)
        _compare(stream, model)


def _add(rng: random.Random, stream: Stream, model: _Model) -> None:
    for _ in range(rng.choice((1, 2, WINDOW + 1))):
        body = rng.randbytes(rng.randrange(4))
        stream.add(body)
        model.bodies.append(body)


def _come_large(rng: random.Random, stream: Stream, model: _Model, now: float) -> None:
    """Nothing is due but for its bytes, as many as are answered at once, or one less, or with what came before."""
    before = bytes(rng.randrange(2))
    if before:
        _come(stream, model, _next(model, before), now)
    _come(stream, model, _next(model, bytes(ANSWER_BYTES - rng.randrange(2))), now)
    _send(stream, model, now)


def _settle(stream: Stream, model: _Model, now: float) -> None:
    """Neither end owes the other anything."""
    if not model.session:
        _come(stream, model, StreamEnvelope(7, 0, 0), now)
    while model.owes or model.untold_frames or model.answered < len(model.bodies):
        stream.ask()
        model.asks = True
        _send(stream, model, now)
        _come(stream, model, msgspec.structs.replace(_next(model), number=0), now)


def _nonsense(rng: random.Random, stream: Stream, now: float) -> None:
    frame = rng.choice((b"", b"\xc1", b"\x93\x01", msgspec.msgpack.encode((7, "one", 0))))
    raised = outcome(lambda: stream.take(frame, now), msgspec.MsgspecError)
    same("what is no frame", raised, Raised("MsgspecError"))


def _come(stream: Stream, model: _Model, came: StreamEnvelope, now: float) -> None:
    same("the body of a frame", stream.take(msgspec.msgpack.encode(came), now), model.take(came, now))


def _send(stream: Stream, model: _Model, now: float) -> None:
    found = [msgspec.msgpack.decode(frame, type=StreamEnvelope) for frame in stream.due(now)]
    same("frames that are due", found, model.due(now))


def _next(model: _Model, body: bytes = b"") -> StreamEnvelope:
    """What an honest end says that has everything and asks nothing."""
    return StreamEnvelope(model.session or 7, model.received + 1, model.sent, False, body)


def _frame(rng: random.Random, model: _Model) -> StreamEnvelope:
    session = rng.choice((0, 8)) if rng.random() < 0.1 else model.session or rng.choice((0, 7, 7))
    number = rng.choice((0, 0, 1, 1, 1, 1, -1, 0, 2)) + model.received if rng.random() < 0.7 else 0
    known = (model.answered, model.answered, model.answered, model.sent, (model.answered + model.sent) // 2)
    received = rng.choice((*known, model.answered - 1, model.sent + 3, 0))
    if not model.session:
        received = rng.choice((0, 0, 3))
    asks, body = rng.random() < 0.15, rng.randbytes(rng.randrange(4))
    return StreamEnvelope(session, max(number, 0), max(received, 0), asks, body)


def _compare(stream: Stream, model: _Model) -> None:
    unanswered = len(model.bodies) - model.answered
    waits = len(model.bodies) > model.numbered
    same("session", stream.session, model.session)
    same("frames that the other end lacks", stream.backlog, unanswered)
    same("is open", stream.is_open, not waits and model.numbered - model.answered < WINDOW)
    same("frames heard", stream.heard, model.heard)
    same("counters of a stream", +stream.counters, +model.counters)
