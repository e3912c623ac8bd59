"""What a router logs: a line for each request, with its id; who comes, goes, drains and breaks. And what it counts."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from kvbaton.api.http import server_loop
from kvbaton.control.registry.roster_news import LINES_MAX, RosterNews, WorkerSeen
from kvbaton.observe.metrics.metric_types import Histogram
from kvbaton.processes import process_logs
from kvbaton.processes.process_logs import LogSettings
from kvbaton.router.dashboard_page import dashboard
from kvbaton.router.openai_api import StreamMeter, answer_size
from tests.router.fake_workers import QUICK, cluster, die, hang, lease, only_first, tells, until

BODY = {"prompt": "abc", "max_tokens": 4}
BREAKS = msgspec.structs.replace(QUICK, breaker_failures=1, probe_min_s=0.01, probe_max_s=0.02)
Lines = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """JSON lines, as they were logged at INFO."""
    out, root = io.StringIO(), logging.getLogger()
    level, handlers, before = root.level, list(root.handlers), process_logs.current()
    process_logs.configure(LogSettings(level="info", format="json"), out)
    yield lambda: [json.loads(line) for line in out.getvalue().splitlines()]
    process_logs.configure(before, io.StringIO())
    root.setLevel(level)
    root.handlers[:] = handlers


def access(lines: Lines) -> list[dict[str, Any]]:
    return [line for line in lines() if line["logger"] == "kvbaton.access" and line["path"] != "/none"]


async def test_each_request_is_one_line_with_method_path_status_time_and_id(lines: Lines) -> None:
    async with cluster() as c:
        for name, body in (("r-whole", BODY), ("r-stream", {**BODY, "stream": True}), ("r-bad", {"prompt": 7})):
            headers = {"X-Request-Id": name}
            async with c.session.post(f"{c.url}/v1/completions?secret=1", json=body, headers=headers) as got:
                await got.read()
        await c.get("/health")
        await c.get("/workers")
    mine = [line for line in access(lines) if str(line["request"]).startswith("r-")]
    routers = [line for line in mine if line["status"] != 200 or line["client"] == "127.0.0.1"]
    told = {(line["request"], line["method"], line["path"], line["status"]) for line in routers}
    path = "/v1/completions"
    assert {("r-whole", "POST", path, 200), ("r-stream", "POST", path, 200), ("r-bad", "POST", path, 400)} <= told
    assert all(line["ms"] >= 0 for line in mine) and "secret" not in str(lines())
    paths = [line["path"] for line in access(lines)]
    assert "/workers" in paths and "/health" not in paths, "probes that are well are logged at DEBUG"


def of_router(lines: Lines, name: str) -> dict[str, Any]:
    """The router's own line about a request; a worker's has no pair."""
    (found,) = [line for line in access(lines) if line["request"] == name and "pair" in line]
    return found


async def test_a_line_says_who_served_when_the_first_token_came_and_how_many(lines: Lines) -> None:
    async with cluster() as c:
        await c.post({**BODY, "prompt": [1, 2, 3]}, **{"X-Request-Id": "whole"})
        await c.post({**BODY, "prompt": [1, 2, 3], "n": 2}, **{"X-Request-Id": "twice"})
        await c.events({**BODY, "prompt": [1, 2, 3]}, **{"X-Request-Id": "stream"})
        await c.post({"prompt": 7}, **{"X-Request-Id": "refused"})
    whole, stream = of_router(lines, "whole"), of_router(lines, "stream")
    assert (whole["pair"], whole["mode"], whole["prompt_tokens"], whole["output_tokens"]) == ("p0/d0", "pull", 3, 9)
    assert (stream["pair"], stream["prompt_tokens"], stream["output_tokens"]) == ("p0/d0", 3, 5), "five chunks"
    assert "ttft_ms" not in whole and 0 < stream["ttft_ms"] <= stream["ms"]
    said = f"pair=p0/d0 mode=pull ttft_ms={stream['ttft_ms']} prompt_tokens=3 output_tokens=5"
    assert stream["message"].endswith(f"{stream['ms']} ms {said}")
    twice = of_router(lines, "twice")
    assert (twice["pair"], twice["prompt_tokens"], twice["output_tokens"]) == ("p0/d0,p0/d0", 6, 18)
    assert not [line for line in access(lines) if line["request"] == "refused" and "pair" in line]


async def test_an_open_dashboard_is_one_line(lines: Lines) -> None:
    async with cluster(access={"pages": dashboard}) as c:
        for path in ("/dashboard", *["/dashboard/state"] * 5):
            async with c.session.get(c.url + path) as answer:
                assert answer.status == 200
        async with c.session.post(f"{c.url}/dashboard/state") as answer:
            assert answer.status == 405
    told = [(line["path"], line["status"]) for line in access(lines) if line["path"].startswith("/dashboard")]
    assert told == [("/dashboard", 200), ("/dashboard/state", 405)], "what goes wrong is told"


def test_milliseconds_are_those_of_a_clock_that_moves(lines: Lines) -> None:
    """uvloop's own is read once for each pass of its loop, in whole milliseconds: many answers took 0.0 ms by it."""

    async def story() -> None:
        async with cluster() as c:
            for _ in range(10):
                assert (await c.get("/workers"))[0] == 200
        took_ms = [line["ms"] for line in access(lines) if line["path"] == "/workers"]
        assert len(took_ms) == 10 and any(ms % 1 > 0 for ms in took_ms)

    server_loop.run(asyncio.wait_for(story(), 60))


