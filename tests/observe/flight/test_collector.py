"""What the router keeps: bounded, in any order, failures apart, and no worker speaks for another."""

from __future__ import annotations

import itertools
import math
import random
import threading

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.observe.flight import journey as j
from kvbaton.observe.flight.collector import LAST_MAX, SIDES_MAX, Gathering
from kvbaton.observe.flight.dumps import printable
from kvbaton.observe.flight.flight_records import NAME_CHARS_MAX, Flight, FlightReport, FlightSeat, Moment
from kvbaton.observe.flight.recorder import is_shared
from kvbaton.observe.flight.worker_reports import GONE_S, WORKERS_MAX
from tests.observe.flight.handoffs import HANDOFF, LIFE, NOW, decode, moments, prefill, router


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def made(clock: Clock | None = None, **bounds: float) -> Gathering:
    gathering = Gathering(clock=clock or Clock(), **bounds)  # type: ignore[arg-type]
    gathering.listed({"p0": (7, "prefill"), "d0": (7, "decode")})
    return gathering


def tell(
    gathering: Gathering, *flights: Flight, worker: str = "", life: int = 7, at: float = NOW, **more: object
) -> None:
    name = worker or (flights[0].worker if flights else "p0")
    gathering.heard(name, life, FlightReport(at, flights=flights, **more), at)  # type: ignore[arg-type]


def named(number: int) -> str:
    return f"{random.Random(number).getrandbits(128):032x}.0"


class Trying:
    """A try that is under way."""

    def __init__(self, **more: object) -> None:
        self.more = more

    def flight(self) -> Flight:
        return router(**({"end": "", "moments": router().moments[:3]} | self.more))


# --- joining


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_records_in_any_order_and_more_than_once_make_one_journey(order: tuple[int, ...]) -> None:
    gathering = made()
    steps = [
        lambda: gathering.note(router()),
        lambda: tell(gathering, prefill()),
        lambda: tell(gathering, decode()),
    ]
    for _ in range(2):
        for index in order:
            steps[index]()
    (journey,) = gathering.journeys()
    assert [lane.seat for lane in journey.lanes] == list(FlightSeat)
    assert journey.missing == ()


def test_a_record_of_a_side_that_is_over_is_not_replaced_by_an_older_one() -> None:
    gathering = made()
    tell(gathering, decode())
    tell(gathering, decode(end="", moments=decode().moments[:2]))
    (journey,) = gathering.journeys()
    assert journey.end == "delivered"
    assert gathering.counters["late_flights"] == 1


def test_what_is_under_way_is_replaced_by_what_it_becomes() -> None:
    gathering = made()
    tell(gathering, decode(end="", moments=decode().moments[:2]))
    assert not gathering.journeys()[0].is_over
    tell(gathering, decode())
    assert gathering.journeys()[0].is_over


def test_tries_of_one_request_are_found_together_and_numbered() -> None:
    gathering = made()
    gathering.note(router(handoff=named(1), end="worker_died"))
    gathering.note(router(handoff="", retries=1, end="worker_timeout", moments=moments((("received", 1.0),))))
    gathering.note(router(handoff=named(2), retries=2, moments=moments((("received", 2.0),))))
    found = gathering.journeys(find="mine")
    assert [(each.number, each.tries, each.end) for each in found] == [
        (2, 3, "ok"), (1, 3, "worker_timeout"), (0, 3, "worker_died"),
    ]  # fmt: skip
    assert [(each.number, each.tries) for each in gathering.journeys(failed=True)] == [(1, 3), (0, 3)]


def test_two_requests_under_one_name_do_not_replace_each_other() -> None:
    gathering = made()
    for at in (0.0, 1.0):
        gathering.note(router(handoff="", moments=moments((("received", at),)), end="no_pair"))
    assert len(gathering.journeys(find="mine")) == 2


