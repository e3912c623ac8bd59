"""The plan of a load, decided by its seed, the same for every target; and recorded ones: Mooncake's lines, our own."""

from __future__ import annotations

import itertools
import statistics

import msgspec
import pytest

from kvbaton_proof.bench.load.request_plan import (
    IDS,
    LINE_BYTES_MAX,
    Ask,
    Lengths,
    Piece,
    Shape,
    TraceError,
    drawn,
    prompt,
    read,
    written,
)

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


GOOD = b'{"timestamp": 3000, "input_length": 1100, "output_length": 7, "hash_ids": [5, 6, 7]}'
NEXT = b'{"timestamp": 3500, "input_length": 600, "output_length": 9, "hash_ids": [5, 9], "model": "any"}'


def test_times_are_seconds_since_the_first_and_lengths_are_as_written() -> None:
    first, second = read([GOOD + b"\n", b"\n", NEXT])
    assert (first.due_s, first.input_tokens, first.output_tokens) == (0.0, 1100, 7)
    assert (second.due_s, second.input_tokens, second.output_tokens) == (0.5, 600, 9)


def test_equal_hash_ids_are_equal_tokens() -> None:
    first, second = read([GOOD, NEXT])
    assert prompt(first, 0)[:512] == prompt(second, 0)[:512]
    assert prompt(first, 0)[512:600] != prompt(second, 0)[512:600]


def test_what_hash_ids_do_not_cover_is_the_requests_own() -> None:
    lines = [b'{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [5]}'] * 2
    first, second = read(lines)
    assert first.input_tokens == second.input_tokens == 600
    assert prompt(first, 0)[:512] == prompt(second, 0)[:512] and prompt(first, 0)[512:] != prompt(second, 0)[512:]


def test_speed_and_scale_shrink_a_trace_and_leave_what_is_shared_shared() -> None:
    first, second = read([GOOD, NEXT], speed=2.0, scale=0.1)
    assert (second.due_s, first.input_tokens, second.input_tokens, first.output_tokens) == (0.25, 110, 60, 1)
    assert prompt(first, 0)[:51] == prompt(second, 0)[:51]


def test_lines_out_of_order_are_put_in_order_and_a_bound_cuts() -> None:
    assert [ask.due_s for ask in read([NEXT, GOOD])] == [0.0, 0.5]
    assert len(read([GOOD, NEXT, GOOD], requests_max=2)) == 2


def test_what_was_recorded_is_replayed() -> None:
    shape = Shape(
        requests=20, seed=1, input=Lengths(5, 90), output=Lengths(2, 9), rate=10.0, prefix_tokens=33, prefixes=2
    )
    asks = list(drawn(shape))
    again = read([written(ask, 1.0 + ask.due_s) for ask in asks])
    assert [(ask.pieces, ask.output_tokens) for ask in again] == [(ask.pieces, ask.output_tokens) for ask in asks]
    assert [prompt(ask, 1) for ask in again] == [prompt(ask, 1) for ask in asks]
    assert [ask.due_s for ask in again] == pytest.approx([ask.due_s for ask in asks], abs=2e-6)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "line 2: not JSON"),
        (b"\xff{}", "line 2: "),
        (b"[1]", "line 2: fields: expected `object`"),
        (b'{"timestamp": 1, "output_length": 3}', "line 2: fields: object missing required field `input_length`"),
        (b'{"timestamp": 1, "input_length": "9", "output_length": 3}', "line 2: input_length: expected `int`"),
        (b'{"timestamp": 1, "input_length": 0, "output_length": 3}', "line 2: input_length: expected `int` >= 1"),
        (b'{"timestamp": 1, "input_length": 3, "output_length": -1}', "line 2: output_length: expected `int` >= 1"),
        (b'{"timestamp": -1, "input_length": 3, "output_length": 1}', "line 2: timestamp: got -1"),
        (b'{"timestamp": 1, "input_length": 3, "output_length": 1, "hash_ids": ["a"]}', "line 2: hash_ids"),
        (
            b'{"timestamp": 1, "input_length": 3, "output_length": 1, "pieces": [["a", 2]]}',
            "line 2: pieces: their tokens",
        ),
        (b'{"timestamp": 1, "input_length": 3, "output_length": 1, "pieces": [["a", 0], ["b", 3]]}', "line 2: pieces"),
        (b" " * LINE_BYTES_MAX + b"{}", "line 2: longer than"),
    ],
)
def test_a_line_that_cannot_be_meant_is_refused_by_its_number_and_field(line: bytes, said: str) -> None:
    with pytest.raises(TraceError) as raised:
        read([GOOD, line])
    assert str(raised.value).startswith(said)


@pytest.mark.parametrize("lines", [[], [b"\n", b"  \n"]])
def test_an_empty_trace_is_refused(lines: list[bytes]) -> None:
    with pytest.raises(TraceError, match="empty"):
        read(lines)
