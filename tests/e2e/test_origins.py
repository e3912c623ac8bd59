"""False KV does not outlive its giver's key: engines that took it, also by way of others, reset their caches."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from kvbaton.api.params import TransferParams
from kvbaton.control import key_rotation
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from tests.e2e.pair import Pair, generate, pair
from tests.e2e.test_turns import ANSWER_TOKENS, MORE, new_handoff, one_turn

pytestmark = pytest.mark.timeout(120)
PROMPT = "A prompt that is long enough to be of several blocks of tokens, so that its beginning is cached. " * 3
KEYS_S = 20.0
"""For a change of the key directory to be in force: 2 s, and a busy machine."""


def lies(worker: EmbeddedWorker) -> None:
    """All KV that it has is false from now on; its node knows nothing of that."""
    worker.engine.memory.pages(0)[:] = 0.25


async def until(happens: Callable[[], bool]) -> None:
    by = time.monotonic() + KEYS_S
    while not happens():
        assert time.monotonic() < by, "it did not happen"
        await asyncio.sleep(0.05)


async def spoilt(both: Pair) -> str:
    params = await both.prefill(PROMPT)
    lies(both.p)
    return await both.decode(PROMPT, params, 12)


def test_what_a_liar_gave_is_forgotten_when_it_is_removed(tmp_path):
    async def go() -> None:
        async with pair(tmp_path) as both:
            [right] = reference_answers([PROMPT], 12)
            assert await spoilt(both) != right
            assert await both.decode(PROMPT, None) != right, "the lie is in D's cache"
            key_rotation.remove(tmp_path / "keys", "p0")
            await until(lambda: both.d.stats()["cache_resets_total"] == 1)
            assert await both.decode(PROMPT, None) == right
            stats = both.d.stats()
            assert stats["cache_resets_total"] == 1 and stats["cache_reset_blocks_total"] > 0
            both.d.engine.validate()

    asyncio.run(go())


def test_a_rotated_key_resets_nothing(tmp_path):
    async def go() -> None:
        async with pair(tmp_path) as both:
            await both.answer(PROMPT, "pull")
            key_rotation.rotate(tmp_path / "keys", "p0")
            await until(lambda: bool(both.d.node.keyring.also))
            key_rotation.finish(tmp_path / "keys", "p0")
            await until(lambda: not both.d.node.keyring.also)
            await both.decode(PROMPT, None)
            assert both.d.stats()["cache_resets_total"] == 0

    asyncio.run(go())


def test_an_answer_under_way_puts_nothing_back(tmp_path):
    """It may go on for minutes on what it was given; nobody else finds it."""

    async def go() -> None:
        async with pair(tmp_path) as both:
            [right] = reference_answers([PROMPT], 200)
            params = await both.prefill(PROMPT)
            lies(both.p)
            under_way = asyncio.create_task(both.decode(PROMPT, params, 400))
            await until(lambda: both.d.stats()["running"] == 1)
            key_rotation.remove(tmp_path / "keys", "p0")
            await until(lambda: both.d.stats()["cache_resets_total"] == 1)
            long = await under_way
            assert long[:200] != right
            assert (await both.decode(PROMPT + long, None, 12)) == reference_answers([PROMPT + long], 12)[0]
            assert await both.decode(PROMPT, None, 200) == right

    asyncio.run(go())


def test_a_lie_that_came_back_by_a_turn_is_forgotten_too(tmp_path):
    """D gives false KV for a next turn; P caches it. D is removed, and P resets."""

    async def go() -> None:
        async with pair(tmp_path, d={"turn_s": 30.0}) as both:
            text, turn = await one_turn(both, PROMPT, None, new_handoff())
            lies(both.d)
            prompt = PROMPT + text + MORE[0]
            await one_turn(both, prompt, turn, new_handoff())
            assert both.p.stats()["turn_loads_total"] == {"taken": 1}
            assert (await generate(both.p, prompt, ANSWER_TOKENS, None))[0] != reference_answers([prompt], 40)[0]
            key_rotation.remove(tmp_path / "keys", "d0")
            await until(lambda: both.p.stats()["cache_resets_total"] == 1)
            told = await generate(both.p, prompt, ANSWER_TOKENS, TransferParams(do_remote_decode=True))
            assert told[0] == reference_answers([prompt], ANSWER_TOKENS)[0]

    asyncio.run(go())
