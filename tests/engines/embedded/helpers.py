"""What engine tests share: prompts, drivers that validate after every step, an oracle, and connectors that copy KV."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.embedded_engine import Engine
from kvbaton.engines.embedded.engine_config import CacheConfig, EngineConfig, ModelConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, Output, RequestStatus, Sampling
from kvbaton.engines.embedded.hooks import BlockIds, Connector, LoadOrder, LoadOutcome, Match, Nothing, NotYet
from kvbaton.engines.embedded.memory.block_cache import BlockPool
from kvbaton.engines.embedded.model.decoder import Model
from kvbaton.protocol.ids import RequestId

TINY = ModelConfig(layers=2, d_model=32, d_hidden=32, heads=4, kv_heads=2, head_dim=8)
SLIDING = ModelConfig(layers=3, d_model=32, d_hidden=32, heads=4, kv_heads=2, head_dim=8, sliding_layers=(1,))
WORDS = (
    "the",
    "of",
    "and",
    "to",
    "in",
    "is",
    "that",
    "for",
    "it",
    "as",
    "was",
    "with",
    "not",
    "he",
    "his",
    "but",
    "they",
)

Prompt = tuple[int, ...]
Answers = dict[RequestId, list[int]]


def prompt(seed: int, tokens: int) -> Prompt:
    """Words of a small language: blocks of different prompts look alike, as in real text."""
    rng = random.Random(seed)
    text = " ".join(rng.choice(WORDS) for _ in range(tokens))
    return tuple(tokenizer.encode(text)[:tokens])


def request(name: str, tokens: Prompt, answer: int = 8, handoff: object = None, **sampling: object) -> EngineRequest:
    settings = {"max_tokens": answer, "ignore_eos": True, **sampling}
    return EngineRequest(RequestId(name), tokens, Sampling(**settings), handoff=handoff)  # type: ignore[arg-type]


def engine(model: ModelConfig = TINY, connector: Connector | None = None, **changes: object) -> Engine:
    """An engine of few blocks; `changes` go to the cache's or the engine's configuration, by name."""
    cache = {name: changes.pop(name) for name in ("blocks", "block_tokens", "tp", "layout") if name in changes}
    cache = {"blocks": 64, "block_tokens": 8, **cache}
    config = EngineConfig(model, CacheConfig(**cache), **changes)  # type: ignore[arg-type]
    return Engine(config, connector)


def step(subject: Engine, pins: Iterable[int] = ()) -> list[Output]:
    """One step, then all invariants; pins are `pins` and those of a `Lender`."""
    outputs = subject.step()
    subject.validate([*pins, *_lent(subject)])
    return outputs


def finish(subject: Engine, steps_max: int = 2000) -> list[Output]:
    """Step until no request is left; at rest all blocks that are not lent are free."""
    outputs: list[Output] = []
    for _ in range(steps_max):
        done = not subject.scheduler.sequences
        outputs += step(subject)
        if done:
            break
    assert not subject.scheduler.sequences, "requests are left"
    assert subject.pool.free_blocks == subject.config.cache.blocks - 1 - len(set(_lent(subject)))
    return outputs


def _lent(subject: Engine) -> list[int]:
    return subject.connector.pins() if isinstance(subject.connector, Lender) else []


def answers(outputs: Iterable[Output]) -> Answers:
    told: Answers = {}
    for output in outputs:
        told.setdefault(output.request_id, [])
        if output.token is not None:
            told[output.request_id].append(output.token)
    return told


@functools.cache
def _answer_alone(tokens: Prompt, count: int, model: ModelConfig) -> list[int]:
    subject = engine(model, blocks=256, prefix_caching=False)
    subject.add_request(request("alone", tokens, count))
    return answers(finish(subject))[RequestId("alone")]


def answer_alone(tokens: Prompt, count: int = 8, model: ModelConfig = TINY) -> list[int]:
    """What a single engine with nothing else to do answers."""
    return _answer_alone(tokens, count, model)


def naive_logits(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """All logits of a sequence by the textbook: no pages, no tiles, one matrix product each, in float64."""
    config, n = model.config, len(tokens)
    cos, sin = (turn[:n, None].astype(np.float64) for turn in model.turns)
    age = np.arange(n)[:, None] - np.arange(n)
    x = model.embedding[list(tokens)].astype(np.float64)
    for index, layer in enumerate(model.layers):
        window = config.window_tokens if index in config.sliding_layers else n
        split = (_norm(x) @ layer.qkv).reshape(n, -1, config.head_dim)
        split = split * cos + np.roll(split, config.head_dim // 2, axis=-1) * sin
        queries, keys, values = np.split(split, [config.heads, config.heads + config.kv_heads], axis=1)
        share = config.heads // config.kv_heads
        keys, values = keys.repeat(share, axis=1), values.repeat(share, axis=1)
        scores = np.einsum("ihd,jhd->hij", queries, keys) * config.head_dim**-0.5
        scores = np.where((age >= 0) & (age < window), scores + model.bias[age], -np.inf)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        x = x + _norm(np.einsum("hij,jhd->ihd", weights, values).reshape(n, -1)) @ layer.out
        gate, up = np.split(_norm(x) @ layer.gate_up, 2, axis=-1)
        x = x + (np.sin(gate) * up) @ layer.down
    return _norm(x) @ model.head


def _norm(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6 / x.shape[-1])


@dataclass
class Lender(Connector):
    """P's side: keeps the blocks of every prompt it computed, until told otherwise."""

    pool: BlockPool = None  # type: ignore[assignment]
    kept: dict[Prompt, BlockIds] = field(default_factory=dict)

    def bind(self, pool: BlockPool) -> None:
        self.pool = pool

    def request_finished(
        self, request: EngineRequest, blocks: BlockIds, status: RequestStatus
    ) -> Mapping[str, object] | None:
        if status is not RequestStatus.LENGTH or request.prompt in self.kept:
            return None
        self.pool.touch(block for row in blocks for block in row if block)
        self.kept[request.prompt] = blocks
        return {"blocks": blocks}

    def pins(self) -> list[int]:
        return [block for blocks in self.kept.values() for row in blocks for block in row if block]


