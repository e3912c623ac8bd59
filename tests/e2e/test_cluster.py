"""What a user does with `kvbaton up`: talk to it, load it, kill its workers, start them again."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import Counter

import openai
import pytest

from kvbaton.engines.embedded.embedded_worker import reference_answers
from tests.e2e.cluster import all_at_rest, ask_all, eventually, pauses, some_prompts, up

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_an_unmodified_openai_client_streams_completions_and_chat(tmp_path):
    with up(tmp_path) as cluster:
        client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
        prompt = "Tell me about shared memory and sockets."
        whole = client.completions.create(model="kvbaton-tiny", prompt=prompt, max_tokens=24, temperature=0)
        stream = client.completions.create(
            model="kvbaton-tiny", prompt=prompt, max_tokens=24, temperature=0, stream=True
        )
        pieces = [chunk.choices[0].text for chunk in stream if chunk.choices]
        assert whole.choices[0].text == "".join(pieces) == reference_answers([prompt], 24)[0]
        assert len([piece for piece in pieces if piece]) == len(whole.choices[0].text), "token by token"
        messages = [{"role": "user", "content": "What is a baton?"}]
        said = client.chat.completions.create(model="kvbaton-tiny", messages=messages, max_tokens=12, temperature=0)
        told = client.chat.completions.create(
            model="kvbaton-tiny", messages=messages, max_tokens=12, temperature=0, stream=True
        )
        assert said.choices[0].message.content == "".join(c.choices[0].delta.content or "" for c in told if c.choices)
        assert client.models.list().data[0].id == "kvbaton-tiny"
        with pytest.raises(openai.BadRequestError, match="max_tokens"):
            client.completions.create(model="kvbaton-tiny", prompt=prompt, max_tokens=-1)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="another", prompt=prompt)
        asyncio.run(all_at_rest(cluster, {"p0", "d0"}))


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


def test_a_stopped_prefiller_costs_deadlines_and_nothing_more(tmp_path):
    """Promises 1 and 2: SIGSTOP for longer than any lease, then SIGCONT."""
    flags = (
        "--prefill",
        "2",
        "--lease-s",
        "1",
        "--claim-timeout",
        "1",
        "--transfer-timeout",
        "2",
        "--defer-timeout",
        "2",
    )
    with up(tmp_path, *flags, "--deadline-s", "20") as cluster:

        async def scenario() -> None:
            victim = cluster.pid("p0")
            for mode in ("pull", "push"):
                prompts = some_prompts(96, f"stop{mode}")
                load = asyncio.create_task(ask_all(cluster.url, prompts, mode))
                await asyncio.sleep(0.4)
                os.kill(victim, signal.SIGSTOP)
                try:
                    await asyncio.sleep(4.0)
                finally:
                    os.kill(victim, signal.SIGCONT)
                answers = await load
                right = reference_answers(prompts, 16)
                assert all(a.text == right[n] for n, a in enumerate(answers) if a.status == 200)
                assert max(answer.seconds for answer in answers) < 30.0
            await all_at_rest(cluster, {"p0", "p1", "d0"})

        asyncio.run(scenario())
