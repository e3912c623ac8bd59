"""W3C traceparent: what is read, what is refused, and what is told further."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.observe.flight import flight_records
from kvbaton.observe.flight.flight_records import Traceparent, new_span_id, new_trace, parse_trace

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"

hexes = st.text("0123456789abcdef", min_size=32, max_size=32)
trace_ids = hexes.filter(lambda text: text != "0" * 32)
span_ids = hexes.map(lambda text: text[:16]).filter(lambda text: text != "0" * 16)


def test_a_header_of_version_00_is_read():
    assert parse_trace(GOOD) == Traceparent(TRACE, SPAN, 1)
    assert parse_trace(GOOD).sampled
    assert not parse_trace(f"00-{TRACE}-{SPAN}-00").sampled


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "00",
        GOOD[:-1],
        GOOD + "0",
        GOOD + "-",  # version 00 has four fields and no more
        GOOD + "-extra",
        GOOD + "\n",
        " " + GOOD,
        GOOD.upper(),
        GOOD.replace("-", "_"),
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE}-{SPAN[:-1]}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-xx",
        f"cc-{TRACE}-{SPAN}-01extra",  # a later version may say more, behind a dash
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 400,
        GOOD.replace("4", "٤"),  # a digit, but not one of theirs
    ],
)
def test_what_breaks_the_rules_is_no_trace(text):
    assert parse_trace(text) is None


@pytest.mark.parametrize("more", ["", "-", "-more", "-more-and-more"])
def test_a_later_version_is_read_as_far_as_it_is_known_and_told_further_as_00(more):
    read = parse_trace(f"cc-{TRACE}-{SPAN}-ff{more}")
    assert read == Traceparent(TRACE, SPAN, flight_records.KNOWN_FLAGS)
    assert str(read.child("1" * 16)) == f"00-{TRACE}-{'1' * 16}-03"


@settings(deadline=None, derandomize=True, database=None)
@given(trace_ids, span_ids, st.integers(0, 3))
def test_what_is_written_reads_as_what_it_was(trace_id, span_id, flags):
    trace = Traceparent(trace_id, span_id, flags)
    assert parse_trace(str(trace)) == trace


@settings(deadline=None, derandomize=True, database=None)
@given(st.one_of(st.text(max_size=80), st.text("0123456789abcdef-", min_size=50, max_size=60)))
def test_whatever_comes_is_valid_or_nothing(text):
    read = parse_trace(text)
    assert read is None or parse_trace(str(read)) == read


@settings(deadline=None, derandomize=True, database=None)
@given(st.integers(0, 54), st.characters(codec="utf-8"))
def test_one_wrong_character_never_gives_another_trace_of_wrong_form(place, character):
    read = parse_trace(GOOD[:place] + character + GOOD[place + 1 :])
    assert read is None or (len(read.trace_id), len(read.span_id)) == (32, 16)
    if character not in "0123456789abcdef-":
        assert read is None


@settings(deadline=None, derandomize=True, database=None)
@given(trace_ids, span_ids, span_ids, st.integers(0, 3))
def test_a_child_stays_in_its_trace(trace_id, span_id, other, flags):
    child = Traceparent(trace_id, span_id, flags).child(other)
    assert (child.trace_id, child.span_id, child.flags) == (trace_id, other, flags)


def test_new_traces_and_spans_are_valid_and_differ():
    traces = [new_trace() for _ in range(100)]
    assert all(parse_trace(str(trace)) == trace and trace.sampled for trace in traces)
    assert len({trace.trace_id for trace in traces}) == len({trace.span_id for trace in traces}) == 100
    assert len({new_span_id() for _ in range(100)}) == 100
    assert not new_trace(sampled=False).sampled


def test_ids_are_never_all_zeros(monkeypatch):
    drawn = iter([bytes(8), bytes(8), bytes(7) + b"\x01"])
    monkeypatch.setattr(flight_records.secrets, "token_bytes", lambda size: next(drawn))
    assert new_span_id() == "0" * 15 + "1"
