"""Turns, as the router knows them: by the beginning of a prompt, once, for as long as D keeps them."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest
from fake_workers import QUICK, cluster, run

from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.protocol.wire.ticket import unseal
from kvbaton.router import turn_book
from kvbaton.router.attempt import RoutedCall
from kvbaton.router.dialect_table import TicketMinter
from kvbaton.router.turn_book import TurnBook
from kvbaton.router.workers.directory import ListedEngine

KEY = b"k" * 32
P = ListedEngine(WorkerId("p0"), "prefill", "http://p", Incarnation(1))
D = ListedEngine(WorkerId("d0"), "decode", "http://d", Incarnation(2))
LONG = "a conversation " * 40
USAGE = {"prompt_tokens": 100, "completion_tokens": 20}
WHOLE = json.dumps({"choices": [{}], "usage": USAGE}).encode()


class Clock:
    now = 100.0
    lists = True


def book(turn_s: float = 30.0) -> tuple[TurnBook, Clock, Counter[str]]:
    clock, counts = Clock(), Counter()
    minter = TicketMinter(KEY, 60.0, wall=lambda: 1000.0)
    return TurnBook(minter, turn_s, lambda peer, now: clock.lists, lambda: clock.now, counts), clock, counts


def call(kind: BodyKind = BodyKind.COMPLETION, stream: bool = False, alone: str = "", **fields: object) -> RoutedCall:
    return RoutedCall(kind, fields, (), (Mode.PULL,), stream, 0.0, "r", json.dumps(fields).encode(), alone)


def chat(*said: str, **more: object) -> RoutedCall:
    messages = [{"role": "user", "content": each} for each in said]
    return call(BodyKind.CHAT, messages=messages, **more)


def talk(turns: TurnBook, first: RoutedCall, answer: bytes = WHOLE) -> dict[str, object]:
    watch = turns.keeps(first, D)
    assert watch is not None
    watch.whole(answer)
    return json.loads(watch.added(b'{"do_remote_prefill":true}'))


def offered(turns: TurnBook, second: RoutedCall) -> dict[str, object] | None:
    return json.loads(turns.offered(second, P, b"{}")).get("turn")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (call(prompt=LONG), call(prompt=LONG + "answer and more")),
        (call(prompt=list(range(300))), call(prompt=list(range(320)))),
        (chat("one"), chat("one", "answer", "two")),
        (chat("one", "answer", "two"), chat("one", "answer", "two", "another", "three")),
    ],
)
def test_the_next_turns_p_is_told_once_who_keeps_it(first: RoutedCall, second: RoutedCall) -> None:
    turns, _, counts = book()
    kept = talk(turns, first)
    told = offered(turns, second)
    assert told is not None and told["tokens"] == 120
    to_d, to_p = unseal(str(kept["keep"]), [KEY], 1000.0), unseal(str(told["ticket"]), [KEY], 1000.0)
    assert to_d.handoff == to_p.handoff and to_d.source == to_p.source == "d0"
    assert (to_d.target, to_p.target, to_p.incarnation) == ("", "p0", 2)
    assert offered(turns, second) is None and counts == {"noted": 1, "offered": 1}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (call(prompt=LONG), call(prompt=LONG)),
        (call(prompt=LONG), call(prompt="b" + LONG)),
        (call(prompt=LONG), call(prompt=LONG + "x", cache_salt="another")),
        (call(prompt=LONG), call(prompt=LONG + "x", model="another")),
        (chat("one"), chat("one")),
        (chat("one"), chat("another", "answer", "two")),
        (chat("one"), chat("one", "answer", "two", cache_salt="s")),
    ],
)
def test_another_conversation_is_told_nothing(first: RoutedCall, second: RoutedCall) -> None:
    turns, _, _ = book()
    talk(turns, first)
    assert offered(turns, second) is None


def test_what_is_too_old_or_of_a_d_that_is_gone_is_forgotten() -> None:
    turns, clock, counts = book()
    for changes in ({"now": 131.0}, {"lists": False}):
        clock.now, clock.lists = 100.0, True
        talk(turns, chat("one"))
        for field, value in changes.items():
            setattr(clock, field, value)
        assert offered(turns, chat("one", "answer", "two")) is None
    assert counts["forgotten"] == 2 and len(turns) == 0


def test_turns_that_were_planted_along_a_text_cost_its_owner_no_more_than_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that knows a long text plants a turn at each step of it, with an end of its own: each is looked at."""
    turns, _, counts = book()
    text, ends = "x" * turn_book.STEP_BYTES * 40, []
    for steps in range(1, 40):
        talk(turns, call(prompt=text[: steps * turn_book.STEP_BYTES] + "another end"))
    genuine = turn_book._whole
    monkeypatch.setattr(turn_book, "_whole", lambda state, rest: ends.append(len(rest)) or genuine(state, rest))
    assert offered(turns, call(prompt=text)) is None
    assert len(ends) == 39 and max(ends) < turn_book.STEP_BYTES, "not 39 times the text"
    assert len(turns) == 39 and counts == {"noted": 39}


