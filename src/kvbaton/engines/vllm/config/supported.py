"""Configurations of vLLM that are refused at start: those in which KV could be wrong, or an engine could not be found.

Laws: both roles of the connector ask here before anything else, and a refusal says what was found and what to change.
Nothing of vLLM is imported: fields are looked up as they are in 0.30 to 0.33, and one that is missing is not set.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from kvbaton.engines.shared.connector_settings import FIELD, ConnectorSettings
from kvbaton.transports import catalogue

ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""PyTorch reads the first that is set; vLLM itself looks at the second alone."""
EXPANDABLE = re.compile(r"expandable_segments\s*:\s*True")
SCATTERED = ("ray", "external_launcher")
"""Executors that may start ranks on other hosts, or a scheduler in each rank."""
SPLIT = ("decode_context_parallel_size", "prefill_context_parallel_size")


class AskedConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What of a launch decides whether its caches can be handed over at all: of a running vLLM, or of a command."""

    device: str = "cpu"  # cpu, cuda, rocm, xpu, tpu, …
    transport: str = catalogue.AUTO
    sleeps: bool = False
    cumem: bool = False
    allocator: str = ""  # PyTorch's, as its environment variable has it
    nodes: int = 1
    executor: str = ""
    ranks: int = 1


def refusals(asked: AskedConfig) -> Iterator[tuple[str, str]]:
    """(what was found and why it cannot work, what to change): also for `kvbaton doctor`, which asks before vLLM."""
    if asked.nodes > 1:
        yield (
            f"nnodes: {asked.nodes}: tensor- and pipeline-parallel ranks of one engine on several hosts are not "
            "supported by this version: an engine is reached at one address",
            "leave out --nnodes and let each data-parallel rank, or one engine, fit on one host",
        )
    if asked.ranks > 1 and asked.executor in SCATTERED:
        yield (
            f"distributed_executor_backend: {asked.executor} may start ranks on other hosts, which this version cannot "
            "reach",
            "set --distributed-executor-backend mp",
        )
    if asked.device not in {"cpu", "cuda"}:
        yield (
            f"device: caches on {asked.device} cannot be handed over by this version: only those in host memory and on "
            "NVIDIA GPUs",
            "run vLLM for CUDA or for CPUs, or another connector",
        )
    if asked.device == "cuda":
        yield from _of_allocators(asked)


def _of_allocators(asked: AskedConfig) -> Iterator[tuple[str, str]]:
    """A cache on a GPU must stay where it is for as long as the engine lives, and what is shared needs a handle."""
    chosen = catalogue.parse(asked.transport)
    by_ipc = chosen == (catalogue.AUTO,) or any(catalogue.plane_of(name).shares for name in chosen)
    if asked.sleeps:
        yield (
            "enable_sleep_mode takes the cache away while peers may read it, which ends an engine by an illegal access",
            "leave out --enable-sleep-mode",
        )
    elif asked.cumem and by_ipc:
        yield (
            "enable_cumem_allocator: memory of that pool has no IPC handle, which transport cuda needs",
            f'leave out --enable-cumem-allocator, or set {FIELD}.transport to "staged-shm,staged-tcp"',
        )
    elif EXPANDABLE.search(asked.allocator) and not asked.cumem:
        yield (
            f"{ALLOCATOR[1]}: expandable_segments:True makes memory that has no IPC handle and may be mapped anew",
            f"leave expandable_segments out of {' and '.join(ALLOCATOR)}",
        )


def asked_of(vllm_config: Any, transport: str, environment: Mapping[str, str] = os.environ) -> AskedConfig:
    """As vLLM has understood it."""
    model, parallel = getattr(vllm_config, "model_config", None), vllm_config.parallel_config
    executor = getattr(parallel, "distributed_executor_backend", None)
    if not isinstance(executor, str):
        executor = "ray" if getattr(executor, "uses_ray", False) else ""
    return AskedConfig(
        device=_device(getattr(vllm_config, "device_config", None)),
        transport=transport,
        sleeps=bool(getattr(model, "enable_sleep_mode", False)),
        cumem=bool(getattr(model, "enable_cumem_allocator", False)),
        allocator=allocator_of(environment),
        nodes=getattr(parallel, "nnodes_within_dp", getattr(parallel, "nnodes", 1)),
        executor=executor,
        ranks=getattr(parallel, "world_size", 1),
    )


def allocator_of(environment: Mapping[str, str]) -> str:
    return next((environment[name] for name in ALLOCATOR if environment.get(name)), "")


def _device(config: Any) -> str:
    """Of a cache; "cpu" where vLLM does not say. PyTorch calls AMD's GPUs cuda as well."""
    device = str(getattr(config, "device_type", "") or "cpu")
    version = getattr(sys.modules.get("torch"), "version", None)
    return "rocm" if device == "cuda" and getattr(version, "hip", None) else device


def check(vllm_config: Any, settings: ConnectorSettings, outer: Any = None) -> None:
    """ValueError for a configuration whose KV this version cannot hand over, with what to change.

    `outer` is vLLM's own configuration, where it can be seen: in a MultiConnector each child gets another.
    """
    transfers = [vllm_config.kv_transfer_config, getattr(outer, "kv_transfer_config", None)]
    _check_parallel(vllm_config.parallel_config)
    if getattr(vllm_config.cache_config, "calculate_kv_scales", False):
        raise ValueError("kvbaton: calculate_kv_scales makes the KV of two engines differ; use static scales")
    for found, fix in refusals(asked_of(vllm_config, settings.transport)):
        raise ValueError(f"kvbaton: {found}. Next: {fix}")
    _check_role(settings, *transfers)
    _check_storing(settings, vllm_config.kv_transfer_config.kv_load_failure_policy)


def _check_parallel(parallel: Any) -> None:
    for field in SPLIT:
        if getattr(parallel, field, 1) > 1:
            raise ValueError(f"kvbaton: {field} above 1 is not supported by this version; run that many engines")
    if getattr(parallel, "enable_elastic_ep", False):
        raise ValueError(
            "kvbaton: enable_elastic_ep: ranks that come, go and change places while they serve are not supported by "
            "this version. Next: leave out --enable-elastic-ep, and start another engine to scale"
        )


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
