"""Whether P's ranks can be mapped onto D's: the layouts as far as a launch determines them, through the real planner.

Law: every decision is `protocol.geometry.plan`'s; a model that is not on this host has no shape.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.doctor.config_checks import ConfiguredEngine
from kvbaton.doctor.config_reading import Finding, finding
from kvbaton.engines.embedded.engine_config import CacheConfig, ModelConfig
from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.geometry.layout import (
    Cell,
    EngineLayout,
    Group,
    GroupKind,
    Per,
    Place,
    Plane,
    Rank,
    Share,
    validate,
)
from kvbaton.protocol.geometry.plan import plan

CONFIG_BYTES_MAX = 4 << 20
BLOCK_TOKENS = 128
COUNT_MAX = 1024  # of heads and layers, as in `protocol.layout`
HEAD_BYTES = 1024  # any size will do: only the placement of heads matters


def examine(p: ConfiguredEngine, d: ConfiguredEngine, where: str) -> Iterator[Finding]:
    layouts = []
    for engine in (p, d):
        try:
            layouts.append(_layout(engine))
        except (ValueError, ProtocolError) as error:
            yield finding("pair-shape", engine.where, str(error), "choose a number that divides it")
            return
    source, target = layouts
    if source is None or target is None:
        return
    try:
        plan(source, target)
    except ProtocolError as error:
        yield finding("pair-shape", where, error.detail, "give both the same tensor parallelism and block size")


def is_latent(engine: ConfiguredEngine) -> bool:
    """MLA: its rows may be written into blocks of another size."""
    return bool((config_of(engine) or {}).get("kv_lora_rank"))


def config_of(engine: ConfiguredEngine) -> dict[str, Any] | None:
    """The model's config.json, where it is on this host."""
    model = engine.launch.option("model")
    path = Path(model) / "config.json"
    try:
        if not model or path.stat().st_size > CONFIG_BYTES_MAX:
            return None
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError, RecursionError):
        return None


def _layout(engine: ConfiguredEngine) -> EngineLayout | None:
    if engine.options is not None:
        from kvbaton.engines.embedded.memory.kv_layout import engine_layout  # with NumPy
        from kvbaton.engines.embedded.memory.kv_memory import KvGeometry

        told = engine.options
        cache = CacheConfig(blocks=told.blocks, block_tokens=told.block_tokens, tp=told.tp)
        return engine_layout(KvGeometry(ModelConfig(seed=told.seed), cache))
    config = config_of(engine)
    if config is None:
        return None
    inner = config.get("text_config")
    config = inner if isinstance(inner, dict) else config
    heads, layers = (_count(config, f"num_{what}") for what in ("attention_heads", "hidden_layers"))
    kv_heads = 1 if config.get("kv_lora_rank") else _count(config, "num_key_value_heads") or heads
    if not (heads and layers):
        return None
    if heads % engine.tp:
        raise ValueError(f"tensor_parallel_size: {engine.tp} does not divide the model's {heads} attention heads")
    if kv_heads % engine.tp and engine.tp % kv_heads:
        raise ValueError(f"tensor_parallel_size: {engine.tp} and {kv_heads} KV heads do not divide each other")
    return _vllm_layout(layers, kv_heads, engine.tp)


def _count(config: dict[str, Any], name: str) -> int:
    """0 where the value is missing."""
    value = config.get(name)
    return value if isinstance(value, int) and 0 < value <= COUNT_MAX else 0


def _vllm_layout(layers: int, heads: int, tp: int) -> EngineLayout:
    """Heads of whole blocks, as vLLM's CPU attention stores them: the smallest unit that can move on its own."""
    count = max(1, heads // tp)
    group = Group(
        name="attention",
        kind=GroupKind.FULL,
        block_tokens=BLOCK_TOKENS,
        layers=tuple(f"layer.{number}" for number in range(layers)),
        heads=heads,
        cells=(Cell("kv", HEAD_BYTES, Per.HEAD),),
        dtype="any",
    )
    page = HEAD_BYTES * count
    places = tuple(Place(number, number * page, layers * page) for number in range(layers))
    ranks = tuple(
        Rank(
            pp=0,
            tp=rank,
            dcp=0,
            region_bytes=(layers * page,),
            shares=(Share(rank * heads // tp, count, 1, places, (Plane(0, HEAD_BYTES, 0),)),),
        )
        for rank in range(tp)
    )
    return validate(EngineLayout((group,), ranks))
