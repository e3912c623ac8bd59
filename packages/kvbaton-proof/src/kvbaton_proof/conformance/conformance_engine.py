"""One vLLM engine core without its processes: real scheduler and block pool, N worker connectors, no model.

Laws: hooks run in the order and on the occasions of `vllm.v1.engine.core` (0.32.0): no step without
`has_requests()`, aborts between execution and update, metadata and outputs pickled on their way. What vLLM asserts
stays an assertion error of the step. Every hook is watched from outside: an exception out of one is recorded and raised
again as vLLM would see it, and nothing about a call is changed, except that blocks fresh from the pool are poisoned
before the connector learns of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
import pickle
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec

from kvbaton_proof.conformance import configs
from kvbaton_proof.conformance.configs import EngineShape
from kvbaton_proof.conformance.conformance_oracle import EOS, Memory
from kvbaton_proof.conformance.runner import CaseRunner, DeviceOrder

HOOKS = (
    "bind_connector_metadata",
    "bind_gpu_block_pool",
    "bind_kv_cache_manager",
    "build_connector_meta",
    "build_connector_worker_meta",
    "clear_connector_metadata",
    "finish_forward",
    "get_block_ids_with_load_errors",
    "get_external_cache_hit_sources",
    "get_finished",
    "get_finished_count",
    "get_handshake_metadata",
    "get_kv_connector_kv_cache_events",
    "get_kv_connector_stats",
    "get_loaded_kv_cache_group_ids",
    "get_num_new_matched_tokens",
    "get_transfer_results",
    "handle_preemptions",
    "has_pending_block_frees",
    "has_pending_push_work",
    "on_new_request",
    "register_finished_partial_tail",
    "register_kv_caches",
    "request_finished",
    "request_finished_all_groups",
    "reset_cache",
    "reset_capture_state",
    "save_kv_layer",
    "set_xfer_handshake_metadata",
    "set_xfer_handshake_metadata_pp_aware",
    "shutdown",
    "start_load_kv",
    "take_events",
    "update_connector_output",
    "update_state_after_alloc",
    "wait_for_layer_load",
    "wait_for_save",
)


@dataclass
class LabWatch:
    """What the hooks of one engine did, by request id: how often it was matched, got blocks to be loaded, was reported
    as loaded or as failed. A report of one that has no blocks yet makes vLLM look at it again, and is not counted."""

    calls: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""
    matched: Counter[str] = field(default_factory=Counter)
    loads: Counter[str] = field(default_factory=Counter)
    loaded_tokens: Counter[str] = field(default_factory=Counter)
    received: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    sent: Counter[str] = field(default_factory=Counter)
    invalid_blocks: int = 0

    def over(self, connector: Any, before: dict[str, Callable[..., None]] | None = None) -> Any:
        """Put the watch on `connector`; `before[hook]` runs ahead of that hook."""
        for name in HOOKS:
            inner = getattr(connector, name, None)
            if inner is not None:
                setattr(connector, name, self._watched(name, inner, (before or {}).get(name)))
        return connector

    def _watched(self, name: str, inner: Callable[..., Any], before: Callable[..., None] | None) -> Callable[..., Any]:
        @functools.wraps(inner)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            if before is not None:
                before(*args)
            begun = time.perf_counter()
            try:
                result = inner(*args, **kwargs)
            except BaseException:
                self.errors.append(f"{name}: {traceback.format_exc(limit=-6)}")
                raise
            took = time.perf_counter() - begun
            if took > self.slowest_s and name != "shutdown":
                self.slowest_s, self.slowest = took, name
            self._note(name, args, result)
            return result

        return call

    def _note(self, name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "get_num_new_matched_tokens" and result[0]:
            self.matched[args[0].request_id] += 1
        elif name == "update_state_after_alloc" and args[2] > 0:
            self.loads[args[0].request_id] += 1
            self.loaded_tokens[args[0].request_id] += args[2]
        elif name == "update_connector_output":  # what vLLM is about to believe, whoever put it there
            self.received.update(each for each in args[0].finished_recving or () if self.loads[each])
            self.failed.update(args[0].failed_recving or ())
            self.sent.update(args[0].finished_sending or ())
        elif name == "get_block_ids_with_load_errors":
            self.invalid_blocks += len(result or ())


def across(value: Any) -> Any:
    """As it arrives in another process."""
    return pickle.loads(pickle.dumps(value, pickle.HIGHEST_PROTOCOL))  # noqa: S301 - our own bytes, vLLM's own way


_PIPELINE_STEPS = 2


@dataclass(slots=True)
class StepOutcome:
    """How a request stands: `reason` is None while it lives. `prompt`: what of it the engine is to compute."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    reason: str | None = None
    params: dict[str, Any] | None = None


