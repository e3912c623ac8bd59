"""Tickets that nobody will use: P is told of each, in every mode, and of no other."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from tests.router.fake_workers import QUICK, after, cluster, lease, only_first, refuse, speak, until

BODY = {"prompt": "abc", "max_tokens": 4}
TOGETHER = ("stream", "push")


@pytest.mark.parametrize("mode", TOGETHER)
async def test_a_minted_ticket_is_given_back_when_d_has_answered_without_p(mode: str) -> None:
    """D gave up waiting and computed the prompt itself; P, when it is done, has a lease for nobody."""
    gate = asyncio.Event()
    async with cluster([after(gate, lease)], 1, settings=msgspec.structs.replace(QUICK, settle_s=20)) as c:
        assert (await c.post(BODY, x_kvbaton_mode=mode))[0] == 200
        assert c.discarded == []
        gate.set()
        await until(lambda: c.discarded == [("p0", c.d[0].params[0]["ticket"])])


@pytest.mark.parametrize("others", [False, True])
async def test_what_d_says_of_the_routers_own_field_is_not_the_clients_fault(others: bool) -> None:
    odd = refuse(400, "kv_transfer_params.ticket: missing", param="kv_transfer_params.ticket", code="invalid_value")
    async with cluster(1 + others, [only_first(odd, speak)]) as c:
        status, answer, _ = await c.post(BODY)
        if others:
            assert (status, answer["choices"][0]["text"]) == (200, "ABC")
        else:
            fault = answer["error"]
            assert (status, fault["type"], fault["code"]) == (502, "handoff_failed", "invalid_value")
