"""Connectors as data: what makes a P and a D of each, how it counts what it hands over, which field of its parameters
says what.

Law: engines of two connectors differ in what is said here, and in nothing else. Anybody's connector is one line:
`given`, with the value of --kv-transfer-config and, where it needs them, what P and D have besides and variables.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from kvbaton.engines.vllm.launch import launching

Device = Literal["cuda", "cpu"]
P, D = "p0", "d0"
NIXL_BEST: Mapping[str, str] = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on", "UCX_TLS": "cuda_ipc,cuda_copy,sm,self,tcp"}
"""The best settings that were found for vLLM's own connector between processes on one GPU, with 8 threads."""
NIXL_PACKAGES = ("nixl_cu13", "nixl_cu12")
ALIAS = """\
import importlib, sys
for part in ("_bindings", "_api", "logging", "_utils"):
    try:
        sys.modules["nixl." + part] = importlib.import_module("{package}." + part)
    except ModuleNotFoundError:
        pass
"""


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """One engine of a pair, as its connector has to know it."""

    name: str  # P or D, or another D behind a router of ours
    home: Path  # of the pair: keys, shims
    device: Device
    port: int  # HTTP
    side_port: int  # where other engines speak to it
    other_side_port: int
    registry: str = ""  # of a router of ours; without one the two are told of each other
    settings: Mapping[str, Any] = {}
    turn_s: float = 0.0


Parts = tuple[Mapping[str, Any], Mapping[str, str]]
"""The value of --kv-transfer-config, and variables."""


class Connector(msgspec.Struct, frozen=True, kw_only=True):
    """One contender. `handed`: its counter of prompts that D took over; where P's parameters name source and blocks."""

    name: str
    parts: Callable[[Seat], Parts]
    handed: str = ""  # "": D's answers say it, by the tokens of the prompt that it did not compute
    registers: bool = False  # at our router's registry; others are named to a router by URL
    is_alone: bool = False  # there is no P: every engine answers by itself
    lease_field: str = ""  # of kv_connector_extra_config: seconds for which P keeps a prompt
    source_field: str = ""
    blocks_field: str = ""
    line: str = ""  # as a user gave it

    @property
    def takes_all_poison(self) -> bool:
        """Whether it is known which fields to mutilate."""
        return bool(self.source_field and self.blocks_field)


def fixed(name: str, config: Mapping[str, Any], variables: Mapping[str, str] = {}, **more: Any) -> Connector:
    """A connector whose P and D have the same configuration, but for fields of `Seat` in it: `{name}`, `{port}`, …"""

    def parts(seat: Seat) -> Parts:
        text = json.dumps([dict(config), dict(variables)])
        for field in ("name", "port", "side_port", "other_side_port", "home"):
            text = text.replace(f"{{{field}}}", str(getattr(seat, field)))
        made, around = json.loads(text)
        made.setdefault("kv_connector_extra_config", {}).update(seat.settings)
        return made, around

    return Connector(name=name, parts=parts, **more)


def _kvbaton(seat: Seat) -> Parts:
    extra = {"name": seat.name, "keys": str(seat.home / "keys"), "control_port": seat.side_port, **seat.settings}
    if seat.registry:
        extra |= {"registry": seat.registry, "http_address": f"{launching.HOST}:{seat.port}"}
    else:
        other = D if seat.name == P else P
        extra["peers"] = {other: f"tcp://{launching.HOST}:{seat.other_side_port}"}
    is_p = seat.name[0] == P[0]
    role = "kv_producer" if is_p else "kv_consumer"
    if seat.turn_s:
        extra["turn_s"] = seat.turn_s
    if is_p and (seat.turn_s or "store" in seat.settings):  # it loads too, and vLLM must know
        role, extra["role"] = "kv_both", "prefill"
    return launching.kv_transfer_config(role, "recompute", extra), {}


