"""What the router writes down of each try: its moments, its handoff, and how it ended, whatever ended it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvbaton.observe.codes.code_catalogue import find
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.flight_records import Flight
from kvbaton.observe.flight.journey import REFUSED, joined
from kvbaton.observe.flight.terminal_timeline import brief, draw
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, WorkerId
from kvbaton.protocol.wire.ticket import Ticket, seal, unseal
from kvbaton.router.flow import kv_params
from kvbaton.router.router_flights import LogBook, begun
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directory import ListedEngine
from tests.router.fake_workers import (
    KEY,
    QUICK,
    Cluster,
    FakeWorker,
    Script,
    after,
    begin_then,
    cluster,
    die,
    hang,
    lease,
    refuse,
    speak,
    until,
)

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "abcd"}]}
HANDOFF = HandoffId(f"{'cd' * 16}.0")
STEPS_OF_PULL = ["received", "chosen", "prefill_sent", "prefill_answered", "decode_sent", "first_byte", "ended"]
CALLER = f"00-{'a' * 32}-{'b' * 16}-01"


def flights(c: Cluster) -> list[Flight]:
    """Oldest first."""
    return c.app.gathering.records()


def steps(flight: Flight) -> list[str]:
    return [moment.step for moment in flight.moments]


def fallback(**more: Any) -> RouterSettings:
    return msgspec.structs.replace(QUICK, **more)


async def lease_really(worker: FakeWorker, _: web.Request, body: dict[str, Any]) -> web.Response:
    """A prefill worker whose ticket is one of ours."""
    ticket = seal(Ticket(HANDOFF, WorkerId(worker.name), time.time() + 60, Incarnation(3), LeaseId(1)), KEY)
    params = {"do_remote_prefill": True, "do_remote_decode": False, "ticket": ticket, "mode": "pull"}
    return web.json_response({"choices": [], "kv_transfer_params": params})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_pull_has_every_moment_and_the_handoff_that_p_named(stream: bool) -> None:
    async with cluster([lease_really]) as c:
        if stream:
            await c.events(BODY, X_Request_Id="mine")
        else:
            await c.post(BODY, X_Request_Id="mine")
        await until(lambda: not c.app.gathering.under_way())
        (flight,) = flights(c)
        assert steps(flight) == STEPS_OF_PULL
        assert [moment.at for moment in flight.moments] == sorted(moment.at for moment in flight.moments)
        assert (flight.handoff, flight.request, flight.end) == (HANDOFF, "mine", "ok")
        assert (flight.peers, flight.mode, flight.retries) == (("p0", "d0"), "pull", 0)
        assert (flight.trace, flight.parent, flight.legs) == ("", "", ())


@pytest.mark.parametrize("mode", ["stream", "push"])
async def test_where_both_are_asked_at_once_the_handoff_is_the_tickets(mode: str) -> None:
    async with cluster() as c:
        await c.post(BODY, x_kvbaton_mode=mode)
        await until(lambda: "prefill_answered" in steps(flights(c)[0]))  # which may be after D's answer
        (flight,) = flights(c)
        assert sorted(steps(flight)) == sorted(STEPS_OF_PULL)
        assert steps(flight)[:4] == ["received", "chosen", "prefill_sent", "decode_sent"]
        assert flight.handoff == unseal(c.d[0].params[0]["ticket"], [KEY], 0).handoff
        assert (flight.mode, flight.end) == (mode, "ok")


@pytest.mark.parametrize("mode", ["stream", "push"])
async def test_a_p_that_answers_after_d_is_written_down_and_nobody_is_told_twice(mode: str) -> None:
    gate, told = asyncio.Event(), list[Flight]()
    async with cluster([after(gate, lease)], settings=fallback(settle_s=20)) as c:
        c.app.gathering.on_flight.append(told.append)
        await c.post(BODY, x_kvbaton_mode=mode)
        assert "prefill_answered" not in steps(flights(c)[0])
        gate.set()
        await until(lambda: steps(flights(c)[0])[-1] == "prefill_answered")
        assert len(flights(c)) == len(told) == 1


async def test_d_alone_is_said_to_be_alone() -> None:
    async with cluster() as c:
        await c.post({**BODY, "prompt_logprobs": 1})
        (flight,) = flights(c)
        assert (flight.mode, flight.peers, flight.handoff) == ("alone", ("-", "d0"), "")
        assert steps(flight) == ["received", "chosen", "decode_sent", "first_byte", "ended"]


async def test_each_try_has_a_record_of_its_own_and_the_failed_one_says_why() -> None:
    async with cluster([die, lease], settings=fallback(prefill_retries=1, suspect_s=60)) as c:
        for _ in range(2):  # whoever is asked first
            assert (await c.post(BODY, X_Request_Id="mine"))[0] == 200
        found = sorted(flights(c), key=lambda flight: (flight.began, flight.retries))
        failed = [flight for flight in found if flight.failed]
        assert [(flight.peers[0], flight.end, flight.retries) for flight in failed] == [("p0", "worker_died", 0)]
        assert "p0" in failed[0].detail
        assert [flight.peers[0] for flight in found if flight.retries == 1] == ["p1"]
        journeys = c.app.gathering.journeys(find="mine")
        assert {journey.tries for journey in journeys} == {2}


@pytest.mark.parametrize(
    ("p", "d", "mode", "code", "end"),
    [
        ([refuse(500)], 1, "pull", "scripted", "502"),
        ([refuse(400)], 1, "pull", "scripted", "400"),
        ([die], [hang], "push", "worker_died", "worker_died"),
        (1, [die], "pull", "worker_died", "worker_died"),
        (1, [refuse(503, type="handoff_failed", code="lease_expired")], "pull", "lease_expired", "lease_expired"),
    ],
)
async def test_a_request_that_fails_ends_with_the_code_that_the_client_gets_if_it_is_a_known_one(
    p: int | list[Script], d: int | list[Script], mode: str, code: str, end: str
) -> None:
    async with cluster(p, d, settings=fallback(prefill_retries=0, decode_retries=0)) as c:
        _, answer, _ = await c.post(BODY, x_kvbaton_mode=mode)
        assert answer["error"]["code"] == code
        found = flights(c)
        assert {flight.end for flight in found} == {end}
        told = answer["error"]["message"]
        assert found[-1].detail in (told[:256], told.partition(": ")[0], f"prefill worker p0 answered {end}")
        assert not c.app.gathering.under_way()
        failed = [journey.end for journey in c.app.gathering.journeys(failed=True)]
        assert failed == ([] if end == "400" else [end]), "a client's mistake is none"


async def test_nobody_to_ask_is_a_record_too_but_not_twice() -> None:
    async with cluster(0, 1) as c:
        assert (await c.post(BODY))[0] == 503
        (flight,) = flights(c)
        assert (flight.end, flight.peers, steps(flight)) == ("no_pair", (), ["received", "ended"])
    async with cluster([die], 1, settings=fallback(breaker_failures=1, prefill_retries=1)) as c:
        assert (await c.post(BODY))[0] == 502
        assert {flight.end for flight in flights(c)} == {"worker_died"}
        assert all(flight.peers for flight in flights(c))
        assert not c.app.gathering.under_way()


async def test_the_deadline_is_an_end_of_its_own() -> None:
    async with cluster(1, [hang], settings=fallback(deadline_s=0.3, first_byte_s=5)) as c:
        assert (await c.post(BODY))[0] == 504
        assert flights(c)[-1].end in ("deadline", "worker_timeout")
        assert not c.app.gathering.under_way()


@pytest.mark.parametrize("mode", ["pull", "stream"])
@pytest.mark.parametrize("before", [True, False])
async def test_a_client_that_leaves_is_no_failure(mode: str, before: bool) -> None:
    async def wait(*_: object) -> None:
        await asyncio.Event().wait()

    async with cluster(1, [hang if before else begin_then(wait)]) as c:
        headers = {"x-kvbaton-mode": mode}
        async with aiohttp.ClientSession() as session:
            call = session.post(c.url + "/v1/completions", json={**BODY, "stream": True}, headers=headers)
            asking = asyncio.ensure_future(call)
            if before:
                await until(lambda: c.d[0].bodies)
                asking.cancel()
            else:
                response = await asking
                await response.content.readany()
                response.close()
        await until(lambda: not c.app.gathering.under_way())
        (flight,) = flights(c)
        assert (flight.end, flight.failed) == ("client_gone", False)


async def test_a_stream_that_breaks_ends_with_what_the_client_was_told() -> None:
    async def cut(request: web.Request, _: web.StreamResponse) -> None:
        assert request.transport is not None
        request.transport.abort()

    async with cluster(1, [begin_then(cut)]) as c:
        await c.events(BODY)
        await until(lambda: not c.app.gathering.under_way())
        (flight,) = flights(c)
        assert (flight.end, flight.failed) == ("worker_died", True)
        assert "mid-stream" in flight.detail


async def test_what_is_under_way_can_be_seen_with_how_far_it_is() -> None:
    gate = asyncio.Event()
    async with cluster([lease_really], [after(gate, speak)]) as c:
        call = asyncio.create_task(c.post(BODY, X_Request_Id="mine"))
        await until(lambda: c.d[0].bodies)
        (flight,) = c.app.gathering.under_way()
        assert (flight.request, flight.handoff, flight.end) == ("mine", HANDOFF, "")
        assert steps(flight)[-1] == "decode_sent"
        (journey,) = c.app.gathering.journeys()
        assert not journey.is_over
        gate.set()
        await call
        assert c.app.gathering.under_way() == []


async def test_parts_of_one_body_are_flights_of_their_own() -> None:
    async with cluster() as c:
        await c.post({**BODY, "n": 3}, X_Request_Id="mine")
        assert sorted(flight.request for flight in flights(c)) == ["mine-0", "mine-1", "mine-2"]


# --- tickets and traces


def test_a_tickets_handoff_is_read_without_its_key_and_nothing_else_is() -> None:
    ticket = seal(Ticket(HANDOFF, WorkerId("p0"), 1.0, Incarnation(9), LeaseId(4), digest=b"d" * 32), b"another key")
    assert kv_params.handoff_of(ticket) == HANDOFF
    odd = seal(Ticket(HandoffId("../../etc"), WorkerId("p0"), 1.0), KEY)
    for text in (None, "", "ticket-p0-1", "é", "x" * 5000, odd, ticket[:40], "A" * 100):
        assert kv_params.handoff_of(text) == ""


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_without_an_exporter_a_clients_trace_goes_on_as_it_came(mode: str) -> None:
    async with cluster(incarnation=Incarnation(5)) as c:
        await c.post(BODY, x_kvbaton_mode=mode, traceparent=CALLER, tracestate="a=b")
        for worker in (c.p[0], c.d[0]):
            assert worker.headers[0].getall("traceparent") == [CALLER]
            assert worker.headers[0]["tracestate"] == "a=b"
            assert worker.params[0]["traceparent"] == CALLER
        (flight,) = flights(c)
        assert (flight.trace, flight.parent, flight.legs) == ("", CALLER, ())


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_with_an_exporter_each_leg_is_told_of_its_own_span(mode: str) -> None:
    async with cluster(settings=fallback(trace=True), incarnation=Incarnation(5)) as c:
        await c.post(BODY, x_kvbaton_mode=mode, traceparent=CALLER)
        (flight,) = flights(c)
        assert flight.parent == CALLER
        assert flight.trace.startswith(f"00-{'a' * 32}-")
        told = [worker.headers[0]["traceparent"] for worker in (c.p[0], c.d[0])]
        assert told == [f"00-{'a' * 32}-{leg}-01" for leg in flight.legs]
        assert [worker.params[0]["traceparent"] for worker in (c.p[0], c.d[0])] == told
        assert len({flight.trace.split("-")[2], *flight.legs, "b" * 16}) == 4


async def test_with_an_exporter_a_request_without_a_trace_begins_one() -> None:
    settings = fallback(trace=True, suspect_s=60)
    async with cluster([die, lease], settings=settings, incarnation=Incarnation(5)) as c:
        for _ in range(2):
            await c.post(BODY)
        found = flights(c)
        roots = [flight for flight in found if flight.retries == 0]
        again = [flight for flight in found if flight.retries == 1]
        assert all(flight.trace == flight.parent for flight in roots)
        assert len({flight.trace for flight in found}) == len(found) == 3
        assert [flight.parent for flight in again] == [flight.trace for flight in roots if flight.failed]


@pytest.mark.parametrize("sent", ["00-1-2-3", "", CALLER.upper(), f"00-{'0' * 32}-{'b' * 16}-01", CALLER + "-x"])
async def test_a_trace_that_breaks_the_rules_is_not_passed_on(sent: str) -> None:
    async with cluster(incarnation=Incarnation(5)) as c:
        await c.post(BODY, traceparent=sent)
        for worker in (c.p[0], c.d[0]):
            assert "traceparent" not in worker.headers[0]
            assert "traceparent" not in worker.params[0]


def test_two_traces_are_none_and_a_share_of_requests_begins_one() -> None:
    header = (b"traceparent", CALLER.encode())
    assert begun([header, header], 0.0) == (None, False)
    assert str(begun([header], 0.0)[0]) == CALLER
    assert begun([], 0.25, lambda: 0.3) == (None, False)
    trace, begins = begun([], 0.25, lambda: 0.2)
    assert trace is not None and begins
    assert begun([], 0.0, lambda: 0.0) == (None, False)


def test_only_workers_of_ours_are_told_in_the_parameters() -> None:
    ours = ListedEngine(WorkerId("p0"), "prefill", "http://h:1", Incarnation(5))
    for other in (
        msgspec.structs.replace(ours, incarnation=Incarnation(0)),
        msgspec.structs.replace(ours, dialect="moriio"),
    ):
        assert kv_params.traced(b'{"a":1}', CALLER, other) == b'{"a":1}'
    assert kv_params.traced(b'{"a":1}', "", ours) == b'{"a":1}'
    for params in (b'{"a":1}', b"{}", b' { "a" : {"b":1} } ', b"{ }"):
        told = msgspec.json.decode(kv_params.traced(params, CALLER, ours))
        assert told == {**msgspec.json.decode(params), "traceparent": CALLER}


def test_share_of_traces_is_checked() -> None:
    assert RouterSettings(trace_sample=0.0).trace_sample == 0.0
    for odd in (-0.1, 1.1, float("nan")):
        with pytest.raises(ValueError, match="trace_sample"):
            RouterSettings(trace_sample=odd)


def test_names_and_details_are_cut_and_the_first_end_stands() -> None:
    gathering = Gathering()
    trip = LogBook(gathering, "router").begin("r" * 500, 0, 7)
    trip.chose("p0", "d0", "pull")
    for _ in range(100):
        trip.mark("again")
    trip.over("e" * 500, "d" * 5000)
    trip.over("ok")
    trip.mark("late")
    (flight,) = gathering.records()
    assert (len(flight.request), len(flight.end), len(flight.detail)) == (128, 128, 256)
    assert len(flight.moments) <= 20


def test_an_error_that_nobody_foresaw_is_an_end_too() -> None:
    ends: list[str] = []
    causes: list[Callable[[], BaseException]] = [KeyError, asyncio.CancelledError, GeneratorExit]
    for cause in causes:
        gathering = Gathering()
        LogBook(gathering).begin("mine", 0, 1).broke(cause())
        ends += [flight.end for flight in gathering.records()]
    assert ends == ["internal", "client_gone", "client_gone"]


def test_words_of_a_worker_cannot_move_an_operators_cursor() -> None:
    gathering = Gathering()
    trip = LogBook(gathering).begin("mine", 0, 1)
    trip.over("\x1b[2J", "\x1b]0;owned\x07")
    (flight,) = gathering.records()
    assert (flight.end, flight.detail) == ("\\x1b[2J", "\\x1b]0;owned\\x07")


@pytest.mark.parametrize("mode", ["pull", "stream"])
async def test_a_clients_mistake_is_refused_by_p_and_no_failed_handoff(mode: str) -> None:
    async with cluster([refuse(404, code=404, type="NotFoundError")], [hang]) as c:  # as vLLM words it
        status, _, headers = await c.post(BODY, x_kvbaton_mode=mode)
        (journey,) = c.app.gathering.journeys(find=headers["x-request-id"])
        assert (status, journey.end, journey.mistake, journey.failed) == (404, "404", True, False)
        assert ("prefill", "p0", REFUSED) in [(each.seat, each.worker, each.why) for each in journey.missing]
        assert c.app.gathering.journeys(failed=True) == []
        drawn = "\n".join(draw(journey))
        assert "P p0: refused the request" in drawn and "no record" not in drawn.partition("D d0")[0]
        assert "next: kvbaton explain 404" in drawn and find("404")
    for busy in (429, 503, 500):
        async with cluster([refuse(busy)]) as c:
            await c.post(BODY)
            assert c.app.gathering.journeys(failed=True), busy


async def test_a_try_that_failed_says_which_later_one_answered() -> None:
    async with cluster([refuse(500), lease]) as c:
        while not c.app.gathering.journeys(failed=True):  # until the one that refuses was asked first
            await c.events(BODY)
        (journey,) = c.app.gathering.journeys(last=1, failed=True)
        assert (journey.number, journey.answered_by, journey.tries) == (0, 1, 2)
        assert brief(journey)[-1].endswith("; try 2 answered")
        assert "the client got its answer anyway: try 2 answered" in draw(journey)
        assert joined(flights(c), last=1, failed=True)[0].answered_by == 1


async def test_tokens_of_a_stream_are_counted_as_they_pass() -> None:
    async with cluster() as c:
        for path, body in (("/v1/completions", BODY), ("/v1/chat/completions", CHAT)):
            before = len(flights(c))
            events = await c.events({**body, "stream_options": {"include_usage": True}}, path)
            await until(lambda before=before: len(flights(c)) == before + 1)
            tokens = [each for each in events[:-1] if each["choices"] and piece(each["choices"][0])]
            flight = flights(c)[-1]
            assert flight.chunks == len(tokens) > 1
            (journey,) = c.app.gathering.journeys(last=1)
            assert journey.chunks == flight.chunks and journey.itl_s is not None
        assert (await c.stats())["token_chunks_total"] == sum(each.chunks for each in flights(c))
        await c.post(BODY)
        assert flights(c)[-1].chunks == 0


def piece(choice: dict[str, Any]) -> str:
    return str(choice["delta"].get("content", "") if "delta" in choice else choice["text"])
