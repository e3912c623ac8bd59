"""Turns, as the router knows them: by the beginning of a prompt, once, for as long as D keeps them."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest

from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.protocol.wire.ticket import unseal
from kvbaton.router.flow.attempt import RoutedCall
from kvbaton.router.flow.dialect_table import TicketMinter
from kvbaton.router.turns import turn_book
from kvbaton.router.turns.turn_book import TurnBook, TurnTable
from kvbaton.router.workers.directory import ListedEngine
from tests.router.fake_workers import QUICK, cluster

KEY = b"k" * 32
P = ListedEngine(WorkerId("p0"), "prefill", "http://p", Incarnation(1))
D = ListedEngine(WorkerId("d0"), "decode", "http://d", Incarnation(2))
LONG = "a conversation " * 40
USAGE = {"prompt_tokens": 100, "completion_tokens": 20}
WHOLE = json.dumps({"choices": [{}], "usage": USAGE}).encode()


class Clock:
    now = 100.0
    lists = True


def book(turn_s: float = 30.0, table: TurnTable | None = None) -> tuple[TurnBook, Clock, Counter[str]]:
    clock, counts = Clock(), Counter()
    minter = TicketMinter(KEY, 60.0, wall=lambda: 1000.0)
    return TurnBook(minter, turn_s, lambda peer, now: clock.lists, lambda: clock.now, counts, table), clock, counts


def call(kind: BodyKind = BodyKind.COMPLETION, stream: bool = False, alone: str = "", **fields: object) -> RoutedCall:
    return RoutedCall(kind, fields, (), (Mode.PULL,), stream, 0.0, "r", json.dumps(fields).encode(), alone)


def chat(*said: str, **more: object) -> RoutedCall:
    return call(BodyKind.CHAT, messages=[user(each) for each in said], **more)


def user(text: str) -> dict[str, object]:
    return {"role": "user", "content": text}


def response(given: object, **more: object) -> RoutedCall:
    return call(BodyKind.RESPONSES, input=given, **more)


def claude(*said: object, **more: object) -> RoutedCall:
    return call(BodyKind.MESSAGES, messages=[{"role": "user", "content": each} for each in said], **more)


def block(text: str, **more: object) -> list[dict[str, object]]:
    return [{"type": "text", "text": text, **more}]


MARK = {"cache_control": {"type": "ephemeral"}}
SAID = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": block("answer")}
BILLED = [*block("x-anthropic-billing-header: cch=1"), *block("be kind")]
BILLED_AGAIN = [*block("x-anthropic-billing-header: cch=2"), *block("be kind")]


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
        (response("one"), response([user("one"), SAID, user("two")])),
        (response([user("one")], instructions="i"), response([user("one"), SAID, user("two")], instructions="i")),
        (
            response([user("one"), SAID, {"type": "function_call_output", "output": "5"}]),
            response([{**user("one"), "type": "message"}, SAID, {"type": "function_call_output", "output": "5"}, SAID]),
        ),
        (response([user("one"), SAID, user("two")]), response([user("one"), {**SAID, "id": ""}, user("two"), SAID])),
        (claude("one"), claude("one", "answer", "two")),
        (claude(block("one", **MARK)), claude("one", "answer", block("two", **MARK))),
        (claude("one", system="be kind"), claude("one", "answer", "two", system=block("be kind", **MARK))),
        (claude("one", system=BILLED), claude("one", "answer", "two", system=BILLED_AGAIN)),
        (claude("one", tools=[{"name": "t"}]), claude("one", "answer", "two", tools=[{"name": "t", **MARK}])),
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
        (response("one"), response("one")),
        (response("one"), response([user("another"), SAID, user("two")])),
        (response("one"), response([user("one"), SAID, user("two")], instructions="i")),
        (response("one"), response([user("one"), SAID, user("two")], tools=[{"type": "function", "name": "t"}])),
        (response("one"), chat("one", "answer", "two")),
        (claude("one"), claude("one", "answer", "two", system="be kind")),
        (claude("one", system="be kind"), claude("one", "answer", "two", system="be rude")),
        (claude(block("one")), claude([*block("one"), *block("more")], "answer", "two")),
        (claude([{"type": "image", "source": "a"}]), claude([{"type": "image", "source": "b"}], "answer", "two")),
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
    assert counts["forgotten"] == 2


def test_turns_that_were_planted_along_a_text_cost_its_owner_no_more_than_their_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client that knows a long text plants a turn at each step of it, with an end of its own: each is looked at."""
    table = TurnTable()
    turns, _, counts = book(table=table)
    text, ends = "x" * turn_book.STEP_BYTES * 40, []
    for steps in range(1, 40):
        talk(turns, call(prompt=text[: steps * turn_book.STEP_BYTES] + "another end"))
    genuine = turn_book.whole
    monkeypatch.setattr(turn_book, "whole", lambda state, rest: ends.append(len(rest)) or genuine(state, rest))
    assert offered(turns, call(prompt=text)) is None
    assert len(ends) == 39 and max(ends) < turn_book.STEP_BYTES, "not 39 times the text"
    assert len(table) == 39 and counts == {"noted": 39}


