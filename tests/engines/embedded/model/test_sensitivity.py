"""The oracle must be able to fail: an answer changes when any block of the cached prompt is wrong, anywhere.

Every comparison of answers in this project is worth as much as this test.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvbaton.engines.embedded.engine_config import CacheConfig, ModelConfig
from kvbaton.engines.embedded.engine_request import Sampling
from kvbaton.engines.embedded.memory.kv_memory import KvGeometry, KvMemory, allocate_regions
from kvbaton.engines.embedded.model.attention import AttentionPiece
from kvbaton.engines.embedded.model.decoder import Model, choose

from ..helpers import SLIDING, TINY, Prompt, prompt

BLOCK = 16
ANSWER = 16
GREEDY = Sampling(ignore_eos=True)
LENGTHS = (BLOCK + 1, 3 * BLOCK, 100, 10 * BLOCK + 5, 20 * BLOCK, 20 * BLOCK + 9)


class Lab:
    """A model with room for many copies of one prompt's KV, each damaged in its own way."""

    def __init__(self, config: ModelConfig) -> None:
        geometry = KvGeometry(config, CacheConfig(blocks=2048, block_tokens=BLOCK))
        self.model = Model(config)
        self.memory = KvMemory(geometry, allocate_regions(geometry))
        self.next_block = 1

    def table(self, tokens: Prompt) -> list[int]:
        count = -(-(len(tokens) + ANSWER) // BLOCK)
        self.next_block += count
        return list(range(self.next_block - count, self.next_block))

    def prefill(self, tokens: Prompt) -> list[int]:
        table = self.table(tokens)
        self._run([AttentionPiece(list(tokens), 0, self._tables(table))])
        return table

    def copy(self, table: list[int], tokens: Prompt) -> list[int]:
        twin = self.table(tokens)
        self.memory.pages(0)[:, twin] = self.memory.pages(0)[:, table]
        return twin

    def answers(self, tokens: Prompt, tables: list[list[int]]) -> list[list[int]]:
        """As D does it: compute the last prompt token again, then decode greedily."""
        told: list[list[int]] = [[tokens[-1]] for _ in tables]
        for position in range(len(tokens) - 1, len(tokens) - 1 + ANSWER):
            pieces = [
                AttentionPiece([so_far[-1]], position, self._tables(table))
                for so_far, table in zip(told, tables, strict=True)
            ]
            for so_far, logits in zip(told, self._run(pieces), strict=True):
                so_far.append(choose(logits, GREEDY, position + 1, 1).token)
        return [so_far[1:] for so_far in told]

    def _tables(self, table: list[int]) -> tuple[list[int], ...]:
        return (table,) * len(self.model.groups)  # groups own different layers: they can share ids here

    def _run(self, pieces: list[AttentionPiece]) -> np.ndarray:
        batch = self.model.batch(pieces, BLOCK)
        return self.model.forward(batch, self.memory, batch.last_rows)


def damages(config: ModelConfig, length: int) -> list[tuple[int, int, slice]]:
    """(layer, block, kv heads): first, middle and last block, in every layer; all heads at once and each alone."""
    last = (length - 2) // BLOCK  # the last that holds a token which is not computed again
    heads = [slice(None), *(slice(head, head + 1) for head in range(config.kv_heads))]
    return list(itertools.product(range(config.layers), sorted({0, last // 2, last}), heads))


def unchanged_answers(config: ModelConfig, length: int, seed: int) -> tuple[int, list[str]]:
    """Damage a prompt's KV in every way; the number of ways, and those that nobody would have noticed."""
    lab = Lab(config)
    pages = lab.memory.pages(0)
    tokens, other = prompt(seed, length), prompt(seed + 1000, length)
    table, foreign = lab.prefill(tokens), lab.prefill(other)
    tables, labels = [], []
    for (layer, block, heads), kind in itertools.product(damages(config, length), ("replaced", "zeroed")):
        twin = lab.copy(table, tokens)
        # the last prompt token is computed again by D, so damage to it is none
        target = pages[layer, twin[block], :, heads, : min(BLOCK, length - 1 - block * BLOCK)]
        source = pages[layer, foreign[block], :, heads, : target.shape[2]]
        if kind == "replaced" and np.array_equal(target, source):
            continue  # layer 0, and the same bytes at the same place: no damage
        target[...] = source if kind == "replaced" else 0.0
        tables.append(twin)
        labels.append(f"seed {seed}, {length} tokens: layer {layer}, block {block}, heads {heads} {kind}")
    expected, *rest = lab.answers(tokens, [table, *tables])
    return len(rest), [label for label, answer in zip(labels, rest, strict=True) if answer == expected]


@pytest.mark.parametrize("length", LENGTHS)
def test_an_answer_changes_when_any_block_is_damaged(length: int) -> None:
    results = [unchanged_answers(ModelConfig(), length, seed) for seed in range(4)]
    unnoticed = [label for _, labels in results for label in labels]
    assert not unnoticed, f"{len(unnoticed)} of {sum(count for count, _ in results)}: {unnoticed}"


@pytest.mark.parametrize("length", [3 * BLOCK, 20 * BLOCK])
def test_an_answer_changes_when_two_blocks_change_places(length: int) -> None:
    """Rotary positions lie in the bytes: a model without a bias by place would not see it."""
    for seed in range(4):
        lab, tokens = Lab(ModelConfig()), prompt(seed, length)
        table = lab.prefill(tokens)
        last = length // BLOCK - 2
        tables = [list(table) for _ in ((0, 1), (0, last), (last - 1, last))]
        for twin, (a, b) in zip(tables, ((0, 1), (0, last), (last - 1, last)), strict=True):
            twin[a], twin[b] = twin[b], twin[a]
        expected = lab.answers(tokens, [table])[0]
        for twin in tables:
            assert twin == table or lab.answers(tokens, [twin])[0] != expected


def test_the_small_models_of_other_tests_notice_too() -> None:
    for length in (BLOCK + 1, 70):
        count, unnoticed = unchanged_answers(TINY, length, 5)
        assert count >= 12
        assert not unnoticed
    assert not unchanged_answers(SLIDING, 50, 5)[1]  # within the window, all layers see all


def test_answers_are_diverse() -> None:
    lab = Lab(ModelConfig())
    texts = [prompt(seed, 64) for seed in range(30)]
    told = [lab.answers(text, [lab.prefill(text)])[0] for text in texts]
    assert len({tuple(answer) for answer in told}) == 30
    assert min(len(set(answer)) for answer in told) >= 5
    assert len({token for answer in told for token in answer}) > 50
