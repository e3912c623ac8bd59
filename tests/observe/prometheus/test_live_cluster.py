"""A real cluster, scraped by a real Prometheus that has the rules this project ships.

Windows and patience of the rules are shortened to seconds, their expressions are as they are.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from kvbaton.api.params import FIELD, LEASE_FOR_PULL
from kvbaton.observe.metrics.metric_names import BY_NAME, METRICS, Where
from kvbaton.security.sealing import NONCE_BYTES, PLAIN, PROOF_BYTES
from kvbaton.transports.net.connection_handshake import _HELLO, _MAGIC
from kvbaton_proof.chaos.strangers import listening
from tests.e2e.cluster import Up, all_at_rest, ask_all, get_json, some_prompts, up, wait_for
from tests.observe.prometheus.server import DASHBOARD, RULES, Server, prometheus, promtool, shortened

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

MODES = ("pull", "stream", "push")
SOON_S = 30.0
LEAK = "KvbatonPinsLeaked"
STRANGERS = "KvbatonStrangers"
HELLO = _HELLO.pack(_MAGIC, PLAIN, 0, 2, 7, bytes(NONCE_BYTES)) + b"d0"
"""Of somebody who holds no secret."""
OWN_SERIES = {name: metric for metric in METRICS for name in metric.series}


@dataclass
class Scene:
    cluster: Up
    server: Server
    workers: dict[str, str]  # name: URL
    begun: float


@pytest.fixture(name="scene", scope="module")
def one_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Router, P and D, with a Prometheus, after some traffic of every kind."""
    directory = tmp_path_factory.mktemp("seeing")
    begun = time.time()
    with contextlib.ExitStack() as stack:
        cluster = stack.enter_context(up(directory, "--lease-s", "600"))
        workers = asyncio.run(addresses(cluster))
        jobs = {"kvbaton-router": [host(cluster.url)], "kvbaton-workers": [host(url) for url in workers.values()]}
        server = stack.enter_context(prometheus(directory / "prometheus", jobs))
        wait_for(lambda: all_up(server, 3), SOON_S)
        scene = Scene(cluster, server, workers, begun)
        for tag in ("first", "second"):  # the first step of a new series is not seen as one
            asyncio.run(traffic(scene, tag))
            delivered = len(MODES) * (1 if tag == "first" else 2)
            wait_for(lambda count=delivered: server.value("sum(kvbaton_handoffs_total)") >= 2 * count, SOON_S)
        yield scene


async def addresses(cluster: Up) -> dict[str, str]:
    async with aiohttp.ClientSession() as session:
        listed = await get_json(session, f"{cluster.url}/workers")
    return {each["name"]: str(each["url"]) for each in listed["workers"]}


def host(url: str) -> str:
    return url.removeprefix("http://")


def all_up(server: Server, count: int) -> bool:
    targets = server.targets()
    return len(targets) == count and set(targets.values()) == {"up"}


async def traffic(scene: Scene, tag: str) -> None:
    """One whole and one streamed answer in each mode, and one that D alone is asked for, and refuses."""
    for mode in MODES:
        (answer,) = await ask_all(scene.cluster.url, some_prompts(1, f"{tag} {mode}"), mode, 4)
        assert answer.status == 200, answer
    async with aiohttp.ClientSession() as session:
        for number, extra in enumerate([*({} for _ in MODES), {"echo": True, "logprobs": 1}]):
            headers = {"x-kvbaton-mode": MODES[number]} if number < len(MODES) else {}
            body = {"prompt": f"{tag} {number} " * 9, "max_tokens": 4, "temperature": 0, "stream": True, **extra}
            async with session.post(f"{scene.cluster.url}/v1/completions", json=body, headers=headers) as answer:
                text = await answer.text()
                assert answer.status == (400 if extra else 200), text


def get(url: str, accept: str = "*/*") -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers={"Accept": accept}), timeout=10) as answer:
        return str(answer.read().decode())


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return dict(json.load(answer))


def comes(server: Server, expr: str, is_right: Callable[[float], bool]) -> None:
    """Sooner or later: who does not answer a scrape within its second has no series until the next one."""
    try:
        wait_for(lambda: is_right(server.value(expr)), SOON_S)
    except AssertionError:
        raise AssertionError(f"{expr}: {server.query(expr)}") from None


