"""A P that has no room to keep KV, a D that answers alone, workers that are full: what becomes of requests."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from aiohttp import web

from kvbaton.api.params import REFUSED_FOR_D
from kvbaton.protocol.ids import Incarnation
from kvbaton.router.router_settings import Fallback
from tests.router.fake_workers import QUICK, Cluster, FakeWorker, cluster, hang, lease, speak

BODY = {"prompt": "abc", "max_tokens": 4}
MODES = ("pull", "stream", "push")


def settings(**more: Any) -> Any:
    return msgspec.structs.replace(QUICK, **more)


async def keep_nothing(_: FakeWorker, __: web.Request, ___: dict[str, Any]) -> web.Response:
    """A vLLM engine whose connector has no room to pin: status 200, and a word for the router."""
    return web.json_response({"choices": [], "kv_transfer_params": REFUSED_FOR_D})


async def needy(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
    """Waits for KV that nobody sends, where it was promised some by the first P."""
    params = body.get("kv_transfer_params") or {}
    waits = params.get("do_remote_prefill") and len(worker.bodies) == 1
    return await (hang if waits else speak)(worker, request, body)


def registered(c: Cluster) -> None:
    """All workers are members of this cluster, as if a registry listed them."""
    c.directory._workers = tuple(
        msgspec.structs.replace(each, incarnation=Incarnation(1)) for each in c.directory._workers
    )


@pytest.mark.parametrize("mode", MODES)
async def test_another_p_is_asked_where_one_has_no_room(mode: str) -> None:
    d = speak if mode == "pull" else needy
    async with cluster([keep_nothing, lease], [d], settings=settings(policy="round-robin")) as c:
        status, answer, _ = await c.post(BODY, x_kvbaton_mode=mode)
        assert (status, answer["choices"][0]["text"]) == (200, "ABC")
        stats = await c.stats()
        assert stats["leg_failures_total"] == {"prefill:pins_full": 1}
        assert stats["retries_total"] == {"prefill": 1}


@pytest.mark.parametrize("mode", MODES)
async def test_where_no_p_has_room_the_client_is_told_to_come_back(mode: str) -> None:
    d = speak if mode == "pull" else hang
    async with cluster([keep_nothing], [d], settings=settings(fallback=Fallback.STRICT)) as c:
        status, answer, headers = await c.post(BODY, x_kvbaton_mode=mode)
        assert (status, answer["error"]["code"]) == (429, "pins_full")
        assert int(headers["Retry-After"]) >= 1
        _, listed = await c.get("/workers")
        assert {worker["state"] for worker in listed["workers"]} == {"serving"}  # full is not failing


async def test_a_d_that_computes_for_want_of_room_at_p_is_told_so() -> None:
    async with cluster([keep_nothing], [speak], settings=settings(fallback=Fallback.LOCAL)) as c:
        registered(c)
        assert (await c.post(BODY))[0] == 200
        assert c.d[0].params == [{"alone": "prefill_full"}]


async def test_a_d_that_answers_a_short_prompt_is_told_so() -> None:
    async with cluster(settings=settings(disagg_min_tokens=100)) as c:
        registered(c)
        assert (await c.post(BODY))[0] == 200
        assert (await c.events(BODY))[-1] == "[DONE]"
        assert [params for d in c.d for params in d.params] == [{"alone": "short"}] * 2


async def test_a_client_cannot_say_the_routers_word() -> None:
    async with cluster(settings=settings(fallback=Fallback.LOCAL)) as c:
        registered(c)
        for p in list(c.p):
            c.directory.lose(p.name)
        assert (await c.post({**BODY, "kv_transfer_params": {"alone": "short"}}))[0] in (200, 400)
        assert all(params == {"alone": "no_prefill"} for d in c.d for params in d.params)


async def test_a_full_worker_is_passed_over_and_that_is_counted() -> None:
    async with cluster(1, 2) as c:
        first = c.directory._workers
        c.directory._workers = tuple(
            msgspec.structs.replace(each, full=each.name == c.d[0].name) for each in c.directory._workers
        )
        for _ in range(4):
            assert (await c.post(BODY))[0] == 200
        assert [len(d.bodies) for d in c.d] == [0, 4]
        assert (await c.stats())["passed_full_total"] == 4
        c.directory._workers = tuple(msgspec.structs.replace(each, full=True) for each in first)
        for _ in range(4):
            assert (await c.post(BODY))[0] == 200
        assert c.d[0].bodies  # all say so: all are asked as before
        assert (await c.stats())["passed_full_total"] == 4
