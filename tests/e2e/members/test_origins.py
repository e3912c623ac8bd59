"""False KV does not outlive its giver's key: engines that took it, also by way of others, reset their caches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.control import key_room
from kvbaton.engines.embedded.embedded_worker import EmbeddedWorker, reference_answers
from tests.e2e.pair import pair
from tests.e2e.store.storehouse import House, house, key_directory, some_store
from tests.waiting import soon

pytestmark = pytest.mark.timeout(120)
PROMPT = "A prompt that is long enough to be of several blocks of tokens, so that its beginning is cached. " * 3
KEYS_S = 20.0
"""For a change of the key directory to be in force: 2 s, and a busy machine."""


def lies(worker: EmbeddedWorker) -> None:
    """All KV that it has is false from now on; its node knows nothing of that."""
    worker.engine.memory.pages(0)[:] = 0.25


async def test_a_rotated_key_resets_nothing(tmp_path):
    async with pair(tmp_path) as both:
        await both.answer(PROMPT, "pull")
        key_room.rotate(tmp_path / "keys", "p0")
        await soon(lambda: bool(both.d.node.keyring.also))
        key_room.finish(tmp_path / "keys", "p0")
        await soon(lambda: not both.d.node.keyring.also)
        await both.decode(PROMPT, None)
        assert both.d.stats()["cache_resets_total"] == 0


async def test_an_answer_under_way_puts_nothing_back(tmp_path):
    """It may go on for minutes on what it was given; nobody else finds it."""
    async with pair(tmp_path) as both:
        [right] = reference_answers([PROMPT], 200)
        params = await both.prefill(PROMPT)
        lies(both.p)
        under_way = asyncio.create_task(both.decode(PROMPT, params, 400))
        await soon(lambda: both.d.stats()["running"] == 1)
        key_room.remove(tmp_path / "keys", "p0")
        await soon(lambda: both.d.stats()["cache_resets_total"] == 1)
        long = await under_way
        assert long[:200] != right
        assert (await both.decode(PROMPT + long, None, 12)) == reference_answers([PROMPT + long], 12)[0]
        assert await both.decode(PROMPT, None, 200) == right


def puts(house: House, name: str, count: int) -> Callable[[], bool]:
    return lambda: house.stat(name, "store_puts_total") >= count


async def poison(house: House, prompt: str) -> None:
    """p0 computes a prompt, and puts something else into the store under its name."""
    liar = house["p0"]
    genuine = liar.engine.connector.chunk_done

    def lying(request: object, blocks: object, computed: int) -> None:
        lies(liar)
        genuine(request, blocks, computed)

    liar.engine.connector.chunk_done = lying  # type: ignore[method-assign,assignment]
    await house.answer("p0", prompt)
    await house.until(puts(house, "p0", 1))


async def test_what_was_computed_on_a_lie_and_put_by_another_counts_no_more_either(tmp_path: Path) -> None:
    directory = key_directory(tmp_path)
    more = PROMPT + "And this was computed by an honest engine, on what it found in the store. " * 2
    with some_store("kvbaton", directory) as store:
        async with house(directory, store, "p0", "d0", "e0") as all_three:
            await poison(all_three, PROMPT)
            await all_three.answer("d0", more)
            await all_three.until(puts(all_three, "d0", 1))
            key_room.remove(directory, "p0")
            await soon(lambda: "p0" in all_three["e0"].node.keyring.removed_names)
            assert await all_three.answer("e0", more) == reference_answers([more], 12)[0]
            assert all_three.stat("e0", "store_hits_blocks_total") == 0
