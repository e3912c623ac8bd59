"""The failure matrix of `flow`: for every way a worker can fail, the one outcome that the client sees."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.api import sse
from kvbaton.router.router_settings import RouterSettings
from tests.router.fake_workers import (
    QUICK,
    FakeWorker,
    Script,
    after,
    begin_then,
    cluster,
    die,
    event,
    hang,
    lease,
    only_first,
    refuse,
    run,
    say,
    speak,
    tells,
    until,
)

BODY = {"prompt": "abc", "max_tokens": 4}
MODES = ("pull", "stream", "push")
HASTY = msgspec.structs.replace(QUICK, first_byte_s=1.0)
HANDOFF_FAILED = refuse(500, "peer_gone: P is gone", type="handoff_failed", code="peer_gone")

BROKEN: dict[str, tuple[Script, int, str]] = {
    "refuses with 400": (refuse(400, "prompt: bad"), 400, "scripted"),
    "refuses with 404": (refuse(404), 404, "scripted"),
    "is full": (refuse(429), 429, "scripted"),
    "is stopping": (refuse(503), 503, "scripted"),
    "fails with 500": (refuse(500, "boom"), 502, "scripted"),
    "redirects": (refuse(302), 502, "scripted"),
    "dies": (die, 502, "worker_died"),
    "answers nonsense": (say(b"<html>"), 502, "bad_answer"),
    "answers a list": (say(b"[1]"), 502, "bad_answer"),
}
P_ONLY: dict[str, tuple[Script, int, str]] = {
    "gives no ticket": (say(b'{"choices": []}'), 502, "bad_answer"),
    "gives null": (say(b'{"kv_transfer_params": null}'), 502, "bad_answer"),
    "gives a text": (say(b'{"kv_transfer_params": "odd"}'), 502, "bad_answer"),
    "gives a list": (say(b'{"kv_transfer_params": [1]}'), 502, "bad_answer"),
    "hangs": (hang, 504, "worker_timeout"),
}


def closed(worker: FakeWorker) -> bool:
    """Whatever it was asked was broken off; time may be up before it is asked, where the machine stood still."""
    return worker.aborted == len(worker.bodies)


def rows(table: dict[str, tuple[Script, int, str]]) -> Any:
    return pytest.mark.parametrize(("script", "status", "code"), table.values(), ids=table.keys())


@rows({**BROKEN, **P_ONLY})
def test_in_pull_a_p_that_fails_costs_an_explicit_error_and_d_is_not_asked(
    script: Script, status: int, code: str
) -> None:
    async def story() -> None:
        async with cluster([script], settings=HASTY if script is hang else QUICK) as c:
            got, answer, headers = await c.post(BODY)
            assert (got, answer["error"]["code"]) == (status, code)
            assert ("Retry-After" in headers) == (status in (429, 503))
            assert c.d[0].bodies == []
            if status not in (400, 404):
                assert "p0" in answer["error"]["message"]

    run(story())


@rows({name: row for name, row in {**BROKEN, **P_ONLY}.items() if row[2] != "bad_answer"})
@pytest.mark.parametrize("mode", ["stream", "push"])
def test_when_p_fails_beside_d_the_client_hears_at_once_and_d_is_closed(
    mode: str, script: Script, status: int, code: str
) -> None:
    async def story() -> None:
        gate = asyncio.Event()
        settings = HASTY if script is hang else QUICK
        async with cluster([after(gate, script)], [hang], settings=settings) as c:
            call = asyncio.create_task(c.post(BODY, x_kvbaton_mode=mode))
            await until(lambda: c.d[0].bodies or call.done())
            gate.set()
            got, answer, _ = await call
            assert got == status
            assert answer["error"]["code"] == code
            await until(lambda: closed(c.d[0]))

    run(story())


@rows(BROKEN)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_d_that_fails_before_its_first_byte_costs_an_explicit_error(
    mode: str, stream: bool, script: Script, status: int, code: str
) -> None:
    async def story() -> None:
        async with cluster(1, [script]) as c:
            got, answer, headers = await c.post({**BODY, "stream": stream}, x_kvbaton_mode=mode)
            assert (got, answer["error"]["code"]) == (status, code)
            assert headers.get("Retry-After") == ("7" if status in (429, 503) else None)

    run(story())


@pytest.mark.parametrize("mode", MODES)
def test_a_d_that_hangs_before_its_first_event_times_out(mode: str) -> None:
    async def story() -> None:
        async with cluster(1, [hang], settings=HASTY) as c:
            status, answer, _ = await c.post({**BODY, "stream": True}, x_kvbaton_mode=mode)
            assert (status, answer["error"]["code"]) == (504, "worker_timeout")
            await until(lambda: closed(c.d[0]))

    run(story())


@pytest.mark.parametrize("mode", MODES)
def test_a_request_past_its_deadline_ends_with_504_and_both_legs_with_it(mode: str) -> None:
    async def story() -> None:
        settings = RouterSettings(deadline_s=2.0)  # P answers well before it
        async with cluster(1, [hang], settings=settings) as c:
            status, answer, _ = await c.post(BODY, x_kvbaton_mode=mode)
            steps = [moment.step for flight in c.app.gathering.records() for moment in flight.moments]
            codes = ["deadline"] if "prefill_answered" in steps else ["deadline", "worker_timeout"]
            assert status == 504 and answer["error"]["code"] in codes
            await until(lambda: closed(c.d[0]))

    run(story())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["is full", "is stopping", "fails with 500", "dies"])
def test_another_p_is_asked_with_a_new_ticket(mode: str, name: str) -> None:
    async def story() -> None:
        asked = asyncio.Event()
        waits_for_its_kv = speak if mode == "pull" else tells(asked, only_first(hang, speak))
        fails = BROKEN[name][0] if mode == "pull" else after(asked, BROKEN[name][0])
        async with cluster([fails, lease], [waits_for_its_kv]) as c:
            status, answer, _ = await c.post(BODY, x_kvbaton_mode=mode)
            assert (status, answer["choices"][0]["text"]) == (200, "ABC")
            assert (len(c.p[0].bodies), len(c.p[1].bodies)) == (1, 1)
            tickets = [params["ticket"] for params in c.d[0].params]
            assert len(tickets) == len(set(tickets)) == (1 if mode == "pull" else 2)
            assert mode == "pull" or c.p[1].params[0]["ticket"] == tickets[-1]

    run(story())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["is full", "fails with 500", "dies", "answers nonsense"])
def test_another_pair_is_asked_when_d_fails_before_its_first_byte(mode: str, stream: bool, name: str) -> None:
    async def story() -> None:
        asked = asyncio.Event()
        async with cluster([tells(asked, lease)], [after(asked, BROKEN[name][0]), speak]) as c:
            body = {**BODY, "stream": stream}
            async with c.session.post(f"{c.url}/v1/completions", json=body, headers={"x-kvbaton-mode": mode}) as got:
                assert got.status == 200
                await got.read()
            (first,), (second,) = c.d[0].params, c.d[1].params
            assert first["ticket"] != second["ticket"]
            assert len(c.p[0].bodies) == 2

    run(story())


def test_tries_are_bounded() -> None:
    async def story() -> None:
        async with cluster([refuse(500)] * 5, 1) as c:
            assert (await c.post(BODY))[0] == 502
            assert sum(len(worker.bodies) for worker in c.p) == 1 + QUICK.prefill_retries
        async with cluster(1, [refuse(500)] * 5) as c:
            assert (await c.post(BODY))[0] == 502
            assert sum(len(worker.bodies) for worker in c.d) == 1 + QUICK.decode_retries

    run(story())


def test_a_fault_of_the_request_is_not_tried_elsewhere() -> None:
    async def story() -> None:
        async with cluster([refuse(400, "n: bad")] * 2, 2) as c:
            status, answer, _ = await c.post(BODY)
            assert (status, answer["error"]["message"]) == (400, "n: bad")
            assert sum(len(worker.bodies) for worker in c.p) == 1

    run(story())


@pytest.mark.parametrize("status", [400, 500])
def test_a_failed_handoff_moves_to_two_other_workers(status: int) -> None:
    async def story() -> None:
        failed = refuse(status, "ticket_expired", type="handoff_failed", code="ticket_expired")
        async with cluster(2, [failed, speak]) as c:
            assert (await c.post(BODY))[0] == 200
            assert [len(worker.bodies) for worker in (*c.p, *c.d)] == [1, 1, 1, 1]

    run(story())


def test_a_failed_handoff_with_one_d_is_tried_from_another_p() -> None:
    async def story() -> None:
        async with cluster(2, [only_first(HANDOFF_FAILED, speak)]) as c:
            assert (await c.post(BODY))[0] == 200
            assert [len(worker.bodies) for worker in (*c.p, *c.d)] == [1, 1, 2]

    run(story())


def test_a_handoff_that_fails_for_good_is_told_with_its_reason() -> None:
    async def story() -> None:
        async with cluster(1, [HANDOFF_FAILED]) as c:
            status, answer, _ = await c.post(BODY)
            assert (status, answer["error"]["type"], answer["error"]["code"]) == (502, "handoff_failed", "peer_gone")
            assert "peer_gone: P is gone" in answer["error"]["message"]

    run(story())


async def _abort(request: web.Request, _: web.StreamResponse) -> None:
    assert request.transport is not None
    request.transport.abort()


async def _cut(request: web.Request, response: web.StreamResponse) -> None:
    await response.write(b'data: {"id": "cut in mid')
    await asyncio.sleep(0)
    await _abort(request, response)


async def _end_early(_: web.Request, __: web.StreamResponse) -> None:
    pass


async def _tell_error(_: web.Request, response: web.StreamResponse) -> None:
    await response.write(event({"error": {"message": "engine broke", "code": "internal"}}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("end", "code"),
    [(_abort, "worker_died"), (_cut, "worker_died"), (_end_early, "worker_died"), (_tell_error, "internal")],
)
def test_a_stream_that_breaks_ends_with_one_error_event_and_no_done(mode: str, end: Any, code: str) -> None:
    async def story() -> None:
        async with cluster(2, [begin_then(end), begin_then(end)]) as c:
            events = await c.events(BODY, x_kvbaton_mode=mode)
            assert [("error" in one) for one in events] == [False, True]
            assert events[1]["error"]["code"] == code
            assert sum(len(worker.bodies) for worker in c.d) == 1

    run(story())


def test_an_error_event_as_the_first_one_counts_as_a_refusal() -> None:
    async def story() -> None:
        first = event({"error": {"message": "late refusal", "type": "x", "code": 500}})
        async with cluster(1, [begin_then(_end_early, first), speak]) as c:
            assert (await c.events(BODY))[-1] == "[DONE]"

    run(story())


def test_a_stream_past_its_deadline_ends_with_an_error_event() -> None:
    async def story() -> None:
        async def wait(*_: Any) -> None:
            await asyncio.Event().wait()

        async with cluster(1, [begin_then(wait)], settings=RouterSettings(deadline_s=4.5)) as c:
            events = await c.events(BODY)
            assert events[-1]["error"]["code"] == "deadline"
            await until(lambda: closed(c.d[0]))

    run(story())


def test_an_event_without_end_is_cut_off() -> None:
    async def story() -> None:
        async def flood(_: web.Request, response: web.StreamResponse) -> None:
            for _ in range(sse.EVENT_BYTES_MAX // (1 << 16) + 8):
                await response.write(b"x" * (1 << 16))

        async with cluster(1, [begin_then(flood)]) as c:
            assert (await c.events(BODY))[-1]["error"]["code"] == "bad_answer"

    run(story())


def test_an_answer_without_end_is_cut_off() -> None:
    async def story() -> None:
        settings = msgspec.structs.replace(QUICK, answer_bytes_max=1000)
        async with cluster([say(b"x" * 2000)], settings=settings) as c:
            assert (await c.post(BODY))[1]["error"]["code"] == "bad_answer"

    run(story())


@pytest.mark.parametrize(("prefills", "decodes", "missing"), [(0, 1, "prefill"), (1, 0, "decode"), (0, 0, "prefill")])
def test_without_a_pair_the_client_is_told_what_is_missing_and_when_to_come_back(
    prefills: int, decodes: int, missing: str
) -> None:
    async def story() -> None:
        async with cluster(prefills, decodes) as c:
            status, answer, headers = await c.post(BODY)
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "no_pair", "1")
            assert f"no {missing} worker is registered" in answer["error"]["message"]
            status, health = await c.get("/health")
            assert (status, health["status"]) == (503, "unavailable")
            assert missing in health["reason"]

    run(story())


def test_a_full_router_answers_429_and_serves_again_later() -> None:
    async def story() -> None:
        gate = asyncio.Event()
        settings = msgspec.structs.replace(QUICK, in_flight_max=2)
        async with cluster([after(gate, lease)], settings=settings) as c:
            calls = [asyncio.create_task(c.post(BODY)) for _ in range(2)]
            await until(lambda: len(c.p[0].bodies) == 2)
            status, answer, headers = await c.post(BODY)
            assert (status, answer["error"]["code"], headers["Retry-After"]) == (429, "full", "1")
            gate.set()
            assert [(await call)[0] for call in calls] == [200, 200]
            assert (await c.post(BODY))[0] == 200

    run(story())


def test_who_was_unreachable_is_asked_last_for_a_while() -> None:
    async def story() -> None:
        settings = msgspec.structs.replace(QUICK, suspect_s=60)
        async with cluster([die, lease], 1, settings=settings) as c:
            for _ in range(5):
                assert (await c.post(BODY))[0] == 200
            assert [len(worker.bodies) for worker in c.p] == [1, 5]
            assert (await c.get("/health"))[1]["workers"]["prefill"] == {"suspect": 1, "serving": 1}

    run(story())