class LabEngine:
    """P or D of the suite."""

    def __init__(
        self,
        shape: EngineShape,
        extra: Mapping[str, Any],
        *,
        module: str = configs.CONNECTOR_MODULE,
        connector: str = configs.CONNECTOR_CLASS,
    ) -> None:
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.core.sched.scheduler import Scheduler

        self.shape = shape
        self.watch = LabWatch()
        self.outcomes: dict[str, StepOutcome] = {}
        self.ends: Counter[str] = Counter()  # of handoffs, as the connector's statistics tell
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.closed = False
        self.first_eos: set[str] = set()
        self.before_executing: Callable[[], None] = lambda: None  # how long a device takes is nobody's business
        self._in_flight: deque[Any] = deque()
        self._aborts: list[str] = []
        self._names = itertools.count(1)
        config = configs.vllm_config(shape, extra, module=module, connector=connector)
        assert shape.stages > 1 or config.max_concurrent_batches == (_PIPELINE_STEPS if shape.pipelined else 1)
        self._depth: int = config.max_concurrent_batches
        planned = configs.kv_cache_config(config, shape)
        self.runners = [self._runner(config, rank) for rank in range(shape.workers)]
        kind = AsyncScheduler if shape.pipelined else Scheduler
        self.scheduler: Any = kind(
            vllm_config=config,
            kv_cache_config=copy.deepcopy(planned),
            structured_output_manager=SimpleNamespace(accept_tokens=lambda request, tokens: True),
            block_size=math.lcm(shape.block_tokens, shape.state_tokens if shape.stateful else 1),
            hash_block_size=shape.block_tokens,
            log_stats=True,
        )
        self.scheduler.use_v2_model_runner = shape.runner == "v2"
        self.connector = self.watch.over(
            self.scheduler.connector, before={"update_state_after_alloc": self._poison_fresh}
        )
        self.aggregator = KVOutputAggregator.from_connector(self.connector, shape.workers)
        self.shake_hands()
        hash_fn = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hash_fn)
        self._hasher = get_request_block_hasher(shape.block_tokens, hash_fn)

    # --- workers

    def _runner(self, config: Any, rank: int) -> CaseRunner:
        from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

        mine = copy.copy(config)  # of what a connector is told, each rank has its own; the rest is only read
        mine.kv_transfer_config = copy.deepcopy(config.kv_transfer_config)
        mine.parallel_config = copy.copy(config.parallel_config)
        mine.parallel_config.rank = rank
        planned = configs.kv_cache_config(config, self.shape, rank // self.shape.ranks)
        with as_rank(rank, self.shape):
            worker = KVConnectorFactory.create_connector(
                config=mine, role=KVConnectorRole.WORKER, kv_cache_config=copy.deepcopy(planned)
            )
            assert isinstance(worker, KVConnectorBase)
            memory, order = Memory(self.shape, planned, rank % self.shape.ranks), DeviceOrder()
            order.works_on(memory.tensors.values())
            self.watch.over(worker)
            worker.register_kv_caches(memory.tensors)
            if self.shape.runner == "v2" and hasattr(worker, "reset_capture_state"):
                worker.reset_capture_state()  # CUDA graphs have been captured
        is_v2, drafts = self.shape.runner == "v2", len(self.shape.windows) if self.shape.drafts else None
        late = self.shape.pipelined
        return CaseRunner(worker, memory, self._sample, order, is_v2=is_v2, is_late=late, drafts_from=drafts)

    def shake_hands(self) -> None:
        """The scheduler's side hears what the workers say of themselves: at start, and at a wake-up."""
        told = {divmod(rank, self.shape.ranks): across(self._handshake(rank)) for rank in range(self.shape.workers)}
        if any(value is not None for value in told.values()):
            self.connector.set_xfer_handshake_metadata_pp_aware(told)

    def _handshake(self, rank: int) -> Any:
        with as_rank(rank, self.shape):
            return self.runners[rank].connector.get_handshake_metadata()

    def _sample(self, name: str, tokens: list[int]) -> int | None:
        return EOS if name in self.first_eos else None

    def _poison_fresh(self, request: Any, blocks: Any, external: int) -> None:
        if external > 0:
            for group, held in enumerate(blocks.blocks):
                fresh = [block.block_id for block in held if not block.is_null and block.block_hash is None]
                for runner in self.runners:
                    runner.memory.poison(group, fresh)

    # --- requests

    def add(
        self,
        prompt: Sequence[int],
        params: Any = None,
        *,
        max_tokens: int = 4,
        name: str | None = None,
        eos_first: bool = False,
        at_once_aborted: bool = False,
        salt: str | None = None,
        computes_all: bool = False,
        in_step: Callable[[], object] | None = None,
        **more: Any,
    ) -> str:
        """A request arrives at the engine core; returns its id. `in_step`: what happens before the scheduler sees it.
        `more`: further fields of vLLM's request."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request, RequestStatus

        from kvbaton.engines.vllm import connector_parts

        name = name or f"r{next(self._names)}"
        sampling = SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            extra_args=None if params is None else {"kv_transfer_params": params},
        )
        sampling.update_from_generation_config({}, eos_token_id=EOS)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self._hasher,
            cache_salt=salt,
            abort_immediately=at_once_aborted,
            **more,
        )
        request.skip_reading_prefix_cache = computes_all  # as for one that wants its prompt's log probabilities
        if eos_first:
            self.first_eos.add(name)
        hands_over = self.shape.stateful and isinstance(params, dict) and params.get("do_remote_decode")
        back = self.shape.drafts if self.shape.drafts > 1 else 1
        shortened = hands_over and len(prompt) > back and not computes_all
        history = isinstance(params, dict) and params.get("history")
        if history or self.shape.pipelined or in_step is not None:
            connector_parts.came(self.scheduler, request)  # as vLLM's thread that reads it
        known = request.all_token_ids[:] if history else prompt
        self.outcomes[name] = StepOutcome(tuple(known[:-back] if shortened else known))
        if in_step is not None:
            in_step()
        self.scheduler.add_request(request)
        if at_once_aborted:
            self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
            self.outcomes[name].reason = "abort"
        return name

    def abort(self, name: str, *, mid_step: bool = False) -> None:
        """The client went away, between steps or while one runs."""
        from vllm.v1.request import RequestStatus

        if mid_step:
            self._aborts.append(name)
            return
        outcome = self.outcomes[name]
        for runner in self.runners:
            runner.aborted.add(name)
        self.scheduler.finish_requests([name], RequestStatus.FINISHED_ABORTED)
        if outcome.reason is None:
            outcome.reason = "abort"

    def status(self, name: str) -> str:
        request = self.scheduler.requests.get(name)
        return "gone" if request is None else str(request.status.name)

    # --- steps

    @property
    def has_work(self) -> bool:
        return bool(self._in_flight) or bool(self.scheduler.has_requests())

    def step(self) -> bool:
        """One turn of the engine core's loop; False when it would have slept."""
        if not self.has_work:
            return False
        self.steps += 1
        if self.scheduler.has_requests():
            scheduled = self.scheduler.schedule()
            self._in_flight.append((across(scheduled), self._issue(scheduled)))
            full = len(self._in_flight) >= self._depth
            if not full and (scheduled.total_num_scheduled_tokens > 0 or self.scheduler.has_requests()):
                return True
        if self._in_flight:
            self._finish_step(*self._in_flight.popleft())
        return True

    def _issue(self, scheduled: Any) -> list[Any]:
        """With one step at a time, a device that works at once; else one that is late, and hooks that come first."""
        issued = []
        for rank, runner in enumerate(self.runners):
            with as_rank(rank, self.shape):
                issued.append(runner.issue(across(scheduled)))
        return issued

    def _finish_step(self, scheduled: Any, issued: list[Any]) -> None:
        self.before_executing()
        outputs = [across(runner.result(each)) for runner, each in zip(self.runners, issued, strict=True)]
        output = self.aggregator.aggregate(outputs) if self.shape.aggregated or len(outputs) > 1 else outputs[0]
        aborts, self._aborts = self._aborts, []
        for name in aborts:
            self.abort(name)
        for told in self.scheduler.update_from_output(scheduled, output).values():
            for each in told.outputs:
                self._take(each)
            self._take_stats(told.scheduler_stats)

    def _take(self, told: Any) -> None:
        outcome = self.outcomes[told.request_id]
        outcome.tokens += told.new_token_ids
        if told.finish_reason is not None and outcome.reason is None:
            outcome.reason = str(told.finish_reason)
            outcome.params = told.kv_transfer_params

    def _take_stats(self, stats: Any) -> None:
        """As they reach vLLM's front end: plain data, through msgpack."""
        if stats is None or not stats.kv_connector_stats:
            return
        plain = msgspec.msgpack.decode(msgspec.msgpack.encode(stats.kv_connector_stats))
        counts = plain.get(configs.CONNECTOR_CLASS, plain).get("counts", {})  # a MultiConnector's are by connector
        self.counts.update(counts)
        self.ends.update({name.split()[1]: count for name, count in counts.items() if name.startswith("ends_total ")})

    # --- the books

    @property
    def pool(self) -> Any:
        return self.scheduler.kv_cache_manager.block_pool

    @property
    def free_blocks(self) -> int:
        return int(self.pool.get_num_free_blocks())

    @property
    def blocks_left(self) -> int:
        """Blocks that somebody still holds."""
        return self.shape.usable_blocks - self.free_blocks

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            for runner in self.runners:
                runner.connector.shutdown()
            self.scheduler.shutdown()


@contextlib.contextmanager
def as_rank(rank: int, shape: EngineShape) -> Iterator[None]:
    """vLLM keeps a worker's place in process-wide groups; several workers share this process."""
    from vllm.distributed import parallel_state

    def group(mine: int, size: int) -> Any:
        return SimpleNamespace(
            rank_in_group=mine,
            world_size=size,
            rank=mine,
            local_rank=mine,
            is_first_rank=mine == 0,
            is_last_rank=mine == size - 1,
            broadcast_object=lambda value, src=0: value,
        )

    stage, mine = divmod(rank, shape.ranks)
    places = {"_TP": (mine, shape.ranks), "_PP": (stage, shape.stages), "_WORLD": (rank, shape.workers)}
    names = ("_TP", "_PP", "_DCP", "_PCP", "_WORLD")
    before = {name: getattr(parallel_state, name, None) for name in names}
    try:
        for name in names:
            setattr(parallel_state, name, group(*places.get(name, (0, 1))))
        yield
    finally:
        for name, value in before.items():
            setattr(parallel_state, name, value)
