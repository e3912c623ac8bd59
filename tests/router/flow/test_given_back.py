"""Tickets that nobody will use: P is told of each, in every mode, and of no other."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.router.fake_workers import QUICK, after, cluster, hang, lease, only_first, refuse, run, speak, until

BODY = {"prompt": "abc", "max_tokens": 4}
TOGETHER = ("stream", "push")


@pytest.mark.parametrize("mode", TOGETHER)
def test_a_minted_ticket_is_given_back_when_d_fails_after_p_has_answered(mode: str) -> None:
    async def story() -> None:
        gate = asyncio.Event()
        async with cluster(1, [after(gate, refuse(500)), speak]) as c:
            call = asyncio.create_task(c.post(BODY, x_kvbaton_mode=mode))
            await until(lambda: c.p[0].bodies and c.d[0].bodies)
            gate.set()
            assert (await call)[0] == 200
            assert c.discarded == [("p0", c.d[0].params[0]["ticket"])]

    run(story())


@pytest.mark.parametrize("mode", TOGETHER)
def test_a_minted_ticket_is_given_back_when_d_has_answered_without_p(mode: str) -> None:
    """D gave up waiting and computed the prompt itself; P, when it is done, has a lease for nobody."""

    async def story() -> None:
        gate = asyncio.Event()
        async with cluster([after(gate, lease)], 1, settings=msgspec.structs.replace(QUICK, settle_s=20)) as c:
            assert (await c.post(BODY, x_kvbaton_mode=mode))[0] == 200
            assert c.discarded == []
            gate.set()
            await until(lambda: c.discarded == [("p0", c.d[0].params[0]["ticket"])])

    run(story())


@pytest.mark.parametrize("mode", TOGETHER)
def test_a_minted_ticket_is_given_back_when_the_client_leaves(mode: str) -> None:
    async def story() -> None:
        async with cluster(1, [hang]) as c:
            call = asyncio.create_task(c.post(BODY, x_kvbaton_mode=mode))
            await until(lambda: c.p[0].bodies and c.d[0].bodies)
            call.cancel()
            await until(lambda: c.discarded == [("p0", c.d[0].params[0]["ticket"])])

    run(story())


@pytest.mark.parametrize("others", [False, True])
def test_what_d_says_of_the_routers_own_field_is_not_the_clients_fault(others: bool) -> None:
    async def story() -> None:
        odd = refuse(400, "kv_transfer_params.ticket: missing", param="kv_transfer_params.ticket", code="invalid_value")
        async with cluster(1 + others, [only_first(odd, speak)]) as c:
            status, answer, _ = await c.post(BODY)
            if others:
                assert (status, answer["choices"][0]["text"]) == (200, "ABC")
            else:
                fault = answer["error"]
                assert (status, fault["type"], fault["code"]) == (502, "handoff_failed", "invalid_value")

    run(story())
