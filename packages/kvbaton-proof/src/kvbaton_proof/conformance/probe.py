"""The smallest connector that hands KV over: proves the harness, and is broken on purpose to prove its alarms.

Law: it keeps vLLM's contract when no fault is named; each `fault` breaks one clause, and the harness must notice.
P's pages are copied in `start_load_kv`, out of another worker of this process; nothing here is fit for anything else.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)

_MEMORY: dict[str, dict[str, Any]] = {}
"""KV tensors by the name in extra_config."""
_LEASES: dict[int, tuple[str, tuple[list[int], ...]]] = {}
_NEXT = itertools.count(1)


@dataclass
class Meta(KVConnectorMetadata):  # type: ignore[misc]
    loads: dict[str, tuple[tuple[list[int], ...], int]] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)


class Probe(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """Pull between engines of one process, by memory copies."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.name, self.fault = extra["name"], extra.get("fault", "")
        self.pending: dict[str, tuple[tuple[list[int], ...], int]] = {}
        self.sent: list[str] = []
        self.done: set[str] = set()
        self.block_tokens = vllm_config.cache_config.block_size

    def get_loaded_kv_cache_group_ids(self, request: Any) -> Any:
        return self._kv_cache_config.transfer_group_ids

    def get_num_new_matched_tokens(self, request: Any, local: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        missing = request.num_prompt_tokens - local
        return (missing, True) if params.get("do_remote_prefill") and missing > 0 else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, external: int) -> None:
        params = request.kv_transfer_params or {}
        if external > 0:
            self.pending[request.request_id] = (blocks.get_block_ids(), params["lease"])
            params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> Meta:
        meta, self.pending, self.sent = Meta(self.pending, self.sent), {}, []
        return meta

    def request_finished(self, request: Any, blocks: list[int]) -> tuple[bool, Any]:
        return self.request_finished_all_groups(request, (blocks,))

    def request_finished_all_groups(self, request: Any, blocks: tuple[list[int], ...]) -> tuple[bool, Any]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_decode"):
            return False, None
        lease = next(_NEXT)
        _LEASES[lease] = (self.name, tuple(list(ids) for ids in blocks))
        return False, {"do_remote_prefill": True, "lease": lease}  # no pin: good until the blocks are reused

    # --- worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        _MEMORY[self.name] = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for request, (blocks, lease) in self._get_connector_metadata().loads.items():
            source, theirs = _LEASES[lease]
            for group, ids in zip(self._kv_cache_config.kv_cache_groups, range(len(blocks)), strict=True):
                for mine, other in zip(blocks[ids], theirs[ids], strict=False):
                    if mine and other and self.fault != "copies nothing":
                        for layer in group.layer_names:
                            _MEMORY[self.name][layer][mine].copy_(_MEMORY[source][layer][other])
            self.done.add(request)

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None: ...

    def wait_for_save(self) -> None: ...

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self.fault == "never reports":
            return KVConnectorTransferResults(None, None, set())
        done, self.done = self.done, set()
        if self.fault == "reports the unknown":
            done = done | {"nobody"}
        failed = done if self.fault == "fails" else set()
        return KVConnectorTransferResults(finished_sending=None, finished_recving=done or None, failed_recving=failed)