@pytest.mark.parametrize("digits", [10, 20, 4000])
def test_a_d_that_tells_of_more_tokens_than_there_can_be_is_told_of_to_nobody(digits: int) -> None:
    """The next turn's P would refuse a number that it cannot read, and the client would be blamed."""
    turns, _, counts = book()
    told = b'{"choices":[{}],"usage":{"prompt_tokens":%d,"completion_tokens":9}}' % 10**digits
    talk(turns, chat("one"), told)
    assert offered(turns, chat("one", "answer", "two")) is None and not counts


def test_the_book_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turn_book, "TURNS_MAX", 3)
    turns, clock, _ = book()
    for number in range(5):
        talk(turns, chat(str(number)))
    assert len(turns) == 3
    clock.now += 31
    talk(turns, chat("late"))
    assert len(turns) == 1


@pytest.mark.parametrize(
    "odd",
    [
        call(prompt="short"),
        call(prompt=LONG, alone="echo"),
        call(prompt=[LONG, LONG]),
        call(prompt=LONG, stream=True, stream_options={"include_usage": False}),
        call(BodyKind.RESPONSES, input=LONG),
        call(BodyKind.CHAT, messages="nonsense"),
        msgspec.structs.replace(call(prompt=LONG), data=None),
    ],
)
def test_what_has_no_next_turn_is_not_kept(odd: RoutedCall) -> None:
    assert book()[0].keeps(odd, D) is None


def test_off_is_off_and_strangers_are_told_nothing() -> None:
    turns, _, _ = book(0.0)
    assert turns.keeps(call(prompt=LONG), D) is None and turns.offered(call(prompt=LONG), P, b"{}") == b"{}"
    turns, _, _ = book()
    foreign = msgspec.structs.replace(D, dialect="moriio")
    assert turns.keeps(call(prompt=LONG), foreign) is None


@pytest.mark.parametrize("answer", [b"", b"[]", b'{"usage":null}', b'{"usage":{"prompt_tokens":"x"}}', b'{"usage":{}}'])
def test_an_answer_without_a_usage_notes_nothing(answer: bytes) -> None:
    turns, _, counts = book()
    talk(turns, call(prompt=LONG), answer)
    assert not counts


CHUNK = b'data: {"choices":[{"text":"a"}]}\n\n'
LAST = b'data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":20}}\n\n'
DONE = b"data: [DONE]\n\n"


@pytest.mark.parametrize("asks", [False, True])
def test_a_streams_usage_reaches_only_clients_who_asked_for_it(asks: bool) -> None:
    options = {"stream_options": {"include_usage": True}} if asks else {}
    turns, _, counts = book()
    asked = call(prompt=LONG, stream=True, **options)
    watch = turns.keeps(asked, D)
    assert watch is not None
    body = json.loads(watch.asked(json.dumps(asked.fields).encode()))
    assert body["stream_options"] == {"include_usage": True}
    assert watch.stream(CHUNK) == CHUNK
    assert watch.stream(CHUNK + LAST + DONE) == CHUNK + (LAST if asks else b"") + DONE
    assert counts == {"noted": 1}


def test_usage_that_tells_of_a_part_is_not_the_end() -> None:
    turns, _, counts = book()
    watch = turns.keeps(call(prompt=LONG, stream=True), D)
    assert watch is not None
    part = b'data: {"choices":[{"text":"a"}],"usage":{"prompt_tokens":100,"completion_tokens":1}}\n\n'
    assert watch.stream(part) == part and not counts


def test_a_router_without_turns_says_nothing_of_them() -> None:
    async def story() -> None:
        async with cluster(1, 1) as c:
            status, _ = (await c.post({"prompt": LONG, "max_tokens": 4}))[:2]
            assert status == 200
            assert "keep" not in c.d[0].params[0] and "turn" not in c.p[0].params[0]
            assert "stream_options" not in c.d[0].bodies[0]

    run(story())


def test_workers_that_have_not_registered_are_not_asked_to_keep_anything() -> None:
    async def story() -> None:
        async with cluster(1, 1, settings=msgspec.structs.replace(QUICK, turn_s=30.0)) as c:
            assert (await c.post({"prompt": LONG, "max_tokens": 4}))[0] == 200
            assert "keep" not in c.d[0].params[0]

    run(story())
