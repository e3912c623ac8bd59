"""The engine: a model, its cache and a scheduler, stepped by one thread.

A step: the connector drains its queue, reports of loads are applied, tokens are scheduled, computed and sampled, and
the connector is told of prompt chunks and ends. Stepping with nothing to run is legal and cheap: pins may need it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.engine_config import EngineConfig
from kvbaton.engines.embedded.engine_request import EngineRequest, Output, RequestState, RequestStatus, Sequence
from kvbaton.engines.embedded.hooks import Chunk, Connector
from kvbaton.engines.embedded.memory.block_cache import BlockPool
from kvbaton.engines.embedded.memory.block_tables import KvCache
from kvbaton.engines.embedded.memory.kv_memory import Floats, KvGeometry, KvMemory, allocate_regions
from kvbaton.engines.embedded.model.attention import AttentionPiece
from kvbaton.engines.embedded.model.decoder import Model
from kvbaton.engines.embedded.model.sampling import choose
from kvbaton.engines.embedded.scheduler import Scheduler, StepWork
from kvbaton.protocol.ids import RequestId


class EngineStats(msgspec.Struct, frozen=True):
    """How full an engine is."""

    running: int
    waiting: int
    loading: int  # LEAVING ones included
    free_blocks: int
    blocks: int


class Engine:
    """Answers requests. All methods belong to one thread."""

    def __init__(
        self,
        config: EngineConfig,
        connector: Connector | None = None,
        regions: list[memoryview] | None = None,
    ) -> None:
        """`regions`: the KV bytes, one per rank; private memory if not given."""
        geometry = KvGeometry(config.model, config.cache)
        self.config = config
        self.connector = connector or Connector()
        self.model = Model(config.model)
        self.memory = KvMemory(geometry, allocate_regions(geometry) if regions is None else regions)
        self.pool = BlockPool(config.cache.blocks)
        cache = KvCache(self.pool, self.model.groups, config.cache.block_tokens)
        self.scheduler = Scheduler(config, cache, self.connector)
        self.tokens_last_step = 0
        self._told_later: list[Output] = []
        self.connector.bind(self.pool)

    def add_request(self, request: EngineRequest) -> None:
        """Queue a request; raises `RejectedError` for one that could never run, or when the queue is full."""
        self.scheduler.add(request)

    def abort(self, request_id: RequestId) -> None:
        """End a request; its last output comes with the next step. Unknown and ended ones are ignored."""
        output = self.scheduler.abort(request_id)
        if output is not None:
            self._told_later.append(output)

    def has_work(self) -> bool:
        """False: a step would do nothing until a request is added."""
        return bool(self.scheduler.sequences or self._told_later) or self.connector.has_pending_work()

    def step(self) -> list[Output]:
        """Do one round of work and tell what came of it. `tokens_last_step == 0`: nothing could be computed."""
        outputs, self._told_later = self._told_later, []
        self.connector.step_begin()
        outputs += self.scheduler.take_reports()
        work = self.scheduler.schedule()
        outputs += self.scheduler.take_refused()
        self.tokens_last_step = sum(each.tokens for each in work)
        if work:
            outputs += self._compute(work)
        return outputs

    def stats(self) -> EngineStats:
        states = [sequence.state for sequence in list(self.scheduler.sequences.values())]
        loading = states.count(RequestState.LOADING) + states.count(RequestState.LEAVING)
        running = len(self.scheduler.running)
        waiting = len(states) - running - loading
        return EngineStats(running, waiting, loading, self.pool.free_blocks, self.config.cache.blocks - 1)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing done, while any block is held."""
        return self.pool.forget_all()

    def validate(self, pins: Iterable[int] = ()) -> None:
        """Raise AssertionError unless blocks, references and queues agree; `pins` names the connector's references."""
        self.scheduler.validate(pins)

    def close(self) -> None:
        """Let go of the KV memory; the engine must not be used afterwards."""
        self.memory.close()

    def _compute(self, work: list[StepWork]) -> list[Output]:
        pieces = [_piece(each.sequence, each.tokens) for each in work]
        batch = self.model.batch(pieces, self.config.cache.block_tokens)
        complete = [_completes(each) for each in work]
        logits = self.model.forward(batch, self.memory, batch.last_rows[complete], self._layer_hook(work))
        for each in work:
            self._advance(each)
        asked = [each.sequence for each, done in zip(work, complete, strict=True) if done]
        return [self._sample(sequence, row) for sequence, row in zip(asked, logits, strict=True)]

    def _layer_hook(self, work: list[StepWork]) -> Callable[[int], None] | None:
        if not self.connector.wants_layers:
            return None
        chunks = [_chunk(each) for each in work if each.sequence.in_prefill]
        return (lambda layer: self.connector.layer_done(layer, chunks)) if chunks else None

    def _advance(self, work: StepWork) -> None:
        sequence, in_prefill = work.sequence, work.sequence.in_prefill
        self.scheduler.advance(sequence, work.tokens)
        if in_prefill:
            computed = min(sequence.computed, sequence.request.given_tokens)
            self.connector.chunk_done(sequence.request, sequence.blocks, computed)
        elif sequence.computed % self.config.cache.block_tokens == 0:
            self.connector.block_done(sequence.request, sequence.blocks, sequence.tokens[: sequence.computed])

    def _sample(self, sequence: Sequence, logits: Floats) -> Output:
        sampling = sequence.request.sampling
        choice = choose(logits, sampling, len(sequence.tokens), sequence.answer_tokens)
        sequence.tokens.append(choice.token)
        text = tokenizer.decode([choice.token])
        cached = min(sequence.cached_tokens, len(sequence.request.prompt))
        told = Output(sequence.request_id, choice.token, text, choice.logprobs, cached_tokens=cached)
        if choice.token == tokenizer.EOS:
            status = RequestStatus.STOPPED
        elif sequence.answer_tokens >= sampling.max_tokens:
            status = RequestStatus.LENGTH
        else:
            return told
        return msgspec.structs.replace(told, status=status, handoff=self.scheduler.end(sequence, status).handoff)


def _piece(sequence: Sequence, tokens: int) -> AttentionPiece:
    start = sequence.computed
    return AttentionPiece(sequence.tokens[start : start + tokens], start, tuple(sequence.tables))


def _completes(work: StepWork) -> bool:
    """Will all tokens of the request have their KV, so that the next one can be sampled?"""
    return work.sequence.computed + work.tokens == len(work.sequence.tokens)


def _chunk(work: StepWork) -> Chunk:
    sequence = work.sequence
    end = min(sequence.computed + work.tokens, sequence.request.given_tokens)
    return Chunk(sequence.request, sequence.blocks, sequence.computed, end)
