"""Real bytes, real sockets, a real model: what comes out of D is what one engine would have said."""

from __future__ import annotations

import asyncio

import pytest

from kvbaton.engines.embedded.embedded_worker import reference_answers
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig, ModelConfig
from kvbaton.engines.embedded.http_worker import RefusedError
from kvbaton.transports.core.transport import CopyEnded
from tests.e2e.pair import Pair, generate, pair

LENGTHS = (1, 14, 15, 16, 17, 30, 31, 32, 33, 100, 250, 400)


def prompts(tag: str) -> list[str]:
    """Different from the first character on, so that no prefix is shared; lengths around block boundaries."""
    return [(f"{tag}{n:03d}" + "the quick brown fox jumps over it " * 20)[:n] or "a" for n in LENGTHS]


async def answers(two: Pair, mode: str, asked: list[str]) -> list[str]:
    return list(await asyncio.gather(*(two.answer(prompt, mode) for prompt in asked)))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_the_answer_is_that_of_one_engine(tmp_path, transport, mode):
    """Promises 1 and 3."""
    asked = prompts(f"{mode}{transport}")
    async with pair(tmp_path, transport=transport) as two:
        assert await answers(two, mode, asked) == reference_answers(asked, 12)
        assert two.ends() == {"delivered": len(asked)}
        await two.at_rest()
        moved = two.d.stats()["bytes_moved_total"] + two.p.stats()["bytes_moved_total"]
        assert moved > 0
        pushed = two.p.stats()["bytes_moved_total"]
        assert (pushed > 0) == (mode == "push" and transport == "tcp"), "on shm the receiver copies (rule 16)"


@pytest.mark.parametrize(
    ("p", "d"),
    [
        ({"tp": 2}, {"tp": 1}),
        ({"tp": 1}, {"tp": 2}),
        ({"tp": 4}, {"tp": 2}),
        ({"block_tokens": 8}, {"block_tokens": 32}),
        ({"block_tokens": 32, "tp": 2}, {"block_tokens": 16}),
    ],
    ids=["tp2-1", "tp1-2", "tp4-2-replicated", "blocks8-32", "blocks32-16-tp2-1"],
)
async def test_engines_of_different_shape_hand_over_to_each_other(tmp_path, p, d):
    """Promise 1, with the geometry between."""
    asked = prompts("shape")
    async with pair(tmp_path, p=p, d=d) as two:
        for mode in ("pull", "stream", "push"):
            fresh = [mode + prompt for prompt in asked]
            assert await answers(two, mode, fresh) == reference_answers(fresh, 12)
        assert two.ends() == {"delivered": 3 * len(asked)}
        await two.at_rest()


async def test_two_kv_groups_with_a_sliding_window_are_handed_over(tmp_path):
    model = ModelConfig(sliding_layers=(1,), window_tokens=40)
    config = EngineConfig(model=model, cache=CacheConfig(blocks=1024))
    asked = prompts("window")
    async with pair(tmp_path, configs=(config, config)) as two:
        expected = [(await generate(two.p, prompt, 12, None))[0] for prompt in asked]
        for mode in ("pull", "stream", "push"):
            assert await answers(two, mode, asked) == expected
        assert two.ends()["delivered"] >= len(asked)
        assert set(two.ends()) == {"delivered"}
        await two.at_rest()


@pytest.mark.parametrize(("layer", "which"), [(0, "first"), (1, "middle"), (2, "last")])
async def test_a_damaged_block_changes_the_answer(tmp_path, layer, which):
    """The comparison above can fail: one page of one layer is zeroed after its copy, and the answer is another."""
    prompt = f"{layer}{which} " + "a question that fills several blocks of tokens, one after the other, " * 3
    async with pair(tmp_path, transport="shm") as two:
        _damage_one_page(two, layer, which)
        text = await two.answer(prompt, "pull")
        assert two.ends() == {"delivered": 1}
        assert text != reference_answers([prompt], 12)[0]