def fired(server: Server, alert: str) -> dict[str, Any]:
    """The labels of an alert, once it fires; also if it is over by the time that we look."""
    expr = f'last_over_time(ALERTS{{alertname="{alert}", alertstate="firing"}}[1m])'
    (found,) = wait_for(lambda: server.query(expr), SOON_S)
    return dict(found["metric"])


def questions() -> list[str]:
    """Every expression of the dashboard, with its variables as Grafana would fill them in."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel.get("targets", ())]
    filled = [
        expr.replace("$__rate_interval", "10s").replace("$worker", ".*").replace("$router", ".*") for expr in found
    ]
    assert filled and not any("$" in expr for expr in filled)
    return filled


def asked(expr: str) -> set[str]:
    return set(re.findall(r"\b(?:kvbaton_\w+|process_start_time_seconds)", expr))


def test_promtool_finds_nothing_to_complain_of_in_any_page(scene: Scene) -> None:
    for url in (scene.cluster.url, *scene.workers.values()):
        assert promtool("check", "metrics", text=get(f"{url}/metrics")).strip() == ""


def test_every_metric_of_the_dashboard_is_in_the_scrape_and_every_question_is_understood(scene: Scene) -> None:
    scraped = scene.server.names()
    missing = {expr: asked(expr) - scraped for expr in questions() if not asked(expr) <= scraped}
    assert missing == {}
    for expr in questions():
        scene.server.query(expr)
    ours = {name for name in scraped if name.startswith("kvbaton_")}
    assert ours <= set(OWN_SERIES) and {BY_NAME["kvbaton_build_info"].name} <= ours


def test_the_dashboard_serves_vllm_as_well() -> None:
    for expr in questions():
        for name in asked(expr):
            where = OWN_SERIES[name].where
            assert Where.ROUTER in where or {Where.WORKER, Where.VLLM} <= set(where), name


def test_what_happened_is_what_prometheus_says(scene: Scene) -> None:
    server = scene.server
    wait_for(lambda: server.value('sum(kvbaton_router_requests_total{outcome="ok"})') == 4 * len(MODES), SOON_S)
    for mode in MODES:
        comes(server, f'sum(kvbaton_handoffs_total{{mode="{mode}", end="delivered"}})', (4.0).__eq__)
        comes(server, f'kvbaton_router_first_byte_seconds_count{{mode="{mode}"}}', (2.0).__eq__)  # of streamed ones
        comes(server, f'kvbaton_router_handover_seconds_count{{mode="{mode}"}}', (2.0).__eq__)
        for stage in ("claim", "queue", "copy", "commit", "deliver"):
            comes(server, f'sum(kvbaton_stage_seconds_count{{stage="{stage}", mode="{mode}"}})', (0.0).__lt__)
    comes(server, "sum(kvbaton_handoff_bytes_sum) == sum(kvbaton_bytes_total)", (0.0).__lt__)
    waited = 'sum(kvbaton_router_first_byte_seconds_sum{mode!="alone"})'
    comes(server, f"sum(kvbaton_router_handover_seconds_sum) / {waited}", lambda share: 0 < share < 1)
    comes(server, 'sum(kvbaton_router_responses_total{status="4xx"})', (2.0).__eq__)
    comes(server, "sum(kvbaton_router_alone_total)", (2.0).__eq__)


def test_a_bucket_and_an_end_lead_to_a_transfer(scene: Scene) -> None:
    end = time.time() + 1
    for series in (
        "kvbaton_stage_seconds_bucket",
        "kvbaton_handoffs_total",
        "kvbaton_router_first_byte_seconds_bucket",
    ):
        found = scene.server.exemplars(series, scene.begun, end)
        ids = {each["labels"]["transfer_id"] for one in found for each in one["exemplars"]}
        assert ids and all(len(transfer) >= 16 for transfer in ids), series


def test_leaked_pins_raise_the_alarm_and_a_healthy_cluster_does_not(scene: Scene) -> None:
    asyncio.run(all_at_rest(scene.cluster, {"p0", "d0"}))
    server, p0 = scene.server, scene.workers["p0"]
    wait_for(
        lambda: server.value("sum(kvbaton_pinned_blocks)") == 0 and server.query("instance:kvbaton_ends:rate5m"), 30
    )
    time_of_rules = "max(timestamp(instance:kvbaton_lease_age:ratio))"
    seen = server.value(time_of_rules)
    wait_for(lambda: server.value(time_of_rules) > seen + 3, SOON_S)  # they were evaluated, again and again
    wait_for(lambda: server.alerts().get("KvbatonTargetDown") != "firing", SOON_S)  # a busy machine may miss a scrape
    noisy = {name for name, state in server.alerts().items() if state == "firing"}
    allowed = {"KvbatonTransferShareHigh", "KvbatonTargetDown"}
    assert noisy <= allowed, "a model this small computes faster than it can be handed over; nothing else is wrong"

    body = {"prompt": "nobody comes for this " * 4, "max_tokens": 1}
    kept = post(f"{p0}/v1/completions", {**body, FIELD: LEASE_FOR_PULL})[FIELD]
    found = fired(server, LEAK)
    assert found["instance"] == host(p0) and found["severity"] == "critical"
    comes(server, "max(kvbaton_oldest_lease_seconds)", (1.0).__lt__)
    comes(server, "max(kvbaton_lease_hold_max_seconds)", (600.0).__eq__)

    post(f"{scene.workers['d0']}/v1/completions", {**body, FIELD: kept})  # somebody comes after all
    comes(server, "sum(kvbaton_pinned_blocks)", (0.0).__eq__)
    wait_for(lambda: LEAK not in server.alerts(), SOON_S)


def test_a_stranger_at_a_data_port_is_on_the_workers_page_and_raises_the_alarm(scene: Scene) -> None:
    server, pid, page = scene.server, scene.cluster.pid("p0"), f"{scene.workers['p0']}/metrics"
    (door,) = [place for place in listening([pid]) if place[0].startswith("\0kvbaton-")]  # of shared memory
    line = 'kvbaton_data_refused_total{{role="prefill",worker="p0",transport="shm",reason="{}"}} {}'
    assert line.format("bad_proof", 0) in get(page).splitlines()
    seen = server.value('sum(kvbaton_data_refused_total{reason="bad_proof"})')
    assert seen == 0 and server.alerts().get(STRANGERS) is None
    for words in (b"", b"GET / HTTP/1.1\r\nHost: somebody.somewhere.example\r\n\r\n"):
        knock(door[0], words)
    assert knock(door[0], HELLO, NONCE_BYTES + PROOF_BYTES, bytes(PROOF_BYTES)) == b""
    for reason in ("left", "bad_greeting", "bad_proof"):
        wait_for(lambda reason=reason: line.format(reason, 1) in get(page).splitlines(), SOON_S)
    assert fired(server, STRANGERS)["instance"] == host(scene.workers["p0"])
    wait_for(lambda: STRANGERS not in server.alerts(), SOON_S)


def knock(name: str, words: bytes, due: int = 0, then: bytes = b"") -> bytes:
    """Say something at a UNIX socket, hear so many bytes, say something else; whatever is answered to that."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(SOON_S)
        sock.connect(name)
        sock.sendall(words)
        while due:
            due -= len(sock.recv(due)) or due
        if then:
            sock.sendall(then)
            with contextlib.suppress(ConnectionError):
                return sock.recv(1)
        return b""


def test_the_page_is_the_same_for_those_who_cannot_read_exemplars(scene: Scene) -> None:
    url = f"{scene.workers['d0']}/metrics"
    classic, modern = get(url), get(url, "application/openmetrics-text")
    assert "transfer_id" in modern and modern.endswith("# EOF\n")
    assert "transfer_id" not in classic and "# EOF" not in classic


def test_the_rules_are_shortened_and_nothing_else_is_changed() -> None:
    before, after = RULES.read_text(), shortened(RULES.read_text())
    changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]
    assert changed and all(re.sub(r"\d+[hms]", "", a) == re.sub(r"\d+[hms]", "", b) for a, b in changed)
