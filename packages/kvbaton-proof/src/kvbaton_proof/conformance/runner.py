"""The model runner of one rank, without a model: takes vLLM's scheduler output, calls the worker hooks in its order.

Laws: the order of hooks is that of `vllm.v1.worker.kv_connector_model_runner_mixin` (V1) or of
`vllm.v1.worker.gpu.kv_connector` (V2), both of 0.32.0. Before a request attends to its past, the past is checked by the
oracle. A device that is *late* has done nothing when a step was issued and its hooks were called: it reads and
writes when the step's output is taken, or when the host waits for it; what a request finds loaded must be there at
issue already, and then still. Copies of another connector begin when the steps that were issued before them have been
run, as on a CUDA stream of their own that waits for the model's; whoever waits for one has the device catch up first.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

from kvbaton_proof.conformance.configs import layer_index
from kvbaton_proof.conformance.conformance_oracle import Memory, draft, next_token, prefix_hashes


class DeviceOrder:
    """Of one rank's device: how many steps it was given, and how many it has run."""

    def __init__(self) -> None:
        self.issued = 0
        self.run = 0
        self.catch_up: Callable[[], None] = lambda: None

    def works_on(self, tensors: Any) -> None:
        for tensor in tensors:
            _BY_MEMORY[tensor.untyped_storage().data_ptr()] = self


_BY_MEMORY: WeakValueDictionary[int, DeviceOrder] = WeakValueDictionary()


def device_of(tensor: Any) -> DeviceOrder:
    return _BY_MEMORY[tensor.untyped_storage().data_ptr()]


class OrderedCopies:
    """Copies between and behind the steps of a device, one after the other; they end when somebody looks."""

    def __init__(self, device: DeviceOrder) -> None:
        self._device = device
        self._waiting: deque[tuple[int, int, Callable[[], None]]] = deque()  # job, steps before it, what it does

    def begin(self, job: int, copy: Callable[[], None]) -> None:
        self._waiting.append((job, self._device.issued, copy))

    def ended(self) -> list[int]:
        """Jobs that have come to their end since the last look."""
        found = []
        while self._waiting and self._waiting[0][1] <= self._device.run:
            job, _, copy = self._waiting.popleft()
            copy()
            found.append(job)
        return found

    def wait(self, jobs: set[int]) -> list[int]:
        """The same, after all of these."""
        if any(job in jobs for job, _, _ in self._waiting):
            self._device.catch_up()
        return self.ended()


@dataclass(slots=True)
class Cached:
    """What a worker remembers of a request."""

    tokens: list[int]
    blocks: list[list[int]]
    only: int | None = None  # the one token that it may answer with


@dataclass(slots=True)
class RunnerWork:
    """What a step computes of one request, as it was when the step was issued."""

    name: str
    state: Cached
    past: int
    count: int
    is_fresh: bool  # its first step, or its first since it was preempted


@dataclass(slots=True, eq=False)
class Issued:
    """A step that the device was given."""

    work: list[RunnerWork]
    output: Any
    zeroed: list[int] = field(default_factory=list)


