"""vLLM configurations without a model: what one engine of the conformance suite looks like.

Law: groups, strides and tensors come from vLLM's own planning and allocation code, never from our idea of them.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import logging
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import msgspec

CONNECTOR_MODULE = "kvbaton.engines.vllm.connector"
CONNECTOR_CLASS = "BatonConnector"
HEAD_FLOATS = 4
MODEL_LEN_MAX = 512
VOCAB = 1000
EOS = 2
STATE = -1
"""In place of a window: the layer keeps a state."""
REFERENCE = -2
"""In place of a window: full attention to the prompt, and a window over the answer (vLLM's R-SWA)."""
ANSWER_WINDOW = 4

_MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": HEAD_FLOATS,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "torch_dtype": "float32",
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": EOS,
}


class EngineShape(msgspec.Struct, frozen=True, kw_only=True):
    """One engine: its KV memory, its ranks and how its scheduler is set."""

    blocks: int = 41  # one of them is vLLM's null block
    block_tokens: int = 4
    windows: tuple[int, ...] = (0, 0)  # one layer each; 0 is full attention, or STATE, or REFERENCE
    kv_dtype: str = "auto"  # or fp8
    latent: bool = False  # rows are latents: one head, the same on every rank
    kv_heads: int = 4  # of the whole model
    ranks: int = 1
    stages: int = 1  # of a pipeline: the layers are dealt out to them in order
    drafts: int = 0  # modules of a drafter, a layer each, behind the model's
    beside: tuple[str, ...] = ()  # in a MultiConnector: ours is called "baton", the other one "offloading"
    chunk_tokens: int = 16
    seqs: int = 8
    model_len: int = MODEL_LEN_MAX
    policy: Literal["recompute", "fail"] = "recompute"
    role: str = "kv_both"
    layout: str = "LBHNC"
    prefix_caching: bool = True
    pipelined: bool = False  # schedule a step before the one ahead of it has run
    aggregated: bool = True  # as the multiprocess executor does, also for one rank
    runner: Literal["v1", "v2"] = "v1"  # whose order of hooks

    @property
    def usable_blocks(self) -> int:
        return self.blocks - 1

    @property
    def stateful(self) -> bool:
        return STATE in self.windows

    @property
    def state_tokens(self) -> int:
        """Of one block of states: a snapshot is kept for each, or one for all."""
        return self.block_tokens if self.prefix_caching else self.model_len

    @property
    def workers(self) -> int:
        return self.stages * self.ranks

    @property
    def layer_windows(self) -> tuple[int, ...]:
        """Of all layers, a drafter's among them."""
        return (*self.windows, *(0,) * self.drafts)

    def layers_of(self, stage: int) -> range:
        count = len(self.layer_windows)
        return range(stage * count // self.stages, (stage + 1) * count // self.stages)

    @property
    def heads_per_rank(self) -> int:
        return 1 if self.latent else max(1, self.kv_heads // self.ranks)


def prepare() -> None:
    """Set what vLLM reads from the environment; before its first import."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("PYTHONHASHSEED", "0")


def hush() -> None:
    """vLLM logs every configuration; only errors are of interest here, and not those that were put in."""
    for name in ("vllm", "kvbaton"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    logging.getLogger("kvbaton").propagate = False


def warm() -> None:
    """Pay for vLLM's imports and its look at the model now, so that no case or seed is charged for them."""
    import vllm.v1.core.sched.async_scheduler
    import vllm.v1.worker.utils  # noqa: F401

    vllm_config(EngineShape(), {}, module="kvbaton_proof.conformance.probe", connector="Probe")


@functools.cache
def _model_config(model_len: int) -> Any:
    from vllm.config import ModelConfig

    with tempfile.TemporaryDirectory(prefix="kvbaton-conformance-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**_MODEL, "max_position_embeddings": model_len}))
        return ModelConfig(
            model=folder,
            tokenizer=folder,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=model_len,
            enforce_eager=True,
        )


def vllm_config(shape: EngineShape, extra: Mapping[str, Any], *, module: str, connector: str) -> Any:
    """The engine's `VllmConfig`, its KV layout resolved."""
    from vllm.config import (
        CacheConfig,
        DeviceConfig,
        KVTransferConfig,
        ParallelConfig,
        SchedulerConfig,
        VllmConfig,
    )

    own = {
        "kv_connector": connector,
        "kv_connector_module_path": module,
        "kv_role": shape.role,
        "kv_load_failure_policy": shape.policy,
        "kv_connector_extra_config": dict(extra),
    }
    transfer = KVTransferConfig(**(_together(shape, own) if shape.beside else own))
    config = VllmConfig(
        model_config=copy.deepcopy(_model_config(shape.model_len)),
        cache_config=CacheConfig(
            block_size=shape.block_tokens,
            enable_prefix_caching=shape.prefix_caching,
            num_gpu_blocks_override=shape.blocks,
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=shape.seqs,
            max_num_batched_tokens=shape.chunk_tokens,
            max_model_len=shape.model_len,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=shape.pipelined and shape.stages == 1,  # runner V1, which CPUs have, cannot with stages
        ),
        parallel_config=ParallelConfig(
            tensor_parallel_size=shape.ranks,
            pipeline_parallel_size=shape.stages,
            **({"distributed_executor_backend": "mp"} if shape.stages > 1 else {}),
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=transfer,
    )
    config.scheduler_config.async_scheduling = shape.pipelined  # the CPU platform switches it off; GPUs do not
    config.cache_config.kv_cache_layout = shape.layout
    config.cache_config.cache_dtype = shape.kv_dtype
    config.cache_config.num_gpu_blocks = shape.blocks
    if shape.drafts:
        from kvbaton_proof.conformance.conformance_oracle import LabDrafter

        config.speculative_config = LabDrafter(shape.drafts, overlapped=shape.pipelined)
    if shape.stateful:  # as vLLM itself sets them for hybrid models
        config.cache_config.mamba_cache_mode = "align" if shape.prefix_caching else "none"
        config.cache_config.mamba_block_size = shape.state_tokens
    return config


def _together(shape: EngineShape, own: dict[str, Any]) -> dict[str, Any]:
    """vLLM's MultiConnector around ours and another."""
    from kvbaton_proof.rig.offloading_host import OFFLOADING

    children = [own if each == "baton" else {**OFFLOADING, "kv_role": shape.role} for each in shape.beside]
    return {
        "kv_connector": "MultiConnector",
        "kv_role": shape.role,
        "kv_load_failure_policy": shape.policy,
        "kv_connector_extra_config": {"connectors": children},
    }


def kv_cache_planning() -> ModuleType:
    """vLLM's module that plans groups and tensors: one of its own since 0.33."""
    home = "vllm.v1.core."
    name = next(each for each in ("kv_cache_planning", "kv_cache_utils") if importlib.util.find_spec(home + each))
    return importlib.import_module(home + name)


def kv_cache_config(config: Any, shape: EngineShape, stage: int | None = None) -> Any:
    """What vLLM plans for these layers: groups, tensors, strides; of all of them, or of those of one stage."""
    planning = kv_cache_planning()
    specs = {layer_name(index): _spec(shape, window) for index, window in enumerate(shape.layer_windows)}
    groups = planning.get_kv_cache_groups(config, specs)
    if stage is not None and shape.stages > 1:
        mine = {layer_name(index): specs[layer_name(index)] for index in shape.layers_of(stage)}
        groups = planning._project_kv_cache_groups_to_worker(groups, mine)
    planned = planning.get_kv_cache_config_from_groups(config, groups, available_memory=1 << 30)
    planned.kv_cache_layout = shape.layout
    planned.kv_tp_replicas = planning.kv_cache_groups_tp_replicas(groups, shape.ranks)
    return planned


def _spec(shape: EngineShape, window: int) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as kinds

    common: dict[str, Any] = {
        "block_size": shape.block_tokens,
        "num_kv_heads": shape.heads_per_rank,
        "head_size": HEAD_FLOATS,
        "dtype": torch.float32 if shape.kv_dtype == "auto" else torch.float8_e4m3fn,
        "max_tp_shards": 1 if shape.latent else shape.kv_heads,
    }
    if window == STATE:
        heads = shape.heads_per_rank
        return kinds.MambaSpec(
            block_size=shape.state_tokens,
            shapes=((3, 2 * heads), (heads, HEAD_FLOATS, 4)),  # a convolution's window, and what it all comes to
            dtypes=(torch.float32, torch.float32),
            page_size_padded=kinds.FullAttentionSpec(**common).page_size_bytes,
            mamba_cache_mode="align" if shape.prefix_caching else "none",
            num_speculative_blocks=shape.drafts,
        )
    if window == REFERENCE:
        return kinds.RSWASpec(rswa_window=ANSWER_WINDOW, **common)
    if shape.latent:
        return (
            kinds.SlidingWindowMLASpec(sliding_window=window, **common) if window else kinds.MLAAttentionSpec(**common)
        )
    return kinds.SlidingWindowSpec(sliding_window=window, **common) if window else kinds.FullAttentionSpec(**common)


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


def layer_index(name: str) -> int:
    return int(name.split(".")[2])
