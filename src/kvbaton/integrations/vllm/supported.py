"""Configurations of vLLM that are refused at start: those in which KV could be wrong, or an engine could not be found.

Laws: both roles of the connector ask here before anything else, and a refusal says what was found and what to change.
Nothing of vLLM is imported: fields are looked up as they are in 0.30 to 0.32, and one that is missing is not set.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from kvbaton.integrations.vllm.settings import FIELD, ConnectorSettings

RANK_OF_ENGINE = re.compile(r"_dp\d+\Z")
"""What vLLM appends to the engine id of each data-parallel rank; of rank 0 of a dense model nothing else is left."""
SPLIT = ("decode_context_parallel_size", "prefill_context_parallel_size")


def check(vllm_config: Any, settings: ConnectorSettings, outer: Any = None) -> None:
    """ValueError for a configuration whose KV this version cannot hand over, with what to change.

    `outer` is vLLM's own configuration, where it can be seen: in a MultiConnector each child gets another.
    """
    transfers = [vllm_config.kv_transfer_config, getattr(outer, "kv_transfer_config", None)]
    _check_parallel(vllm_config, [each for each in transfers if each is not None])
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ValueError("kvbaton: calculate_kv_scales makes the KV of two engines differ; use static scales")
    _check_role(settings, *transfers)
    _check_storing(settings, vllm_config.kv_transfer_config.kv_load_failure_policy)


def _check_parallel(vllm_config: Any, transfers: list[Any]) -> None:
    parallel = vllm_config.parallel_config
    for field in SPLIT:
        if getattr(parallel, field, 1) > 1:
            raise ValueError(f"kvbaton: {field} above 1 is not supported by this version; run that many engines")
    for found in _data_parallel(parallel, transfers):
        raise ValueError(
            f"kvbaton: data parallelism is not supported by this version ({found}): all ranks would have one name, and "
            "half of the handoffs would reach another rank. Leave out --data-parallel-size and what belongs to it, run "
            "that many engines, each with a name of its own, and let the router choose among them"
        )


def _data_parallel(parallel: Any, transfers: list[Any]) -> Iterator[str]:
    """By what one rank can be seen to be of several. A dense model's ranks are told that there is one of them."""
    if getattr(parallel, "data_parallel_size", 1) > 1:
        yield f"data_parallel_size is {parallel.data_parallel_size}"
    for field in ("data_parallel_index", "data_parallel_rank"):
        if getattr(parallel, field, 0) > 0:
            yield f"{field} is {getattr(parallel, field)}"
    for field in ("data_parallel_external_lb", "data_parallel_hybrid_lb"):
        if getattr(parallel, field, False):
            yield f"{field} is set"
    for transfer in transfers:
        engine_id = str(getattr(transfer, "engine_id", ""))
        if RANK_OF_ENGINE.search(engine_id):
            yield f"engine_id is {engine_id!r}"


def _check_role(settings: ConnectorSettings, transfer: Any, outer: Any) -> None:
    """Whoever loads must be a consumer in vLLM's eyes: only for those it keeps freed blocks until the steps in flight
    have written to them (0.32.0, `Scheduler.defer_block_free`)."""
    missing = {"prefill": not transfer.is_kv_producer, "decode": not transfer.is_kv_consumer}
    if missing.get(settings.role):
        raise ValueError(f"kvbaton: {FIELD}.role: got {settings.role!r}, expected nothing else than kv_role says")
    if settings.store and not transfer.is_kv_consumer:
        raise ValueError(
            f"kvbaton: kv_role: got {transfer.kv_role!r}, expected 'kv_both' with {FIELD}.store: vLLM would let steps "
            f'in flight write over what is loaded from it. Set "kv_role": "kv_both", and {FIELD}.role to "prefill" '
            "where the engine shall only prefill"
        )
    loads = settings.store or (transfer.is_kv_consumer and settings.role != "prefill")
    if loads and outer is not None and not outer.is_kv_consumer:
        raise ValueError(
            f"kvbaton: kv_role: got {outer.kv_role!r} for {outer.kv_connector}, expected 'kv_both' around a connector "
            "that loads: vLLM would let steps in flight write over what is loaded"
        )


def _check_storing(settings: ConnectorSettings, policy: str) -> None:
    if settings.store and policy != "recompute":
        raise ValueError(
            f"kvbaton: kv_load_failure_policy: got {policy!r}, expected 'recompute' with {FIELD}.store: what is not in "
            "the store, or not any more, is computed by this engine"
        )
