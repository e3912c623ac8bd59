"""A prefill and a decode configuration, checked offline: can they find each other, connect, and agree on the KV?

Law: it compares what the engines compare (`protocol.content`, `protocol.geometry`, the transports' names); what cannot
be known from here, such as weights on another host, is left to them.

Whether P's ranks can be mapped onto D's: the layouts as far as a launch determines them, through the real planner.

Law: every decision is `protocol.geometry.plan`'s; a model that is not on this host has no shape.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.control.addressing import registry_places
from kvbaton.control.joining.join_client import is_auto
from kvbaton.doctor import key_checks
from kvbaton.doctor.config_checks import ConfiguredEngine
from kvbaton.doctor.config_reading import Finding, finding
from kvbaton.engines.embedded.engine_config import CacheConfig, ModelConfig
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.shared.weights_digest import weights_digest
from kvbaton.engines.vllm.content.vllm_compat import config_digest
from kvbaton.protocol.content import difference
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
from kvbaton.security.sealing import is_loopback
from kvbaton.transports import catalogue

if TYPE_CHECKING:
    from kvbaton.engines.embedded.worker_options import WorkerOptions


CONFIG_BYTES_MAX = 4 << 20
BLOCK_TOKENS = 128
COUNT_MAX = 1024  # of heads and layers, as in `protocol.layout`
HEAD_BYTES = 1024  # any size will do: only the placement of heads matters


def examine_shapes(p: ConfiguredEngine, d: ConfiguredEngine, where: str) -> Iterator[Finding]:
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


CPU_BLOCK = "128"  # vLLM's own choice on CPU
CONFIG_FIELDS_SHOWN = 3
TEXT_CHARS_MAX = 300
DTYPES = {"half": "float16", "float": "float32"}
DEFAULTS = {"kv_cache_dtype": "auto", "quantization": "none", "tokenizer": "", "chat_template": ""}


def examine(p: ConfiguredEngine, d: ConfiguredEngine, device: str = "cpu") -> list[Finding]:
    """Problems between the two. `device`: where vLLM's caches will be."""
    where = f"{p.where} and {d.where}"
    if p.told is None or d.told is None:
        return []
    found = [*_people(p, d, where), *_planes(p, d, where, device), *_times(p, d, where)]
    if (p.settings is None) is not (d.settings is None):
        fix = "pair vLLM with vLLM, and kvbaton worker with kvbaton worker"
        return [*found, finding("pair-differs", where, "engine: one is vLLM, the other is kvbaton worker", fix)]
    return [*found, *_facts(p, d, where, device), *examine_shapes(p, d, where)]


# --- finding each other


def _people(p: ConfiguredEngine, d: ConfiguredEngine, where: str) -> Iterator[Finding]:
    ours, theirs = p.told, d.told
    assert ours is not None and theirs is not None
    if ours.name == theirs.name and not is_auto(ours.name):
        yield finding("pair-name", where, f"name: both are {ours.name}", "give each its own name and keys")
    if ours.keys and theirs.keys:
        names = (ours.name, theirs.name, *(name for name, _ in _places(ours)))
        yield from key_checks.compare(ours.keys, theirs.keys, where, names)
    modes = [mode for mode in ours.modes if mode in theirs.modes]
    if not modes:
        found = f"modes: P has {', '.join(ours.modes)}, D has {', '.join(theirs.modes)}"
        yield finding("pair-modes", where, found, "give both the same modes, or remove modes")
    if is_loopback(ours.control_host) is not is_loopback(theirs.control_host):
        found = f"control_host: P has {ours.control_host}, D has {theirs.control_host}"
        yield finding("pair-unreachable", where, found, "set both to addresses that the other engine can reach")
    yield from _registries(p, d, where)


def _registries(p: ConfiguredEngine, d: ConfiguredEngine, where: str) -> Iterator[Finding]:
    ours, theirs = p.told, d.told
    assert ours is not None and theirs is not None
    here, there = _places(ours), _places(theirs)
    if (here or there) and not here & there:  # one in common is enough: each list is the union of all
        found = f"registry: P has {ours.registry or 'none'}, D has {theirs.registry or 'none'}"
        if ours.registry == theirs.registry:
            found = f"registry_name: P has {ours.registry_name}, D has {theirs.registry_name}"
        yield finding("pair-registry", where, found, "give both the same registry, under one name")
    if isinstance(ours, ConnectorSettings) and isinstance(theirs, ConnectorSettings) and not ours.registry:
        for one, other in ((p, d), (d, p)):
            yield from _peer(one, other, where)


def _places(told: ConnectorSettings | WorkerOptions) -> set[tuple[str, str]]:
    if not told.registry:
        return set()
    return set(registry_places(told.registry.replace("localhost", "127.0.0.1"), told.registry_name))


def _peer(one: ConfiguredEngine, other: ConfiguredEngine, where: str) -> Iterator[Finding]:
    """Without a registry each must list the other's listening address."""
    ours, theirs = one.settings, other.settings
    if ours is None or theirs is None or not (ours.peers or theirs.peers):
        return
    if theirs.control_port == 0:
        found = f"control_port: {theirs.name} uses an ephemeral port, so it cannot be listed under peers"
        yield finding("pair-registry", where, found, f"give {theirs.name} a control_port, or both a registry")
        return
    wanted, listed = f"tcp://{theirs.control_host}:{theirs.control_port}", ours.peers.get(theirs.name)
    if listed != wanted:
        found = f"peers.{theirs.name}: {ours.name} has {listed or 'none'}, but {theirs.name} listens at {wanted}"
        yield finding("pair-registry", where, found, f"set peers.{theirs.name} of {ours.name} to {wanted}")


