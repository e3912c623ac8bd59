"""Records made of marks: complete, bounded, told once."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvbaton.observe.flight import recorder as under_test
from kvbaton.observe.flight.flight_records import (
    FLIGHTS_MAX,
    REPORT_BYTES_MAX,
    STAGES,
    Flight,
    FlightSeat,
    Moment,
    decode,
    stages,
)
from kvbaton.observe.flight.recorder import FAILED_KEPT_MAX, KEPT_MAX, TAKEN_S, TOLD_PER_REPORT, Recorder, is_shared
from kvbaton.protocol.effects import Begun, End, Ended, Mark, Side, Step
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import HandoffId, Incarnation, PeerId, RequestId, WorkerId

ME = PeerId(WorkerId("d0"), Incarnation(0xAB))
WALL = 1000.0
PULL = (Step.CLAIMED, Step.GRANTED, Step.ALLOCATED, Step.FIRST_BYTE, Step.COPIED)


def begun(number: int, side: Side = Side.DECODE, **more: object) -> Mark:
    what = Begun(HandoffId(f"{number:032x}.0"), RequestId(f"r{number}"), WorkerId("p0"), 5, **more)  # type: ignore[arg-type]
    return Mark(side, number, Step.ASKED if side is Side.DECODE else Step.BEGUN, 0.0, what)


def whole(number: int, reason: Reason | None = None, steps: Sequence[Step] = PULL) -> list[Mark]:
    """D's side of one handoff, a step each second."""
    between = [Mark(Side.DECODE, number, step, float(at)) for at, step in enumerate(steps, 1)]
    at = float(len(steps) + 1)
    ended = Ended(End(reason, "why" if reason else ""), 640, 3, "shm", 1)
    return [
        begun(number), *between, Mark(Side.DECODE, number, Step.ENDED, at, ended),
        Mark(Side.DECODE, number, Step.RESTED, at),
    ]  # fmt: skip


def fed(count: int, reason: Reason | None = None) -> Recorder:
    recorder = Recorder(ME)
    for number in range(count):
        recorder.take(whole(number, reason, ()), [], 1.0, WALL)
    return recorder


def test_a_record_has_all_that_was_said() -> None:
    recorder = Recorder(ME)
    recorder.take(whole(1), [(RequestId("r1"), WALL + 6.5)], 6.0, WALL)
    (flight,) = recorder.last(5)
    assert (flight.seat, flight.worker, flight.incarnation) == (FlightSeat.DECODE, "d0", "00000000000000ab")
    assert (flight.request, flight.peers, flight.mode, flight.transport) == ("r1", ("p0",), "pull", "shm")
    assert (flight.tokens, flight.blocks, flight.bytes, flight.retries, flight.end) == (5, 3, 640, 1, "delivered")
    assert [moment.step for moment in flight.moments][-3:] == ["ended", "rested", "taken"]
    assert flight.began == WALL
    assert tuple(stages(flight)) == STAGES
    assert stages(flight)["deliver"] == pytest.approx(0.5)


def test_it_is_told_once_when_the_engine_has_taken_it() -> None:
    recorder, heard = Recorder(ME), list[Flight]()
    recorder.on_flight.append(heard.append)
    recorder.take(whole(1), [], 6.0, WALL)
    assert not heard and recorder.next_look(6.0) is not None and [each.end for each in recorder.under_way()]
    recorder.take([], [(RequestId("r1"), WALL + 6.1)], 6.2, WALL)
    recorder.take([], [], 6.3, WALL)
    assert [each.request for each in heard] == ["r1"] and recorder.next_look(6.3) is None


