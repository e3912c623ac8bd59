"""Flights become spans: which, under whom, when, and with what said of them."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.observe.flight.flight_records import MOMENTS_MAX, STAGES, Flight, FlightSeat, Moment, stages
from kvbaton.observe.tracing.trace_spans import Span, SpanKind, spans_of
from kvbaton.protocol.effects import Step
from tests.observe.tracing.flights import (
    CLIENT,
    HANDOFF,
    LEG_D,
    LEG_P,
    T0,
    TRACE,
    TRY,
    at_ns,
    decode,
    header,
    moments,
    prefill,
    router,
)


def made(flight: Flight) -> dict[str, Span]:
    numbers = itertools.count(1)
    spans = spans_of(flight, lambda: f"{next(numbers):016x}")
    assert len({span.span_id for span in spans}) == len(spans)
    return {span.name.removeprefix("kvbaton."): span for span in spans}


def times(span: Span) -> tuple[int, int]:
    return span.begin_ns, span.end_ns


def test_the_router_has_a_request_with_two_legs_under_what_the_client_sent():
    found = made(router())
    assert list(found) == ["request", "prefill", "decode"]
    request = found["request"]
    assert (request.trace_id, request.span_id, request.parent_id) == (TRACE, TRY, CLIENT)
    assert (request.kind, request.is_entry, request.error) == (SpanKind.SERVER, True, "")
    assert times(request) == (at_ns(0), at_ns(100))
    assert request.attributes == {
        "kvbaton.handoff": HANDOFF,
        "kvbaton.transfer_id": HANDOFF[:-2],
        "kvbaton.request": "req-1",
        "kvbaton.worker": "router",
        "kvbaton.peer": "p0,d0",
        "kvbaton.mode": "pull",
        "kvbaton.tokens": 100,
        "kvbaton.end": "ok",
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "url.path": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "kvbaton",
        "gen_ai.request.model": "tiny",
        "gen_ai.usage.input_tokens": 100,
        "gen_ai.usage.output_tokens": 4,
    }
    assert [(event.name, event.at_ns) for event in request.events][-2:] == [
        ("first_byte", at_ns(60)),
        ("ended", at_ns(100)),
    ]
    for name, span_id, peer, begin, end in (("prefill", LEG_P, "p0", 2, 30), ("decode", LEG_D, "d0", 31, 100)):
        leg = found[name]
        assert (leg.span_id, leg.parent_id, leg.kind, leg.is_entry) == (span_id, TRY, SpanKind.CLIENT, False)
        assert times(leg) == (at_ns(begin), at_ns(end))
        path = {"http.request.method": "POST", "url.path": "/v1/chat/completions"}
        assert leg.attributes == {"kvbaton.peer": peer, **path}


def test_a_trace_that_the_router_began_has_no_parent():
    assert made(router(parent=""))["request"].parent_id == ""
    assert not made(router(parent=""))["request"].is_entry
    other = header(CLIENT).replace(TRACE, "e" * 32)
    assert made(router(parent=other))["request"].parent_id == "", "of another trace"
    assert made(router(parent=header(TRY)))["request"].parent_id == "", "nobody is his own parent"


def test_a_leg_that_was_never_sent_has_no_span():
    alone = router(moments=moments(("received", 0), ("decode_sent", 1), ("ended", 9)), peers=("-", "d0"), legs=())
    assert list(made(alone)) == ["request", "decode"]
    assert made(alone)["request"].attributes["kvbaton.peer"] == "d0"


def test_a_try_that_failed_at_p_is_told_of_the_leg_to_p():
    failed = router(
        end="worker_unavailable", detail="p0 refused", retries=2,
        moments=moments(("received", 0), ("prefill_sent", 2), ("ended", 9)),
    )  # fmt: skip
    found = made(failed)
    assert found["request"].error == found["prefill"].error == "worker_unavailable: p0 refused"
    assert times(found["prefill"]) == (at_ns(2), at_ns(9))
    assert found["request"].attributes["error.type"] == "worker_unavailable"
    assert found["request"].attributes["kvbaton.try"] == 2


def test_a_try_that_failed_at_d_leaves_the_leg_to_p_well():
    found = made(router(end="stream_broken"))
    assert (found["prefill"].error, found["decode"].error) == ("", "stream_broken")


def test_d_has_a_handoff_with_its_stages_under_its_leg():
    found = made(decode())
    handoff = found.pop("handoff")
    assert (handoff.trace_id, handoff.parent_id, handoff.kind) == (TRACE, LEG_D, SpanKind.SERVER)
    assert handoff.is_entry
    assert times(handoff) == (at_ns(33), at_ns(58))
    assert handoff.attributes["kvbaton.bytes"] == 4096
    assert handoff.attributes["kvbaton.transport"] == "shm"
    assert handoff.attributes["kvbaton.retries"] == 1
    assert handoff.attributes["kvbaton.incarnation"] == "00aa"
    assert {name: times(span) for name, span in found.items()} == {
        "claim": (at_ns(33), at_ns(36)),
        "queue": (at_ns(36), at_ns(40)),
        "copy": (at_ns(40), at_ns(50)),
        "commit": (at_ns(50), at_ns(54)),
        "deliver": (at_ns(54), at_ns(58)),
    }
    assert all(span.parent_id == handoff.span_id and span.error == "" for span in found.values())
    assert [(event.name, event.at_ns) for event in found["copy"].events] == [("first_byte", at_ns(44))]


def test_stages_are_those_of_the_metrics():
    """Spans and histograms tell one story."""
    spans = made(decode())
    for name, seconds in stages(decode()).items():
        if name != "first_byte":  # an event here
            begin, end = times(spans[name])
            assert (end - begin) / 1e9 == pytest.approx(seconds, abs=2e-6)
    assert set(STAGES) - {"first_byte"} == set(spans) - {"handoff"}


D_STEPS = ("asked", "granted", "allocated", "copied")


@pytest.mark.parametrize(("count", "stage"), [(1, "claim"), (2, "queue"), (3, "copy"), (4, "commit")])
def test_the_stage_in_which_a_handoff_failed_says_so_and_no_other(count, stage):
    steps = moments(*((step, 10.0 * n) for n, step in enumerate(D_STEPS[:count])), ("ended", 90), ("rested", 95))
    found = made(decode(end="peer_gone", detail="p0 is gone", moments=steps))
    assert found["handoff"].error == "peer_gone: p0 is gone"
    assert times(found["handoff"]) == (at_ns(0), at_ns(95))
    bad = {name for name, span in found.items() if span.error}
    assert bad == {"handoff", stage}
    assert times(found[stage]) == (at_ns(10 * (count - 1)), at_ns(90))


@pytest.mark.parametrize("end", ["client_gone", "aborted"])
def test_what_nobody_wanted_any_more_is_no_error(end):
    steps = moments(("asked", 0), ("ended", 5), ("rested", 5))
    found = made(decode(end=end, moments=steps))
    assert {span.error for span in found.values()} == {""}
    assert times(found["claim"]) == (at_ns(0), at_ns(5))


def test_blocks_that_were_there_before_the_grant_give_no_negative_time():
    steps = moments(("asked", 0), ("allocated", 5), ("granted", 8), ("copied", 20), ("ended", 21))
    found = made(decode(moments=steps))
    assert times(found["queue"]) == (at_ns(8), at_ns(8))
    assert times(found["copy"]) == (at_ns(8), at_ns(20))


def test_p_has_a_lease_with_the_prompt_and_the_reader_under_its_leg():
    found = made(prefill())
    lease = found.pop("lease")
    assert (lease.parent_id, lease.kind, times(lease)) == (LEG_P, SpanKind.SERVER, (at_ns(5), at_ns(57)))
    assert [event.name for event in lease.events] == ["begun", "complete", "seated", "committed", "closed", "rested"]
    assert {name: times(span) for name, span in found.items()} == {
        "compute": (at_ns(5), at_ns(25)),
        "read": (at_ns(35), at_ns(55)),
    }
    assert found["read"].attributes == {"kvbaton.peer": "d0", "kvbaton.end": "committed"}


def test_what_p_did_before_the_lease_has_spans_of_its_own():
    """In pull all is leased at the end of computing."""
    steps = moments(("accepted", 1), ("scheduled", 4), ("begun", 25), ("complete", 25), ("closed", 50), ("rested", 51))
    found = made(prefill(moments=steps))
    assert times(found["prefill_queue"]) == (at_ns(1), at_ns(4))
    assert times(found["compute"]) == (at_ns(4), at_ns(25))


def test_a_push_shows_what_p_wrote():
    steps = moments(
        ("parked", 0, "d0"), ("begun", 1), ("seated", 2, "d0"), ("offered", 3, "d0"), ("first_byte", 6),
        ("complete", 9), ("written", 12, "d0"), ("committed", 13, "d0"), ("closed", 14),
    )  # fmt: skip
    write = made(prefill(mode="push", moments=steps))["write"]
    assert times(write) == (at_ns(3), at_ns(12))
    assert [event.name for event in write.events] == ["first_byte"]


@pytest.mark.parametrize(
    ("going", "error", "end"),
    [
        (("stale", 9, "d0"), "stale", "stale"),
        (("left", 9, "d0: transfer_timeout"), "transfer_timeout", "transfer_timeout"),
        (("left", 9, "d0: aborted"), "", "aborted"),
        (("left", 9, "d0"), "left", "left"),
    ],
)
def test_a_reader_that_went_without_the_kv_is_told(going, error, end):
    steps = moments(("begun", 0), ("seated", 2, "d0"), going, ("closed", 20), ("rested", 20))
    read = made(prefill(end="peer_gone", moments=steps))["read"]
    assert (read.error, read.attributes["kvbaton.end"], times(read)) == (error, end, (at_ns(2), at_ns(9)))


def test_each_reader_has_its_own_end():
    steps = moments(
        ("begun", 0), ("seated", 1, "d0"), ("seated", 2, "d1"), ("committed", 3, "d1"), ("seated", 4, "d2"),
        ("left", 5, "d0: busy"), ("closed", 9),
    )  # fmt: skip
    reads = [span for span in spans_of(prefill(moments=steps)) if span.name == "kvbaton.read"]
    assert [(span.attributes["kvbaton.peer"], times(span), span.error) for span in reads] == [
        ("d0", (at_ns(1), at_ns(5)), "busy"),
        ("d1", (at_ns(2), at_ns(3)), ""),
        ("d2", (at_ns(4), at_ns(9)), ""),
    ]


@pytest.mark.parametrize("make", [router, prefill, decode])
def test_only_ended_flights_of_sampled_traces_have_spans(make):
    assert spans_of(make())
    assert spans_of(make(trace=header(TRY, "03")))
    assert spans_of(make(trace=header(TRY, "00"))) == []
    assert spans_of(make(trace="")) == []
    assert spans_of(make(trace="nonsense")) == []
    assert spans_of(make(end="")) == []
    assert spans_of(make(moments=())) == []


def test_a_leg_that_was_told_nonsense_still_has_a_valid_id():
    legs = [span.span_id for span in spans_of(router(legs=("xyz", "0" * 16)))[1:]]
    assert all(len(leg) == 16 and int(leg, 16) for leg in legs)


ROUTER_STEPS = ("received", "chosen", "prefill_sent", "prefill_answered", "decode_sent", "first_byte", "ended")
any_moments = st.lists(
    st.builds(
        Moment,
        st.sampled_from([*ROUTER_STEPS, *Step, "taken"]),
        st.floats(T0 - 5, T0 + 5),
        st.sampled_from(["", "d0", "d0: busy"]),
    ),
    max_size=MOMENTS_MAX,
)


@settings(deadline=None, derandomize=True, database=None)
@given(st.sampled_from(list(FlightSeat)), any_moments, st.sampled_from(["ok", "delivered", "peer_gone", "aborted"]))
def test_whatever_was_recorded_children_lie_within_their_parents(seat, steps, end):
    flight = msgspec.structs.replace(decode(), seat=seat, moments=tuple(steps), end=end)
    spans = spans_of(flight)
    assert bool(spans) == bool(steps)
    by_id = {span.span_id: span for span in spans}
    assert len(by_id) == len(spans) <= MOMENTS_MAX + 6
    for span in spans[1:]:
        parent = by_id[span.parent_id]
        assert parent is spans[0]
        assert parent.begin_ns <= span.begin_ns <= span.end_ns <= parent.end_ns
    for span in spans:
        assert not span.error or flight.failed or span.name == "kvbaton.read"