@pytest.mark.parametrize("text", ["mine", "cmpl-mine-p", "cmpl-mine-d", HANDOFF, HANDOFF[:32], HANDOFF[:6], "l-mine-d"])
def test_a_handoff_is_found_by_each_of_its_names(text: str) -> None:
    gathering = made()
    gathering.note(router())
    tell(gathering, prefill())
    tell(gathering, decode())
    gathering.note(router(handoff=named(1), request="another"))
    assert [journey.handoff for journey in gathering.journeys(find=text)] == [HANDOFF]


@pytest.mark.parametrize("text", [HANDOFF[:5], "min", "nobody", "ine"])
def test_what_could_mean_many_is_not_found(text: str) -> None:
    gathering = made()
    gathering.note(router())
    assert gathering.journeys(find=text) == []


# --- under way


def test_tries_under_way_are_seen_and_join_what_workers_told() -> None:
    gathering = made()
    live = Trying()
    gathering.watch(live)
    tell(gathering, prefill(end="", moments=prefill().moments[:1]))
    (journey,) = gathering.journeys()
    assert ([lane.seat for lane in journey.lanes], journey.end) == ([FlightSeat.ROUTER, FlightSeat.PREFILL], "")
    assert [flight.request for flight in gathering.under_way()] == ["mine"]
    gathering.unwatch(live)
    gathering.note(router())
    assert gathering.under_way() == []
    assert gathering.journeys()[0].end == "ok"


def test_only_so_many_under_way_are_shown_the_newest_first() -> None:
    gathering = made()
    for number in range(10):
        gathering.watch(Trying(request=f"r{number}"))
    assert [flight.request for flight in gathering.under_way(3)] == ["r9", "r8", "r7"]


# --- bounds


def test_failures_are_not_washed_out_by_successes() -> None:
    gathering = made(journeys_max=10, failures_max=5)
    gathering.note(router(end="worker_died"))
    for number in range(100):
        gathering.note(router(handoff=named(number), moments=moments((("received", 1.0 + number),))))
    assert [journey.handoff for journey in gathering.journeys(failed=True)] == [HANDOFF]
    assert len(gathering.journeys(last=LAST_MAX)) == 11


def test_failed_handoffs_are_not_washed_out_by_requests_for_which_nobody_was_asked() -> None:
    gathering = made(journeys_max=10, failures_max=5)
    gathering.note(router(end="worker_died"))
    for number in range(100):
        steps = moments((("received", 1.0 + number),))
        gathering.note(router(handoff="", request=f"r{number}", peers=(), moments=steps, end="no_pair"))
    assert [each.handoff for each in gathering.journeys(failed=True, handoffs=True)] == [HANDOFF]
    assert [each.end for each in gathering.journeys(failed=True)] == ["no_pair"] * 5 + ["worker_died"]
    assert len(gathering.records()) == 6


def test_a_success_that_turns_out_to_have_failed_elsewhere_is_kept_as_a_failure() -> None:
    gathering = made()
    gathering.note(router())
    tell(gathering, prefill(end="lease_expired"))
    assert [journey.handoff for journey in gathering.journeys(failed=True)] == [HANDOFF]


def test_a_client_that_left_is_no_failure() -> None:
    gathering = made()
    gathering.note(router(end="client_gone"))
    assert gathering.journeys(failed=True) == []


def test_memory_is_bounded_whatever_workers_tell() -> None:
    gathering = made(bytes_max=1 << 20)
    long = tuple(Moment("s" * 128, NOW, "d" * 256) for _ in range(48))
    for number in range(300):
        tell(gathering, decode(handoff=named(number), moments=long, end="peer_gone" if number % 2 else "delivered"))
    assert gathering._bytes <= 1 << 20
    assert gathering._bytes == sum(each.bytes for kept in (gathering._fine, gathering._failed) for each in kept)
    assert gathering.counters["forgotten"] > 200


