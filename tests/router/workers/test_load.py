"""Tokens under way, and who has seen the beginning of a prompt."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from kvbaton.api.bodies import BodyKind
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.router.router_stats import LABELS_MAX, count
from kvbaton.router.workers.prefixes import HOLDERS_MAX, PIECE_BYTES, PIECES_MAX, Prefixes, pieces
from kvbaton.router.workers.worker_load import ANSWER_TOKENS_GUESS, Loads, answer_tokens, prompt_tokens

A, B = (PeerId(WorkerId(name), Incarnation(0)) for name in "ab")


def test_what_is_taken_is_given_back_once() -> None:
    loads = Loads()
    first, second = loads.take(A, 10), loads.take(A, 5)
    assert loads.tokens == {A: 15}
    first.give()
    first.give()
    assert loads.tokens == {A: 5}
    second.give()
    assert loads.tokens == {}


@pytest.mark.parametrize(
    ("kind", "fields", "expected"),
    [
        (BodyKind.COMPLETION, {"prompt": [5] * 100}, 100),
        (BodyKind.COMPLETION, {"prompt": "x" * 400}, 100),
        (BodyKind.COMPLETION, {"prompt": ["x" * 40, "y" * 40]}, 20),
        (BodyKind.COMPLETION, {"prompt": ""}, 1),
        (BodyKind.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x" * 392}]}]}, 100),
        (BodyKind.RESPONSES, {"input": "x" * 200, "instructions": "y" * 200}, 100),
    ],
)
def test_the_length_of_a_prompt_is_estimated(kind: BodyKind, fields: Any, expected: int) -> None:
    assert prompt_tokens(kind, fields, 4.0) == expected


def test_a_body_nested_deeply_is_measured_all_the_same() -> None:
    deep: Any = "x" * 8
    for _ in range(5000):
        deep = [deep]
    assert prompt_tokens(BodyKind.CHAT, {"messages": deep}, 4.0) == 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [({"max_tokens": 7}, 7), ({"max_completion_tokens": 3, "max_tokens": 9}, 3), ({}, ANSWER_TOKENS_GUESS)],
)
def test_the_length_of_an_answer_is_what_was_asked_for(fields: Any, expected: int) -> None:
    assert answer_tokens(fields) == expected


def text(count: int, letter: str = "x") -> dict[str, Any]:
    return {"prompt": letter * (PIECE_BYTES * count)}


def test_prompts_share_the_names_of_what_they_begin_with() -> None:
    (long, total), (short, _) = pieces(BodyKind.COMPLETION, text(4)), pieces(BodyKind.COMPLETION, text(2))
    assert long[:2] == short
    assert len(set(long)) == total == 4
    assert pieces(BodyKind.COMPLETION, {"prompt": "short"}) == ((), 0)
    assert pieces(BodyKind.COMPLETION, {**text(1), "cache_salt": "a"}) != pieces(BodyKind.COMPLETION, text(1))
    names, total = pieces(BodyKind.COMPLETION, text(PIECES_MAX + 50))
    assert (len(names), total) == (PIECES_MAX, PIECES_MAX + 50)


def test_only_an_unbroken_beginning_counts() -> None:
    prefixes = Prefixes(100)
    names, total = pieces(BodyKind.COMPLETION, text(4))
    prefixes.note(A, names[:3])
    prefixes.note(B, names[:1])
    prefixes.note(B, names[2:3])
    assert prefixes.share(names, total) == {A: 0.75, B: 0.25}
    assert prefixes.share(names, 2 * total) == {A: 0.375, B: 0.125}, "what is not told apart is not known"
    assert prefixes.share((), 0) == {}


def test_memory_is_bounded_and_the_longest_unused_go_first() -> None:
    prefixes = Prefixes(10)
    old, total = pieces(BodyKind.COMPLETION, text(4))
    prefixes.note(A, old)
    for letter in "abcdefghij":
        prefixes.note(A, pieces(BodyKind.COMPLETION, text(4, letter))[0])
        assert len(prefixes) <= 10
    assert prefixes.share(old, total) == {}
    many = Prefixes(10)
    for number in range(20):
        many.note(PeerId(WorkerId(f"w{number}"), Incarnation(0)), old)
    assert len(many.share(old, total)) == HOLDERS_MAX


def test_labels_that_workers_could_invent_do_not_grow_for_ever() -> None:
    counter: Counter[str] = Counter()
    for number in range(10_000):
        count(counter, f"code-{number}")
    count(counter, 'odd"\n')
    assert len(counter) == LABELS_MAX + 1
    assert counter["other"] == 10_000 - LABELS_MAX + 1
