"""KV computed by one engine and decoded by another, in one process: the shape of what the connector will do."""

from __future__ import annotations

import pytest

from kvbaton.engines.embedded.engine_config import ModelConfig
from kvbaton.engines.embedded.engine_request import RequestState
from kvbaton.protocol.ids import RequestId

from .helpers import SLIDING, TINY, answer_alone, answers, finish, pair, prompt, request, step

DEFAULT = ModelConfig()
SHAPES = [
    ({}, {}),
    ({"tp": 2}, {}),
    ({}, {"tp": 2}),
    ({"tp": 4}, {"tp": 2, "layout": "BL"}),
    ({"block_tokens": 16, "layout": "BL"}, {"tp": 4}),
    ({"block_tokens": 8}, {"block_tokens": 32}),
]


@pytest.mark.parametrize("model", [DEFAULT, TINY, SLIDING])
@pytest.mark.parametrize(("p", "d"), SHAPES)
def test_an_answer_on_copied_kv_is_the_single_engines(
    model: ModelConfig, p: dict[str, object], d: dict[str, object]
) -> None:
    world = pair(model, p, {"blocks": 128, **d})
    for length in (1, 8, 33, 100):
        tokens = prompt(length, length)
        world.prefill(tokens)
        name = RequestId(str(length))
        world.d.add_request(request(name, tokens, 12, handoff=["load"]))
        outputs = finish(world.d)
        assert answers(outputs)[name] == answer_alone(tokens, 12, model)
        assert outputs[0].cached_tokens == length


@pytest.mark.parametrize("window", [8, 9, 15, 16, 17, 30])
def test_a_window_of_any_size_finds_all_that_the_last_token_sees(window: int) -> None:
    """P must not have let go of a block that D needs to compute the last prompt token again."""
    model = ModelConfig(layers=2, d_model=32, d_hidden=32, head_dim=8, sliding_layers=(1,), window_tokens=window)
    world = pair(model, {"step_tokens_max": 11}, {"blocks": 128})
    for length in range(40, 58):
        tokens = prompt(length, length)
        world.prefill(tokens)
        world.d.add_request(request(str(length), tokens, 6, handoff=["load"]))
        assert answers(finish(world.d))[RequestId(str(length))] == answer_alone(tokens, 6, model)


def test_a_wrong_copy_gives_a_wrong_answer() -> None:
    """The tests of this file can fail."""
    world = pair()
    tokens = prompt(1, 100)
    world.prefill(tokens)
    kept = world.lender.kept[tokens]
    world.lender.kept[tokens] = ((kept[0][1], kept[0][0], *kept[0][2:]),)
    world.d.add_request(request("a", tokens, 12, handoff=["load"]))
    assert answers(finish(world.d))[RequestId("a")] != answer_alone(tokens, 12)


def test_only_the_last_token_is_computed_after_a_load() -> None:
    world = pair(steps=3)
    tokens = prompt(1, 50)
    world.prefill(tokens)
    world.d.add_request(request("a", tokens, 4, handoff=["load"]))
    computed, states = [], []
    while world.d.scheduler.sequences:
        step(world.d)
        computed.append(world.d.tokens_last_step)
        states += [each.state for each in world.d.scheduler.sequences.values()]
    assert computed == [0, 0, 0, 1, 1, 1, 1]
    assert states[:3] == [RequestState.LOADING] * 3
    assert world.borrower.seen == [("allocated", "a", 50), ("allocated", "a", 0)]


def test_loaded_blocks_are_found_by_the_next_request() -> None:
    world = pair()
    tokens = prompt(1, 50)
    world.prefill(tokens)
    world.d.add_request(request("a", tokens, 4, handoff=["load"]))
    finish(world.d)
    world.d.add_request(request("b", tokens, 4))
    outputs = finish(world.d)
    assert outputs[0].cached_tokens == 48
    assert answers(outputs)[RequestId("b")] == answer_alone(tokens, 4)


def test_only_what_is_not_at_hand_is_loaded() -> None:
    world = pair()
    shared, tokens = prompt(1, 40), prompt(1, 40) + prompt(2, 30)
    world.prefill(tokens)
    world.d.add_request(request("a", shared, 2))
    finish(world.d)
    world.d.add_request(request("b", tokens, 8, handoff=["load"]))
    assert answers(finish(world.d))[RequestId("b")] == answer_alone(tokens, 8)
    assert ("allocated", "b", 30) in world.borrower.seen


@pytest.mark.parametrize("model", [TINY, SLIDING])
@pytest.mark.parametrize("loaded", [8, 40, 49])
def test_what_a_load_leaves_out_is_computed(model: ModelConfig, loaded: int) -> None:
    """As a store does it: a prefix is loaded, the rest is not there."""
    world = pair(model, p={"step_tokens_max": 512})
    world.borrower.tokens_max = loaded
    tokens = prompt(1, 50)
    world.prefill(tokens)
    world.d.add_request(request("a", tokens, 8, handoff=["load"]))
    outputs = finish(world.d)
    assert answers(outputs)[RequestId("a")] == answer_alone(tokens, 8, model)
    assert outputs[0].cached_tokens == loaded


@pytest.mark.parametrize("model", [TINY, SLIDING])
@pytest.mark.parametrize(("move", "cached"), [("fail", 0), (30, 24), (5, 0), (50, 48)])
def test_a_good_prefix_is_kept_when_the_rest_fails(model: ModelConfig, move: object, cached: int) -> None:
    world = pair(model)
    tokens = prompt(1, 50)
    world.prefill(tokens)
    world.d.add_request(request("a", tokens, 8, handoff=[move]))
    outputs = finish(world.d)
    assert answers(outputs)[RequestId("a")] == answer_alone(tokens, 8, model)
    assert outputs[0].cached_tokens == cached


def test_a_request_preempted_after_its_load_is_computed_here() -> None:
    world = pair(d={"blocks": 12, "prefix_caching": False})
    texts = [prompt(seed, 30) for seed in range(2)]
    for seed, tokens in enumerate(texts):
        world.prefill(tokens)
        world.d.add_request(request(str(seed), tokens, 30, handoff=["load"]))
    told = answers(finish(world.d))
    assert ("preempted", "1", 0) in world.borrower.seen
    assert told == {RequestId(str(seed)): answer_alone(tokens, 30) for seed, tokens in enumerate(texts)}


def test_pinned_blocks_of_a_finished_prefill_stay_as_they_are() -> None:
    world = pair(p={"blocks": 20})
    tokens = prompt(1, 60)
    world.prefill(tokens)
    kept = list(world.lender.kept[tokens][0])
    before = world.p.memory.pages(0)[:, kept].copy()
    epochs = [world.p.pool.epoch[block] for block in kept]
    for seed in range(2, 6):
        other = prompt(seed, 50)
        world.p.add_request(request(str(seed), other, 20))
        finish(world.p)
        world.p.pool.unpin(world.lender.kept.pop(other)[0])
    assert (world.p.memory.pages(0)[:, kept] == before).all()
    world.p.pool.unpin(kept)
    assert [world.p.pool.epoch[block] for block in kept] == epochs
    world.p.pool.allocate(world.p.pool.free_blocks)
    assert all(world.p.pool.epoch[block] > epoch for block, epoch in zip(kept, epochs, strict=True))