def test_many_that_wait_to_be_taken_do_not_slow_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those are looked through ten times a second, not at every step of the node."""
    recorder, looks = Recorder(ME), list[int]()
    waits = under_test._waits
    monkeypatch.setattr(under_test, "_waits", lambda each, wall: looks.append(1) or waits(each, wall))
    for number in range(50):
        recorder.take(whole(number), [], 6.0, WALL)
    before = len(looks)
    for step in range(1000):
        recorder.take([], [], 6.0 + step / 10_000, WALL)
    assert len(looks) - before <= 100
    recorder.take([], [(RequestId("r7"), WALL + 6.1)], 6.1, WALL)
    assert [each.request for each in recorder.last(9)] == ["r7"], "but who is taken is told at once"


def test_an_engine_that_never_takes_it_is_not_waited_for() -> None:
    recorder = Recorder(ME)
    recorder.take(whole(1), [], 6.0, WALL)
    recorder.take([], [], 6.0 + TAKEN_S + 0.1, WALL)
    (flight,) = recorder.last(1)
    assert "taken" not in [moment.step for moment in flight.moments]
    recorder.take([], [(RequestId("r1"), WALL + 9)], 9.0, WALL)
    assert recorder.last(2) == [flight], "too late to be told, and harmless"


def test_what_never_had_blocks_has_nothing_to_take() -> None:
    recorder = Recorder(ME)
    recorder.take(whole(1, Reason.PEER_GONE, (Step.CLAIMED,)), [], 2.0, WALL)
    (flight,) = recorder.last(1, failed=True)
    assert (flight.end, flight.detail, flight.failed) == ("peer_gone", "why", True)


@pytest.mark.parametrize("reason", [Reason.ABORTED, Reason.CANCELLED, Reason.DISCARDED])
def test_what_nobody_wanted_any_more_did_not_fail(reason: Reason) -> None:
    assert fed(1, reason).last(1, failed=True) == []


def test_p_names_its_readers_and_the_mode() -> None:
    recorder = Recorder(PeerId(WorkerId("p0"), Incarnation(1)))
    marks = [
        begun(1, Side.PREFILL, deferred=True),
        Mark(Side.PREFILL, 1, Step.PARKED, -1.0, detail="d0"),
        Mark(Side.PREFILL, 1, Step.SEATED, 1.0, detail="d0"),
        Mark(Side.PREFILL, 1, Step.SEATED, 1.0, detail="d1"),
        Mark(Side.PREFILL, 1, Step.OFFERED, 1.0, detail="d0"),
    ]
    recorder.take(marks, [], 2.0, WALL)
    (flight,) = recorder.under_way()
    assert flight.peers == ("p0", "d0", "d1") and flight.mode == "push" and not flight.is_over
    assert flight.moments[0].step == "parked", "in the order of time"


def test_successes_do_not_wash_failures_out() -> None:
    recorder = fed(1, Reason.STALE)
    for number in range(1, KEPT_MAX + 2):
        recorder.take(whole(number, None, ()), [], 1.0, WALL)
    assert len(recorder.last(10**6)) == KEPT_MAX
    assert [each.end for each in recorder.last(5, failed=True)] == ["stale"]


def test_failures_are_bounded_too() -> None:
    assert len(fed(FAILED_KEPT_MAX + 9, Reason.STALE).last(10**6, failed=True)) == FAILED_KEPT_MAX


def test_what_is_under_way_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "OPEN_MAX", 4)
    recorder = Recorder(ME)
    recorder.take([begun(number) for number in range(9)], [], 1.0, WALL)
    assert [each.request for each in recorder.under_way()] == ["r5", "r6", "r7", "r8"]
    recorder.take([Mark(Side.DECODE, 0, Step.CLAIMED, 1.0)], [], 1.0, WALL)
    assert recorder.counters["marks_lost"] == 1


def test_found_by_handoff_its_beginning_or_the_request() -> None:
    recorder = fed(3)
    recorder.take([begun(9)], [], 1.0, WALL)
    for text, expected in (("r1", ["r1"]), (f"{2:032x}", ["r2"]), (f"{9:032x}.0", ["r9"]), ("r", []), ("", [])):
        assert [each.request for each in recorder.find(text)] == expected, text


def test_a_listener_that_raises_costs_only_itself() -> None:
    recorder, heard = Recorder(ME), list[Flight]()
    recorder.on_flight += [lambda _: 1 / 0, heard.append]  # type: ignore[list-item, return-value]
    recorder.take(whole(1, None, ()), [], 1.0, WALL)
    assert len(heard) == 1 and recorder.counters["listener_faults"] == 1


def test_a_report_tells_what_is_new_once() -> None:
    recorder = fed(3)
    first = decode(recorder.report(5.0, {"pins": 2.0}, {"p0": "shm"}))
    assert len(first.flights) == 3 and first.gauges == {"pins": 2.0} and first.links == {"p0": "shm"}
    assert decode(recorder.report(6.0, {}, {})).flights == ()
    recorder.show(["r1", "nobody"])
    assert [each.request for each in decode(recorder.report(7.0, {}, {})).flights] == ["r1"]


def test_beyond_a_rate_a_share_is_told_and_every_failure() -> None:
    recorder = fed(1500)
    for number in range(20):
        recorder.take(whole(5000 + number, Reason.STALE, ()), [], 1.0, WALL)
    report = decode(recorder.report(1.0, {}, {}))
    assert report.share < 1 and len(report.flights) <= FLIGHTS_MAX
    assert sum(each.failed for each in report.flights) == 20
    good = [each for each in report.flights if not each.failed]
    assert 0 < len(good) <= 2 * TOLD_PER_REPORT
    for _ in range(3):
        recorder.take(whole(9000, None, ()), [], 1.0, WALL)
        report = decode(recorder.report(1.0, {}, {}))
    assert report.share == 1.0, "when it calms down, all are told again"


def test_shares_are_nested_and_the_same_everywhere() -> None:
    rng = random.Random(7)
    names = [f"{rng.getrandbits(128):032x}.0" for _ in range(4000)]
    for level in range(1, 6):
        smaller = {name for name in names if is_shared(name, level)}
        assert smaller < {name for name in names if is_shared(name, level - 1)}
        assert len(smaller) == pytest.approx(4000 / 2**level, rel=0.3)


def test_a_report_fits_whatever_things_are_named() -> None:
    recorder = Recorder(ME)
    for number in range(300):
        marks = whole(number, Reason.STALE, [Step.CLAIMED] * 60)
        marks = [Mark(m.side, m.key, m.step, m.at, m.what, "x" * 5000) for m in marks]
        recorder.take(marks, [], 100.0, WALL)
    data = recorder.report(1.0, {}, {})
    report = decode(data)
    assert len(data) <= REPORT_BYTES_MAX and len(report.flights) > 0 and report.missed > 0


def test_a_leases_record_has_what_came_before_it_and_ds_has_not() -> None:
    recorder = Recorder(ME)
    before = {1: (Moment("accepted", WALL - 0.5), Moment("scheduled", WALL - 0.3))}
    recorder.take([begun(1, Side.PREFILL), begun(1)], [], 1.0, WALL, lambda lease: before.pop(lease, ()))
    p, d = recorder.under_way()
    assert [moment.step for moment in p.moments] == ["accepted", "scheduled", "begun"] and not before
    assert [moment.step for moment in d.moments] == ["asked"]