# --- moving bytes


def _planes(p: ConfiguredEngine, d: ConfiguredEngine, where: str, device: str) -> Iterator[Finding]:
    ours, theirs = p.told, d.told
    assert ours is not None and theirs is not None
    device = device if p.options is None else "cpu"
    here, there = (_offers(each.transport, each.checksum, device) for each in (ours, theirs))
    common = [name for name in here if name in there]
    if not common:
        found = f"transport: P offers {', '.join(here)}, D offers {', '.join(there)}"
        yield finding("pair-transport", where, found, "give both the same transport and checksum")
    elif _two_hosts(ours.control_host, theirs.control_host) and all(
        catalogue.capabilities(n).same_host for n in common
    ):
        found = f"transport: only {', '.join(common)} in common, which work within one host only"
        yield finding("pair-transport", where, found, "add tcp, or another network transport, to transport on both")


def _offers(choice: str, checksum: catalogue.ChecksumChoice, device: str) -> Sequence[str]:
    """By name; for `auto` the transports that this machine would offer."""
    if choice == catalogue.AUTO:
        return catalogue.offered(choice, device, checksum)
    plain = {name: catalogue.checksum_of(name, device, checksum) == "off" for name in catalogue.parse(choice)}
    return [name if plain[name] else name + catalogue.SUMS for name in plain]


def _two_hosts(one: str, other: str) -> bool:
    return one != other and not is_loopback(one) and not is_loopback(other)


def _times(p: ConfiguredEngine, d: ConfiguredEngine, where: str) -> Iterator[Finding]:
    """D must not wait longer than P holds; each alone was checked before."""
    for field in ("transfer_timeout", "defer_timeout"):
        value = getattr(d.told, field)
        if p.max_hold_s < value <= d.max_hold_s:
            found = f"D's {field} ({value:g} s) is above P's max_hold_s ({p.max_hold_s:g} s): P releases first"
            yield finding("time-contradiction", where, found, f"raise max_hold_s on P, or lower {field} on D")


# --- the KV


def _facts(p: ConfiguredEngine, d: ConfiguredEngine, where: str, device: str) -> Iterator[Finding]:
    if p.options is not None and d.options is not None:
        yield from _differing({"seed": str(p.options.seed)}, {"seed": str(d.options.seed)}, where)
        return
    yield from _model(p, d, where)
    if p.launch.options is None or d.launch.options is None:
        return
    yield from _differing(_options(p), _options(d), where)
    dtypes = [DTYPES.get(dtype, dtype) for dtype in (e.launch.option("dtype") or "auto" for e in (p, d))]
    if "auto" not in dtypes:
        yield from _differing({"dtype": dtypes[0]}, {"dtype": dtypes[1]}, where)
    if not is_latent(p):
        sizes = [each.launch.option("block_size") or (CPU_BLOCK if device == "cpu" else "") for each in (p, d)]
        if all(sizes):  # on a GPU vLLM's default depends on the attention backend
            yield from _differing({"block_size": sizes[0]}, {"block_size": sizes[1]}, where)


def _options(engine: ConfiguredEngine) -> dict[str, str]:
    return {name: engine.launch.option(name) or default for name, default in DEFAULTS.items()}


def _differing(ours: dict[str, str], theirs: dict[str, str], where: str) -> Iterator[Finding]:
    """One finding for every field that differs, in the handshake's words."""
    for field, value in ours.items():
        told = difference({field: value}, {field: theirs[field]})
        if told is not None:
            text = told.replace("ours is", "P has").replace("theirs is", "D has")
            yield finding("pair-differs", where, text, f"give both the same {field}")


def _model(p: ConfiguredEngine, d: ConfiguredEngine, where: str) -> Iterator[Finding]:
    """By the content of its files where both are here, as the engines do; otherwise by name."""
    assert p.settings is not None and d.settings is not None
    if p.settings.model_id != d.settings.model_id:
        yield from _differing({"model_id": p.settings.model_id}, {"model_id": d.settings.model_id}, where)
        return
    ours, theirs = (_real(each.launch.option("model")) for each in (p, d))
    if ours == theirs or not (ours and theirs) or p.settings.model_id:
        return
    configs = [config_of(each) for each in (p, d)]
    weights = [_weights(each) for each in (p, d)]
    if not (all(configs) and all(weights)):
        found = f"model: P has {p.launch.option('model')}, D has {d.launch.option('model')}"
        yield finding("pair-model", where, found, "name the same model, or give both the same model_id")
        return
    yield from _differing({"weights": weights[0]}, {"weights": weights[1]}, where)
    here, there = (config or {} for config in configs)
    names = [name for name in {**here, **there} if _digest(name, here) != _digest(name, there)]
    for name in names[:CONFIG_FIELDS_SHOWN]:
        text = f"config.json {name}: P has {here.get(name)!r}, D has {there.get(name)!r}"
        yield finding("pair-differs", where, text[:TEXT_CHARS_MAX], "serve the same model on both")


def _digest(name: str, config: Mapping[str, Any]) -> str:
    """Compares one field by the rule of the compatibility key: what differs between machines does not count."""
    return config_digest(SimpleNamespace(to_dict=lambda: {name: config[name]} if name in config else {}))


def _real(model: str) -> str:
    return os.path.realpath(model) if model and os.path.exists(model) else model


def _weights(engine: ConfiguredEngine) -> str:
    try:
        return weights_digest(engine.launch.option("model"), None)
    except (ValueError, OSError):
        return ""