def test_a_worker_that_invents_failures_washes_out_its_own() -> None:
    """Promise 5: a member that was taken over does not hide what happened to the others."""
    gathering = made(failures_max=20)
    real = [named(number) for number in range(6)]
    gathering.note(router(handoff=real[0], end="worker_died"))
    tell(gathering, decode(handoff=real[1], end="stale"))
    tell(gathering, prefill(handoff=real[2], end="lease_expired"), decode(handoff=real[3], end="stale"), worker="d0")
    for number in range(100, 2100):
        tell(gathering, prefill(handoff=named(number), end="lease_expired"), worker="p0")
    kept = {journey.handoff for journey in gathering.journeys(last=LAST_MAX, failed=True)}
    assert len(kept) == 20
    assert {real[0], real[1], real[3]} <= kept
    assert named(2099) in kept and named(2000) not in kept


def test_what_the_router_saw_too_is_not_on_the_bill_of_who_told_it_first() -> None:
    gathering = made(failures_max=10)
    tell(gathering, prefill(end="lease_expired"))
    gathering.note(router(end="handoff_failed"))
    for number in range(100):
        tell(gathering, prefill(handoff=named(number), end="lease_expired"))
    assert HANDOFF in {journey.handoff for journey in gathering.journeys(last=LAST_MAX, failed=True)}


def test_fat_records_of_one_worker_cost_the_others_nothing() -> None:
    gathering = made(bytes_max=1 << 20)
    for number in range(20):
        tell(gathering, decode(handoff=named(number)))
    fat = tuple(Moment("s" * 128, NOW, "d" * 256) for _ in range(48))
    for number in range(100, 400):
        tell(gathering, prefill(handoff=named(number), moments=fat))
    kept = {journey.handoff for journey in gathering.journeys(last=LAST_MAX)}
    assert {named(number) for number in range(20)} <= kept
    assert gathering._bytes <= 1 << 20


def test_one_handoff_has_so_many_sides_and_no_more() -> None:
    gathering = made()
    gathering.listed({f"d{number}": (7, "decode") for number in range(9)})
    for number in range(20):
        tell(gathering, decode(worker=f"d{number % 9}", request=f"r{number}"))
    assert len(gathering.journeys()[0].lanes) == SIDES_MAX


def test_no_worker_takes_the_places_of_the_others_and_the_router_has_its_own() -> None:
    """Promise 5: one that tells ever more of a handoff does not hide that it failed elsewhere."""
    gathering = made()
    for number in range(20):
        tell(gathering, prefill(request=f"r{number}"))
    tell(gathering, decode(end="stale"))
    gathering.note(router(end="handoff_failed"))
    (journey,) = gathering.journeys(failed=True)
    seats = [lane.seat for lane in journey.lanes]
    assert (
        seats.count(FlightSeat.PREFILL) == 2 and seats.count(FlightSeat.DECODE) == seats.count(FlightSeat.ROUTER) == 1
    )
    assert gathering.counters["odd_flights"] == 18


def test_what_was_refused_at_ds_door_is_told_although_no_handoff_came_of_it() -> None:
    gathering = made()
    tell(gathering, decode(handoff="", request="turned-away", end="ticket_forged"))
    tell(gathering, decode(handoff="", request="odd", end="delivered"))
    (journey,) = gathering.journeys()
    assert [lane.request for lane in journey.lanes] == ["turned-away"]


@pytest.mark.parametrize("value", [1.7e308, -1.7e308, 1e19])
def test_gauges_beyond_all_counting_are_left_out(value: float) -> None:
    """Their sums and differences would be infinite, and break whoever rounds them."""
    gathering = made()
    gathering.heard("d0", 7, FlightReport(NOW, gauges={"bytes_total": value, "pins": 1.0}), NOW)
    (told,) = (each for each in gathering.workers() if each.name == "d0")
    assert told.gauges == {"pins": 1.0}


def test_at_high_rates_the_same_share_is_kept_as_workers_tell() -> None:
    clock = Clock()
    gathering = made(clock, flights_per_s=100)
    for number in range(4000):
        clock.now += 0.001
        handoff = named(number)
        if gathering.wants(handoff, always=False):
            gathering.note(router(handoff=handoff))
    assert gathering.level == 4
    kept = {journey.handoff for journey in gathering.journeys(last=60)}
    assert all(is_shared(handoff, 4) for handoff in kept)
    assert gathering.counters["sampled_out"] > 2000
    odd = next(named(number) for number in itertools.count(4000) if not is_shared(named(number), 4))
    assert gathering.wants(odd, always=True)
    tell(gathering, decode(handoff=odd))
    assert gathering.journeys(find=odd) == []
    gathering.ask_for(odd)
    tell(gathering, decode(handoff=odd))
    assert len(gathering.journeys(find=odd)) == 1
    clock.now += 60.0
    assert gathering.wants(odd, always=False)  # all is calm again


