"""A real decoder-only transformer, small enough for numpy and exact enough to be an oracle.

RMSNorm, rotary positions and a bias by age, grouped-query attention, gated MLP; float32, weights from a seed. Laws:
 1. A token's logits depend on the tokens before it and on nothing else: not on the batch, the chunks, the block size,
    the layout or the ranks. Each row goes through its own matrix-vector product (`_rows`), attention is tiled.
 2. An answer depends on every block of the prompt, in every layer and head. A model of random weights easily repeats
    itself whatever its cache holds; this one has what a trained model would not need. Values are rotated like keys
    (else the mean over many tokens is the mean of the language, and a wrong block vanishes in it). Keys are biased
    by where they are found (else two blocks of a prompt could change places unseen: rotary positions lie in the bytes).
    What attention returns is normalised (else it fades with the length). Each layer outweighs those before it, and its
    MLP gates by a steep sine: a small difference before it is a large one behind. See `test_sensitivity`.

Bits hold for one kind of machine, one version of numpy (1.26.4 and 2.4.6 differ) and one BLAS thread: a process that
runs an engine sets OPENBLAS_NUM_THREADS=1 before it imports numpy.

The next token: a pure function of logits, the request's sampling and the position.

Randomness is drawn from (seed, position), not from a running generator: a token is the same whether it was sampled by P
or D, before or after a preemption, alone or in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.engine_config import ModelConfig
from kvbaton.engines.embedded.engine_request import Sampling
from kvbaton.engines.embedded.memory.kv_memory import Floats, Ints, KvMemory
from kvbaton.engines.embedded.model.attention import AttentionPiece, AttentionPlan, attend, plan
from kvbaton.engines.embedded.tokenizer import EOS, SPEAKABLE

_SPEAKABLE = np.array(SPEAKABLE)


TEMPERATURE_MIN = 1e-6
"""Below this the likeliest token is all there is, and dividing by it only overflows."""


class Choice(msgspec.Struct, frozen=True):
    token: int
    logprobs: tuple[tuple[int, float], ...] = ()  # the chosen token first, then the likeliest


def choose(logits: Floats, sampling: Sampling, position: int, answer_tokens: int) -> Choice:
    """Pick the token at `position`, the answer's token number `answer_tokens`."""
    allowed = _SPEAKABLE
    if sampling.ignore_eos or answer_tokens < sampling.min_tokens:
        allowed = allowed[allowed != EOS]
    scores = logits[allowed]
    index = int(scores.argmax())
    if sampling.temperature > TEMPERATURE_MIN:
        index = _draw(scores / sampling.temperature, sampling.seed, position)
    token = int(allowed[index])
    if sampling.logprobs is None:
        return Choice(token)
    logprobs = scores.astype(np.float64) - _log_total(scores)
    likeliest = np.argsort(-logprobs, kind="stable")[: sampling.logprobs]
    pairs = [(int(allowed[each]), float(logprobs[each])) for each in (index, *likeliest)]
    return Choice(token, tuple(pairs))


def _draw(scores: Floats, seed: int, position: int) -> int:
    weights = np.exp(scores.astype(np.float64) - _log_total(scores))
    dice = np.random.default_rng((seed % 2**64, position)).random()
    return min(int(np.searchsorted(np.cumsum(weights), dice, side="right")), len(scores) - 1)


def _log_total(scores: Floats) -> float:
    top = float(scores.max())
    return top + float(np.log(np.exp(scores.astype(np.float64) - top).sum()))


ROTARY_BASE = 32.0  # the slowest pair turns once in 130 tokens
BIAS = 1.0  # of a key by its age
ATTENTION_GAIN = 2.0
MLP_GAIN = 8.0
GATE_STEEPNESS = 8.0
LAYER_GROWTH = 4.0  # each layer outweighs all before it

_EPSILON = np.float32(1e-6)


class ModelLayer(msgspec.Struct, frozen=True):
    qkv: Floats
    out: Floats
    gate_up: Floats
    down: Floats


class Batch(msgspec.Struct, frozen=True):
    """The rows of one step and, per KV group, where their KV goes and which calls they share."""

    tokens: Ints
    positions: Ints
    slots: tuple[tuple[Ints, Ints], ...]  # per group: (block, token within it) of each row
    plans: tuple[list[AttentionPlan], ...]
    last_rows: Ints  # of each piece