@dataclass
class CaseRunner:
    """One rank. `sample` may replace the token that a request answers with."""

    connector: Any
    memory: Memory
    sample: Callable[[str, list[int]], int | None] = lambda request, tokens: None
    order: DeviceOrder = field(default_factory=DeviceOrder)
    is_v2: bool = False
    is_late: bool = False
    drafts_from: int | None = None  # the number of a drafter's first layer
    states: dict[str, Cached] = field(default_factory=dict)
    computed: int = 0  # positions, of all requests
    computed_of: Counter[str] = field(default_factory=Counter)
    _pending: Counter[tuple[int, int]] = field(default_factory=Counter)  # (group, block) that steps in flight write
    aborted: set[str] = field(default_factory=set)  # a step in flight still computes them; nobody hears the answer
    _given: deque[Issued] = field(default_factory=deque)  # steps that a late device has not run yet

    def __post_init__(self) -> None:
        self.order.catch_up = self._catch_up

    # --- what the engine sees

    def issue(self, step: Any) -> Issued:
        """Give the device a step; all hooks are called."""
        from vllm.v1.outputs import KVConnectorOutput

        meta, connector = step.kv_connector_metadata, self.connector
        assert meta is not None
        if self.is_v2:
            self._update_states(step)
            connector.handle_preemptions(meta)
        else:
            connector.handle_preemptions(meta)
            self._update_states(step)
        connector.bind_connector_metadata(meta)
        issued = Issued(self._work(step), KVConnectorOutput(), list(step.new_block_ids_to_zero or ()))
        if not self.is_late:
            self.memory.zero(issued.zeroed)
        options = {"scheduler_output": step, "request_ids": list(step.num_scheduled_tokens)} if self.is_v2 else {}
        if step.has_sync_kv_loads:
            self._start_loads(options)
        self._give(issued)
        try:
            self._forward(issued.work)
        finally:
            if self.is_v2:
                connector.finish_forward()
            if not step.has_sync_kv_loads:
                self._start_loads(options if issued.work else {})
            self._after_forward(step, issued.output)
        return issued

    def result(self, issued: Issued) -> Any:
        """The step has ended on the device: vLLM's `ModelRunnerOutput`."""
        from vllm.v1.outputs import ModelRunnerOutput

        while issued in self._given:
            self._run(self._given.popleft())
        if not issued.work:
            return ModelRunnerOutput.with_kv_conn_output_only(issued.output)
        names = [each.name for each in issued.work]
        sampled = [self._sampled(each) for each in issued.work]
        self._draft(issued.work)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=issued.output,
        )

    # --- the device

    def _give(self, issued: Issued) -> None:
        self.order.issued += 1
        if self.is_late:
            self._given.append(issued)
        else:
            self.order.run += 1  # whatever comes behind the step comes after its work

    def _run(self, issued: Issued) -> None:
        """What a late device does of a step."""
        self.order.run += 1
        self.memory.zero(issued.zeroed)
        hashes = self._hashes(issued.work)
        for each in issued.work:
            self._pending.subtract(self._written(each))
        for group, layer in self.memory.in_order if issued.work else ():
            self._compute(issued.work, hashes, group, layer)

    def _catch_up(self) -> None:
        while self._given:
            self._run(self._given.popleft())

    # --- helpers

    def _start_loads(self, options: dict[str, Any]) -> None:
        context = SimpleNamespace(attn_metadata=None, no_compile_layers={}, virtual_engine=0)
        self.connector.start_load_kv(context, **options)

    def _after_forward(self, step: Any, output: Any) -> None:
        connector = self.connector
        connector.wait_for_save()
        results = connector.get_transfer_results(step.finished_req_ids)
        output.finished_sending = results.finished_sending or None
        output.finished_recving = results.finished_recving or None
        output.failed_recving = results.failed_recving
        output.invalid_block_ids = connector.get_block_ids_with_load_errors()
        output.kv_connector_stats = connector.get_kv_connector_stats()
        output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
        output.kv_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()

    def _update_states(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self.states.pop(name, None)
        for new in step.scheduled_new_reqs:  # V2: also those that were preempted, with all their tokens
            tokens = new.prompt_token_ids if new.prefill_token_ids is None else new.prefill_token_ids
            allowed = getattr(new.sampling_params, "allowed_token_ids", None) or (None,)
            self.states[new.req_id] = Cached(list(tokens), [list(ids) for ids in new.block_ids], allowed[0])
        cached = step.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            state, fresh = self.states[name], cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                tokens = list(cached.all_token_ids.get(name, state.tokens))
                self.states[name] = Cached(tokens, [list(ids) for ids in fresh], state.only)
            elif fresh is not None:
                for ids, more in zip(state.blocks, fresh, strict=True):
                    ids.extend(more)

    def _work(self, step: Any) -> list[RunnerWork]:
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        fresh = computed.keys() | set(cached.resumed_req_ids)
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.computed += step.total_num_scheduled_tokens
        self.computed_of.update(step.num_scheduled_tokens)
        return [
            RunnerWork(name, self.states[name], computed[name], count, name in fresh)
            for name, count in step.num_scheduled_tokens.items()
        ]

    def _forward(self, work: list[RunnerWork]) -> None:
        """As far as the host sees it: a late device computes in `result`."""
        hashes = self._hashes(work)
        if self.is_late:
            self._look(work, hashes)
        if self.is_v2 and self.is_late and all(each.count == 1 for each in work):
            return  # one CUDA graph: no layer is seen
        for group, layer in self.memory.in_order if work else ():
            told = group not in self.memory.states and not self._is_drafts(layer)
            # vLLM calls no hook around a layer with states, and those of a drafter when the step was asked for its end
            if told:
                self.connector.wait_for_layer_load(layer)
            if not self.is_late:
                self._compute(work, hashes, group, layer)
            if told:
                self.connector.save_kv_layer(layer, self.memory.tensors[layer], None)

    def _hashes(self, work: list[RunnerWork]) -> list[Any]:
        return [prefix_hashes(each.state.tokens) for each in work]

    def _look(self, work: list[RunnerWork], hashes: list[Any]) -> None:
        """What was loaded must be there when the device is told to read it."""
        for each, own in zip(work, hashes, strict=True):
            for group, layer in self.memory.in_order if each.is_fresh else ():
                self._check(each, group, layer, own, self._before_pending(each, group))
            self._pending.update(self._written(each))  # what comes after it in this very step may find it, too

    def _written(self, work: RunnerWork) -> list[tuple[int, int]]:
        """(group, block) that a step writes to; vLLM lets others find them cached before it has."""
        found = []
        for group, ids in enumerate(work.state.blocks):
            size = self.memory.states.get(group, self.memory.block_tokens)
            last = (work.past + work.count - 1) // size
            first = last if group in self.memory.states else work.past // size
            found += [(group, block) for block in ids[first : last + 1]]
        return found

    def _before_pending(self, work: RunnerWork, group: int) -> int:
        """How many of its positions no step in flight has still to compute."""
        if group in self.memory.states:
            return 0 if work.past and self._pending[group, self._state_block(work, group, work.past)] else work.past
        for at, block in enumerate(work.state.blocks[group]):
            if self._pending[group, block]:
                return min(at * self.memory.block_tokens, work.past)
        return work.past

    def _draft(self, work: list[RunnerWork]) -> None:
        """A drafter comes after the sampled token, which it needs."""
        for group, layer in self.memory.in_order if self.drafts_from is not None else ():
            module = layer_index(layer) - (self.drafts_from or 0)
            for each in work if module >= 0 else ():
                if each.name not in self.aborted:
                    draft(self.memory, module, layer, group, each)

    def _is_drafts(self, layer: str) -> bool:
        return self.drafts_from is not None and layer_index(layer) >= self.drafts_from

    def _compute(self, work: list[RunnerWork], hashes: list[Any], group: int, layer: str) -> None:
        if self._is_drafts(layer):
            return
        for each, own in zip(work, hashes, strict=True):
            self._check(each, group, layer, own)
            past, blocks = each.past, each.state.blocks[group]
            if group in self.memory.states:
                upto = past + each.count
                self.memory.write_state(layer, self._state_block(each, group, upto), own[:upto])
                continue
            self.memory.write(layer, blocks, past, own[past : past + each.count])

    def _check(self, work: RunnerWork, group: int, layer: str, hashes: Any, upto: int | None = None) -> None:
        if self._is_drafts(layer):
            return
        if group in self.memory.states:
            if work.past and work.name not in self.aborted and upto in (None, work.past):
                block = self._state_block(work, group, work.past)
                self.memory.check_state(layer, block, hashes[: work.past], work.name)
            return
        window, upto = self.memory.windows[group], work.past if upto is None else upto
        first = max(0, work.past - window + 1) if window else 0
        if work.name not in self.aborted and upto > first:
            self.memory.check(layer, work.state.blocks[group], first, hashes[first:upto], work.name)

    def _state_block(self, work: RunnerWork, group: int, tokens: int) -> int:
        """Where vLLM's kernels find the state after so many tokens, and leave it."""
        block: int = work.state.blocks[group][(tokens - 1) // self.memory.states[group]]
        return block

    def _sampled(self, work: RunnerWork) -> list[int]:
        """A token only when all that is known has been computed."""
        tokens = work.state.tokens
        if work.past + work.count < len(tokens):
            return []
        chosen = self.sample(work.name, tokens) if work.state.only is None else work.state.only
        token = next_token(tokens) if chosen is None else chosen
        tokens.append(token)
        return [token]