def _damage_one_page(two: Pair, layer: int, which: str) -> None:
    """Zero the page of one block of D's as soon as the copy into it has ended."""
    plane = two.d.node.ranks[0]["shm"]
    memory, geometry = two.d.regions[0].view, two.d.engine.memory.geometry
    drain = plane.drain

    def drain_and_damage():
        events = drain()
        for event in events:
            if isinstance(event, CopyEnded):
                held = next(iter(two.d.node.doorway._holds.values()))
                block = {"first": held[0], "middle": held[len(held) // 2], "last": held[-2]}[which]
                at = geometry.offset(layer, block)
                memory[at : at + geometry.page_bytes] = bytes(geometry.page_bytes)
        return events

    plane.drain = drain_and_damage


async def test_what_d_has_already_is_not_moved_again(tmp_path):
    prompt = "the same long prompt, asked twice, " * 6
    async with pair(tmp_path) as two:
        first = await two.answer(prompt, "pull")
        moved = two.d.stats()["bytes_moved_total"]
        assert await two.answer(prompt, "pull") == first
        page = two.d.engine.memory.geometry.page_bytes * 3
        assert two.d.stats()["bytes_moved_total"] - moved <= page, "only the last, unshared block"
        await two.at_rest()


@pytest.mark.parametrize("policy", ["recompute", "fail"])
async def test_other_weights_are_refused_by_name_and_the_policy_decides(tmp_path, policy):
    """Promise 1: seed 002's failed handshake, in both policies."""
    prompt = "whose weights are these? " * 4
    async with pair(tmp_path, p={"seed": 8}, d={"policy": policy}) as two:
        params = await two.prefill(prompt)
        if policy == "recompute":
            assert await two.decode(prompt, params) == reference_answers([prompt], 12)[0]
        else:
            with pytest.raises(RefusedError, match="weights") as refused:
                await two.decode(prompt, params)
            assert refused.value.code == "incompatible"
        assert two.ends() == {"incompatible": 1}


@pytest.mark.parametrize("mode", ["stream", "push"])
async def test_a_prefiller_that_never_begins_costs_the_deadline_and_nothing_else(tmp_path, mode):
    """Promise 2: D alone, P never gets its half of the request."""
    prompt = "nobody will compute this over there " * 3
    async with pair(tmp_path, d={"defer_timeout": 0.5}, p={"defer_timeout": 0.5}) as two:
        from kvbaton.api.params import Mode, TransferParams, target_params

        await two.answer("so that the two know each other, however long that takes", "pull")
        params = TransferParams.parse(target_params(Mode(mode), two.ticket()))
        assert await two.decode(prompt, params) == reference_answers([prompt], 12)[0]
        assert two.ends() == {"delivered": 1, "defer_timeout": 1}
        await two.at_rest()


@pytest.mark.parametrize("mode", ["pull", "stream", "push"])
async def test_clients_that_leave_at_any_moment_leave_nothing_behind(tmp_path, mode):
    """Promise 3, under aborts of either side."""
    async with pair(tmp_path, p={"lease_s": 1.0, "defer_timeout": 1.0}, d={"defer_timeout": 1.0}) as two:
        asked = [f"{mode} {n} " + "leaving soon " * 12 for n in range(24)]
        tasks = [asyncio.create_task(two.answer(prompt, mode)) for prompt in asked]
        for n, task in enumerate(tasks):
            await asyncio.sleep(0.003)
            if n % 2:
                task.cancel()
        done = await asyncio.gather(*tasks, return_exceptions=True)
        kept = [text for n, text in enumerate(done) if not n % 2]
        assert kept == reference_answers(asked[::2], 12)
        await two.at_rest()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
async def test_workers_that_lost_sight_of_each_other_pair_again(tmp_path, transport):
    """Promise 2: a registry that flaps, several times, costs at most the handoffs under way."""
    async with pair(tmp_path, transport=transport) as two:
        for turn in range(3):
            for mode in ("pull", "stream", "push"):
                prompt = f"{turn} {mode} after every flap we hand over again " * 2
                assert await two.answer(prompt, mode) == reference_answers([prompt], 12)[0]
            await two.lose_sight()
            await two.at_rest()
        assert two.ends() == {"delivered": 9}


async def test_two_workers_of_both_roles_hand_over_to_each_other(tmp_path):
    """One data connection serves both directions; giving one up does not take the other along."""
    async with pair(tmp_path, transport="tcp", p={"role": "both"}, d={"role": "both"}) as two:
        back = Pair(two.d, two.p, two.key)
        for turn in range(2):
            for mode in ("pull", "push"):
                for way, (there, names) in enumerate([(two, ("p0", "d0")), (back, ("d0", "p0"))]):
                    prompt = f"{turn}{way} {mode} there and back again, with the same two workers " * 2
                    there.names = names
                    assert await there.answer(prompt, mode) == reference_answers([prompt], 12)[0]
            await two.lose_sight(both=False)
            await two.at_rest()
        assert two.ends() == {"delivered": 4}
        assert back.ends() == {"delivered": 4}
