"""The engine: a model, its cache and a scheduler, stepped by one thread.

A step: the connector drains its queue, reports of loads are applied, tokens are scheduled, computed and sampled, and
the connector is told of prompt chunks and ends. Stepping with nothing to run is legal and cheap: pins may need it.

How many tokens of which requests are computed in a step: continuous batching, chunked prefill, preemption, loads.

Laws:
 1. Requests are served in the order they came. One that the connector is not ready for is passed over and keeps its
    place. One that finds no room is passed by those only that have their blocks already: they will give some back.
 2. Running requests go first; when blocks run out, the one that came last gives up all of its own and is computed anew.
 3. Every accepted request ends by `_end`, once: `request_finished`, then its blocks are freed. A request that ends
    while loading keeps its blocks until the connector reports (`LEAVING`).
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.engine_config import EngineConfig
from kvbaton.engines.embedded.engine_request import (
    EngineRequest,
    FullError,
    Output,
    RejectedError,
    RequestState,
    RequestStatus,
    Sequence,
)
from kvbaton.engines.embedded.hooks import Chunk, Connector, LoadOrder, LoadOutcome, NoRoom, NotYet
from kvbaton.engines.embedded.memory.block_cache import BlockPool, HashChain
from kvbaton.engines.embedded.memory.block_tables import Hit, KvCache
from kvbaton.engines.embedded.memory.kv_memory import Floats, KvGeometry, KvMemory, allocate_regions
from kvbaton.engines.embedded.model.attention import AttentionPiece
from kvbaton.engines.embedded.model.decoder import Model, choose
from kvbaton.protocol.ids import RequestId


class StepWork(msgspec.Struct, frozen=True):
    """Tokens of one request to compute in this step."""

    sequence: Sequence
    tokens: int


class _Turn(enum.Enum):
    """The outcome for a waiting request."""

    RUN = enum.auto()  # it has the blocks for its next tokens
    LATER = enum.auto()  # it waits for the connector
    NO_ROOM = enum.auto()


class Scheduler:
    """Queues of one engine."""

    def __init__(self, config: EngineConfig, cache: KvCache, connector: Connector) -> None:
        self.config = config
        self.cache = cache
        self.connector = connector
        self.sequences: dict[RequestId, Sequence] = {}
        self.waiting: list[Sequence] = []  # WAITING, LOADING or LOADED, in order of arrival
        self.running: list[Sequence] = []  # in order of admission
        self._refused: list[Output] = []  # by the connector, in this step

    def add(self, request: EngineRequest) -> None:
        """Accept a request, or raise `RejectedError`."""
        self._check(request)
        chain = HashChain(self.cache.block_tokens, request.cache_salt)
        given = [*request.prompt, *request.history]
        sequence = Sequence(request, given, chain, [[] for _ in self.cache.groups])
        self.sequences[request.request_id] = sequence
        self.waiting.append(sequence)
        self.connector.on_new_request(request)

    def abort(self, request_id: RequestId) -> Output | None:
        """End a request wherever it is; None if it is unknown or has ended already."""
        sequence = self.sequences.get(request_id)
        if sequence is None or sequence.state is RequestState.LEAVING:
            return None
        return self.end(sequence, RequestStatus.ABORTED)

    def end(self, sequence: Sequence, status: RequestStatus) -> Output:
        """A request is over, its last token told separately."""
        if sequence.state is RequestState.LOADING:
            return self._end(sequence, status, "", RequestState.LEAVING)
        return self._end(sequence, status, "", RequestState.ENDED)

    def take_reports(self) -> list[Output]:
        """Apply the connector's reports of loads; a report that is not due raises AssertionError, as in vLLM."""
        outputs = []
        for report in self.connector.take_reports():
            sequence = self.sequences.get(report.request_id)
            due = sequence is not None and sequence.state in (RequestState.LOADING, RequestState.LEAVING)
            assert sequence is not None and due, f"report for {report.request_id}, which is not loading"
            outputs += self._apply(report, sequence)
        return outputs

    def schedule(self) -> list[StepWork]:
        """Give out the step's token budget: running requests first, then as many waiting ones as fit."""
        work, budget = [], self.config.step_tokens_max
        running_before = len(self.running)
        for sequence in list(self.running):
            tokens = min(len(sequence.tokens) - sequence.computed, budget)
            if tokens and sequence.state is RequestState.RUNNING and self._make_room(sequence, tokens):
                work.append(StepWork(sequence, tokens))
                budget -= tokens
        if len(self.running) == running_before:  # nobody was preempted: there is room for more
            work += self._admit(budget)
        return work

    def take_refused(self) -> list[Output]:
        """Requests that the connector refused in the last `schedule`."""
        refused, self._refused = self._refused, []
        return refused

    def advance(self, sequence: Sequence, tokens: int) -> None:
        """`tokens` more of a request have their KV; full blocks can now be found by others."""
        full_before = sequence.computed // self.cache.block_tokens
        sequence.computed += tokens
        is_full = sequence.computed // self.cache.block_tokens > full_before
        if is_full and self._may_publish(sequence):
            hashes = sequence.chain.extend(sequence.tokens, sequence.computed)
            self.cache.publish(sequence.tables, hashes, full_before)

    def validate(self, pins: Iterable[int] = ()) -> None:
        """Raise AssertionError unless every reference is a live request's or one of `pins` (a block per pin)."""
        held = Counter(pins)
        for sequence in self.sequences.values():
            for table in sequence.tables:
                held.update(block for block in table if block)
        self.cache.pool.validate(held)
        queued = sorted(id(each) for each in (*self.waiting, *self.running))
        live = (each for each in self.sequences.values() if each.state is not RequestState.LEAVING)
        assert queued == sorted(id(each) for each in live), "a live request is in no queue, or in two"
        assert all(each.state is RequestState.RUNNING for each in self.running), "a running request is not RUNNING"

    def _check(self, request: EngineRequest) -> None:
        tokens = len(request.prompt) + request.sampling.max_tokens
        context, capacity = self.config.model.context_tokens_max, self.config.cache.blocks - 1
        if request.request_id in self.sequences:
            raise RejectedError(f"request id {request.request_id} is in use; choose another")
        if not request.prompt or request.sampling.max_tokens < 1:
            raise RejectedError("a request needs at least one prompt token and max_tokens of at least 1")
        for name, given in (("prompt", request.prompt), ("history", request.history)):
            if given and not 0 <= min(given) <= max(given) < tokenizer.VOCAB:
                raise RejectedError(f"{name} tokens must be within 0 and {tokenizer.VOCAB - 1}")
        if len(request.history) >= request.sampling.max_tokens:
            raise RejectedError(f"a history of {len(request.history)} tokens leaves none of max_tokens to generate")
        if tokens > context:
            raise RejectedError(f"prompt and max_tokens are {tokens} tokens, the context is {context}")
        if self.cache.blocks_for(tokens) > capacity:
            raise RejectedError(f"{self.cache.blocks_for(tokens)} blocks are required, the cache has {capacity}")
        if len(self.waiting) >= self.config.waiting_max:
            raise FullError(f"{len(self.waiting)} requests are already waiting; try again later")

    def _make_room(self, sequence: Sequence, tokens: int) -> bool:
        """Grow a running request's tables; False if it had to give its own blocks back."""
        while not self.cache.grow(sequence.tables, sequence.computed + tokens, sequence.computed):
            victim = self.running[-1]
            self.running.remove(victim)
            self.waiting.insert(0, victim)
            self._give_back(victim)
            if victim is sequence:
                return False
        return True

    def _give_back(self, sequence: Sequence) -> None:
        self.connector.preempted(sequence.request)
        self._release(sequence)
        sequence.enter(RequestState.WAITING)

    def _admit(self, budget: int) -> list[StepWork]:
        work: list[StepWork] = []
        no_room = False
        for sequence in list(self.waiting):
            if not budget or len(self.running) >= self.config.seqs_max:
                break
            if no_room and sequence.state is not RequestState.LOADED:
                continue
            turn = self._start(sequence, budget)
            no_room = no_room or turn is _Turn.NO_ROOM
            if turn is _Turn.RUN:
                self.waiting.remove(sequence)
                self.running.append(sequence)
                sequence.enter(RequestState.RUNNING)
                self.connector.allocated(sequence.request, sequence.blocks, 0)
                tokens = min(len(sequence.tokens) - sequence.computed, budget)
                work.append(StepWork(sequence, tokens))
                budget -= tokens
        return work

    def _start(self, sequence: Sequence, budget: int) -> _Turn:
        """Get a waiting request the blocks for its next tokens, from here or from the connector."""
        if sequence.state is RequestState.LOADING:
            return _Turn.LATER
        if sequence.state is RequestState.WAITING:
            turn = self._find_kv(sequence)
            if turn is not _Turn.RUN:
                return turn
        end = min(len(sequence.tokens), sequence.computed + budget)
        if self.cache.grow(sequence.tables, end, sequence.computed):
            return _Turn.RUN
        if not self.running:  # loaded requests hold all blocks and none can grow: one must be computed here instead
            self._give_back(sequence)
        return _Turn.NO_ROOM

    def _find_kv(self, sequence: Sequence) -> _Turn:
        """Ask the prefix cache, then the connector, for what a request need not compute."""
        hit = self._lookup(sequence)
        answer = self.connector.match(sequence.request, hit.tokens)
        if isinstance(answer, NotYet):
            return _Turn.LATER
        if isinstance(answer, NoRoom):
            self._refused.append(self._end(sequence, RequestStatus.REFUSED, answer.reason, RequestState.ENDED))
            return _Turn.LATER
        if not isinstance(answer, LoadOrder):
            return _Turn.RUN if self._take(sequence, hit, 0) else _Turn.NO_ROOM
        assert answer.tokens > 0, f"a load of {answer.tokens} tokens was offered for {sequence.request_id}"
        if not self._take(sequence, hit, answer.tokens):
            return _Turn.NO_ROOM
        sequence.enter(RequestState.LOADING)
        self.connector.allocated(sequence.request, sequence.blocks, answer.tokens)
        return _Turn.LATER

    def _lookup(self, sequence: Sequence) -> Hit:
        """The local prefix, whole blocks; the last token is left to compute, for its logits."""
        if not self.config.prefix_caching:
            return self.cache.no_hit()
        return self.cache.lookup(sequence.chain.extend(sequence.tokens, len(sequence.tokens) - 1))

    def _take(self, sequence: Sequence, hit: Hit, external: int) -> bool:
        """Adopt a hit and make room for `external` tokens after it, if the whole sequence would fit."""
        known, all_tokens = hit.tokens + external, len(sequence.tokens)
        assert known <= all_tokens, f"{known} tokens offered for {sequence.request_id}, which has {all_tokens}"
        sequence.era = self.cache.pool.era
        tables = self.cache.adopt(hit)
        computed = min(known, all_tokens - 1)
        fits = self.cache.missing(tables, all_tokens, computed) <= self.cache.pool.free_blocks
        if not fits or not self.cache.grow(tables, known, computed):
            self.cache.release(tables)
            return False
        sequence.tables, sequence.promised, sequence.cached_tokens = tables, known, known
        sequence.computed = computed if not external else 0
        return True

    def _apply(self, report: LoadOutcome, sequence: Sequence) -> list[Output]:
        if sequence.state is RequestState.LEAVING:
            self._forget(sequence, RequestState.ENDED)
            return []
        good = sequence.promised if report.ok else min(report.good_prefix_tokens or 0, sequence.promised)
        if self._may_publish(sequence):
            self.cache.publish(sequence.tables, sequence.chain.extend(sequence.tokens, good))
        if report.ok:
            sequence.computed = min(good, len(sequence.tokens) - 1)
            sequence.enter(RequestState.LOADED)
        elif self.config.on_load_failure == "recompute" or not report.final:
            self._release(sequence)
            sequence.enter(RequestState.WAITING)
        else:
            return [self._end(sequence, RequestStatus.ERROR, report.reason, RequestState.ENDED)]
        return []

    def _may_publish(self, sequence: Sequence) -> bool:
        """Not if what it has was begun before all that was cached then was forgotten."""
        return self.config.prefix_caching and sequence.era == self.cache.pool.era

    def _end(self, sequence: Sequence, status: RequestStatus, reason: str, state: RequestState) -> Output:
        self.connector.ending(sequence.request, sequence.tokens)
        answer = self.connector.request_finished(sequence.request, sequence.blocks, status)
        queue = self.running if sequence.state is RequestState.RUNNING else self.waiting
        queue.remove(sequence)
        if state is RequestState.LEAVING:
            sequence.enter(state)
        else:
            self._forget(sequence, state)
        return Output(sequence.request_id, status=status, reason=reason, handoff=answer)

    def _forget(self, sequence: Sequence, state: RequestState) -> None:
        self._release(sequence)
        sequence.enter(state)
        del self.sequences[sequence.request_id]

    def _release(self, sequence: Sequence) -> None:
        self.cache.release(sequence.tables)
        sequence.computed = 0


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
