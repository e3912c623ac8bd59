"""Watches every hook of a connector from outside: what it raised, how long it took, what it reported.

Law: an exception out of any hook is recorded and re-raised as vLLM would see it; nothing about a call is changed,
except that blocks fresh from the pool are poisoned before the connector learns of them.
"""

from __future__ import annotations

import functools
import pickle
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

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
