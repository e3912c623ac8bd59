"""The configuration of a chaos run's members: a router, a store on a small disk, and workers with short leases.

Law: a member has the same name, address and ports in every incarnation, so that a restart is at the same place.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.engines.embedded.worker_options import Role, WorkerOptions
from kvbaton.processes.child_process import KVBATON_ARGV, free_ports
from kvbaton_proof.chaos.liars.lies import LIAR
from kvbaton_proof.chaos.network import rooms
from kvbaton_proof.chaos.network.networks import Network

ROUTER, STORE = "router", "store"
FALSE_REGISTRY = "registry"
"""The second of two, beside the router's own: it tells the truth until it is told to lie."""

DEADLINE_S = 15.0
"""Within which the router ends every request."""
FIRST_BYTE_S = 6.0
LEASE_S = 3.0
CLAIM_S = 2.0
DEFER_S = 4.0
"""Short, so that a fault of some seconds is longer than each of them."""

STREAM_DEADLINE_S, STREAM_FIRST_BYTE_S = 120.0, 30.0
"""Where streams are long, and one D suddenly has those of two: it is slow then, and not dead."""
BLOCKS = 256
SEQS_MAX = 32
WAITING_MAX = 96
IN_FLIGHT_MAX = 96
"""A flood must meet bounds."""
STALL_S = 2.0
"""Shorter than a D is stopped for, and longer than a machine as busy as this one holds up a D that lives."""
STORE_BYTES = 1 << 20
"""What memory has no room for goes to the disk soon."""
STORE_DISK_BYTES = 24 << 20
DISK_BYTES = 48 << 20
"""A disk is full when somebody else fills it: the store alone keeps within its bound."""
SHM_BYTES = 8192


class Ports(msgspec.Struct, frozen=True):
    """`front`: HTTP, or a store's only one. `back`: control messages, or a router's registry."""

    front: int
    back: int


class Spec(msgspec.Struct, frozen=True):
    """One member."""

    name: str
    role: str  # router, store, registry, prefill or decode
    host: str
    ports: Ports

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.ports.front}"

    @property
    def is_engine(self) -> bool:
        return self.role in ("prefill", "decode")


class Surroundings(msgspec.Struct, frozen=True):
    """What all members of a run share."""

    keys: str
    breakpoints: str  # the conductor's socket
    disk: str  # where the store keeps values
    has_rooms: bool
    transport: str
    deadline_s: float = DEADLINE_S
    first_byte_s: float = FIRST_BYTE_S
    streams: int = 0  # long ones that the engines must have room for
    stream_blocks: int = 0  # each of so many blocks
    copies_percent: float = 0.0
    streams_continue: bool = True


def specs(prefills: int, decodes: int, network: Network, rng: random.Random) -> dict[str, Spec]:
    """Router first, then the store and the registry, then P and D."""
    roles = {ROUTER: "router", STORE: "store", FALSE_REGISTRY: "registry"}
    roles |= {f"p{n}": "prefill" for n in range(prefills)} | {f"d{n}": "decode" for n in range(decodes)}
    found = {}
    for name, role in roles.items():
        host = network.address(name)
        front, back = free_ports(2, host, rng)
        found[name] = Spec(name, role, host, Ports(front, back))
    return found


def names(prefills: int, decodes: int) -> list[str]:
    """The names of all hosts: the members, and one that only a liar is."""
    return [
        ROUTER,
        STORE,
        FALSE_REGISTRY,
        *(f"p{n}" for n in range(prefills)),
        *(f"d{n}" for n in range(decodes)),
        LIAR,
    ]


def argv(
    spec: Spec, all_specs: Mapping[str, Spec], around: Surroundings, changes: Mapping[str, Any], *, full_shm: bool
) -> list[str]:
    """What starts a life of a member, as the host that it is."""
    if spec.role == "router":
        return [*KVBATON_ARGV, *_router_words(spec, all_specs, around)]
    if spec.role == "store":
        words = [*KVBATON_ARGV, *_store_words(spec, around)]
        return rooms.command(around.disk, DISK_BYTES, words) if around.has_rooms else words
    if spec.role == "registry":
        words = [sys.executable, "-m", "kvbaton_proof.chaos.liars.false_registry"]
        return [*words, around.keys, spec.name, spec.host, str(spec.ports.back)]
    options = msgspec.structs.replace(options_of(spec, all_specs, around), **changes)
    text = msgspec.json.encode(options).decode()
    words = [sys.executable, "-m", "kvbaton_proof.chaos.worker_main", around.breakpoints, text]
    if full_shm:
        return rooms.command("/dev/shm", SHM_BYTES, words, full=True)
    return words


def _router_words(spec: Spec, all_specs: Mapping[str, Spec], around: Surroundings) -> list[str]:
    return [
        "router", "--keys", around.keys, "--host", spec.host, "--port", str(spec.ports.front),
        "--registry", _place(all_specs[FALSE_REGISTRY]), "--own-registry", "--registry-host", spec.host,
        "--registry-port", str(spec.ports.back), "--show-pair", "--no-same-host",
        "--fallback", "local", "--deadline-s", str(around.deadline_s), "--first-byte-s", str(around.first_byte_s),
        "--connect-s", "2", "--in-flight-max", str(IN_FLIGHT_MAX),
        "--streams-continue", "on" if around.streams_continue else "off", "--stall-s", str(STALL_S),
    ]  # fmt: skip


def _store_words(spec: Spec, around: Surroundings) -> list[str]:
    return [
        "store", "--keys", around.keys, "--host", spec.host, "--port", str(spec.ports.front),
        "--bytes", str(STORE_BYTES), "--disk", str(Path(around.disk)), "--disk-bytes", str(STORE_DISK_BYTES),
        "--stop-on-eof",
    ]  # fmt: skip


def _place(spec: Spec) -> str:
    return f"{spec.name}@tcp://{spec.host}:{spec.ports.back}"


def options_of(spec: Spec, all_specs: Mapping[str, Spec], around: Surroundings) -> WorkerOptions:
    router, store = all_specs[ROUTER], all_specs[STORE]
    role: Role = "prefill" if spec.role == "prefill" else "decode"
    return WorkerOptions(
        name=spec.name,
        role=role,
        keys=around.keys,
        registry=f"{_place(router)},{_place(all_specs[FALSE_REGISTRY])}",
        http_host=spec.host,
        http_port=spec.ports.front,
        control_host=spec.host,
        control_port=spec.ports.back,
        transport=around.transport,
        lease_s=LEASE_S,
        claim_timeout=CLAIM_S,
        defer_timeout=DEFER_S,
        transfer_timeout=DEFER_S,
        blocks=max(BLOCKS, around.stream_blocks * around.streams),
        max_num_seqs=max(SEQS_MAX, around.streams),
        copies_percent=around.copies_percent if role == "decode" else 0.0,
        waiting_max=WAITING_MAX,
        store=f"tcp://{store.host}:{store.ports.front}",
        store_timeout=0.5,
    )