def test_a_listener_hears_every_flight_and_one_that_fails_costs_nothing() -> None:
    gathering = made(flights_per_s=0.001)
    heard: list[Flight] = []
    gathering.on_flight += [lambda _: 1 / 0, heard.append]  # type: ignore[list-item]
    for number in range(100):
        assert gathering.wants(named(number), always=False)
        gathering.note(router(handoff=named(number)))
    gathering.note(router(end="", handoff=named(100)))
    assert len(heard) == 100
    assert gathering.counters["callback_faults"] == 100


# --- workers


def test_what_a_worker_told_last() -> None:
    clock = Clock()
    gathering = made(clock)
    tell(gathering, worker="p0", at=NOW, gauges={"pins": 3, "bytes_total": 100.0}, links={"d0": "shm"})
    tell(gathering, worker="p0", at=NOW + 2, gauges={"pins": 4, "bytes_total": 300.0}, share=0.5, missed=2)
    clock.now = NOW + 3
    d0, p0 = gathering.workers()
    assert (p0.name, p0.seat, p0.here, p0.incarnation, p0.age_s) == ("p0", "prefill", True, LIFE, 1.0)
    assert (p0.gauges["pins"], p0.share, p0.missed) == (4, 0.5, 2)
    assert (d0.age_s, d0.gauges) == (None, {})
    assert gathering.reporters() == [("p0", 7)]
    assert (gathering.reports_of("p0"), gathering.reports_of("d0"), gathering.reports_of("nobody")) == (2, 0, 0)


def test_a_new_life_begins_anew_and_the_old_ones_records_are_marked() -> None:
    gathering = made()
    tell(gathering, prefill(), gauges={"bytes_total": 500.0})
    gathering.listed({"p0": (8, "prefill"), "d0": (7, "decode")})
    (told,) = (each for each in gathering.workers() if each.name == "p0")
    assert (told.incarnation, told.age_s, told.gauges) == (f"{8:016x}", None, {})
    assert [lane.gone for lane in gathering.journeys()[0].lanes] == [True]
    tell(gathering, prefill(handoff=named(1)), life=7, gauges={"bytes_total": 900.0})  # late, of the old life
    assert next(each for each in gathering.workers() if each.name == "p0").gauges == {}
    assert gathering.journeys(find=named(1))[0].lanes[0].incarnation == LIFE


def test_who_left_is_shown_for_a_while_with_its_last_word() -> None:
    clock = Clock()
    gathering = made(clock)
    tell(gathering, prefill(end=""), gauges={"pins": 3})
    gathering.listed({"d0": (7, "decode")})
    p0 = gathering.workers()[1]
    assert (p0.here, p0.gauges["pins"]) == (False, 3)
    assert gathering.journeys()[0].lanes[0].gone
    clock.now += GONE_S + 1
    assert [each.name for each in gathering.workers()] == ["d0"]


def test_so_many_workers_are_kept_and_those_that_are_here_go_last() -> None:
    gathering = made()
    for number in range(WORKERS_MAX + 50):
        tell(gathering, worker=f"w{number}", at=NOW + number)
    names = {each.name for each in gathering.workers()}
    assert len(names) <= WORKERS_MAX
    assert {"p0", "d0", f"w{WORKERS_MAX + 49}"} <= names