class Model:
    """Weights and the forward pass. Immutable; holds no KV."""

    def __init__(self, config: ModelConfig) -> None:
        self.config = config
        self.groups = config.groups
        self._group_of = {layer: index for index, group in enumerate(self.groups) for layer in group.layers}
        rng = np.random.default_rng(config.seed)
        self.embedding = _normal(rng, tokenizer.VOCAB, config.d_model, 1.0)
        self.layers = [_layer(rng, config, LAYER_GROWTH**index) for index in range(config.layers)]
        self.head = _normal(rng, config.d_model, tokenizer.VOCAB, config.d_model**-0.5)
        self.turns = _turns(config)
        self.bias = _normal(rng, 1, config.context_tokens_max, BIAS)[0]

    def batch(self, pieces: Sequence[AttentionPiece], block_tokens: int) -> Batch:
        """Lay the pieces of a step out as rows, in order."""
        spans = [range(piece.start, piece.start + len(piece.tokens)) for piece in pieces]
        positions = np.array([position for span in spans for position in span])
        slots, plans = [], []
        for index, group in enumerate(self.groups):
            tables = [piece.tables[index] for piece in pieces]
            blocks = [table[at // block_tokens] for table, span in zip(tables, spans, strict=True) for at in span]
            slots.append((np.array(blocks), positions % block_tokens))
            plans.append(plan(pieces, index, group.window_tokens, block_tokens, self.bias))
        tokens = np.array([token for piece in pieces for token in piece.tokens])
        return Batch(tokens, positions, tuple(slots), tuple(plans), np.cumsum([len(span) for span in spans]) - 1)

    def forward(
        self,
        batch: Batch,
        memory: KvMemory,
        rows: Ints,
        layer_done: Callable[[int], None] | None = None,
    ) -> Floats:
        """Write the KV of all rows, tell `layer_done` of each layer that has its KV, return the logits of `rows`."""
        x = self.embedding[batch.tokens]
        turn = self.turns[:, batch.positions, None]
        for index, layer in enumerate(self.layers):
            group = self._group_of[index]
            queries = self._write_kv(index, _rows(_norm(x), layer.qkv), turn, batch.slots[group], memory)
            if layer_done is not None:
                layer_done(index)
            seen = self._attend(index, queries, batch.plans[group], memory)
            x = x + _rows(_norm(seen), layer.out)
            x = x + _rows(_gated(_rows(_norm(x), layer.gate_up)), layer.down)
        return _rows(_norm(x[rows]), self.head)

    def _write_kv(self, layer: int, qkv: Floats, turn: Floats, slots: tuple[Ints, Ints], memory: KvMemory) -> Floats:
        """Put keys and values into their pages on every rank that holds their head; return the scaled queries."""
        config, geometry = self.config, memory.geometry
        turned = _rotate(qkv.reshape((len(qkv), -1, config.head_dim)), turn)
        queries, kv = turned[:, : config.heads], turned[:, config.heads :]
        kv = kv.reshape((len(qkv), 2, config.kv_heads, config.head_dim))
        block, token = slots
        for rank in range(geometry.cache.tp):
            mine = geometry.kv_heads(rank)
            memory.pages(rank)[layer][block, :, :, token] = kv[:, :, mine.start : mine.stop]
        return queries * np.float32(config.head_dim**-0.5)

    def _attend(self, layer: int, queries: Floats, plans: list[AttentionPlan], memory: KvMemory) -> Floats:
        seen = np.empty_like(queries)
        for rank in range(memory.geometry.cache.tp):
            mine = memory.geometry.query_heads(rank)
            pages = memory.pages(rank)[layer]
            for each in plans:
                seen[each.rows, mine.start : mine.stop] = attend(queries[:, mine.start : mine.stop], pages, each)
        return seen.reshape((len(seen), -1))


def _rows(x: Floats, weight: Floats) -> Floats:
    """`x @ weight`, one matrix-vector product per row: how a matrix product sums may depend on the number of rows."""
    product: Floats = np.matmul(x[:, None, :], weight)
    return product[:, 0, :]


def _gated(x: Floats) -> Floats:
    half = x.shape[-1] // 2
    gated: Floats = np.sin(x[:, :half]) * x[:, half:]
    return gated


def _norm(x: Floats) -> Floats:
    squares = np.add.reduce(x * x, axis=-1, keepdims=True)
    squares += _EPSILON
    normed: Floats = x * np.sqrt(np.float32(x.shape[-1]) / squares)
    return normed


def _rotate(x: Floats, turn: Floats) -> Floats:
    """Turn pairs (i, i + half) of each head by the angle of the row's position."""
    cos, sin = turn
    half = x.shape[-1] // 2
    swapped = np.concatenate((x[..., half:], x[..., :half]), axis=-1)
    swapped *= sin
    swapped += x * cos
    return swapped


def _turns(config: ModelConfig) -> Floats:
    """`[cos and signed sin, positions, head_dim]`."""
    half = config.head_dim // 2
    angles = np.arange(config.context_tokens_max)[:, None] * ROTARY_BASE ** -(np.arange(half) / half)
    cos, sin = np.cos(angles), np.sin(angles)
    return np.stack((np.hstack((cos, cos)), np.hstack((-sin, sin)))).astype(np.float32)


def _layer(rng: np.random.Generator, config: ModelConfig, gain: float) -> ModelLayer:
    d, hidden = config.d_model, config.d_hidden
    heads_d, kv_d = config.heads * config.head_dim, config.kv_heads * config.head_dim
    gate_up = _normal(rng, d, 2 * hidden, d**-0.5)
    gate_up[:, :hidden] *= GATE_STEEPNESS
    return ModelLayer(
        qkv=_normal(rng, d, heads_d + 2 * kv_d, d**-0.5),
        out=_normal(rng, heads_d, d, gain * ATTENTION_GAIN * heads_d**-0.5),
        gate_up=gate_up,
        down=_normal(rng, hidden, d, gain * MLP_GAIN * hidden**-0.5),
    )


def _normal(rng: np.random.Generator, rows: int, columns: int, scale: float) -> Floats:
    return (rng.standard_normal((rows, columns)) * scale).astype(np.float32)
