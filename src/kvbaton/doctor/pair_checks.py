"""A prefill and a decode configuration, checked offline: can they find each other, connect, and agree on the KV?

Law: it compares what the engines compare (`protocol.content`, `protocol.geometry`, the transports' names); what cannot
be known from here, such as weights on another host, is left to them.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from kvbaton.control.addressing import registry_places
from kvbaton.control.joining.join_client import is_auto
from kvbaton.doctor import key_checks, shape_checks
from kvbaton.doctor.config_checks import ConfiguredEngine
from kvbaton.doctor.config_reading import Finding, finding
from kvbaton.engines.vllm.config.connector_settings import ConnectorSettings
from kvbaton.engines.vllm.content.vllm_compat import config_digest, weights_digest
from kvbaton.protocol.content import difference
from kvbaton.security.sealing import is_loopback
from kvbaton.transports import catalogue

if TYPE_CHECKING:
    from kvbaton.engines.embedded.worker_options import WorkerOptions

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
    return [*found, *_facts(p, d, where, device), *shape_checks.examine(p, d, where)]


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
    if not shape_checks.is_latent(p):
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
    configs = [shape_checks.config_of(each) for each in (p, d)]
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
