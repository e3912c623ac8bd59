"""What clients of streamed answers wait for, as the router measures it and tells Prometheus."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web
from prometheus_client.openmetrics.parser import text_string_to_metric_families as read

from tests.router.fake_workers import Cluster, FakeWorker, after, cluster, lease, refuse

BODY = {"prompt": "hey you", "max_tokens": 4}
LEG, HANDOVER, FIRST = (f"kvbaton_router_{what}_seconds" for what in ("prefill", "handover", "first_byte"))


async def page(c: Cluster) -> dict[tuple[str, ...], float]:
    """Samples by name and label values."""
    async with c.session.get(f"{c.url}/metrics", headers={"Accept": "application/openmetrics-text"}) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        text = await response.text()
    return {(s.name, *s.labels.values()): s.value for family in read(text) for s in family.samples}


async def test_a_pull_waits_for_p_and_then_for_the_handover() -> None:
    async with cluster() as c:
        await c.events(BODY)
        await c.post(BODY)  # a whole answer has no first byte to speak of
        found = await page(c)
        assert [found[f"{name}_count", "pull"] for name in (FIRST, LEG, HANDOVER)] == [1, 1, 1]
        leg, handover, first = (found[f"{name}_sum", "pull"] for name in (LEG, HANDOVER, FIRST))
        assert leg > 0 and handover > 0 and leg + handover <= first


async def test_handing_over_costs_nothing_where_d_answers_before_p() -> None:
    async with cluster() as c:
        gate = asyncio.Event()
        c.p[0].script = after(gate, lease)
        await c.events(BODY, x_kvbaton_mode="push")
        gate.set()
        found = await page(c)
        assert found[f"{HANDOVER}_count", "push"] == 1 and found[f"{HANDOVER}_sum", "push"] == 0
        assert 0 < found[f"{LEG}_sum", "push"] <= found[f"{FIRST}_sum", "push"]


async def test_a_request_that_was_tried_twice_waits_from_its_beginning() -> None:
    async with cluster(2) as c:
        asked: list[str] = []

        async def at_second(worker: FakeWorker, request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
            asked.append(worker.name)
            return await (lease if len(asked) > 1 else refuse(500))(worker, request, body)

        for worker in c.p:
            worker.script = at_second
        await c.events(BODY)
        assert len(set(asked)) == 2
        found = await page(c)
        assert found[f"{FIRST}_count", "pull"] == found[f"{LEG}_count", "pull"] == 1
        assert found["kvbaton_router_retries_total", "prefill"] == 1
        assert found[f"{LEG}_sum", "pull"] + found[f"{HANDOVER}_sum", "pull"] < found[f"{FIRST}_sum", "pull"]


async def test_ends_are_told_by_whose_fault_they_are() -> None:
    async with cluster() as c:
        await c.post(BODY)
        await c.post({"prompt": 5})
        c.p[0].script = refuse(500)
        await c.post(BODY)
        c.p[0].script = refuse(429)
        await c.post(BODY)
        found = await page(c)
        told = [found["kvbaton_router_responses_total", status] for status in ("2xx", "4xx", "5xx", "429", "gone")]
        assert told == [1, 1, 1, 1, 0]
        assert sum(value for (name, *_), value in found.items() if name == "kvbaton_router_requests_total") == 4
