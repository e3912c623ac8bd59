"""Failures of workers that the matrix on real ones (tests/e2e/router/test_failure_matrix.py) has no row for."""

from __future__ import annotations

import msgspec
import pytest
from aiohttp import web

from tests.router.fake_workers import (
    QUICK,
    Script,
    begin_then,
    cluster,
    die,
    event,
    lease,
    only_first,
    refuse,
    say,
    speak,
)

BODY = {"prompt": "abc", "max_tokens": 4}
MODES = ("pull", "stream", "push")
HANDOFF_FAILED = refuse(500, "peer_gone: P is gone", type="handoff_failed", code="peer_gone")

ODD: dict[str, tuple[Script, str]] = {
    "redirects": (refuse(302), "scripted"),
    "answers a list": (say(b"[1]"), "bad_answer"),
    "gives null": (say(b'{"kv_transfer_params": null}'), "bad_answer"),
    "gives a list": (say(b'{"kv_transfer_params": [1]}'), "bad_answer"),
}


@pytest.mark.parametrize(("script", "code"), ODD.values(), ids=ODD)
async def test_in_pull_an_odd_p_costs_an_explicit_error_and_d_is_not_asked(script: Script, code: str) -> None:
    async with cluster([script]) as c:
        got, answer, _ = await c.post(BODY)
        assert (got, answer["error"]["code"]) == (502, code)
        assert "p0" in answer["error"]["message"] and c.d[0].bodies == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["redirects", "answers a list"])
async def test_an_odd_d_costs_an_explicit_error(mode: str, stream: bool, name: str) -> None:
    async with cluster(1, [ODD[name][0]]) as c:
        got, answer, _ = await c.post({**BODY, "stream": stream}, x_kvbaton_mode=mode)
        assert (got, answer["error"]["code"]) == (502, ODD[name][1])


@pytest.mark.parametrize("status", [400, 500])
async def test_a_failed_handoff_moves_to_two_other_workers(status: int) -> None:
    failed = refuse(status, "ticket_expired", type="handoff_failed", code="ticket_expired")
    async with cluster(2, [failed, speak]) as c:
        assert (await c.post(BODY))[0] == 200
        assert [len(worker.bodies) for worker in (*c.p, *c.d)] == [1, 1, 1, 1]


async def test_a_failed_handoff_with_one_d_is_tried_from_another_p() -> None:
    async with cluster(2, [only_first(HANDOFF_FAILED, speak)]) as c:
        assert (await c.post(BODY))[0] == 200
        assert [len(worker.bodies) for worker in (*c.p, *c.d)] == [1, 1, 2]


async def test_a_handoff_that_fails_for_good_is_told_with_its_reason() -> None:
    async with cluster(1, [HANDOFF_FAILED]) as c:
        status, answer, _ = await c.post(BODY)
        assert (status, answer["error"]["type"], answer["error"]["code"]) == (502, "handoff_failed", "peer_gone")
        assert "peer_gone: P is gone" in answer["error"]["message"]


async def _tell_error(_: web.Request, response: web.StreamResponse) -> None:
    await response.write(event({"error": {"message": "engine broke", "code": "internal"}}))


@pytest.mark.parametrize("mode", MODES)
async def test_an_error_that_d_tells_in_mid_stream_is_the_last_event_and_nobody_else_is_asked(mode: str) -> None:
    async with cluster(2, [begin_then(_tell_error), begin_then(_tell_error)]) as c:
        events = await c.events(BODY, x_kvbaton_mode=mode)
        assert [("error" in one) for one in events] == [False, True]
        assert events[1]["error"]["code"] == "internal"
        assert sum(len(worker.bodies) for worker in c.d) == 1


async def test_an_answer_without_end_is_cut_off() -> None:
    settings = msgspec.structs.replace(QUICK, answer_bytes_max=1000)
    async with cluster([say(b"x" * 2000)], settings=settings) as c:
        assert (await c.post(BODY))[1]["error"]["code"] == "bad_answer"


async def test_who_was_unreachable_is_asked_last_for_a_while() -> None:
    settings = msgspec.structs.replace(QUICK, suspect_s=60)
    async with cluster([die, lease], 1, settings=settings) as c:
        for _ in range(5):
            assert (await c.post(BODY))[0] == 200
        assert [len(worker.bodies) for worker in c.p] == [1, 5]
        assert (await c.get("/health"))[1]["workers"]["prefill"] == {"suspect": 1, "serving": 1}
