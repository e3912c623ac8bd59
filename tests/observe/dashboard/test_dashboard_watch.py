"""From what a router gathers to what its page shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kvbaton.observe.dashboard.pulse import CHUNKS, RETRIES, SAMPLES_MAX, Figures, ListedWorker, Trouble, failure_of
from kvbaton.observe.dashboard.state import DOTS_MAX, FAILURES_MAX
from kvbaton.observe.dashboard.watch import COUNTED_KEPT, FRESH_S, FRESH_S_MAX, WAITING_KEPT, ClusterWatch
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.flight_records import WHOLE, Flight, FlightReport, FlightSeat, Moment
from kvbaton.observe.flight.journey import join

BEGIN = 1_800_000_000.0
HERE = (
    ListedWorker("p0", "prefill", "ready", f"{1:016x}"),
    ListedWorker("d0", "decode", "ready", f"{2:016x}"),
)


def handoff_of(number: int) -> str:
    return f"{number:032x}.0"


class Clock:
    def __init__(self) -> None:
        self.now = BEGIN

    def __call__(self) -> float:
        return self.now


class Cluster:
    """A watch over a real gathering, in virtual time."""

    def __init__(self, listed: Sequence[ListedWorker] = HERE) -> None:
        self.clock = Clock()
        self.gathering = Gathering(clock=self.clock)
        self.listed = list(listed)
        self.looks = 0
        self.spent_s = 0.0
        self._cost = 0.0
        names = {each.name: (int(each.incarnation, 16), each.role) for each in listed}
        self.gathering.listed(names)
        self.figures = Figures(3)
        self.watch = ClusterWatch(self.gathering, self._look, lambda: self.figures, clock=self.clock, cost=self._spend)

    def _look(self) -> Sequence[ListedWorker]:
        self.looks += 1
        return self.listed

    def _spend(self) -> float:
        self._cost += self.spent_s
        return self._cost

    def state(self) -> dict[str, Any]:
        found: dict[str, Any] = msgspec.json.decode(self.watch.state())
        return found

    def handed(self, number: int, end: str = "ok", under_way: bool = False) -> Flight:
        now = self.clock.now
        steps = [("received", -0.05), ("chosen", -0.049), ("prefill_sent", -0.048), ("prefill_answered", -0.03)]
        steps += [("decode_sent", -0.029)] if under_way else [("decode_sent", -0.029), ("first_byte", -0.01)]
        flight = Flight(
            FlightSeat.ROUTER,
            "router",
            handoff=handoff_of(number),
            request=f"r{number}",
            peers=("p0", "d0"),
            mode="pull",
            tokens=100,
            moments=tuple(Moment(step, now + at) for step, at in steps),
            end="" if under_way else end,
        )
        if not under_way:
            self.gathering.note(flight)
        return flight

    def told(self, handoffs: int, delivered: int, count: int = 0, flights: Sequence[Flight] = ()) -> None:
        gauges = {"handoffs_total": float(handoffs), "delivered_total": float(delivered), "bytes_total": float(count)}
        self.heard(gauges, flights)

    def heard(self, gauges: dict[str, float], flights: Sequence[Flight] = ()) -> None:
        report = FlightReport(self.clock.now, gauges, {"p0": "shm"}, tuple(flights), version="7", host="rack-1")
        self.gathering.heard("d0", 2, report, self.clock.now)


def decode(number: int, at: float, end: str = "delivered", detail: str = "") -> Flight:
    steps = ("asked", "granted", "allocated", "first_byte", "copied", "ended", "taken")
    moments = tuple(Moment(step, at + n / 1000) for n, step in enumerate(steps))
    return Flight(
        FlightSeat.DECODE,
        "d0",
        handoff=handoff_of(number),
        request="x",
        peers=("p0",),
        moments=moments,
        end=end,
        detail=detail,
    )


def test_one_state_is_made_for_all_who_look_at_once() -> None:
    cluster = Cluster()
    first = cluster.watch.state()
    for _ in range(1000):
        assert cluster.watch.state() is first
    cluster.clock.now += FRESH_S
    assert cluster.watch.state() is not first
    assert cluster.looks == 2


def test_a_state_that_takes_long_to_make_is_made_less_often() -> None:
    cluster = Cluster()
    cluster.spent_s = 0.1
    cluster.watch.state()
    cluster.clock.now += 1.9
    cluster.watch.state()
    assert cluster.looks == 1
    cluster.spent_s = 1000.0
    cluster.clock.now += 0.2
    cluster.watch.state()
    assert cluster.looks == 2
    cluster.clock.now += FRESH_S_MAX
    cluster.watch.state()
    assert cluster.looks == 3


def test_a_clock_that_is_set_back_does_not_stop_the_page() -> None:
    cluster = Cluster()
    cluster.watch.state()
    cluster.clock.now -= 3600
    cluster.handed(1)
    cluster.watch.state()
    assert cluster.looks == 2


def test_handoffs_are_counted_by_the_workers_where_they_count() -> None:
    cluster = Cluster()
    cluster.told(1000, 1000)
    cluster.state()
    for second in range(4):
        cluster.clock.now += 1
        cluster.handed(second)  # counts at D
        cluster.told(1000 + 10 * (second + 1), 1000 + 9 * (second + 1), 500 * (second + 1))
        cluster.state()
    now = cluster.state()["now"]
    assert (now["ended"], now["failed"]) == (40, 4)
    assert now["delivered"] == 0.9


def test_handoffs_to_workers_that_do_not_report_are_counted_by_the_router() -> None:
    cluster = Cluster()
    for number in range(10):
        cluster.clock.now += 0.2
        cluster.handed(number, "worker_died" if number == 3 else "ok")
    now = cluster.state()["now"]
    assert (now["ended"], now["failed"]) == (10, 1)
    assert now["ttft_p50_ms"] == 40.0


def test_of_a_worker_that_died_the_router_alone_tells_that_handoffs_failed() -> None:
    cluster = Cluster()
    cluster.told(1000, 1000)
    cluster.state()
    for number in range(8):
        cluster.clock.now += 0.5
        cluster.handed(number)
        cluster.told(1001 + number, 1001 + number)
    for number in range(8, 10):  # it tells nothing any more
        cluster.clock.now += 0.5
        cluster.handed(number, "worker_died")
    cluster.clock.now += 1
    now = cluster.state()["now"]
    assert (now["ended"], now["failed"], now["delivered"]) == (10, 2, 0.8)


def test_a_failure_that_both_sides_tell_of_counts_once() -> None:
    cluster = Cluster()
    cluster.told(1000, 1000)
    cluster.state()
    for number in range(10):
        cluster.clock.now += 0.5
        cluster.handed(number, "transfer_timeout" if number < 3 else "ok")
        cluster.told(1001 + number, 1000 + max(number - 2, 0))
    cluster.clock.now += 1
    now = cluster.state()["now"]
    assert (now["ended"], now["failed"], now["delivered"]) == (10, 3, 0.7)


def test_the_headline_counts_the_handoffs_that_the_list_shows() -> None:
    """One that D alone told of, as it computed the prompt itself; one of a D that died; one that both told of."""
    cluster = Cluster()
    cluster.told(1000, 1000)
    cluster.state()
    cluster.handed(1)
    cluster.told(1001, 1000, flights=[decode(1, BEGIN, "claim_timeout")])
    cluster.handed(2, "worker_died")
    cluster.clock.now += 1
    cluster.handed(3, "transfer_timeout")
    cluster.told(1002, 1000, flights=[decode(3, BEGIN, "transfer_timeout")])
    for number in range(3000):  # and what was refused for want of workers is no handoff
        moments = (Moment("received", cluster.clock.now + number * 1e-4),)
        cluster.gathering.note(
            Flight(FlightSeat.ROUTER, "router", request=f"r{10 + number}", moments=moments, end="no_pair")
        )
    cluster.figures = Figures(counts={"5xx": 3000})
    cluster.clock.now += 1
    found = cluster.state()
    assert {each["handoff"] for each in found["failures"]} == {handoff_of(number) for number in (1, 2, 3)}
    assert (found["now"]["failed"], found["now"]["ended"], found["now"]["errors"]) == (3, 3, 3000)
    assert len(cluster.watch._failures._counted) == 3 < COUNTED_KEPT


def test_an_even_flow_of_handoffs_is_an_even_line_whenever_workers_report_and_somebody_looks() -> None:
    """Reports, looks and buckets do not keep step."""
    cluster = Cluster()
    total, reported_at = 0.0, BEGIN
    cluster.told(0, 0)
    for _ in range(40):
        cluster.state()
        cluster.clock.now += 0.85
        while reported_at + 0.7 <= cluster.clock.now:
            reported_at, total = reported_at + 0.7, total + 7
            report = FlightReport(
                reported_at, {"handoffs_total": total, "delivered_total": total, "bytes_total": total}
            )
            cluster.gathering.heard("d0", 2, report, reported_at)
    line = [value for value in cluster.state()["history"]["handoffs"] if value is not None]
    assert len(line) >= 15 and line[:-1] == [10.0] * (len(line) - 1)  # of the last one reports are missing yet


def test_trouble_is_told_at_once_however_fresh_the_page_is() -> None:
    cluster = Cluster()
    down = Trouble("nobody is there", is_down=True)
    assert cluster.state()["trouble"] is None
    assert msgspec.json.decode(cluster.watch.state(down))["trouble"] == {"text": "nobody is there", "is_down": True}
    assert cluster.watch.state(down) is cluster.watch.state(down)
    assert cluster.state()["trouble"] is None


def test_one_request_that_waits_at_p_and_at_d_waits_once() -> None:
    cluster = Cluster()
    cluster.heard({"waiting": 1.0})
    cluster.gathering.heard("p0", 1, FlightReport(cluster.clock.now, {"waiting": 1.0}), cluster.clock.now)
    cluster.figures = Figures(1, waiting=1)
    cluster.clock.now += 1
    assert (cluster.state()["now"]["in_flight"], cluster.state()["now"]["waiting"]) == (1, 1)


def tried(at: float, *steps: tuple[str, float, str], number: int = 0, request: str = "r1", end: str = "ok") -> Flight:
    """One try of a request, which the router took up at `at`."""
    moments = (Moment("received", at), *(Moment(step, at + after, detail) for step, after, detail in steps))
    return Flight(
        FlightSeat.ROUTER,
        "router",
        request=request,
        peers=("p0", "d0"),
        mode="pull",
        retries=number,
        moments=moments,
        end=end,
    )


def test_a_client_waits_through_the_tries_that_failed() -> None:
    cluster = Cluster()
    cluster.gathering.note(tried(BEGIN - 3.0, ("prefill_sent", 0.1, ""), end="worker_died"))
    cluster.gathering.note(tried(BEGIN - 2.0, ("prefill_sent", 0.1, ""), number=1, end="worker_died"))
    cluster.gathering.note(tried(BEGIN - 1.0, ("first_byte", 0.2, ""), number=2))
    assert cluster.state()["now"]["ttft_p50_ms"] == 2200.0
    assert not cluster.watch._first_bytes._waiting


def test_an_id_that_is_used_again_does_not_wait_since_its_former_use() -> None:
    cluster = Cluster()
    cluster.gathering.note(tried(BEGIN - 3.0, end="worker_died"))
    cluster.gathering.note(tried(BEGIN - 1.0, ("first_byte", 0.2, "")))
    assert cluster.state()["now"]["ttft_p50_ms"] == 200.0


def test_what_was_not_streamed_has_no_first_byte_of_its_own() -> None:
    cluster = Cluster()
    cluster.gathering.note(tried(BEGIN - 9.0, ("first_byte", 9.0, WHOLE)))
    assert cluster.state()["now"]["ttft_p50_ms"] is None
    cluster.gathering.note(tried(BEGIN - 1.0, ("first_byte", 0.3, ""), request="r2"))
    cluster.clock.now += FRESH_S
    assert cluster.state()["now"]["ttft_p50_ms"] == 300.0


def test_requests_that_nobody_answered_are_not_remembered_for_ever() -> None:
    cluster = Cluster()
    for number in range(WAITING_KEPT + 500):
        cluster.gathering.note(tried(BEGIN, request=f"r{number}", end="worker_died"))
    assert len(cluster.watch._first_bytes._waiting) == WAITING_KEPT


def test_nothing_of_ten_minutes_ago_is_shown_as_of_now() -> None:
    cluster = Cluster()
    cluster.told(1000, 1000)
    cluster.state()
    cluster.clock.now += 1
    cluster.told(1500, 1400, 10**9)  # and nobody looks
    cluster.clock.now += 600
    found = cluster.state()
    cluster.clock.now += 2
    for now in (found["now"], cluster.state()["now"]):
        assert (now["ended"], now["failed"], now["delivered"]) == (0, 0, None)
        assert (now["handoffs_s"], now["bytes_s"]) == (0.0, 0)


def test_a_worker_that_starts_again_is_not_counted_from_zero() -> None:
    cluster = Cluster()
    cluster.told(1000, 1000)
    cluster.state()
    cluster.clock.now += 1
    cluster.gathering.listed({"d0": (3, "decode")})
    cluster.gathering.heard("d0", 3, FlightReport(cluster.clock.now, {"handoffs_total": 5.0, "delivered_total": 5.0}))
    assert cluster.state()["now"]["ended"] == 0


def test_handoffs_that_ended_are_told_once_and_for_a_short_while() -> None:
    cluster = Cluster()
    for number in range(3):
        cluster.handed(number, "worker_died" if number == 1 else "ok")
    ended = cluster.state()["ended"]
    assert [each["n"] for each in ended] == [1, 2, 3]
    assert [each["failed"] for each in ended] == [False, True, False]
    cluster.clock.now += 5
    assert cluster.state()["ended"] == []


def test_what_is_under_way_is_where_its_request_is() -> None:
    cluster = Cluster()
    flight = cluster.handed(1, under_way=True)

    class Live:
        def flight(self) -> Flight:
            return flight

    cluster.gathering.watch(Live())
    (dot,) = cluster.state()["under_way"]
    assert (dot["from"], dot["to"], dot["stage"]) == (0, 1, "handoff")


def test_a_request_for_d_alone_is_no_handoff() -> None:
    cluster = Cluster()
    moments = (Moment("received", BEGIN), Moment("first_byte", BEGIN + 0.1))
    flight = Flight(
        FlightSeat.ROUTER, "router", request="r", peers=("-", "d0"), mode="alone", moments=moments, end="ok"
    )
    cluster.gathering.note(flight)
    found = cluster.state()
    assert (found["now"]["ended"], found["ended"]) == (0, [])
    assert found["now"]["ttft_p50_ms"] == 100.0


def test_stage_times_come_from_d_and_count_once() -> None:
    cluster = Cluster()
    cluster.handed(1)
    cluster.told(1, 1, flights=[decode(1, BEGIN - 0.02)])
    for _ in range(3):
        stages = {stage["name"]: stage for stage in cluster.state()["stages"]}
        cluster.clock.now += 1.5
    assert stages["claim"]["count"] == 1
    assert stages["copy"]["p50_ms"] == 2.0


def test_stage_times_are_there_though_everything_that_is_newest_is_under_way() -> None:
    cluster = Cluster()
    for number in range(200):
        cluster.gathering.watch(Under(cluster.handed(1000 + number, under_way=True)))
    for second in range(3):
        cluster.told(second, second, flights=[decode(10 * second + n, BEGIN - 1) for n in range(10)])
        cluster.clock.now += 1.0
    stages = {stage["name"]: stage for stage in cluster.state()["stages"]}
    assert (stages["claim"]["count"], stages["claim"]["p50_ms"]) == (30, 1.0)


class Under:
    """An attempt in flight."""

    def __init__(self, record: Flight) -> None:
        self._record = record

    def flight(self) -> Flight:
        return self._record


def test_what_a_client_did_wrong_is_no_handoff_and_no_failure() -> None:
    cluster = Cluster()
    cluster.told(0, 0)
    cluster.state()
    for number in range(8):
        wrong = msgspec.structs.replace(cluster.handed(number, under_way=True), end="404", mistake=True)
        cluster.gathering.note(msgspec.structs.replace(wrong, handoff=""))
    cluster.handed(100, "worker_died")
    cluster.figures = Figures(3, counts={"4xx": 8, RETRIES: 1, CHUNKS: 40})
    cluster.clock.now += 2
    found = cluster.state()
    assert (found["now"]["ended"], found["now"]["failed"]) == (1, 1)
    assert (found["now"]["mistakes"], found["now"]["retries"], found["now"]["tokens_s"]) == (8, 1, 20.0)
    assert [failure["reason"] for failure in found["failures"]] == ["worker_died"]
    assert [dot["end"] for dot in found["ended"]] == ["worker_died"]
    cluster.clock.now += 2
    assert cluster.state()["now"]["tokens_s"] == 10.0  # of whole buckets that are past: 40 in four seconds


def test_a_failure_whose_request_a_later_try_answered_says_so() -> None:
    cluster = Cluster()
    cluster.gathering.note(tried(BEGIN - 2.0, end="worker_died"))
    cluster.gathering.note(tried(BEGIN - 1.9, request="r2", end="worker_died"))
    cluster.gathering.note(tried(BEGIN - 1.0, ("first_byte", 0.2, ""), number=1))
    assert {each["request"]: each["answered"] for each in cluster.state()["failures"]} == {"r1": True, "r2": False}


def test_ends_that_are_nobodys_fault_are_not_counted_as_failures() -> None:
    cluster = Cluster()
    gauges = {"handoffs_total": 0.0, "delivered_total": 0.0, "failed_total": 0.0}
    cluster.heard(gauges)
    cluster.state()
    cluster.clock.now += 1
    cluster.heard({"handoffs_total": 10.0, "delivered_total": 6.0, "failed_total": 1.0})  # three were aborted
    now = cluster.state()["now"]
    assert (now["ended"], now["failed"]) == (7, 1)


def test_rows_and_headline_have_one_window() -> None:
    cluster = Cluster()
    for second in range(13):
        cluster.told(5 * second, 5 * second, 1000 * second)
        found = cluster.state()
        cluster.clock.now += 1
    row = next(each for each in found["workers"] if each["name"] == "d0")
    assert (row["handoffs_s"], row["bytes_s"]) == (found["now"]["handoffs_s"], found["now"]["bytes_s"]) == (5.0, 1000)


def test_the_share_that_d_computed_alone_is_of_the_last_minute_and_known_only_where_it_is_told() -> None:
    cluster = Cluster()
    cluster.told(0, 0)
    assert (cluster.state()["now"]["alone"], cluster.state()["now"]["alone_told"]) == (None, False)
    for prompts, alone in ((1000.0, 1000.0), (1400.0, 1100.0)):
        cluster.clock.now += 1
        cluster.heard({"handoffs_total": 0.0, "prompt_tokens_total": prompts, "alone_tokens_total": alone})
        found = cluster.state()
    assert (found["now"]["alone"], found["now"]["alone_told"]) == (0.78571, True)
    assert next(each for each in found["workers"] if each["name"] == "d0")["alone"] == 0.78571


def test_a_worker_that_left_is_shown_as_gone() -> None:
    cluster = Cluster()
    cluster.told(1, 1)
    cluster.listed.pop()
    cluster.gathering.listed({"p0": (1, "prefill")})
    states = {worker["name"]: worker["state"] for worker in cluster.state()["workers"]}
    assert states == {"p0": "ready", "d0": "gone"}


def test_a_listed_worker_is_not_shown_what_its_former_life_told() -> None:
    cluster = Cluster()
    cluster.told(7, 7)
    cluster.listed[1] = ListedWorker("d0", "decode", "ready", f"{9:016x}")
    (worker,) = [each for each in cluster.state()["workers"] if each["name"] == "d0"]
    assert "heard_s" not in worker


def test_failures_name_the_side_that_failed_first_of_all_d() -> None:
    router = Flight(FlightSeat.ROUTER, "router", handoff=handoff_of(1), request="r1", peers=("p0", "d0"), end="ok")
    failure = failure_of(join([router, decode(1, BEGIN, "claim_timeout", "p0 did not answer")]))
    assert (failure.reason, failure.detail, failure.seen_by) == ("claim_timeout", "p0 did not answer", "d0")
    assert (failure.find, failure.request, failure.target) == (handoff_of(1), "r1", "d0")


def test_a_try_that_came_to_no_handoff_is_found_by_its_request() -> None:
    moments = (Moment("received", BEGIN), Moment("prefill_sent", BEGIN), Moment("ended", BEGIN + 1))
    router = Flight(
        FlightSeat.ROUTER, "router", request="r1", peers=("p0", "d0"), mode="pull", end="worker_died", moments=moments
    )
    failure = failure_of(join([router]))
    assert (failure.reason, failure.find, failure.source, failure.at) == ("worker_died", "r1", "p0", BEGIN + 1)


def test_100_000_flights_leave_a_bounded_watch_and_a_bounded_state() -> None:
    cluster = Cluster()
    for number in range(100):
        cluster.handed(number, "worker_died")
    flight = msgspec.structs.replace(cluster.handed(1000, under_way=True), end="ok")
    (over,) = cluster.gathering.on_flight
    for _ in range(100):
        cluster.clock.now += 1
        for _ in range(1000):
            over(flight)
    found = cluster.state()
    assert len(found["ended"]) == DOTS_MAX
    assert len(found["failures"]) == FAILURES_MAX
    assert len(cluster.watch._ended._moving) == DOTS_MAX
    assert len(cluster.watch._ended._buckets) <= 6
    assert sum(len(each.ttft.kept) for each in cluster.watch._pulse._buckets) <= 90 * SAMPLES_MAX
    assert found["now"]["handoffs_s"] > 900