async def test_lines_about_a_request_carry_its_id_also_where_it_is_tried_again(lines: Lines) -> None:
    async with cluster([only_first(die, lease)], 2, settings=BREAKS) as c:
        status, _, _ = await c.post(BODY, **{"X-Request-Id": "tried-twice"})
        assert status in (200, 502, 503)
    about = [line for line in lines() if line["logger"].startswith("kvbaton.router") and "p0" in line["message"]]
    failing = [line for line in about if line.get("code") == "worker-failing"]
    assert failing and all(line["request"] == "tried-twice" for line in failing)


async def test_a_client_that_goes_is_499_and_errors_alone_can_be_asked_for(lines: Lines) -> None:
    asked = asyncio.Event()
    async with cluster([tells(asked, hang)], settings=QUICK) as c:
        going = asyncio.create_task(c.post(BODY, **{"X-Request-Id": "goes"}))
        await asked.wait()
        going.cancel()
        await until(lambda: [line for line in access(lines) if line["request"] == "goes"])
        gone = [line for line in access(lines) if line["request"] == "goes" and line["client"] == "127.0.0.1"]
        assert {line["status"] for line in gone} == {499}
        process_logs._CURRENT[0] = LogSettings(level="info", format="json", access="errors")
        await c.get("/workers")
        await c.session.get(f"{c.url}/nothing", headers={"X-Request-Id": "missed"})
    paths = [line["path"] for line in access(lines)]
    assert "/workers" not in paths and "/nothing" in paths


async def test_who_comes_goes_drains_and_breaks_is_logged_once(lines: Lines) -> None:
    async with cluster([only_first(die, lease)], 2, settings=BREAKS) as c:
        c.p[0].healthy = False

        def news(code: str, name: str) -> int:
            return sum(line.get("code") == code and name in line["message"] for line in lines())

        await until(lambda: all(news("worker-joined", name) for name in ("p0", "d0", "d1")))
        await c.post(BODY)
        await until(lambda: news("breaker-opened", "p0"))
        c.p[0].healthy = True
        await until(lambda: news("breaker-closed", "p0"))
        c.directory.drain("d0")
        await until(lambda: news("worker-draining", "d0"))
        c.directory.lose("d1")
        await until(lambda: news("worker-left", "d1"))
        for code, name in (("worker-joined", "p0"), ("breaker-opened", "p0"), ("worker-draining", "d0")):
            assert news(code, name) == 1, code


def test_a_member_that_comes_and_goes_costs_a_bounded_number_of_lines(lines: Lines) -> None:
    now = [0.0]
    news = RosterNews(lambda: now[0])
    for life in range(1000):
        news.look([WorkerSeen("p0", life, "prefill", "", "serving")])
    assert len(lines()) == LINES_MAX
    now[0] += 3600
    news.look([])
    said = [line["message"] for line in lines()[LINES_MAX:]]
    assert said[0].startswith("[worker-left] prefill worker p0") and f"{1000 - LINES_MAX} further changes" in said[1]


def test_a_stream_is_counted_as_it_passes() -> None:
    between = Histogram((1.0,))
    meter = StreamMeter(between)
    for data in (
        b"data: {1}\n\n",
        b": a comment\n\n",
        b"data: {2}\n\ndata: {3}\n\n",
        b"data: {4}\n\n",
        b"data: [DONE]\n\n",
    ):
        meter.came(data)
    assert meter.tokens == 4 and between.count == 2, "two gaps between three chunks with tokens"
    assert answer_size(b'{"usage": {"completion_tokens": 9}}') == 9 and answer_size(b"{}") == 0
    assert answer_size(b'{"text": "\\"completion_tokens\\": 5", "usage": {"output_tokens":12}}') == 12


async def test_figures_of_answers_and_of_workers(lines: Lines) -> None:
    async with cluster() as c:
        for stream in (False, True):
            async with c.session.post(f"{c.url}/v1/completions", json={**BODY, "stream": stream}) as got:
                await got.read()
        async with c.session.get(f"{c.url}/metrics") as got:
            page = (await got.text()).splitlines()
        found = {name: float(value) for name, _, value in (line.rpartition(" ") for line in page if line[0] != "#")}
        assert found['kvbaton_router_request_seconds_count{mode="pull"}'] == 2
        assert found['kvbaton_router_output_tokens_total{mode="pull"}'] >= 2
        assert found['kvbaton_router_prompt_tokens_total{mode="pull"}'] >= 2
        assert found['kvbaton_router_worker_asked_total{role="prefill",worker="p0"}'] == 2
        assert found['kvbaton_router_worker_asked_total{role="decode",worker="d0"}'] == 2
        assert found['kvbaton_router_worker_failures_total{role="decode",worker="d0"}'] == 0
        assert found['kvbaton_router_worker_tokens{role="decode",worker="d0"}'] == 0
