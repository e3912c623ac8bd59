"""No prefill worker is left: what D answers alone, what it must not be asked, and what operators are told of it."""

from __future__ import annotations

import argparse
import asyncio
from typing import Any

import msgspec
import pytest

from kvbaton.api.params import Mode
from kvbaton.cli import up
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.router.workers.available import LEFT_MAX, LEFT_S, AvailableWorkers
from kvbaton.router.workers.directory import ListedEngine, WorkerListState
from kvbaton.router.workers.health import Health
from tests.router.fake_workers import QUICK, Cluster, cluster, lease, say, speak

BODY = {"prompt": "abc", "max_tokens": 3}
DEFAULT = msgspec.structs.replace(QUICK, fallback=RouterSettings().fallback)
LEANING = {"dialect": "moriio", "address": "host:127.0.0.1,handshake:{port},notify:{port}", "modes": (Mode.PULL,)}
"""As MoRI-IO's workers are where D reads: for such a D every prompt comes from P."""


async def refused(c: Cluster, status: int, code: str, **more: Any) -> str:
    found, answer, _ = await c.post({**BODY, **more})
    assert (found, answer["error"]["code"]) == (status, code), answer
    assert not c.d[0].bodies, "it was asked"
    return str(answer["error"]["message"])


@pytest.mark.parametrize("processes", [1, 2])
async def test_by_default_an_idle_d_answers_when_the_last_p_is_gone_and_health_says_degraded(processes: int) -> None:
    async with cluster(1, 1, settings=DEFAULT, processes=processes) as c:
        assert (await c.get("/health"))[1]["status"] == "ok"
        c.directory.lose("p0")
        while (await c.get("/health"))[1]["status"] == "ok":
            await asyncio.sleep(0.01)
        status, health = await c.get("/health")
        assert (status, health["status"]) == (200, "degraded")
        assert "no prefill worker is registered" in health["reason"] and "--fallback local" in health["reason"]
        while not c.d[0].bodies or "kv_transfer_params" in c.d[0].bodies[-1]:  # until that process has heard of it
            status, answer, _ = await c.post(BODY)
            assert (status, answer["choices"][0]["text"]) == (200, "ABC")
        told = (await c.get("/workers"))[1]
        assert [each["name"] for each in told["workers"]] == ["d0"]
        ((left),) = told["left"]
        assert (left["name"], left["role"]) == ("p0", "prefill") and left["ago_s"] >= 0


async def test_strict_is_still_a_choice() -> None:
    async with cluster(0, 1, settings=msgspec.structs.replace(QUICK, fallback=Fallback.STRICT)) as c:
        assert "no prefill worker" in await refused(c, 503, "no_pair")
        status, health = await c.get("/health")
        assert (status, health["status"]) == (503, "unavailable")


@pytest.mark.parametrize("prefills", [0, 1])
async def test_a_d_that_takes_every_prompt_for_handed_over_is_not_asked_alone(prefills: int) -> None:
    """It would decode on blocks that nobody wrote, with status 200."""
    settings = msgspec.structs.replace(DEFAULT, disagg_min_tokens=100)
    handed = say(b'{"choices": [], "kv_transfer_params": {"do_remote_prefill": true, "transfer_id": "tx"}}')
    async with cluster([handed] * prefills, 1, settings=settings, key=None, computes_alone=False, **LEANING) as c:
        said = await refused(c, 503, "no_pair", echo=True, logprobs=1)
        assert "needs one engine for prompt and answer" in said
        if prefills:
            assert (await c.post(BODY))[0] == 200, "short as it is, it is handed over"
            assert len(c.p[0].bodies) == len(c.d[0].bodies) == 1
        else:
            await refused(c, 503, "no_pair")
            status, health = await c.get("/health")
            assert (status, health["status"]) == (503, "unavailable")


async def test_nor_is_it_sent_what_is_passed_while_another_worker_can_answer() -> None:
    async with cluster([speak], [speak], settings=DEFAULT, **LEANING) as c:
        c.directory.change("d0", computes_alone=False)
        assert (await c.post(BODY, "/v1/chat/completions/batch"))[0] == 200
        assert (len(c.p[0].bodies), len(c.d[0].bodies)) == (1, 0)


async def test_where_nobody_computes_alone_only_what_needs_no_prompt_is_passed() -> None:
    async with cluster([speak], [speak], settings=DEFAULT, **LEANING) as c:
        c.directory.change("p0", computes_alone=False)
        c.directory.change("d0", computes_alone=False)
        status, answer, _ = await c.post(BODY, "/v1/chat/completions/batch")
        assert (status, answer["error"]["code"]) == (503, "no_worker")
        assert (len(c.p[0].bodies), len(c.d[0].bodies)) == (0, 0)
        assert (await c.post(BODY, "/tokenize"))[0] == 200


async def test_a_p_that_drains_is_none_that_is_left() -> None:
    async with cluster([lease], [speak], settings=DEFAULT) as c:
        c.directory.drain("p0")
        assert (await c.post(BODY))[0] == 200
        assert (await c.stats())["alone_total"] == {"fallback": 1}


@pytest.mark.parametrize(
    ("words", "fallback"),
    [((), "local"), (("--fallback", "strict"), "strict"), (("--check",), "strict")],
)
def test_up_has_the_flag_and_its_check_hides_no_failed_handoff(words: tuple[str, ...], fallback: str) -> None:
    parser = argparse.ArgumentParser()
    up.add_arguments(parser)
    args = parser.parse_args(words)
    args.otlp_endpoint = ""
    assert up.plan_of(args, "auto", http_port=0, mode=Mode.PULL).settings.fallback == fallback


# --- who left


class Listed:
    def __init__(self, *workers: ListedEngine) -> None:
        self.workers = workers

    def snapshot(self) -> tuple[ListedEngine, ...]:
        return self.workers


def engine(name: str, life: int = 1, state: WorkerListState = WorkerListState.SERVING) -> ListedEngine:
    return ListedEngine(name, "prefill", "http://x", life, state=state)  # type: ignore[arg-type]


def test_who_left_is_told_until_it_is_back_or_long_ago_and_a_drain_is_no_loss() -> None:
    listed = Listed(engine("a"), engine("b"), engine("c", state=WorkerListState.DRAINING))
    roster = AvailableWorkers(listed, Health(2.0, 1, 1.0, 10.0))
    assert roster.left(0.0) == []
    listed.workers = ()
    assert [(ago_s, each.name) for ago_s, each in roster.left(10.0)] == [(0.0, "a"), (0.0, "b")]
    listed.workers = (engine("a", 2),)
    assert [(ago_s, each.name) for ago_s, each in roster.left(15.0)] == [(5.0, "b")]
    assert roster.left(10.0 + LEFT_S + 1) == []
    listed.workers = (engine("a", 2, WorkerListState.DRAINING),)
    roster.view(16.0)
    listed.workers = ()
    assert [each.name for _, each in roster.left(17.0)] == ["b"], "it was back, and drained"


def test_no_more_than_so_many_are_remembered() -> None:
    listed = Listed(*(engine(f"w{number}") for number in range(2 * LEFT_MAX)))
    roster = AvailableWorkers(listed, Health(2.0, 1, 1.0, 10.0))
    roster.view(0.0)
    listed.workers = ()
    assert len(roster.left(1.0)) == LEFT_MAX
