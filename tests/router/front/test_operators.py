"""Who is shown pages for operators, and what `/flights` answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.api.http.http_types import Answer, Events, Request
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.flight_records import Flight, FlightReport, FlightSeat, Moment
from kvbaton.observe.flight.journey import Journey
from kvbaton.router.app import Board, router_app
from kvbaton.router.dashboard_page import dashboard
from kvbaton.router.operator_access import ASK_S, FlightsPage, FlightsQuery, guarded, why_not
from kvbaton.router.router_settings import Fallback, OperatorPages, RouterSettings
from kvbaton.router.workers.directory import StaticDirectory
from tests.router.fake_workers import QUICK, cluster, die, lease, speak

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
HANDOFF = f"{'ef' * 16}.0"
AUTO, OPEN, OFF = OperatorPages


def request(
    peer: str = "127.0.0.1", host: str = "127.0.0.1:8000", query: str = "", near: str = "", **more: str
) -> Request:
    given = [(name.replace("_", "-").encode(), value.encode()) for name, value in more.items()]
    return Request("GET", "/flights", [(b"host", host.encode()), *given], b"", query, peer, None, near)


@pytest.mark.parametrize("peer", ["127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"])
@pytest.mark.parametrize("host", ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:8000", "10.0.0.1"])
def test_this_machine_is_shown_them_by_address(peer: str, host: str) -> None:
    assert why_not(request(peer, host), AUTO) == ""


@pytest.mark.parametrize("peer", ["10.0.0.1", "::ffff:10.0.0.1", "fe80::1%lo", "", "unix", "2001:db8::1"])
@pytest.mark.parametrize("near", ["", "10.0.0.2", "127.0.0.1"])
def test_other_machines_are_not(peer: str, near: str) -> None:
    said = why_not(request(peer, near=near), AUTO)
    assert "--operator-pages open" in said and "--operator-key-file" in said


@pytest.mark.parametrize("own", ["10.0.0.1", "::ffff:10.0.0.1", "2001:db8::1"])
def test_this_machine_is_shown_them_by_any_address_of_its_own(own: str) -> None:
    assert why_not(request(own, "10.0.0.1:8000", near=own), AUTO) == ""
    assert why_not(request(own, "evil.example", near=own), AUTO)
    assert why_not(request(own, "10.0.0.1:8000", near=own, x_forwarded_for=own), AUTO)
    assert why_not(request(own, "10.0.0.1:8000", near=own, origin="https://evil.example"), AUTO)


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "localhost.evil.example", "0x7f.1"])
def test_a_name_that_could_be_rebound_is_not(host: str) -> None:
    assert why_not(request(host=host), AUTO)


def test_a_request_without_host_is_not() -> None:
    assert why_not(Request("GET", "/flights", [], b"", "", "127.0.0.1"), AUTO)


@pytest.mark.parametrize("name", ["x_forwarded_for", "forwarded", "x_real_ip", "via", "x_forwarded_host"])
def test_whoever_comes_through_a_proxy_is_not_this_machine(name: str) -> None:
    assert why_not(request(**{name: "127.0.0.1"}), AUTO)


def test_open_shows_everybody_and_off_nobody() -> None:
    assert why_not(request("10.0.0.1", "evil.example", via="x"), OPEN) == ""
    assert "off" in why_not(request(), OFF)


@pytest.mark.parametrize("fallback", Fallback)
async def test_the_dashboard_says_what_cannot_be_served_and_why(fallback: Fallback) -> None:
    settings = msgspec.structs.replace(QUICK, fallback=fallback)
    async with cluster([lease], [speak], settings=settings, access={"pages": dashboard}) as c:
        assert (await c.get("/dashboard/state"))[1]["trouble"] is None
        c.directory.lose("p0")
        strict = fallback is Fallback.STRICT
        assert (await c.post(BODY))[0] == (503 if strict else 200)
        trouble = (await c.get("/dashboard/state"))[1]["trouble"]
        assert trouble["is_down"] is strict
        begin = "Requests are answered 503 (--fallback strict): " if strict else "Degraded: "
        assert trouble["text"].startswith(f"{begin}no prefill worker is registered"), trouble
        c.directory.lose("d0")
        trouble = (await c.get("/dashboard/state"))[1]["trouble"]
        assert trouble["is_down"] and trouble["text"].startswith("Requests are answered 503: no "), trouble
        c.app.draining.set()
        assert "drains" in (await c.get("/dashboard/state"))[1]["trouble"]["text"]
        told = (await c.stats())["responses_total"]
        errors = (await c.get("/dashboard/state"))[1]["now"]["errors"]
        assert errors == told.get("5xx", 0) == (1 if strict else 0)


def test_a_refusal_is_one_line_with_status_403() -> None:
    async def never(_: Request) -> Answer | Events:
        raise AssertionError("not for strangers")

    with pytest.raises(ApiError) as told:
        asyncio.run(guarded(never, AUTO)(request("10.0.0.1")))  # type: ignore[arg-type]
    assert (told.value.status, told.value.code, told.value.message.count("\n")) == (403, "operators_only", 0)


# --- what is asked


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ("", FlightsQuery()),
        ("last=7&failed=1", FlightsQuery(7, True)),
        ("failed=0&id=a%20b", FlightsQuery(find="a b")),
        ("id=x&last=200", FlightsQuery(200, find="x")),
    ],
)
def test_what_is_asked_is_read_from_the_query(query: str, wanted: FlightsQuery) -> None:
    assert FlightsQuery.parse(query) == wanted


@pytest.mark.parametrize(
    "query",
    [
        "last=0", "last=201", "last=-1", "last=x", "last=", "last=٣", "last=99999999999999999999", "failed=2", "id=",
        f"id={'x' * 300}", "odd=1", "&".join(["last=1"] * 20),
    ],
)  # fmt: skip
def test_a_field_that_is_wrong_is_named(query: str) -> None:
    with pytest.raises(ApiError) as told:
        FlightsQuery.parse(query)
    assert told.value.status == 400
    assert told.value.param in (query.split("=", maxsplit=1)[0], "query")


# --- the page


async def test_the_page_lists_the_last_and_the_failed_and_finds_one() -> None:
    settings = msgspec.structs.replace(QUICK, prefill_retries=0)
    async with cluster([die], 1, settings=settings) as c:
        await c.post(BODY, X_Request_Id="first")
        await c.post({**BODY, "prompt_logprobs": 1}, X_Request_Id="second")
        status, told = await c.get("/flights")
        assert (status, [each["request"] for each in told["journeys"]]) == (200, ["second", "first"])
        journeys = msgspec.convert(told["journeys"], list[Journey])
        assert [journey.failed for journey in journeys] == [False, True]
        assert [each["request"] for each in (await c.get("/flights?failed=1"))[1]["journeys"]] == ["first"]
        assert [each["request"] for each in (await c.get("/flights?id=second"))[1]["journeys"]] == ["second"]
        assert len((await c.get("/flights?last=1"))[1]["journeys"]) == 1
        assert (await c.get("/flights?id=nobody"))[1] == {"journeys": []}
        assert (await c.get("/flights?last=0"))[0] == 400
        async with c.session.get(c.url + "/flights", headers={"Host": "evil.example"}) as response:
            assert response.status == 403
        async with c.session.post(c.url + "/flights") as response:
            assert response.status == 405


async def test_pages_that_are_off_are_off() -> None:
    async with cluster(settings=msgspec.structs.replace(QUICK, operator_pages=OFF)) as c:
        assert (await c.get("/flights"))[0] == 403
        assert (await c.get("/health"))[0] == 200


async def test_more_pages_can_be_added_and_are_guarded_like_the_others() -> None:
    seen: list[Board] = []

    async def page(asked: Request) -> Answer | Events:
        return Answer(f"hello {asked.query}".encode(), content_type="text/html")

    def pages(board: Board) -> dict[str, Any]:
        seen.append(board)
        return {"/dashboard": page}

    async with router_app(StaticDirectory([]), RouterSettings(), pages=pages) as app:
        handler = app.handler("GET", "/dashboard")
        answer = await handler(request(query="a=1"))
        assert isinstance(answer, Answer)
        assert answer.body == b"hello a=1"
        with pytest.raises(ApiError):
            await handler(request("10.0.0.1"))
        with pytest.raises(ApiError):
            app.handler("POST", "/dashboard")
        (board,) = seen
        assert board.gathering is app.gathering
        assert (board.workers(), board.stats()["in_flight"]) == ([], 0)


# --- asking workers


class Workers:
    """Workers that answer a question with a report, or do not."""

    def __init__(self, gathering: Gathering, answers: dict[str, Sequence[Flight]]) -> None:
        self.gathering = gathering
        self.answers = answers
        self.asked: list[tuple[str, int, list[str]]] = []

    def show(self, worker: str, incarnation: int, ids: Sequence[str]) -> bool:
        self.asked.append((worker, incarnation, list(ids)))
        asyncio.get_running_loop().call_soon(self._answer, worker, incarnation)
        return True

    def _answer(self, worker: str, incarnation: int) -> None:
        if worker in self.answers:
            self.gathering.heard(worker, incarnation, FlightReport(2.0, flights=tuple(self.answers[worker])))


def flight(seat: FlightSeat, worker: str, **more: Any) -> Flight:
    steps = {FlightSeat.ROUTER: ("received", "prefill_sent", "decode_sent", "ended")}.get(seat, ("begun",))
    moments = tuple(Moment(step, 1000.0) for step in steps)
    given = {"handoff": HANDOFF, "request": f"at-{worker}", "end": "ok" if seat is FlightSeat.ROUTER else "delivered"}
    return Flight(seat, worker, moments=moments, **(given | more))


def gathered() -> Gathering:
    gathering = Gathering()
    gathering.listed({"p0": (1, "prefill"), "d0": (2, "decode"), "d1": (3, "decode")})
    for worker, life in (("p0", 1), ("d0", 2), ("d1", 3)):
        gathering.heard(worker, life, FlightReport(1.0))
    return gathering


async def test_whose_record_is_missing_is_asked_for_it() -> None:
    gathering = gathered()
    gathering.note(flight(FlightSeat.ROUTER, "router", peers=("p0", "d0"), mode="pull"))
    known = {"p0": [flight(FlightSeat.PREFILL, "p0")], "d0": [flight(FlightSeat.DECODE, "d0")]}
    workers = Workers(gathering, known)  # type: ignore[arg-type]
    (journey,) = await FlightsPage(gathering, workers.show).journeys(FlightsQuery(find="at-router"))
    assert journey.missing == ()
    assert workers.asked == [("d0", 2, ["at-router", HANDOFF]), ("p0", 1, ["at-router", HANDOFF])]
    workers.asked.clear()
    await FlightsPage(gathering, workers.show).journeys(FlightsQuery(find="at-router"))
    assert workers.asked == [], "all of it is here"


async def test_a_worker_whose_record_was_under_way_is_asked_again() -> None:
    gathering = gathered()
    gathering.note(flight(FlightSeat.ROUTER, "router", peers=("p0", "d0"), mode="pull"))
    gathering.heard("p0", 1, FlightReport(2.0, flights=(flight(FlightSeat.PREFILL, "p0"),)))
    gathering.heard("d0", 2, FlightReport(2.0, flights=(flight(FlightSeat.DECODE, "d0", end=""),)))
    workers = Workers(gathering, {"d0": [flight(FlightSeat.DECODE, "d0")]})
    (journey,) = await FlightsPage(gathering, workers.show).journeys(FlightsQuery(find=HANDOFF))
    assert [name for name, *_ in workers.asked] == ["d0"]
    assert all(lane.end for lane in journey.lanes)


async def test_an_id_that_only_a_worker_knows_is_found_by_asking_all() -> None:
    gathering = gathered()
    workers = Workers(gathering, {"p0": [], "d1": [flight(FlightSeat.DECODE, "d1")]})
    (journey,) = await FlightsPage(gathering, workers.show).journeys(FlightsQuery(find=HANDOFF[:8]))
    assert journey.lanes[0].worker == "d1"
    assert sorted(name for name, *_ in workers.asked) == ["d0", "d1", "p0"]


async def test_a_worker_that_does_not_answer_is_not_waited_for_long() -> None:
    gathering = gathered()
    gathering.note(flight(FlightSeat.ROUTER, "router", peers=("p0", "d0"), mode="pull"))
    workers = Workers(gathering, {})
    begun = asyncio.get_running_loop().time()
    (journey,) = await FlightsPage(gathering, workers.show).journeys(FlightsQuery(find="at-router"))
    took = asyncio.get_running_loop().time() - begun
    assert took >= ASK_S
    assert {missing.worker for missing in journey.missing} == {"p0", "d0"}


@pytest.mark.parametrize("digits", ["000000001", "1" * 5000, "0000000001" + "0" * 4301, "+1", "1_0"])
def test_a_number_of_any_length_is_a_number_or_refused(digits: str) -> None:
    try:
        assert FlightsQuery.parse(f"last={digits}").last == 1
    except ApiError as error:
        assert error.status == 400


async def test_of_the_last_ones_too_workers_are_asked_for_what_lacks() -> None:
    """Whoever looks right after a request sees it whole, although workers report twice a second."""
    gathering = gathered()
    gathering.note(flight(FlightSeat.ROUTER, "router", peers=("p0", "d0"), mode="pull"))
    workers = Workers(gathering, {})
    assert len(await FlightsPage(gathering, workers.show).journeys(FlightsQuery())) == 1
    assert sorted(workers.asked) == [("d0", 2, [HANDOFF]), ("p0", 1, [HANDOFF])]


async def test_where_nothing_is_known_or_nobody_can_be_asked_nobody_is() -> None:
    gathering = gathered()
    workers = Workers(gathering, {})
    assert await FlightsPage(gathering, workers.show).journeys(FlightsQuery()) == []
    gathering.note(flight(FlightSeat.ROUTER, "router", peers=("p0", "d0"), mode="pull"))
    assert len(await FlightsPage(gathering, None).journeys(FlightsQuery(find="at-router"))) == 1
    assert await FlightsPage(gathering, workers.show).journeys(FlightsQuery(find="x")) == []
    assert workers.asked == []
