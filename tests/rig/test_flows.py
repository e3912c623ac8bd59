"""Streams that are watched: what counts as lost, as wrong, and as a gap."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.api.bodies import BodyKind
from kvbaton_proof.chaos.streams.stream_load import Kind
from kvbaton_proof.chaos.streams.stream_reader import StreamReader
from kvbaton_proof.rig.flows import Flow

KIND = Kind("greedy")
HEAD = {"id": "a", "object": "text_completion", "created": 1, "model": "m"}


def flow(*events: object, done: bool = True, tokens: int = 3) -> Flow:
    body = {"max_tokens": tokens, "ignore_eos": True, "return_token_ids": True}
    found = Flow(KIND, body, StreamReader(BodyKind.COMPLETION, ids_asked=True))
    for event in events:
        found.reader.feed(msgspec.json.encode(event))
    if done:
        found.reader.feed(b"[DONE]")
    return found


def event(ids: list[int], finish: str | None = None) -> dict[str, object]:
    return {**HEAD, "choices": [{"index": 0, "text": "x" * len(ids), "token_ids": ids, "finish_reason": finish}]}


def test_a_whole_stream_is_neither_lost_nor_wrong() -> None:
    found = flow(event([1]), event([2, 3], "length"))
    assert (found.loss, found.problem) == ("", "")


@pytest.mark.parametrize("last", [event([2, 3]), {"error": {"code": "decode_died", "message": "gone"}}])
def test_a_stream_without_its_end_is_lost(last: dict[str, object]) -> None:
    assert flow(event([1]), last, done="error" not in last).loss in ("no end", "decode_died")


@pytest.mark.parametrize("ids", [[2], [2, 2, 3]])
def test_a_token_less_or_more_is_a_problem(ids: list[int]) -> None:
    assert "3 were due" in flow(event([1]), event(ids, "length")).problem


def test_gaps_are_of_the_time_in_which_they_end() -> None:
    found = flow()
    found.moments = [1.0, 2.0, 5.0, 5.5]
    assert found.gaps(2.0, 9.0) == [3.0, 0.5]
    assert found.gaps(4.0, 5.2) == [3.0]