@pytest.mark.parametrize("digits", [10, 20, 4000])
def test_a_d_that_tells_of_more_tokens_than_there_can_be_is_told_of_to_nobody(digits: int) -> None:
    """The next turn's P would refuse a number that it cannot read, and the client would be blamed."""
    turns, _, counts = book()
    told = b'{"choices":[{}],"usage":{"prompt_tokens":%d,"completion_tokens":9}}' % 10**digits
    talk(turns, chat("one"), told)
    assert offered(turns, chat("one", "answer", "two")) is None and not counts


def test_the_book_is_bounded() -> None:
    table = TurnTable(turns_max=3)
    turns, clock, counts = book(table=table)
    for number in range(5):
        talk(turns, chat(str(number)))
    assert len(table) == 3 and counts["forgotten"] == 2
    clock.now += 31
    talk(turns, chat("late"))
    assert len(table) == 1 and counts["forgotten"] == 5


@pytest.mark.parametrize(
    "odd",
    [
        call(prompt="short"),
        call(prompt=LONG, alone="echo"),
        call(prompt=[LONG, LONG]),
        call(prompt=LONG, stream=True, stream_options={"include_usage": False}),
        call(BodyKind.RESPONSES, input=None),
        call(BodyKind.CHAT, messages="nonsense"),
        call(BodyKind.MESSAGES, messages={}),
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


@pytest.mark.parametrize(
    ("first", "usage"),
    [
        (response("one"), {"input_tokens": 100, "output_tokens": 20, "total_tokens": 120}),
        (claude("one"), {"input_tokens": 100, "output_tokens": 20, "cache_read_input_tokens": None}),
        (claude("one"), {"input_tokens": 3, "cache_read_input_tokens": 90, "cache_creation_input_tokens": 7,
                         "output_tokens": 20}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_is_as_long_as_its_api_says(first: RoutedCall, usage: dict[str, object], stream: bool) -> None:
    """What was cached is a part of a response's input, and no part of a message's."""
    turns, _, counts = book()
    watch = turns.keeps(msgspec.structs.replace(first, stream=stream), D)
    assert watch is not None and watch.asked(b"{}") == b"{}", "these streams tell their usage unasked"
    if not stream:
        watch.whole(json.dumps({"type": "message", "usage": usage}).encode())
    elif first.kind is BodyKind.RESPONSES:
        opening = typed("response.created", response={"usage": None}) + typed("response.text", delta='"usage"')
        last = typed("response.completed", response={"status": "completed", "usage": usage})
        assert watch.stream(opening) == opening and not counts
        assert watch.stream(opening + last) == opening + last
    else:
        opening = typed("message_start", message={"usage": {"input_tokens": 9, "output_tokens": 1}})
        last = typed("message_delta", delta={"stop_reason": "end_turn"}, usage=usage)
        assert watch.stream(opening) == opening and not counts
        assert watch.stream(opening + last + typed("message_stop")) == opening + last + typed("message_stop")
    second = response([user("one"), SAID, user("two")]) if first.kind is BodyKind.RESPONSES else claude("one", "a", "b")
    told = offered(turns, second)
    assert told is not None and told["tokens"] == 120


def typed(kind: str, **values: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **values})}\n\n".encode()


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"[]",
        b'{"usage":null}',
        b'{"usage":{"prompt_tokens":"x"}}',
        b'{"usage":{}}',
        b'{"usage":{"prompt_tokens":1,"completion_tokens":9223372036854775807}}',
        b'{"usage":{"prompt_tokens":-5,"completion_tokens":7}}',
        b'{"usage":{"prompt_tokens":5,"completion_tokens":null}}',
    ],
)
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


async def test_a_router_without_turns_says_nothing_of_them() -> None:
    async with cluster(1, 1) as c:
        status, _ = (await c.post({"prompt": LONG, "max_tokens": 4}))[:2]
        assert status == 200
        assert "keep" not in c.d[0].params[0] and "turn" not in c.p[0].params[0]
        assert "stream_options" not in c.d[0].bodies[0]


async def test_workers_that_have_not_registered_are_not_asked_to_keep_anything() -> None:
    async with cluster(1, 1, settings=msgspec.structs.replace(QUICK, turn_s=30.0)) as c:
        assert (await c.post({"prompt": LONG, "max_tokens": 4}))[0] == 200
        assert "keep" not in c.d[0].params[0]
