"""The plan of a load: decided by its seed, the same for every target."""

from __future__ import annotations

import itertools
import statistics

import msgspec
import pytest

from kvbaton_proof.bench.load.request_plan import IDS, Ask, Lengths, Piece, Shape, drawn, prompt

SHAPE = Shape(requests=200, seed=3, input=Lengths(10, 50), output=Lengths(4, 4), rate=20.0)


def test_the_same_seed_gives_the_same_plan_and_another_gives_another() -> None:
    assert list(drawn(SHAPE)) == list(drawn(SHAPE))
    other = list(drawn(msgspec.structs.replace(SHAPE, seed=4)))
    assert [ask.due_s for ask in other] != [ask.due_s for ask in drawn(SHAPE)]
    assert [ask.pieces for ask in other] != [ask.pieces for ask in drawn(SHAPE)]


def test_arrivals_begin_at_once_and_their_gaps_are_those_of_a_poisson_process() -> None:
    due = [ask.due_s for ask in drawn(msgspec.structs.replace(SHAPE, requests=20_000))]
    gaps = [late - early for early, late in itertools.pairwise(due)]
    assert due[0] == 0.0 and min(gaps) > 0
    assert statistics.mean(gaps) == pytest.approx(1 / 20, rel=0.05)
    assert statistics.pstdev(gaps) == pytest.approx(1 / 20, rel=0.05), "an exponential's deviation is its mean"


@pytest.mark.parametrize("rate", [None, float("inf")])
def test_without_a_rate_all_is_due_at_once(rate: float | None) -> None:
    assert {ask.due_s for ask in drawn(msgspec.structs.replace(SHAPE, rate=rate))} == {0.0}


def test_a_rate_changes_nothing_but_the_times() -> None:
    slow, fast = list(drawn(SHAPE)), list(drawn(msgspec.structs.replace(SHAPE, rate=999.0)))
    assert [(ask.pieces, ask.output_tokens) for ask in slow] == [(ask.pieces, ask.output_tokens) for ask in fast]


def test_lengths_stay_within_their_bounds_and_reach_them() -> None:
    found = {ask.input_tokens for ask in drawn(msgspec.structs.replace(SHAPE, requests=2000))}
    assert found == set(range(10, 51))


def test_prompts_have_the_tokens_that_were_asked_for_and_share_their_beginnings() -> None:
    shape = msgspec.structs.replace(SHAPE, prefix_tokens=30, prefixes=3)
    asks = list(drawn(shape))
    beginnings = {tuple(prompt(ask, 3)[:30]) for ask in asks}
    assert len(beginnings) == 3
    for ask in asks:
        assert len(prompt(ask, 3)) == ask.input_tokens == 30 + ask.pieces[1].tokens
        assert set(prompt(ask, 3)) <= set(IDS)
    assert len({tuple(prompt(ask, 3)) for ask in asks}) == len(asks), "no two prompts are the same"


def test_a_mark_changes_the_beginning_and_not_the_length() -> None:
    ask = Ask(0, 0.0, (Piece("u0", 40),), 4)
    plain, one, other = prompt(ask, 1), prompt(ask, 1, "one"), prompt(ask, 1, "other")
    assert len(plain) == len(one) == len(other) == 40
    assert one[:8] != plain[:8] != other[:8] != one[:8] and one[8:] == plain[8:] == other[8:]
    assert len(prompt(Ask(0, 0.0, (Piece("u0", 3),), 4), 1, "one")) == 3


@pytest.mark.parametrize("text", ["0", "-1", "9:3", "x", "", "3:", ":3", "1:2:3", "1.5", str(1 << 21)])
def test_a_length_that_cannot_be_meant_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Lengths.parse(text)


def test_a_length_is_read_as_it_is_written() -> None:
    assert Lengths.parse("64:512") == Lengths(64, 512) and str(Lengths(64, 512)) == "64:512"
    assert Lengths.parse("7") == Lengths(7, 7) and str(Lengths(7, 7)) == "7"