_NIXL_ON_GPU = fixed(
    "nixl",
    {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
     "kv_connector_extra_config": {"num_threads": 8}},
    {"VLLM_NIXL_SIDE_CHANNEL_HOST": launching.HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": "{side_port}", **NIXL_BEST},
    handed="",
)  # fmt: skip


def _nixl(seat: Seat) -> Parts:
    """On a CPU with the shim that lets its progress thread sleep."""
    if seat.device == "cpu":
        around = launching.nixl_environment(seat.home, seat.side_port)
        extra = {**launching.NIXL["kv_connector_extra_config"], **seat.settings}
        return {**launching.NIXL, "kv_connector_extra_config": extra}, around | _nixl_path(seat.home / "site")
    config, variables = _NIXL_ON_GPU.parts(seat)
    set_here = {name: os.environ[name] for name in NIXL_BEST if name in os.environ}  # as other machines want it
    return config, {**variables, **set_here, **_nixl_path(seat.home / "nixl")}


HOST_WORKER: Mapping[str, Any] = {
    "spec_name": "HostOffloadingSpec", "spec_module_path": "kvbaton_proof.rig.offloading_host",
}  # fmt: skip
"""The worker of OffloadingConnector on a CPU, where vLLM has none of its own."""
OFFLOADED_BYTES = 1 << 30


def _offloading(seat: Seat) -> Parts:
    extra = {"cpu_bytes_to_use": OFFLOADED_BYTES, **(HOST_WORKER if seat.device == "cpu" else {}), **seat.settings}
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {**config, "kv_connector_extra_config": extra}, {}


NOTHING = Connector(name="", parts=lambda seat: ({}, {}), is_alone=True)
"""vLLM as it is."""
CONNECTORS: dict[str, Connector] = {
    each.name: each
    for each in (
        Connector(
            name="kvbaton", parts=_kvbaton, handed='kvbaton_ends_total{end="delivered"', registers=True,
            lease_field="lease_s", source_field="ticket", blocks_field="ticket",
        ),
        Connector(
            name="nixl", parts=_nixl, handed="vllm:nixl_xfer_time_seconds_count", lease_field="kv_lease_duration",
            source_field="remote_engine_id", blocks_field="remote_block_ids",
        ),
        Connector(name="offloading", parts=_offloading, is_alone=True),
    )
}  # fmt: skip
"""By name; `given` adds to them."""


class _Given(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A connector in a user's words."""

    config: dict[str, Any]
    p: dict[str, Any] = {}  # what P has besides, or in place of it
    d: dict[str, Any] = {}
    variables: dict[str, str] = {}
    handed: str = ""
    is_alone: bool = False
    lease_field: str = ""
    source_field: str = ""
    blocks_field: str = ""


def given(text: str) -> Connector:
    """`NAME=JSON` or `NAME=FILE`, made known under its name: the value of --kv-transfer-config, or an object that has
    it as `config`, and the other fields of `_Given`. ValueError says what is wrong."""
    name, _, rest = text.partition("=")
    if not re.fullmatch(r"[a-z][\w.]{0,30}", name) or not rest:
        raise ValueError(f"got {text!r}, expected NAME=JSON or NAME=FILE, a name of small letters, digits, _ and .")
    if name in BUILT_IN:
        raise ValueError(f"got {name!r}, which is built in; choose another name")
    try:
        data = rest.encode() if rest.lstrip().startswith("{") else Path(rest).read_bytes()
        told = msgspec.json.decode(data, type=dict[str, Any])
        told = told if "config" in told else {"config": told}
        made = msgspec.convert(told, _Given)
    except OSError as error:
        raise ValueError(f"{rest}: {error.strerror}; name a file, or give JSON") from None
    except msgspec.DecodeError as error:
        raise ValueError(f"{name}: {error}; expected the value of --kv-transfer-config, or that as config") from None
    if "kv_connector" not in made.config:
        raise ValueError(f"{name}: has no kv_connector; expected the value of --kv-transfer-config")

    def parts(seat: Seat) -> Parts:
        own = made.p if seat.name[0] == P[0] else made.d
        return fixed(name, {**made.config, **own}, made.variables).parts(seat)

    more = {field: getattr(made, field) for field in ("handed", "is_alone", "lease_field", "source_field",
                                                      "blocks_field")}  # fmt: skip
    CONNECTORS[name] = Connector(name=name, parts=parts, line=text, **more)
    return CONNECTORS[name]


BUILT_IN = frozenset(CONNECTORS)


def _nixl_path(directory: Path) -> dict[str, str]:
    """vLLM imports `nixl`; where only the package that it stands for is installed, an alias is put on the path."""
    if importlib.util.find_spec("nixl") is not None:
        return {}
    package = next((name for name in NIXL_PACKAGES if importlib.util.find_spec(name) is not None), None)
    if package is None:
        return {}  # vLLM's Python is another one, and has it by its name
    (directory / "nixl").mkdir(parents=True, exist_ok=True)
    (directory / "nixl" / "__init__.py").write_text(ALIAS.format(package=package))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH", "")]))}


def has_nixl() -> bool:
    """Whether vLLM's own connector can be run here."""
    return any(importlib.util.find_spec(name) is not None for name in ("nixl", *NIXL_PACKAGES))
