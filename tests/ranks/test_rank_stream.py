"""A stream over a lossy way: everything arrives once and in order, whatever is lost, and nothing overflows a queue.

`Counted` holds one end to a model that only counts, whatever the other end says: numbers that came already or are far
ahead, more or less received than there was, another session.
"""

from __future__ import annotations

import random
from collections import Counter, deque

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvbaton.ranks.rank_stream import (
    ANSWER_BYTES,
    ANSWER_FRAMES,
    LIMITS,
    RESEND_S,
    WINDOW_FRAMES_MAX,
    Stream,
    StreamEnvelope,
)

SESSION = 7


class Way:
    """Two ends, and frames between them that the test may lose."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ends = Stream(SESSION), Stream()
        self.under_way: tuple[deque[bytes], deque[bytes]] = deque(), deque()
        self.arrived: tuple[list[bytes], list[bytes]] = [], []

    def send(self, end: int, lose: float = 0.0, rng: random.Random | None = None) -> int:
        frames = self.ends[end].due(self.now)
        self.under_way[1 - end].extend(frame for frame in frames if rng is None or rng.random() >= lose)
        return len(frames)

    def receive(self, end: int) -> None:
        while self.under_way[end]:
            body = self.ends[end].take(self.under_way[end].popleft(), self.now)
            if body is not None:
                self.arrived[end].append(body)


def numbers(count: int) -> list[bytes]:
    return [str(number).encode() for number in range(count)]


def test_frames_arrive_in_order_and_both_ends_know_it() -> None:
    way = Way()
    for body in numbers(10):
        way.ends[0].add(body)
    way.send(0)
    way.receive(1)
    assert way.arrived[1] == numbers(10) and way.ends[0].backlog == 10
    way.ends[1].add(b"answer")
    way.send(1)
    way.receive(0)
    assert way.arrived[0] == [b"answer"] and way.ends[0].backlog == 0, "the answer tells how far the other end is"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_is_lost_comes_again_until_it_has_arrived_once(seed: int) -> None:
    way, rng = Way(), random.Random(seed)
    wanted = numbers(60), numbers(40)
    for _ in range(2000):
        way.now += 0.3
        for end in (0, 1):
            if wanted[end] and rng.random() < 0.3:
                way.ends[end].add(wanted[end].pop(0))
            if rng.random() < 0.1:
                way.ends[0].ask()
            way.send(end, 0.4, rng)
            if rng.random() < 0.5:
                way.receive(1 - end)
    assert way.arrived == (numbers(40), numbers(60))
    assert way.ends[0].counters["resent"] and way.ends[1].counters["gaps"]


def test_nothing_is_sent_again_while_the_other_end_is_merely_silent() -> None:
    way = Way()
    way.ends[0].add(b"x")
    assert way.send(0) == 1
    way.now = 1000.0
    assert way.send(0) == 0


def test_a_frame_is_sent_again_only_after_a_while() -> None:
    way = Way()
    way.ends[1].session = SESSION
    way.ends[0].add(b"x")
    way.send(0, 1.0, random.Random(1))
    for now, again in ((RESEND_S / 2, 0), (RESEND_S * 1.5, 1), (RESEND_S * 2, 1)):
        way.now = now
        way.ends[1].ask()  # and says with it how far it is
        way.send(1)
        way.receive(0)
        assert way.ends[0].counters["resent"] == again
        way.send(0)
    way.receive(1)
    assert way.arrived[1] == [b"x"]


def test_never_more_frames_are_unanswered_than_a_queue_holds() -> None:
    """The law that keeps frames from being lost at a full queue."""
    way = Way()
    for body in numbers(3 * WINDOW_FRAMES_MAX):
        way.ends[0].add(body)
    assert way.send(0) == WINDOW_FRAMES_MAX < LIMITS.frames_queued_max
    assert not way.ends[0].is_open and way.send(0) == 0
    for _ in range(3):
        way.receive(1)
        way.send(1)
        way.receive(0)
        way.send(0)
    way.receive(1)
    assert way.arrived[1] == numbers(3 * WINDOW_FRAMES_MAX), "answers flow although nothing is said the other way"


@pytest.mark.parametrize(("count", "size"), [(ANSWER_FRAMES, 1), (2, ANSWER_BYTES // 2)])
def test_many_frames_or_bytes_are_answered_unasked_and_few_are_not(count: int, size: int) -> None:
    way = Way()
    for index in range(count):
        way.ends[0].add(bytes(size))
        way.send(0)
        way.receive(1)
        assert way.send(1) == (index == count - 1)


def test_a_question_is_answered() -> None:
    way = Way()
    way.ends[0].ask()
    assert way.send(0) == 1
    way.receive(1)
    assert way.send(1) == 1 and way.send(1) == 0
    way.receive(0)
    assert way.send(0) == 0, "an answer is no question"


def test_another_session_is_refused_and_changes_nothing() -> None:
    way, other = Way(), Stream(8)
    way.ends[0].add(b"first")
    way.send(0)
    way.receive(1)
    other.add(b"other")
    for frame in other.due(0.0):
        assert way.ends[1].take(frame, 0.0) is None
    assert way.ends[1].session == SESSION and way.ends[1].counters["refused"] == 1
    way.ends[0].add(b"second")
    way.send(0)
    way.receive(1)
    assert way.arrived[1] == [b"first", b"second"]


def test_a_new_process_in_the_place_of_the_old_one_is_not_taken_for_it() -> None:
    way = Way()
    way.ends[0].add(b"first")
    way.send(0)
    way.receive(1)
    way.ends[1].ask()
    way.send(1)
    way.receive(0)
    assert way.ends[0].heard == 1
    way.ends = way.ends[0], Stream()  # the other end is gone; somebody else has its keys
    way.ends[0].add(b"second")
    way.send(0)
    way.receive(1)
    way.ends[1].ask()
    way.send(1)
    way.receive(0)
    assert way.arrived[1] == [b"first"], "what was meant for the old one is not carried out"
    assert way.ends[0].heard == 1, "who knows less than was said before is not who said it"


def test_a_session_in_which_somebody_was_heard_is_not_taken_over() -> None:
    way = Way()
    way.ends[1].session = SESSION
    way.ends[1].add(b"news")
    way.send(1)
    way.receive(0)
    way.ends[0].add(b"second")
    late = Stream()
    assert [late.take(frame, 0.0) for frame in way.ends[0].due(0.0)] == [None]
    assert not late.session and late.counters["refused"] == 1


def test_what_is_no_frame_is_said_to_be_none() -> None:
    for junk in (b"", b"\xc1", b"\x93\x01\x02", bytes(100), msgspec.msgpack.encode((7, "one", 0))):
        with pytest.raises(msgspec.MsgspecError):
            Stream(1).take(junk, 0.0)


@pytest.mark.parametrize("spare", [0, 1])
def test_as_many_bytes_as_are_answered_at_once_are_and_one_less_is_not(spare: int) -> None:
    """Also when they came in two frames."""
    stream = Stream(SESSION)
    for number, size in enumerate((1, ANSWER_BYTES - 1 - spare), 1):
        stream.take(frame_of(SESSION, number, 0, False, bytes(size)), 0.0)
    assert len(stream.due(0.0)) == 1 - spare


def frame_of(*fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


class Counted(RuleBasedStateMachine):
    """One end and its model: frames are numbered from 1 in the order in which they were added; at most a window of them
    is unanswered. What was sent and is unanswered is sent again, all of it, when the other end is heard not to have
    come on for `RESEND_S`. An answer of its own is sent where the other end asked, sent what came already or too early,
    or is owed one for frames. Who knows less than was said before is not heard."""

    WINDOW, ANSWERS = 5, 3

    @initialize(session=st.sampled_from((0, SESSION)))
    def begin(self, session: int) -> None:
        self.stream = Stream(session)
        self.stream.window_max, self.stream.answer_frames = self.WINDOW, self.ANSWERS
        self.session, self.now, self.moved_at = session, 0.0, 0.0
        self.bodies: list[bytes] = []
        self.numbered = self.sent = self.answered = self.received = self.untold = self.heard = 0
        self.owes = self.asks = False
        self.counters: Counter[str] = Counter()

    @rule(seconds=st.sampled_from((0.25, 0.5, RESEND_S)))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule(bodies=st.lists(st.binary(max_size=3), min_size=1, max_size=7))
    def add(self, bodies: list[bytes]) -> None:
        for body in bodies:
            self.stream.add(body)
        self.bodies += bodies

    @rule()
    def ask(self) -> None:
        self.stream.ask()
        self.asks = True

    @rule(count=st.integers(1, 3))
    def hear_the_next(self, count: int) -> None:
        """An honest end that has everything and asks nothing."""
        for _ in range(count):
            self.take(StreamEnvelope(self.session or SESSION, self.received + 1, self.sent))

    @rule(
        session=st.sampled_from((None, None, None, 0, 8)),
        ahead=st.sampled_from((None, -1, 0, 1, 1, 1, 2)),
        behind=st.integers(-3, 5),
        asks=st.booleans(),
        body=st.binary(max_size=3),
    )
    def hear_anything(self, session: int | None, ahead: int | None, behind: int, asks: bool, body: bytes) -> None:
        number = 0 if ahead is None else max(self.received + ahead, 0)
        ours = (self.session or SESSION) if session is None else session
        self.take(StreamEnvelope(ours, number, max(self.sent - behind, 0), asks, body))

    def take(self, came: StreamEnvelope) -> None:
        assert self.stream.take(msgspec.msgpack.encode(came), self.now) == self.expected_of(came)

    def expected_of(self, came: StreamEnvelope) -> bytes | None:
        if self.session == 0 and came.received == 0:
            self.session = came.session
        if self.session == 0 or came.session != self.session:
            self.counters["refused"] += 1
            return None
        self.heard += came.received >= self.answered
        known = min(came.received, self.sent)
        if known > self.answered:
            self.answered, self.moved_at = known, self.now
        elif known == self.answered and self.sent > self.answered and self.now - self.moved_at >= RESEND_S:
            self.counters["resent"] += self.sent - self.answered
            self.sent = self.answered
        self.owes |= came.asks
        if came.number in (0, self.received + 1):
            self.received += came.number > 0
            self.untold += came.number > 0
            return came.body if came.number else None
        self.counters["repeated" if came.number <= self.received else "gaps"] += 1
        self.owes = True
        return None

    @rule()
    def send(self) -> None:
        self.numbered = max(self.numbered, min(len(self.bodies), self.answered + self.WINDOW))
        if self.sent == self.answered < self.numbered:
            self.moved_at = self.now
        frames = [(number, self.bodies[number - 1]) for number in range(self.sent + 1, self.numbered + 1)]
        self.sent = self.numbered
        if not frames and (self.owes or self.asks or self.untold >= self.ANSWERS):
            frames = [(0, b"")]
        due = [msgspec.msgpack.decode(frame, type=StreamEnvelope) for frame in self.stream.due(self.now)]
        assert due == [StreamEnvelope(self.session, number, self.received, self.asks, body) for number, body in frames]
        if frames:
            self.untold, self.owes, self.asks = 0, False, False

    @precondition(lambda self: hasattr(self, "stream"))
    @invariant()
    def the_same_is_seen(self) -> None:
        seen = self.stream.session, self.stream.backlog, self.stream.heard, +self.stream.counters
        assert seen == (self.session, len(self.bodies) - self.answered, self.heard, +self.counters)
        waits = len(self.bodies) > self.numbered
        assert self.stream.is_open == (not waits and self.numbered - self.answered < self.WINDOW)


TestCounted = Counted.TestCase
TestCounted.settings = settings(max_examples=80, stateful_step_count=40)
