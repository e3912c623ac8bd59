"""The model runner of one rank, without a model: takes vLLM's scheduler output, calls the worker hooks in its order.

Law: the order of hooks is that of `vllm.v1.worker.kv_connector_model_runner_mixin` (0.32.0), the part after the forward
in a `finally`. Before a request attends to its past, the past is checked against the oracle.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from kvbaton.integrations.vllm.conformance.oracle import Memory, next_token, prefix_hashes


@dataclass(slots=True)
class Cached:
    """What a worker remembers of a request."""

    tokens: list[int]
    blocks: list[list[int]]


@dataclass
class Runner:
    """One rank. `sample` may replace the token that a request answers with."""

    connector: Any
    memory: Memory
    sample: Callable[[str, list[int]], int | None] = lambda request, tokens: None
    states: dict[str, Cached] = field(default_factory=dict)
    computed: int = 0  # positions, of all requests
    computed_of: Counter[str] = field(default_factory=Counter)
    aborted: set[str] = field(default_factory=set)  # a step in flight still computes them; nobody hears the answer

    def execute(self, step: Any) -> Any:
        """One step; returns vLLM's `ModelRunnerOutput`."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        meta = step.kv_connector_metadata
        assert meta is not None
        connector, output = self.connector, KVConnectorOutput()
        connector.handle_preemptions(meta)
        self._update_states(step)
        connector.bind_connector_metadata(meta)
        context = SimpleNamespace(attn_metadata=None, no_compile_layers={}, virtual_engine=0)
        if step.has_sync_kv_loads:
            connector.start_load_kv(context)
        try:
            sampled = self._forward(step)
        finally:
            if not step.has_sync_kv_loads:
                connector.start_load_kv(context)
            connector.wait_for_save()
            results = connector.get_transfer_results(step.finished_req_ids)
            output.finished_sending = results.finished_sending
            output.finished_recving = results.finished_recving
            output.failed_recving = results.failed_recving
            output.invalid_block_ids = connector.get_block_ids_with_load_errors()
            output.kv_connector_stats = connector.get_kv_connector_stats()
            output.kv_cache_events = connector.get_kv_connector_kv_cache_events()
            output.kv_connector_worker_meta = connector.build_connector_worker_meta()
            connector.clear_connector_metadata()
        if not step.num_scheduled_tokens:
            return ModelRunnerOutput.with_kv_conn_output_only(output)
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[sampled[name] for name in names],
            kv_connector_output=output,
        )

    def _update_states(self, step: Any) -> None:
        for name in step.finished_req_ids:
            self.states.pop(name, None)
        for new in step.scheduled_new_reqs:
            self.states[new.req_id] = Cached(list(new.prompt_token_ids), [list(ids) for ids in new.block_ids])
        cached = step.scheduled_cached_reqs
        for at, name in enumerate(cached.req_ids):
            state, fresh = self.states[name], cached.new_block_ids[at]
            if name in cached.resumed_req_ids:
                state.blocks = [list(ids) for ids in fresh]
                state.tokens = list(cached.all_token_ids.get(name, state.tokens))
            elif fresh is not None:
                for ids, more in zip(state.blocks, fresh, strict=True):
                    ids.extend(more)

    def _forward(self, step: Any) -> dict[str, list[int]]:
        if not step.num_scheduled_tokens:
            return {}
        computed = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        cached = step.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self.computed += step.total_num_scheduled_tokens
        self.computed_of.update(step.num_scheduled_tokens)
        hashes = {name: prefix_hashes(self.states[name].tokens) for name in step.num_scheduled_tokens}
        for group, layer in self.memory.in_order:
            self.connector.wait_for_layer_load(layer)
            for name, count in step.num_scheduled_tokens.items():
                self._attend(name, group, layer, computed[name], count, hashes[name])
            self.connector.save_kv_layer(layer, self.memory.tensors[layer], None)
        return {name: self._sampled(name, computed[name] + count) for name, count in step.num_scheduled_tokens.items()}

    def _attend(self, name: str, group: int, layer: str, past: int, count: int, hashes: Any) -> None:
        window, blocks = self.memory.windows[group], self.states[name].blocks[group]
        first = max(0, past - window + 1) if window else 0
        if name not in self.aborted:
            self.memory.check(layer, blocks, first, hashes[first:past], name)
        self.memory.write(layer, blocks, past, hashes[past : past + count])

    def _sampled(self, name: str, done: int) -> list[int]:
        """A token only when all that is known has been computed."""
        state = self.states[name]
        if done < len(state.tokens):
            return []
        chosen = self.sample(name, state.tokens)
        token = next_token(state.tokens) if chosen is None else chosen
        state.tokens.append(token)
        return [token]
