"""Attention alone: right numbers, exact padding, calls shared only as far as it pays. Invariance is in test_model."""

from __future__ import annotations

import numpy as np
import pytest

from kvbaton.engines.embedded.memory.kv_memory import Floats
from kvbaton.engines.embedded.model.attention import QUERIES_MAX, TILES_MAX, AttentionPiece, attend, plan

BLOCK = 8
BIAS = np.random.default_rng(9).standard_normal(4096).astype(np.float32)


def pages_of(blocks: int, seed: int = 0) -> Floats:
    rng = np.random.default_rng(seed)
    pages = rng.standard_normal((blocks, 2, 2, BLOCK, 16)).astype(np.float32)
    pages[0] = 0.0
    return pages


def expected(queries: Floats, pages: Floats, table: list[int], start: int, window: int | None) -> np.ndarray:
    """Each query over exactly the keys that it may see, in float64."""
    both = pages[table].transpose(1, 2, 0, 3, 4).reshape(2, 2, -1, 16).astype(np.float64)
    rows = []
    for index, query in enumerate(queries.astype(np.float64)):
        end = start + index + 1
        first = 0 if window is None else max(0, end - window)
        keys, values = both[:, :, first:end].repeat(2, axis=1)
        scores = np.einsum("hd,hnd->hn", query, keys) + BIAS[: end - first][::-1]
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        rows.append(np.einsum("hn,hnd->hd", weights / weights.sum(axis=-1, keepdims=True), values))
    return np.array(rows)


@pytest.mark.parametrize("window", [None, 1, 5, 32, 50])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 70), (31, 1), (32, 1), (100, 1), (95, 30)])
def test_a_query_sees_exactly_the_keys_that_it_may(window: int | None, start: int, count: int) -> None:
    pages = pages_of(40)
    table = list(range(1, 1 + -(-(start + count) // BLOCK)))
    queries = np.random.default_rng(1).standard_normal((count, 4, 16)).astype(np.float32)
    seen = np.empty_like(queries)
    for call in plan([AttentionPiece([0] * count, start, (table,))], 0, window, BLOCK, BIAS):
        seen[call.rows] = attend(queries, pages, call)
    np.testing.assert_allclose(seen, expected(queries, pages, table, start, window), atol=1e-5)


def test_what_a_block_held_before_is_never_seen() -> None:
    pages = pages_of(4)
    queries = np.ones((1, 4, 16), dtype=np.float32)
    (call,) = plan([AttentionPiece([0], 9, ([1, 2],))], 0, None, BLOCK, BIAS)
    clean = attend(queries, pages, call)
    pages[2, :, :, 2:] = np.nan
    assert np.array_equal(attend(queries, pages, call), clean)


def test_decoding_requests_of_like_length_share_calls() -> None:
    pieces = [AttentionPiece([0], 40 + index, ([1] * 20,)) for index in range(10)]
    assert [len(call.rows) for call in plan(pieces, 0, None, BLOCK, BIAS)] == [10]


def test_a_long_request_does_not_pad_short_ones() -> None:
    pieces = [AttentionPiece([0], position, ([1] * 200,)) for position in (10, 1500, 20)]
    assert sorted(len(call.rows) for call in plan(pieces, 0, None, BLOCK, BIAS)) == [1, 2]


def test_calls_are_bounded_in_size() -> None:
    pieces = [AttentionPiece([0], 300, ([1] * 40,)) for _ in range(50)]
    for call in plan(pieces, 0, None, BLOCK, BIAS):
        assert call.blocks.shape[0] * call.blocks.shape[1] <= TILES_MAX + call.blocks.shape[0]
    long = plan([AttentionPiece([0] * 300, 0, ([1] * 40,))], 0, None, BLOCK, BIAS)
    assert max(call.rows.shape[1] for call in long) == QUERIES_MAX


def test_every_row_is_computed_once() -> None:
    pieces = [AttentionPiece([0] * count, 5, ([1] * 40,)) for count in (1, 70, 1, 3, 200)]
    rows = np.concatenate([call.rows.ravel() for call in plan(pieces, 0, 30, BLOCK, BIAS)])
    assert sorted(rows) == list(range(275))
