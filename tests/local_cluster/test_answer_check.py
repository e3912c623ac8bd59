"""The verdict of `up --check`, and the prompts that it rests on."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.api.params import Mode
from kvbaton.local_cluster.answer_check import CheckRow, _line, _verdict, prompts, summary
from kvbaton.local_cluster.stream_check import StreamRow, long_ones, stream_texts

GOOD: dict[str, Any] = {
    "mode": "pull", "transport": "shm", "requests": 24, "identical": 24, "handoffs": 20, "handoffs_needed": 20,
    "bytes_moved": 5000, "pins": 0, "seconds": 0.5,
}  # fmt: skip
OUTLIVED = StreamRow(transport="tcp", killed="d0", streams=6, whole=6, moved=3, seconds=1.0)


@pytest.mark.parametrize("tokens", [8, 16, 32])
def test_prompts_are_mixed_and_always_the_same(tokens: int) -> None:
    asked = prompts(tokens)
    lengths = {len(one.text.encode()) + 1 for one in asked}
    assert {tokens - 1, tokens, tokens + 1, 8 * tokens + 1} <= lengths
    assert min(lengths) == 2
    assert max(lengths) > 600
    texts = [one.text for one in asked]
    assert len(texts) - len(set(texts)) == 3
    shared = [one for one in texts if sum(other[: 6 * tokens] == one[: 6 * tokens] for other in texts) >= 3]
    assert len(shared) >= 3
    assert asked == prompts(tokens)


def test_a_prompt_that_must_move_is_asked_once_more_only_as_one_that_need_not() -> None:
    asked = prompts(16)
    moving = [one.text for one in asked if one.moves]
    assert len(moving) == len(set(moving)) >= 14


@pytest.mark.parametrize("change", [{"identical": 23}, {"handoffs": 19}, {"bytes_moved": 0}, {"pins": 1}])
def test_one_thing_amiss_in_one_row_is_not_ok(change: dict[str, Any]) -> None:
    good, bad = CheckRow(**GOOD), CheckRow(**{**GOOD, **change})
    assert _verdict([good, good], OUTLIVED, 1.0)["ok"]
    assert not _verdict([good, bad], OUTLIVED, 1.0)["ok"]
    assert not _verdict([], OUTLIVED, 1.0)["ok"]


@pytest.mark.parametrize("change", [{"whole": 5}, {"moved": 0}, {"streams": 0, "whole": 0}])
def test_a_stream_that_is_not_whole_or_was_never_moved_is_not_ok(change: dict[str, Any]) -> None:
    bad = msgspec.structs.replace(OUTLIVED, **change)
    assert not _verdict([CheckRow(**GOOD)], bad, 1.0)["ok"]
    assert f"whole {bad.whole} of {bad.streams}" in bad.line()


def test_only_long_answers_are_streamed() -> None:
    texts, answers = ["a", "b", "c"], ["x" * 299, "y" * 300, "z" * 400]
    assert [each.text for each in long_ones(texts, answers)] == ["b", "c"]
    assert len(set(stream_texts())) == len(stream_texts())


def test_what_went_wrong_is_in_the_lines() -> None:
    bad = CheckRow(**{**GOOD, "identical": 23, "handoffs": 3, "differences": ("5 bytes 'x': expected 'a', got 'b'",)})
    line = _line(bad)
    assert "identical 23 of 24" in line
    assert "too few handoffs: 20 requests needed one" in line
    assert "differs: 5 bytes 'x'" in line


def test_the_last_lines_state_the_figures() -> None:
    verdict = _verdict([CheckRow(**GOOD)] * 6, OUTLIVED, 9.87)
    assert summary(verdict, list(Mode), ["shm", "tcp"]).splitlines() == [
        "identical answers 144 of 144, for pull, streaming pull and push, over shm and over tcp; streams whole 6 "
        "of 6 after kill -9 of their D",
        "30000 bytes moved in 120 handoffs; 0 pins left; 9.87 s",
    ]
    assert "for push, over tcp" in summary(verdict, [Mode.PUSH], ["tcp"])
    assert "for pull and push" in summary(verdict, [Mode.PULL, Mode.PUSH], ["tcp"])
