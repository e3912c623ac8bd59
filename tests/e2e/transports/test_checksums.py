"""Bytes that go wrong on their way: with checksums a failed handoff and a right answer; without them a wrong answer."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvbaton.api.params import Mode
from kvbaton.engines.embedded.embedded_worker import reference_answers
from tests.e2e.cluster import ask_all, some_prompts
from tests.e2e.transports.test_planes import ANSWER_TOKENS, WORKER, Cluster, cluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(150)]

DAMAGED = str(Path(__file__).with_name("corrupting_worker.py"))
COUNT = 16
MANY = 64
"""Where one answer at least must be wrong: two of three copies that are wrong by one byte change no token."""


async def wrong_answers(here: Cluster, mode: Mode, count: int = COUNT) -> int:
    prompts = some_prompts(count, f"damaged {mode}")
    answers, right = await asyncio.gather(
        ask_all(here.url, prompts, mode, ANSWER_TOKENS),
        asyncio.to_thread(reference_answers, prompts, ANSWER_TOKENS),
    )
    assert all(answer.status == 200 for answer in answers)
    return sum(answer.text != text for answer, text in zip(answers, right, strict=True))


@pytest.mark.parametrize("plane", ["shm", "tcp"])
async def test_a_damaged_copy_is_a_failed_handoff_with_its_own_reason(tmp_path: Path, plane: str) -> None:
    flags = ("--transport", plane, "--checksum", "full")
    async with cluster(tmp_path, plane, {"d0": (DAMAGED, "3", "worker", *flags)}, ("--checksum", "full")) as here:
        for mode in Mode:
            assert await wrong_answers(here, mode) == 0
        ends = (await here.at_rest())["d0"]["ends_total"]
        assert set(ends) == {"delivered", "checksum_mismatch"} and sum(ends.values()) == COUNT * len(Mode)
        assert ends["checksum_mismatch"] >= COUNT / 4, ends


async def test_without_checksums_the_same_damage_is_a_wrong_answer(tmp_path: Path) -> None:
    """Or the test above would prove nothing."""
    async with cluster(tmp_path, "tcp", {"d0": (DAMAGED, "1", "worker", "--transport", "tcp")}) as here:
        assert await wrong_answers(here, Mode.PULL, MANY) > 0
        assert set((await here.at_rest())["d0"]["ends_total"]) == {"delivered"}


async def test_one_side_with_checksums_and_one_without_are_told_so(tmp_path: Path) -> None:
    words = {"d0": (*WORKER, "--transport", "tcp", "--checksum", "sample")}
    async with cluster(tmp_path, "tcp", words) as here:
        answer = (await ask_all(here.url, some_prompts(1, "apart"), Mode.PULL, ANSWER_TOKENS))[0]
        assert answer.status == 503 and "tcp+sums" in answer.text, answer
