"""Promise 1 rests on this: a token's logits depend on the tokens before it and on nothing else, bit for bit."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.engine_config import CacheConfig, ModelConfig
from kvbaton.engines.embedded.memory.kv_memory import Floats, KvGeometry, KvMemory, allocate_regions
from kvbaton.engines.embedded.model.attention import AttentionPiece
from kvbaton.engines.embedded.model.decoder import Model

from ..helpers import SLIDING, naive_logits, prompt

DEFAULT = ModelConfig()
MODELS = [DEFAULT, SLIDING, ModelConfig(kv_heads=4, layers=2)]


class Bench:
    """A model on its own memory; each request gets blocks in shuffled order, from a pool full of NaN."""

    def __init__(self, config: ModelConfig, **cache: object) -> None:
        self.cache = CacheConfig(**{"blocks": 512, "block_tokens": 16, **cache})  # type: ignore[arg-type]
        self.model = Model(config)
        geometry = KvGeometry(config, self.cache)
        self.memory = KvMemory(geometry, allocate_regions(geometry))
        for rank in range(self.cache.tp):
            self.memory.pages(rank)[:, 1:] = np.nan
        self._free = list(range(1, self.cache.blocks))
        random.Random(3).shuffle(self._free)

    def tables(self, tokens: int) -> tuple[list[int], ...]:
        count = -(-tokens // self.cache.block_tokens)
        return tuple([self._free.pop() for _ in range(count)] for _ in self.model.groups)

    def run(self, *pieces: AttentionPiece) -> Floats:
        """Logits of every row of every piece."""
        batch = self.model.batch(pieces, self.cache.block_tokens)
        return self.model.forward(batch, self.memory, np.arange(len(batch.tokens)))

    def whole(self, tokens: tuple[int, ...]) -> Floats:
        return self.run(AttentionPiece(list(tokens), 0, self.tables(len(tokens))))


def cut(length: int, rng: random.Random) -> list[tuple[int, int]]:
    cuts = sorted({0, length, *rng.sample(range(1, length), min(length - 1, rng.randint(1, 9)))})
    return list(itertools.pairwise(cuts))


@pytest.mark.parametrize("config", MODELS)
def test_logits_are_the_textbooks(config: ModelConfig) -> None:
    tokens = prompt(1, 150)
    bench = Bench(config)
    expected = naive_logits(bench.model, tokens)
    np.testing.assert_allclose(bench.whole(tokens), expected, atol=5e-3)


@pytest.mark.parametrize("config", MODELS)
def test_logits_do_not_depend_on_chunk_boundaries(config: ModelConfig) -> None:
    tokens = prompt(2, 420)
    expected = Bench(config).whole(tokens)
    for seed in range(8):
        bench = Bench(config)
        tables = bench.tables(len(tokens))
        chunks = cut(len(tokens), random.Random(seed))
        parts = [bench.run(AttentionPiece(list(tokens[a:b]), a, tables)) for a, b in chunks]
        assert np.array_equal(np.concatenate(parts), expected), f"seed {seed}"


@pytest.mark.parametrize("config", MODELS)
def test_logits_do_not_depend_on_what_else_is_computed(config: ModelConfig) -> None:
    rng = random.Random(5)
    texts = [prompt(seed, rng.choice((2, 30, 90, 150, 300))) for seed in range(12)]
    expected = [Bench(config).whole(text) for text in texts]
    bench = Bench(config)
    tables = [bench.tables(len(text)) for text in texts]
    at = [0] * len(texts)
    while live := [index for index, text in enumerate(texts) if at[index] < len(text)]:
        chosen = rng.sample(live, rng.randint(1, len(live)))
        ends = [min(len(texts[index]), at[index] + rng.choice((1, 1, 1, 7, 40, 100))) for index in chosen]
        pieces = [
            AttentionPiece(list(texts[index][at[index] : end]), at[index], tables[index])
            for index, end in zip(chosen, ends, strict=True)
        ]
        rows = bench.run(*pieces)
        for index, end in zip(chosen, ends, strict=True):
            count = end - at[index]
            assert np.array_equal(rows[:count], expected[index][at[index] : end])
            rows, at[index] = rows[count:], end


@pytest.mark.parametrize("config", MODELS[:2])
@pytest.mark.parametrize(
    "cache",
    [{"tp": 2}, {"tp": 4}, {"layout": "BL"}, {"block_tokens": 8}, {"block_tokens": 32, "tp": 2, "layout": "BL"}],
)
def test_logits_do_not_depend_on_where_the_kv_lies(config: ModelConfig, cache: dict[str, object]) -> None:
    tokens = prompt(3, 100)
    expected = Bench(config).whole(tokens)
    bench = Bench(config, **cache)
    tables = bench.tables(len(tokens))
    parts = [bench.run(AttentionPiece(list(tokens[a:b]), a, tables)) for a, b in ((0, 60), (60, 99), (99, 100))]
    assert np.array_equal(np.concatenate(parts), expected)


def test_a_sliding_layer_does_not_look_behind_its_window() -> None:
    config = ModelConfig(layers=1, sliding_layers=(0,), window_tokens=20)
    tokens = prompt(4, 90)
    bench = Bench(config, block_tokens=8)
    (table,) = bench.tables(len(tokens))
    expected = bench.run(AttentionPiece(list(tokens), 0, (table,)))[-1]
    left_behind = (89 - 20 + 1) // 8
    table[:left_behind] = [0] * left_behind
    assert np.array_equal(bench.run(AttentionPiece([tokens[-1]], 89, (table,)))[0], expected)
    bench.memory.pages(0)[0, table[left_behind]] = 0.0
    assert not np.array_equal(bench.run(AttentionPiece([tokens[-1]], 89, (table,)))[0], expected)


def test_layers_are_told_in_order_and_their_kv_is_written() -> None:
    bench = Bench(DEFAULT)
    tables = bench.tables(16)
    batch = bench.model.batch([AttentionPiece(list(prompt(1, 16)), 0, tables)], 16)
    told: list[int] = []

    def layer_done(layer: int) -> None:
        assert np.isfinite(bench.memory.pages(0)[layer, tables[0][0]]).all()
        assert np.isnan(bench.memory.pages(0)[layer + 1 :, tables[0][0]]).all()
        told.append(layer)

    bench.model.forward(batch, bench.memory, batch.last_rows, layer_done)
    assert told == [0, 1, 2]


def test_another_seed_is_another_model() -> None:
    tokens = (tokenizer.BOS, 65, 66)
    assert not np.array_equal(Bench(DEFAULT).whole(tokens), Bench(ModelConfig(seed=8)).whole(tokens))