@pytest.mark.parametrize(
    ("prepare", "why"),
    [
        (lambda g: None, j.FOREIGN),
        (lambda g: tell(g, worker="p0", at=NOW - 1), j.NOT_YET),
        (lambda g: tell(g, worker="p0", at=NOW + 60), j.FORGOTTEN),
        (lambda g: tell(g, worker="p0", share=2.0**-10), j.SAMPLED_OUT),
        (lambda g: (tell(g, worker="p0"), g.listed({})), j.GONE),
        (lambda g: g.listed({}), j.GONE),
    ],
)
def test_why_a_side_is_missing(prepare: object, why: str) -> None:
    gathering = made()
    assert not is_shared(HANDOFF, 10)
    gathering.note(router())
    tell(gathering, decode())
    prepare(gathering)  # type: ignore[operator]
    assert [(each.worker, each.why) for each in gathering.journeys()[0].missing] == [("p0", why)]


# --- peers that are wrong, or taken over


def test_a_worker_speaks_for_itself_alone() -> None:
    gathering = made()
    gathering.note(router())
    lies = (decode(worker="d0", incarnation="0" * 16), router(worker="router", end="lie"))
    tell(gathering, prefill(worker="d0", incarnation="0" * 16), *lies, worker="p0")
    (journey,) = gathering.journeys()
    assert [(lane.seat, lane.worker, lane.incarnation) for lane in journey.lanes] == [
        (FlightSeat.ROUTER, "router", ""), (FlightSeat.PREFILL, "p0", LIFE),
    ]  # fmt: skip
    assert journey.end == "ok"
    assert gathering.counters["odd_flights"] == 2, "a prefill worker does not decode, and is no router"


@pytest.mark.parametrize("at", [math.nan, math.inf, -math.inf, -1.0, 0.0, 1e300])
def test_times_that_are_none_are_left_out(at: float) -> None:
    gathering = made()
    tell(gathering, decode(moments=(Moment("asked", at),)), at=NOW)
    assert gathering.journeys() == []
    gathering.heard("p0", 7, FlightReport(at, gauges={"pins": at, "more": 1.0}, share=at), NOW)
    told = gathering.workers()[1]
    assert told.gauges.get("more") == 1.0
    assert all(map(math.isfinite, told.gauges.values()))
    assert 0 <= told.share <= 1


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    gathering = made()
    evil = "\x1b]0;owned\x07\n\u202e"
    bent = decode(
        request=evil, peers=(evil,), mode=evil, transport=evil, detail=evil, end=evil, trace=evil,
        moments=(Moment("asked", NOW, evil), Moment(evil, NOW)),
    )  # fmt: skip
    tell(gathering, bent, gauges={evil: 1.0}, links={evil: evil})
    shown = msgspec.json.decode(msgspec.json.encode([gathering.journeys(), gathering.workers()]))

    def texts(value: object) -> list[str]:
        if isinstance(value, dict):
            return [text for each in (*value, *value.values()) for text in texts(each)]
        if isinstance(value, list):
            return [text for each in value for text in texts(each)]
        return [value] if isinstance(value, str) else []

    assert all(text.isprintable() for text in texts(shown))
    assert "\\x1b" in str(shown)


@settings(deadline=None)
@given(st.binary(max_size=400))
def test_a_surrogate_or_any_other_text_survives_being_spelled_out(data: bytes) -> None:
    text = data.decode("utf-16-le", "surrogatepass") if len(data) % 2 == 0 else data.decode("latin-1")
    assert printable(text).isprintable()
    assert len(printable(text)) <= max(len(text), NAME_CHARS_MAX)


def test_threads_may_tell_and_look_at_the_same_time() -> None:
    gathering = Gathering(journeys_max=50)
    stop = threading.Event()
    faults: list[Exception] = []

    def look() -> None:
        try:
            while not stop.is_set():
                gathering.journeys()
                gathering.under_way()
                gathering.workers()
                gathering.records()
        except Exception as fault:  # noqa: BLE001 - the test tells of it
            faults.append(fault)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for number in range(2000):
            live = Trying(handoff=named(number))
            gathering.watch(live)
            tell(gathering, decode(handoff=named(number)))
            gathering.unwatch(live)
            gathering.note(router(handoff=named(number)))
    finally:
        stop.set()
        looking.join(10)
    assert not faults
    assert not looking.is_alive()