@dataclass
class Borrower(Connector):
    """D's side: copies the KV of prompts that `lender` kept, some steps after their blocks were allocated.

    What becomes of a request is drawn from its `handoff`: a list of moves, consumed in order. A string "wait" answers
    `NotYet`, "load" loads, "fail" and a number fail after copying that many tokens; an empty list: computed here.
    """

    lender: Lender
    source: Engine
    steps: int = 1  # between allocation and report
    target: Engine = None  # type: ignore[assignment]
    loading: dict[RequestId, tuple[EngineRequest, BlockIds, int, object]] = field(default_factory=dict)
    due: dict[RequestId, int] = field(default_factory=dict)
    finished: list[tuple[RequestId, RequestStatus]] = field(default_factory=list)
    tokens_max: int = 10_000  # loads no more than this at once
    local: dict[RequestId, int] = field(default_factory=dict)
    seen: list[tuple[str, RequestId, int]] = field(default_factory=list)

    def match(self, request: EngineRequest, local_tokens: int) -> Match:
        moves = request.handoff
        left = len(request.prompt) - local_tokens
        if not isinstance(moves, list) or not moves or left <= 0:
            return Nothing()
        if moves[0] == "wait":
            moves.pop(0)
            return NotYet()
        self.local[request.request_id] = local_tokens
        return LoadOrder(min(left, self.tokens_max))

    def allocated(self, request: EngineRequest, blocks: BlockIds, external_tokens: int) -> None:
        self.seen.append(("allocated", request.request_id, external_tokens))
        if external_tokens:
            moves = request.handoff
            assert isinstance(moves, list)
            self.loading[request.request_id] = (request, blocks, external_tokens, moves.pop(0))
            self.due[request.request_id] = self.steps

    def preempted(self, request: EngineRequest) -> None:
        self.seen.append(("preempted", request.request_id, 0))

    def request_finished(self, request: EngineRequest, blocks: BlockIds, status: RequestStatus) -> None:
        self.finished.append((request.request_id, status))

    def take_reports(self) -> list[LoadOutcome]:
        reports = []
        for name in list(self.due):
            self.due[name] -= 1
            if self.due[name] <= 0:
                del self.due[name]
                reports.append(self._end(*self.loading.pop(name)))
        return reports

    def has_pending_work(self) -> bool:
        return bool(self.loading)

    def _end(self, request: EngineRequest, blocks: BlockIds, external: int, move: object) -> LoadOutcome:
        """Copy, or copy a part and fail."""
        first = self.local.pop(request.request_id)
        total = first + external
        good = total if move == "load" else first
        if isinstance(move, int):
            good = min(total, first + move)
        copy_kv(self.source, self.lender.kept[request.prompt], self.target, blocks, range(first, good))
        if move == "load":
            return LoadOutcome(request.request_id, ok=True)
        prefix = good if isinstance(move, int) else None
        return LoadOutcome(request.request_id, ok=False, good_prefix_tokens=prefix, reason="as told")


def copy_kv(source: Engine, source_blocks: BlockIds, target: Engine, target_blocks: BlockIds, tokens: range) -> None:
    """Copy the KV of `tokens` one by one, head by head: any ranks, layouts, block sizes. Null entries are skipped."""
    read, write = source.memory, target.memory
    size_read, size_write = source.config.cache.block_tokens, target.config.cache.block_tokens
    for group, spec in enumerate(source.model.groups):
        for token in tokens:
            there = target_blocks[group][token // size_write]
            here = source_blocks[group][token // size_read]
            if there == 0:
                continue
            assert here != 0, f"token {token} of group {group} is wanted, but the source has let it go"
            for head in range(source.config.model.kv_heads):
                kv = _slots(read, head)[0][list(spec.layers), here, :, :, token % size_read]
                for view in _slots(write, head):
                    view[list(spec.layers), there, :, :, token % size_write] = kv


def _slots(memory: object, head: int) -> list[np.ndarray]:
    """One head's pages `[layers, blocks, K and V, 1, tokens, head_dim]` on every rank that holds it."""
    geometry = memory.geometry  # type: ignore[attr-defined]
    ranks = [rank for rank in range(geometry.cache.tp) if head in geometry.kv_heads(rank)]
    starts = [(rank, head - geometry.kv_heads(rank).start) for rank in ranks]
    return [memory.pages(rank)[:, :, :, at : at + 1] for rank, at in starts]  # type: ignore[attr-defined]


@dataclass
class Pair:
    """P and D in one process."""

    p: Engine
    d: Engine
    lender: Lender
    borrower: Borrower

    def prefill(self, tokens: Prompt) -> None:
        self.p.add_request(request("prefill", tokens, 1))
        finish(self.p)


def pair(model: ModelConfig = TINY, p: Mapping[str, object] = {}, d: Mapping[str, object] = {}, steps: int = 1) -> Pair:
    lender = Lender()
    prefiller = engine(model, lender, **{"blocks": 512, **p})
    borrower = Borrower(lender, prefiller, steps)
    decoder = engine(model, borrower, **d)
    borrower.target = decoder
    return Pair(prefiller, decoder, lender, borrower)
