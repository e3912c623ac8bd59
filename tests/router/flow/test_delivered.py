"""A client that reads one answer of several engines, one after the other, has the unbroken answer and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvbaton.api import sse
from kvbaton.router.flow.delivered import CHANNELS_MAX, Delivered
from kvbaton.router.flow.said_text import HistoryRoom, SeamError
from tests.router.stream_reader import Reader

Piece = tuple[tuple[str, ...], str]
"""Where a token's text belongs (a path within a chat's delta), and the text."""
CONTENT, REASONING = ("content",), ("reasoning",)
ROOMY = (1 << 20, 1 << 20)


class Engine:
    """Tells an answer, as vLLM and the embedded engine do: any number of tokens an event."""

    def __init__(self, name: str, pieces: list[Piece], *, chat: bool, ids: bool = True) -> None:
        self.head = {"id": f"cmpl-{name}", "object": "text_completion", "created": len(name), "model": "tiny"}
        self.name = name
        self.pieces = pieces
        self.chat = chat
        self.ids = ids

    def events(self, sizes: list[int], placeholders: int = 0) -> list[bytes]:
        """`placeholders`: how many of the first tokens another engine sampled."""
        found, at = [], 0
        if self.chat:
            delta = {"role": "assistant", "content": ""}
            found.append(self._event({"delta": delta, "finish_reason": None}, prompt_token_ids=[1, 2, 3]))
        while at < len(self.pieces):
            size = sizes[len(found) % len(sizes)]
            found.append(self._tokens(at, min(at + size, len(self.pieces)), placeholders))
            at += size
        usage = {"prompt_tokens": 3, "completion_tokens": len(self.pieces), "total_tokens": 3 + len(self.pieces)}
        return [*found, sse.event({**self.head, "choices": [], "usage": usage}), sse.DONE]

    def _tokens(self, begin: int, end: int, placeholders: int) -> bytes:
        rows = [0.0 if at < placeholders else -float(at) for at in range(begin, end)]
        choice: dict[str, Any] = {"finish_reason": "length" if end == len(self.pieces) else None}
        if self.chat:
            choice |= {"delta": self._delta(begin, end), "logprobs": {"content": [{"logprob": each} for each in rows]}}
        else:
            text = "".join(text for _, text in self.pieces[begin:end])
            choice |= {"text": text, "logprobs": {"tokens": ["t"] * len(rows), "token_logprobs": rows}}
            choice |= {"prompt_token_ids": [1, 2, 3]} if self.ids and not begin else {}
        return self._event(choice | ({"token_ids": list(range(begin, end))} if self.ids else {}))

    def _delta(self, begin: int, end: int) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        for at in range(begin, end):
            path, text = self.pieces[at]
            if path[0] != "tool_calls":
                delta[path[0]] = delta.get(path[0], "") + text
                continue
            number = int(path[1])
            calls = delta.setdefault("tool_calls", [])
            call = next((each for each in calls if each["index"] == number), None)
            if call is None:
                call = {"index": number, "function": {"arguments": ""}}
                calls.append(call)
            if path not in [each for each, _ in self.pieces[:at]]:
                call |= {"id": f"call-{self.name}-{number}", "type": "function"}
                call["function"]["name"] = f"f{number}"
            call["function"]["arguments"] += text
        return delta

    def _event(self, choice: dict[str, Any], **more: Any) -> bytes:
        return sse.event({**self.head, **more, "choices": [{"index": 0, **choice}]})


TEXTS = st.sampled_from(["", "a", "b", "ab", "é", "日本", "a\n\n", '"token_ids":[7]', "\\"])
TOOLS = st.sampled_from([CONTENT, REASONING, ("tool_calls", "0"), ("tool_calls", "1")])
SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def in_order(pieces: list[Piece]) -> list[Piece]:
    """Reasoning, content, and one call after the other, as parsers tell them."""
    order = {REASONING: 0, CONTENT: 1, ("tool_calls", "0"): 2, ("tool_calls", "1"): 3}
    return sorted(pieces, key=lambda piece: order[piece[0]])


def unbroken(engine: Engine, sizes: list[int], *, ids_wanted: bool) -> Reader:
    delivered, reader = Delivered(HistoryRoom(*ROOMY), ids_wanted=ids_wanted, usage_due=True), Reader()
    for event in engine.events(sizes):
        reader.read(delivered.told(event))
    return reader


def moved(
    pieces: list[Piece], cuts: list[int], sizes: list[list[int]], *, chat: bool, ids_wanted: bool, batch: int
) -> Reader:
    """One engine after the other, each until it has told so many events more; the last to its end."""
    room, reader = HistoryRoom(*ROOMY), Reader()
    delivered = Delivered(room, ids_wanted=ids_wanted, usage_due=True)
    for number, size in enumerate(sizes):
        engine = Engine(f"d{number}", pieces, chat=chat)
        events = engine.events(size, len(delivered.history) if number else 0)
        is_last = number == len(sizes) - 1
        told = events if is_last else events[: max(cuts[number], 1)]
        for at in range(0, len(told), batch):
            reader.read(delivered.told(b"".join(told[at : at + batch])))
        if reader.finishes and not is_last:
            reader.read(delivered.rest() if not reader.dones else b"")
            break
        if not is_last:
            assert delivered.history == tuple(range(len(delivered.history)))
            delivered.moved()
    assert room.held == len(delivered.history)
    delivered.close()
    assert room.held == 0
    return reader


@given(
    st.lists(st.tuples(st.just(CONTENT), TEXTS), min_size=1, max_size=24), st.lists(st.integers(1, 30), min_size=3,
    max_size=3), st.lists(SIZES, min_size=2, max_size=4), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_a_completion_of_several_engines_is_the_unbroken_one(
    pieces: list[Piece], cuts: list[int], sizes: list[list[int]], ids_wanted: bool, batch: int
) -> None:
    expected = unbroken(Engine("d0", pieces, chat=False), [1], ids_wanted=ids_wanted)
    assert moved(pieces, cuts, sizes, chat=False, ids_wanted=ids_wanted, batch=batch).told == expected.told
    assert expected.ids == (list(range(len(pieces))) if ids_wanted else [])
    assert expected.dones == 1
    assert len(expected.usages) == 1


@given(
    st.lists(st.tuples(TOOLS, TEXTS), min_size=1, max_size=24).map(in_order), st.lists(st.integers(1, 30), min_size=3,
    max_size=3), st.lists(SIZES, min_size=2, max_size=4), st.booleans(), st.integers(1, 3),
)  # fmt: skip
def test_a_chat_of_several_engines_is_the_unbroken_one(
    pieces: list[Piece], cuts: list[int], sizes: list[list[int]], ids_wanted: bool, batch: int
) -> None:
    expected = unbroken(Engine("d0", pieces, chat=True), [1], ids_wanted=ids_wanted)
    assert moved(pieces, cuts, sizes, chat=True, ids_wanted=ids_wanted, batch=batch).told == expected.told


ABC: list[Piece] = [(CONTENT, each) for each in "abcdef"]


def begun(count: int = 3, **more: Any) -> tuple[Delivered, Reader]:
    delivered, reader = Delivered(HistoryRoom(*ROOMY), **more), Reader()
    for event in Engine("d0", ABC, chat=False).events([1])[:count]:
        reader.read(delivered.told(event))
    return delivered, reader


@pytest.mark.parametrize("chat", [False, True])
def test_another_text_is_never_shown(chat: bool) -> None:
    delivered, reader = Delivered(HistoryRoom(*ROOMY)), Reader()
    for event in Engine("d0", ABC, chat=chat).events([1])[:4]:
        reader.read(delivered.told(event))
    had = dict(reader.texts)
    delivered.moved()
    other: list[Piece] = [(CONTENT, each) for each in "abXdef"]
    with pytest.raises(SeamError, match="text"):
        for event in Engine("d1", other, chat=chat).events([1]):
            reader.read(delivered.told(event))
    assert reader.texts == had


def test_other_tokens_under_the_same_text_are_another_history() -> None:
    delivered, _ = begun()
    delivered.moved()
    with pytest.raises(SeamError, match="tokens"):
        delivered.told(sse.event({"choices": [{"index": 0, "text": "ab", "token_ids": [0, 7]}]}))


@pytest.mark.parametrize("events", [sse.DONE, sse.event({"choices": [{"index": 0, "text": "a", "token_ids": [0],
    "finish_reason": "stop"}]})])  # fmt: skip
def test_an_answer_that_ends_before_what_the_client_has_is_another(events: bytes) -> None:
    delivered, _ = begun()
    delivered.moved()
    with pytest.raises(SeamError):
        delivered.told(events)


def test_new_text_while_another_is_owed_is_another_answer() -> None:
    delivered = Delivered(HistoryRoom(*ROOMY))
    for event in Engine("d0", [(REASONING, "a"), (CONTENT, "b")], chat=True).events([1])[:3]:
        delivered.told(event)
    delivered.moved()
    with pytest.raises(SeamError, match="goes on"):
        delivered.told(sse.event({"choices": [{"index": 0, "delta": {"content": "bc"}, "token_ids": [0]}]}))


@pytest.mark.parametrize("fault", [
    {"error": {"message": "died", "code": 500}}, {"error": {"message": "died", "code": "handoff_lost"}},
    {"choices": [{"index": 0, "text": "", "finish_reason": "abort", "token_ids": []}]},
])  # fmt: skip
def test_an_engine_that_gives_up_is_not_shown_and_another_goes_on(fault: Any) -> None:
    delivered, reader = begun()
    last = sse.event({**fault, "id": "x"})
    assert delivered.told(last + sse.DONE) == b""
    assert delivered.broken_off == last
    delivered.moved()
    assert not delivered.broken_off
    for event in Engine("d1", ABC, chat=False).events([4]):
        reader.read(delivered.told(event))
    assert reader.texts == {("text",): "abcdef"}


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("count", [1, 2])
def test_tokens_that_come_with_an_engines_last_word_are_shown(before: int, count: int) -> None:
    """In one piece: what is in the history must have been said, in whole events."""
    delivered, reader = Delivered(HistoryRoom(*ROOMY)), Reader()
    events = Engine("d0", ABC, chat=False).events([1])
    for event in events[:before]:
        reader.read(delivered.told(event))
    end = before + count
    shown = delivered.told(b"".join(events[before:end]) + sse.event({"error": {"message": "bye", "code": 503}}))
    assert shown.endswith(b"\n\n")
    reader.read(shown)
    assert (reader.texts, delivered.history) == ({("text",): "abcdef"[:end]}, tuple(range(end)))
    assert delivered.broken_off


def test_the_clients_own_mistake_is_shown() -> None:
    delivered, _ = begun()
    fault = sse.event({"error": {"message": "no", "code": 400}})
    assert delivered.told(fault) == fault
    assert not delivered.broken_off


def test_what_is_left_behind_the_last_word_is_told_without_another_engine() -> None:
    delivered, reader = begun(6, usage_due=True)
    reader.read(delivered.rest())
    assert reader.usages == [{"prompt_tokens": 3, "completion_tokens": 6, "total_tokens": 9}]
    delivered, reader = begun(6)
    reader.read(delivered.rest())
    assert (reader.dones, reader.usages, reader.texts) == (1, [], {("text",): "abcdef"})
    delivered, _ = begun(5)
    assert delivered.rest() == b"", "there is more to say"


@pytest.mark.parametrize(("room", "why"), [(HistoryRoom(2, 99), "history_max"), (HistoryRoom(99, 2), "histories_max")])
def test_ids_are_bounded_and_the_stream_goes_on(room: HistoryRoom, why: str) -> None:
    delivered, reader = Delivered(room), Reader()
    for event in Engine("d0", ABC, chat=False).events([1]):
        reader.read(delivered.told(event))
    assert delivered.stuck == why
    assert room.held == 0
    assert reader.texts == {("text",): "abcdef"}
    assert reader.ids == []


@pytest.mark.parametrize(("events", "why"), [
    (sse.event({"choices": [{"index": 0, "text": "a"}]}), "no_ids"),
    (sse.event({"choices": [{"index": 0, "delta": {"tool_calls": [{"function": {"arguments": "a"}}]}}]}), "no_ids"),
    (sse.event({"choices": [{"index": 1, "text": "a", "token_ids": [1]}]}), "choices"),
    (b'data: {"choices": 7}\n\n', "unreadable"),
    (b'data: {"choices": []}\r\n\r\n', "unreadable"),
])  # fmt: skip
def test_what_nobody_could_go_on_with_passes_and_is_known(events: bytes, why: str) -> None:
    delivered = Delivered(HistoryRoom(*ROOMY))
    shown = delivered.told(events)
    assert list(sse.payloads(shown)), "it is the client's all the same"
    assert delivered.stuck == why
    assert delivered.history == ()


def test_ids_that_stand_first_are_taken_out_too() -> None:
    event = b'data: {"prompt_token_ids":[1,2],"choices":[{"token_ids":[5],"index":0,"text":"a"}]}\n\n'
    delivered = Delivered(HistoryRoom(*ROOMY))
    assert list(sse.payloads(delivered.told(event))) == [b'{"choices":[{"index":0,"text":"a"}]}']
    assert delivered.history == (5,)


def test_comments_pass() -> None:
    delivered, _ = begun()
    assert delivered.told(b": still here\n\n") == b": still here\n\n"


def _told(**choice: Any) -> bytes:
    return sse.event({"id": "a", "choices": [{"index": 0, **choice}]})


def test_texts_of_an_answer_are_bounded_in_number_and_depth() -> None:
    room = HistoryRoom(*ROOMY)
    wide, deep, after = Delivered(room), Delivered(room), Delivered(room)
    for number in range(2 * CHANNELS_MAX):
        assert b'"x"' in wide.told(_told(delta={f"n{number}": "x"}, token_ids=[1])), "it is shown all the same"
    assert wide.stuck == "unreadable" and len(wide._channels) <= CHANNELS_MAX
    nested: Any = "x"
    for _ in range(500):
        nested = [nested]
    assert b'"x"' in deep.told(_told(delta={"a": nested}, token_ids=[1])) and deep.stuck == "unreadable"
    after.told(_told(text="a", token_ids=[1]))
    after.moved()
    with pytest.raises(SeamError):
        after.told(_told(delta={"a": nested}, token_ids=[1]))
    after.close()
    assert room.held == 0


@pytest.mark.parametrize("rows", ["x", [1], 5])
def test_log_probabilities_of_another_kind_end_the_stream(rows: Any) -> None:
    delivered = Delivered(HistoryRoom(*ROOMY))
    delivered.told(_told(text="a", token_ids=[1]))
    delivered.moved()
    with pytest.raises(SeamError, match="log probabilities"):
        delivered.told(_told(text="ab", token_ids=[1, 2], logprobs=rows))


def test_ids_that_are_none_give_back_what_was_held_and_no_more() -> None:
    room = HistoryRoom(*ROOMY)
    other, delivered = Delivered(room), Delivered(room)
    other.told(_told(text="abc", token_ids=[1, 2, 3]))
    delivered.told(_told(text="a", token_ids=[1]))
    delivered.told(_told(text="b", token_ids=[2, 3, 2**40]))
    assert delivered.stuck == "unreadable" and room.held == 3
    delivered.close()
    assert room.held == 3
