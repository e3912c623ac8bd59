"""What each leg is asked in each mode, what is passed on and when, and that both legs end with the client."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.api.params import Mode
from kvbaton.protocol.ids import is_handoff_id
from kvbaton.protocol.wire.ticket import unseal
from tests.router.fake_workers import (
    KEY,
    QUICK,
    FakeWorker,
    after,
    cluster,
    event,
    hang,
    lease,
    payloads,
    speak,
    until,
)

BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 4, "temperature": 0}
TOGETHER = ("stream", "push")
MODES = ("pull", *TOGETHER)


async def test_pull_asks_p_for_one_token_and_hands_its_ticket_to_d() -> None:
    async with cluster() as c:
        status, answer, _ = await c.post(BODY)
        assert (status, answer["choices"][0]["text"]) == (200, "ABC")
        asked = {"do_remote_decode": True, "do_remote_prefill": False, "mode": "pull"}
        one_token = {"max_tokens": 1, "stream": False, "ignore_eos": True}
        assert c.p[0].bodies == [{**BODY, **one_token, "kv_transfer_params": asked}]
        given = {
            "do_remote_prefill": True, "do_remote_decode": False, "ticket": "ticket-p0-1",
            "remote_engine_id": "p0", "mode": "pull",
        }  # fmt: skip
        assert c.d[0].bodies == [{**BODY, "kv_transfer_params": given}]


@pytest.mark.parametrize("mode", TOGETHER)
async def test_streaming_and_push_give_both_legs_one_signed_ticket(mode: str) -> None:
    async with cluster() as c:
        status, answer, _ = await c.post(BODY, x_kvbaton_mode=mode)
        assert (status, answer["choices"][0]["text"]) == (200, "ABC")
        (source,), (target,) = c.p[0].params, c.d[0].params
        assert source == {
            "do_remote_decode": True, "do_remote_prefill": False, "mode": mode, "ticket": target["ticket"],
        }  # fmt: skip
        assert (target["do_remote_prefill"], target["mode"]) == (True, mode)
        assert (c.p[0].bodies[0]["max_tokens"], c.p[0].bodies[0]["stream"]) == (1, False)
        ticket = unseal(target["ticket"], [KEY], 0)
        assert (ticket.source, ticket.target, ticket.lease, ticket.digest) == ("p0", "d0", 0, b"")
        assert is_handoff_id(ticket.handoff)


@pytest.mark.parametrize("mode", TOGETHER)
async def test_streaming_and_push_begin_on_d_before_p_has_answered(mode: str) -> None:
    gate = asyncio.Event()
    async with cluster([after(gate, lease)], [after(gate, speak)]) as c:
        call = asyncio.create_task(c.post(BODY, x_kvbaton_mode=mode))
        await until(lambda: c.p[0].bodies and c.d[0].bodies)
        gate.set()
        assert (await call)[0] == 200


async def test_pull_begins_on_d_after_p_has_answered() -> None:
    gate = asyncio.Event()
    async with cluster([after(gate, lease)]) as c:
        call = asyncio.create_task(c.post(BODY))
        await until(lambda: c.p[0].bodies)
        assert c.d[0].bodies == []
        gate.set()
        assert (await call)[0] == 200


@pytest.mark.parametrize("mode", TOGETHER)
async def test_ds_first_byte_goes_on_while_p_is_still_busy(mode: str) -> None:
    gate = asyncio.Event()
    async with cluster([after(gate, lease)]) as c:
        events = await c.events(BODY, x_kvbaton_mode=mode)
        assert events[-1] == "[DONE]"
        gate.set()
        await until(lambda: c.p[0].aborted == 0)


@pytest.mark.parametrize("mode", TOGETHER)
async def test_a_p_that_never_ends_is_closed_soon_after_ds_answer(mode: str) -> None:
    settings = msgspec.structs.replace(QUICK, settle_s=0.05)
    async with cluster([hang], settings=settings) as c:
        assert (await c.post(BODY, x_kvbaton_mode=mode))[0] == 200
        await until(lambda: c.p[0].aborted == 1)


@pytest.mark.parametrize("mode", MODES)
async def test_an_event_is_passed_on_before_the_next_one_is_made(mode: str) -> None:
    gate = asyncio.Event()
    seen = asyncio.Event()

    async def slowly(_: FakeWorker, request: web.Request, __: dict[str, Any]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(event({"n": 1}))
        await gate.wait()
        await response.write(event({"n": 2}) + b"data: [DO")
        await seen.wait()
        await response.write(b"NE]\n\n")
        return response

    async with (
        cluster(1, [slowly]) as c,
        c.session.post(
            f"{c.url}/v1/completions", json={**BODY, "stream": True}, headers={"x-kvbaton-mode": mode}
        ) as response,
    ):
        assert payloads(await response.content.readany()) == [{"n": 1}]
        gate.set()
        assert payloads(await response.content.readany()) == [{"n": 2}]  # the cut event waits for its end
        seen.set()
        assert await response.content.read() == b"data: [DONE]\n\n"


async def test_all_pairs_are_used_in_turn() -> None:
    settings = msgspec.structs.replace(QUICK, show_pair=True)
    async with cluster(2, 2, settings=settings) as c:
        used = [(await c.post(BODY))[2]["x-kvbaton-pair"] for _ in range(4)]
        assert used == ["p0/d0", "p1/d1", "p0/d1", "p1/d0"]


async def test_limits_of_the_client_stay_with_d_and_p_gets_its_own() -> None:
    async with cluster() as c:
        asked = {"min_tokens": 3, "max_completion_tokens": 9, "stream_options": {"include_usage": True}, "odd": [1]}
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True, **asked}
        await c.events(body, "/v1/chat/completions")
        p, d = c.p[0].bodies[0], c.d[0].bodies[0]
        assert (p["max_tokens"], p["max_completion_tokens"], p["min_tokens"], p["odd"]) == (1, 1, 1, [1])
        assert "stream_options" not in p
        assert {name: d[name] for name in asked} == asked
        assert c.p[0].paths == c.d[0].paths == ["/v1/chat/completions"]


async def test_without_a_key_to_sign_with_only_pull_is_served() -> None:
    settings = msgspec.structs.replace(QUICK, mode=Mode.PUSH)
    async with cluster(key=None, settings=settings) as c:
        assert (await c.post(BODY))[0] == 200
        assert c.p[0].params[0]["mode"] == "pull"
        status, answer, headers = await c.post(BODY, x_kvbaton_mode="push")
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "no_pair", "1")


async def test_the_clusters_mode_gives_way_to_one_that_a_pair_has_in_common() -> None:
    settings = msgspec.structs.replace(QUICK, mode=Mode.PUSH)
    async with cluster(settings=settings, modes=(Mode.STREAM,)) as c:
        assert (await c.post(BODY))[0] == 200
        assert c.p[0].params[0]["mode"] == "stream"
