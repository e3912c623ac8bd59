"""The judge of long streams: what is right, and that each way of being wrong is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvbaton.api.bodies import BodyKind
from kvbaton_proof.chaos.streams.stream_judge import Fate, Right, compared, judge
from kvbaton_proof.chaos.streams.stream_load import EMBEDDED, Asked, Flow, Kind, StreamBoard
from kvbaton_proof.chaos.streams.stream_reader import Choice, StreamReader, whole

TEXT = "abcdefgh"
RIGHT = Right([Choice(TEXT, "length")], {"completion_tokens": 8})
USAGE = {"choices": [], "usage": {"completion_tokens": 8}}


def _chunk(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]}


def _read(*chunks: dict[str, Any] | bytes, ids_asked: bool = False) -> StreamReader:
    reader = StreamReader(BodyKind.COMPLETION, ids_asked=ids_asked)
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "m"}
    for each in chunks:
        reader.feed(each if isinstance(each, bytes) else msgspec.json.encode({**head, **each}))
    return reader


def _fate(
    *chunks: dict[str, Any] | bytes, right: Right = RIGHT, was_cut: bool = True, goes_on: bool = True
) -> tuple[Fate, str]:
    return judge(_read(*chunks), right, was_cut=was_cut, goes_on=goes_on)


END = (_chunk("gh", "length"), USAGE, b"[DONE]")
BROKE = b'{"error":{"code":"worker_died"}}'


@pytest.mark.parametrize(
    ("chunks", "fate"),
    [
        ((_chunk("abcdef"), *END), Fate.RIGHT),
        ((_chunk("abcd"), _chunk("cdef"), *END), Fate.TWICE),
        ((_chunk("abcd"), _chunk("f"), *END), Fate.MISSING),
        ((_chunk("abcd"), _chunk("xf"), *END), Fate.WRONG),
        ((_chunk("abcdef"), BROKE), Fate.LOST),
        ((_chunk("abcdef"),), Fate.LOST),
        ((_chunk("abcx"), BROKE), Fate.WRONG),
        ((BROKE,), Fate.REFUSED),
        ((_chunk("abcdef"), _chunk("gh", "stop"), USAGE, b"[DONE]"), Fate.WRONG),
        ((_chunk("abcdef"), _chunk("gh"), USAGE, b"[DONE]"), Fate.WRONG),
        ((_chunk("abcdefgh", "length"), _chunk("", "length"), b"[DONE]"), Fate.WRONG),
        ((_chunk("abcdef"), *END, BROKE), Fate.WRONG),
        ((_chunk("abcdef"), {**_chunk("gh", "length"), "id": "cmpl-2"}, b"[DONE]"), Fate.WRONG),
        ((_chunk("abcdef"), _chunk("gh", "length", token_ids=[1, 2]), b"[DONE]"), Fate.WRONG),
        ((_chunk("abcdef"), {**_chunk("gh", "length"), "kv_transfer_params": {}}, b"[DONE]"), Fate.WRONG),
        ((_chunk(TEXT, "length"), {"choices": [], "usage": {"completion_tokens": 9}}, b"[DONE]"), Fate.WRONG),
        ((_chunk(TEXT, "length"), USAGE, USAGE, b"[DONE]"), Fate.WRONG),
        ((b"{]",), Fate.WRONG),
    ],
)
def test_each_way_of_a_stream_has_its_verdict(chunks: Sequence[dict[str, Any] | bytes], fate: Fate) -> None:
    found, said = _fate(*chunks)
    assert found is fate, said


def test_only_what_cannot_go_on_may_end_in_the_event_and_only_when_it_was_cut() -> None:
    assert _fate(_chunk("abc"), BROKE, goes_on=False)[0] is Fate.ENDED
    assert _fate(_chunk("abc"), BROKE, goes_on=False, was_cut=False)[0] is Fate.LOST
    assert _fate(_chunk("abc"), goes_on=False)[0] is Fate.LOST, "a closed connection is not the event"


def test_token_ids_and_log_probabilities_are_each_told_once() -> None:
    def told(ids: Sequence[int], *texts: str) -> StreamReader:
        columns = {
            "tokens": list(texts), "token_logprobs": [-1.0] * len(texts), "top_logprobs": None,
            "text_offset": list(range(len(texts))),
        }  # fmt: skip
        return _read(_chunk("ab", "length", token_ids=list(ids), logprobs=columns), b"[DONE]", ids_asked=True)

    rows = [["a", -1.0, None, 0], ["b", -1.0, None, 1]]
    right = Right([Choice("ab", "length", [1, 2], rows)], {})
    assert judge(told([1, 2], "a", "b"), right, was_cut=True, goes_on=True)[0] is Fate.RIGHT
    assert judge(told([1, 1, 2], "a", "b"), right, was_cut=True, goes_on=True)[0] is Fate.TWICE
    assert judge(told([2], "a", "b"), right, was_cut=True, goes_on=True)[0] is Fate.MISSING
    assert judge(told([1, 2], "a"), right, was_cut=True, goes_on=True)[0] is Fate.MISSING
    assert judge(told([1, 2], "a", "c"), right, was_cut=True, goes_on=True)[0] is Fate.WRONG


def test_of_a_near_tie_the_text_before_it_is_compared() -> None:
    right = Right([Choice(TEXT, "length")], {"completion_tokens": 8}, sure_chars=4)
    assert _fate(_chunk("abcdxyzz", "length"), USAGE, b"[DONE]", right=right)[0] is Fate.RIGHT
    assert _fate(_chunk("abxdefgh", "length"), USAGE, b"[DONE]", right=right)[0] is Fate.WRONG
    assert _fate(_chunk("abcdcdefgh", "length"), USAGE, b"[DONE]", right=right)[0] is Fate.RIGHT, "only usage can tell"
    nine = {"choices": [], "usage": {"completion_tokens": 9}}
    assert _fate(_chunk("abcdcdefgh", "length"), nine, b"[DONE]", right=right)[0] is Fate.WRONG


def test_without_a_seed_each_token_counts_though_nobody_knows_it() -> None:
    right = Right([Choice(TEXT, "length")], {}, is_one_text=False)
    assert _fate(_chunk("12345678", "length"), b"[DONE]", right=right)[0] is Fate.RIGHT
    assert _fate(_chunk("123456789", "length"), b"[DONE]", right=right)[0] is Fate.TWICE
    assert _fate(_chunk("1234567", "length"), b"[DONE]", right=right)[0] is Fate.MISSING


@pytest.mark.parametrize(("got", "fate"), [("aab", Fate.TWICE), ("b", Fate.MISSING), ("ba", Fate.WRONG)])
def test_a_text_with_a_piece_again_or_left_out_is_named(got: str, fate: Fate) -> None:
    assert compared(got, "ab") is fate


def test_a_chat_is_opened_once() -> None:
    def read(*deltas: dict[str, str]) -> StreamReader:
        reader = StreamReader(BodyKind.CHAT)
        for delta in deltas:
            head = {"id": "1", "object": "chat", "created": 1, "model": "m"}
            reader.feed(msgspec.json.encode({**head, "choices": [{"index": 0, "delta": delta}]}))
        return reader

    opening = {"role": "assistant", "content": ""}
    assert not read(opening, {"content": "a"}).problems
    assert "opened twice" in read(opening, {"content": "a"}, opening).problems[0]
    assert "not opened" in read({"content": "a"}).problems[0]


def test_the_events_of_a_response_are_numbered_and_build_what_the_last_one_says() -> None:
    def read(*numbers: int, said: str = "ab") -> StreamReader:
        reader = StreamReader(BodyKind.RESPONSES)
        for number, text in zip(numbers, "ab", strict=False):
            event = {"type": "response.output_text.delta", "sequence_number": number, "delta": text, "logprobs": []}
            reader.feed(msgspec.json.encode(event))
        part = {"text": said, "logprobs": []}
        response = {
            "id": "r", "created_at": 1, "model": "m", "status": "completed", "usage": {"output_tokens": 2},
            "output": [{"content": [part]}],
        }  # fmt: skip
        reader.feed(msgspec.json.encode({"type": "response.completed", "sequence_number": 2, "response": response}))
        return reader

    right = Right([Choice("ab", "completed")], {"output_tokens": 2})
    assert judge(read(0, 1), right, was_cut=True, goes_on=True)[0] is Fate.RIGHT
    assert judge(read(0, 0), right, was_cut=True, goes_on=True)[0] is Fate.WRONG
    assert judge(read(0, 1, said="a"), right, was_cut=True, goes_on=True)[0] is Fate.WRONG


def test_whole_answers_are_read_as_streams_are() -> None:
    answer = {"choices": [{"index": 1, "text": "b", "finish_reason": "stop"}, {"index": 0, "text": "a",
              "finish_reason": "length"}], "usage": {"completion_tokens": 2}}  # fmt: skip
    choices, usage = whole(BodyKind.COMPLETION, answer)
    assert [(each.text, each.finish) for each in choices] == [("a", "length"), ("b", "stop")]
    assert usage == {"completion_tokens": 2}


def test_a_stream_is_cut_at_the_d_where_it_flows_and_counted_once() -> None:
    board = StreamBoard()
    flow, begun, other = (Flow(Asked(EMBEDDED[0], {}, RIGHT), where={name}) for name in ("d0", "d0", "d1"))
    board.flows |= {flow, begun, other}
    board.told(flow, 1.0)
    board.told(other, 1.0)
    assert board.hurt("d0", ["d1"]) == 1, "of one that told nothing yet nothing can be lost"
    board.told(flow, 1.5)
    assert board.hurt("d1", ["d0"]) == 2
    board.end(flow, Fate.RIGHT, "")
    counts = board.counts({})
    assert (counts.cut, counts.cuts, counts.gap_p50_s) == (2, 3, 0.5)
    assert counts.by_kind == {"greedy": {"streams": 1, "cut": 1, "right": 1}}


@pytest.mark.parametrize("fate", [Fate.LOST, Fate.TWICE, Fate.MISSING, Fate.WRONG, Fate.LATE])
def test_each_bad_fate_breaks_the_verdict_and_is_said(fate: Fate) -> None:
    board = StreamBoard()
    board.end(Flow(Asked(Kind("greedy"), {}, RIGHT)), fate, "so")
    assert not board.counts({}).ok
    assert board.said == [f"{fate}: greedy, cut 0 times: so"]
    relaxed = StreamBoard(must_go_on=False)
    relaxed.end(Flow(Asked(Kind("greedy"), {}, RIGHT)), fate, "so")
    assert relaxed.counts({}).ok is (fate is Fate.LOST), "among faults that leave no D a stream may be lost"
