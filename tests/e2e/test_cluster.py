"""What a user does with `kvbaton up`: load it, kill its workers, start them again.

Talking to it is tests/e2e/router/test_openai_client.py; stopping its workers, test_failure_matrix.py and, under copies,
tests/e2e/transports/test_late_data.py.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter

import pytest

from kvbaton.engines.embedded.embedded_worker import reference_answers
from tests.e2e.cluster import all_at_rest, ask_all, eventually, pauses, some_prompts, up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_512_requests_at_once_are_all_right_with_a_lease_shorter_than_the_queue(tmp_path):
    """Promises 1 to 3, in pull and in push."""
    by_handoff = {"pull": False, "push": False}
    with up(tmp_path, "--prefill", "2", "--decode", "2", "--lease-s", "2") as cluster:
        before = 0
        for turn, mode in itertools.product(range(3), ("pull", "push")):
            prompts = some_prompts(512, f"{turn} {mode}")
            with pauses() as longest:
                answers = asyncio.run(ask_all(cluster.url, prompts, mode))
                stats = asyncio.run(all_at_rest(cluster, {"p0", "p1", "d0", "d1"}))
            assert {answer.status for answer in answers} == {200}
            assert [answer.text for answer in answers] == reference_answers(prompts, 16)
            assert max(answer.seconds for answer in answers) > 2.0, "the queue must outlast the lease"
            assert all(worker["faults_total"] == 0 for worker in stats.values())
            delivered = sum(stats[name]["delivered_total"] for name in ("d0", "d1"))
            by_handoff[mode] |= delivered - before == 512
            assert by_handoff[mode] or longest[0] > 1.0, "every one of them by a handoff, none by recomputing"
            before = delivered
            if all(by_handoff.values()):
                break
        assert all(by_handoff.values()), "not once, whenever the machine did not stand still for half a lease"


def test_killed_workers_cost_no_wrong_answer_and_leave_no_pin(tmp_path):
    """Promises 1 to 4: kill -9 of P, then of D, under load; then both join again and are used."""
    flags = ("--prefill", "2", "--decode", "2", "--lease-s", "2", "--claim-timeout", "3", "--transfer-timeout", "5")
    with up(tmp_path, *flags, "--defer-timeout", "5") as cluster:

        async def under_load(victim: str, mode: str, survivors: set[str]) -> None:
            prompts = some_prompts(128, f"{victim}{mode}")
            load = asyncio.create_task(ask_all(cluster.url, prompts, mode))
            busy = [name for name in ("p0", "p1", "d0", "d1") if name != victim]

            async def well_under_way() -> bool:
                stats = await cluster.workers()
                return victim in stats and stats[victim]["running"] + stats[victim]["pins"] > 0 and bool(busy)

            await eventually(well_under_way, 20.0)
            os.kill(cluster.pid(victim), signal.SIGKILL)
            answers = await load
            right = reference_answers(prompts, 16)
            wrong = [n for n, answer in enumerate(answers) if answer.status == 200 and answer.text != right[n]]
            assert not wrong
            assert {answer.status for answer in answers} <= {200, 500, 502, 503, 504}
            failed = Counter((answer.status, answer.text[:200]) for answer in answers if answer.status != 200)
            assert failed.total() < len(prompts) // 2, failed.most_common(3)
            await all_at_rest(cluster, survivors)

        asyncio.run(under_load("p0", "push", {"p1", "d0", "d1"}))
        asyncio.run(under_load("d0", "pull", {"p1", "d1"}))
        cluster.restart("p0")
        cluster.restart("d0")
        asyncio.run(_joined_and_used(cluster))


async def _joined_and_used(cluster) -> None:
    async def joined() -> bool:
        return {"p0", "p1", "d0", "d1"} <= set(await cluster.workers())

    await eventually(joined, 30.0)
    prompts = some_prompts(64, "again")
    answers = await ask_all(cluster.url, prompts, "pull")
    assert [answer.text for answer in answers] == reference_answers(prompts, 16)
    stats = await all_at_rest(cluster, {"p0", "p1", "d0", "d1"})
    assert stats["p0"]["leases_total"] > 0
    assert stats["d0"]["delivered_total"] > 0
