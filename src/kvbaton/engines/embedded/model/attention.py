"""Attention over paged KV whose result for a token does not depend on what else is computed with it, bit for bit.

Floating-point sums depend on their order, and a library picks the order by the shape of the call. So every call has
one shape: a query meets its keys in tiles of 32 tokens (one matrix-vector product each, whatever the batch), and tiles
are added one after the other, first to last. Padding is exact: a position that a query may not see weighs 0.0, and
adding 0.0 changes nothing. Requests of different lengths can then share calls, and prompts can be cut into chunks
anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from kvbaton.engines.embedded.engine_config import TILE_TOKENS
from kvbaton.engines.embedded.memory.kv_memory import Floats, Ints

QUERIES_MAX = 32
"""Queries of one request that meet the same tiles at once: of more, the early ones may not see many of the tiles."""

SPREAD_MAX = 1.5
"""Decoding requests share calls while the longest has at most this many times the tiles of the shortest."""

TILES_MAX = 48
"""Queries times tiles that decoding requests share calls for: beyond it temporary arrays outgrow the CPU's cache."""

_UNSEEN = np.float32(-np.inf)


class AttentionPiece(msgspec.Struct, frozen=True):
    """What one request computes in one step: tokens at `start`, `start + 1`, ... and its block table per group."""

    tokens: list[int]
    start: int
    tables: tuple[list[int], ...]


class AttentionPlan(msgspec.Struct, frozen=True):
    """Queries that meet their keys in the same calls: `[sequences, queries]`; tiles come first, as they are summed."""

    rows: Ints  # [sequences, queries] rows of the batch
    blocks: Ints  # [tiles, sequences, blocks of a tile]
    bias: Floats  # [tiles, sequences, queries, 1, 1, 1, tokens of a tile]; minus infinity where a query may not look
    stale: tuple[Ints, ...]  # (tile, sequence, token) beyond the last query, where a block holds what was there before


def plan(
    pieces: Sequence[AttentionPiece], group: int, window_tokens: int | None, block_tokens: int, bias: Floats
) -> list[AttentionPlan]:
    """Sort the queries of a step into calls; how changes the time taken and nothing else. `bias` is by age of a key."""
    parts: list[_Part] = []
    row = 0
    for piece in pieces:
        for first in range(0, len(piece.tokens), QUERIES_MAX):
            count = min(QUERIES_MAX, len(piece.tokens) - first)
            at = piece.start + first
            lowest = 0 if window_tokens is None else max(0, at - window_tokens + 1) // TILE_TOKENS
            highest = (at + count - 1) // TILE_TOKENS
            parts.append(_Part(row + first, count, at, lowest, highest + 1 - lowest, piece.tables[group]))
        row += len(piece.tokens)
    bias = bias if window_tokens is None else bias[:window_tokens]
    return [_join(alike, bias, block_tokens) for alike in _alike(parts)]


def attend(queries: Floats, pages: Floats, call: AttentionPlan) -> Floats:
    """Values that `queries` `[rows, heads, head_dim]` (scaled) see in one layer's pages of one rank."""
    kv_heads, head_dim = pages.shape[2], pages.shape[4]
    both = _gather(pages, call.blocks)
    if call.stale[0].size:
        tile, sequence, token = call.stale
        both[:, tile, sequence, 0, :, 0, token] = 0.0  # 0.0 times what was there before could still be NaN
    keys, values = both
    asked = queries[call.rows].reshape((*call.rows.shape, kv_heads, -1, 1, head_dim))
    scores = asked @ keys.swapaxes(-1, -2)
    scores += call.bias
    scores -= np.maximum.reduce(scores, axis=(0, -1), keepdims=True)
    weights = np.exp(scores, out=scores)
    total = _sum_in_order(np.add.reduce(weights, axis=-1, keepdims=True))
    seen = _sum_in_order(weights @ values)
    seen /= total
    return seen.reshape((*call.rows.shape, -1, head_dim))


class _Part(msgspec.Struct, frozen=True):
    """Up to `QUERIES_MAX` queries of one request."""

    row: int
    count: int
    position: int
    tile: int  # the first that any of them sees
    tiles: int
    table: list[int]


def _alike(parts: list[_Part]) -> Iterator[list[_Part]]:
    """Parts with equally many queries and not too different numbers of tiles."""
    alike: list[_Part] = []
    for part in sorted(parts, key=lambda part: (part.count, part.tiles)):
        full = alike and (
            part.count != alike[0].count
            or part.tiles > SPREAD_MAX * alike[0].tiles + 1
            or part.tiles * part.count * len(alike) >= TILES_MAX
        )
        if full:
            yield alike
            alike = []
        alike.append(part)
    if alike:
        yield alike


def _join(parts: list[_Part], bias: Floats, block_tokens: int) -> AttentionPlan:
    per_tile = TILE_TOKENS // block_tokens
    tiles, count = max(part.tiles for part in parts), parts[0].count
    blocks = np.zeros((len(parts), tiles * per_tile), dtype=np.int64)
    for index, part in enumerate(parts):
        ids = part.table[part.tile * per_tile : (part.tile + part.tiles) * per_tile]
        blocks[index, : len(ids)] = ids
    blocks = np.ascontiguousarray(blocks.reshape(len(parts), tiles, per_tile).swapaxes(0, 1))
    rows = np.array([part.row for part in parts])[:, None] + np.arange(count)
    first = np.array([part.position for part in parts])[:, None]
    keys = np.array([part.tile * TILE_TOKENS for part in parts])[:, None] + np.arange(tiles * TILE_TOKENS)
    age = (first + np.arange(count))[:, :, None] - keys[:, None, :]  # [sequences, queries, keys]
    biases = np.where((age >= 0) & (age < len(bias)), bias[np.clip(age, 0, len(bias) - 1)], _UNSEEN)
    biases = biases.reshape(len(parts), count, tiles, TILE_TOKENS).transpose(2, 0, 1, 3)
    beyond = (keys >= first + count).reshape(len(parts), tiles, TILE_TOKENS).swapaxes(0, 1)
    stale = np.nonzero(beyond & np.repeat(blocks != 0, block_tokens, axis=-1))
    return AttentionPlan(rows, blocks, np.ascontiguousarray(biases)[:, :, :, None, None, None, :], stale)


def _gather(pages: Floats, blocks: Ints) -> Floats:
    """Keys and values, `[K and V, tiles, sequences, 1, kv heads, 1, tokens of a tile, head_dim]`, copied."""
    tiles, sequences, _ = blocks.shape
    _, _, kv_heads, _, head_dim = pages.shape
    both = pages[blocks].transpose(3, 0, 1, 4, 2, 5, 6)
    return both.reshape((2, tiles, sequences, 1, kv_heads, 1, TILE_TOKENS, head_dim))


def _sum_in_order(parts: Floats) -> Floats:
    """Sum over the first axis, first to last: `sum` orders by shape, `accumulate` has to go one by one."""
    total: Floats = np.add.accumulate(parts, axis=0)[-1]
    return total
