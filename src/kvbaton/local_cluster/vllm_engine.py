"""vLLM servers as this program's commands start them: their options, and their connector's settings.

Law: an option here is an option of `kvbaton up`, `bench` or `chaos`. Command line and environment of a server are
`integrations.vllm.launching`'s.

vLLM servers as the workers of a cluster on this machine's CPU.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec

from kvbaton.api.http.fetch import fetch as fetch_answer
from kvbaton.engines.embedded.worker_options import Policy
from kvbaton.engines.vllm.launch.launching import (
    HOST,
    PROBE_S,
    PYTHON_VARIABLE,
    environment,
    find_python,
    kv_transfer_config,
    server_argv,
    shown,
    tiny_model,
)
from kvbaton.engines.vllm.models.tiny_hybrids import HYBRIDS
from kvbaton.local_cluster.embedded_cluster import ClusterPlace
from kvbaton.processes.child_process import GUARD, Child, Program, Say, free_ports, ready
from kvbaton.protocol.legality import Role
from kvbaton.router.router_settings import RouterSettings

__all__ = [
    "HOST",
    "KV_ROLES",
    "PROBE_S",
    "PYTHON_VARIABLE",
    "ServerOptions",
    "VllmHandoff",
    "environment",
    "fetch",
    "find_python",
    "kv_transfer_config",
    "server_argv",
    "serving",
    "shown",
    "tiny_model",
]  # fmt: skip

GET_S = 20.0
KV_ROLES: Mapping[str, str] = {"prefill": "kv_producer", "decode": "kv_consumer", "both": "kv_both"}


class VllmHandoff(msgspec.Struct, frozen=True, kw_only=True):
    """The connector's settings; the names are those of `kv_connector_extra_config`."""

    name: str
    keys: str
    registry: str
    http_address: str
    registry_name: str = "router"
    control_host: str = HOST
    control_port: int = 0
    transport: str = "auto"
    mode: str = "pull"
    lease_s: float = 15.0
    transfer_timeout: float = 30.0
    defer_timeout: float = 60.0
    claim_timeout: float = 10.0
    max_hold_s: float = 180.0
    otlp_endpoint: str = ""
    turn_s: float = 0.0
    role: str = ""


class ServerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that all servers of a cluster share."""

    python: str
    model: str
    served_name: str
    kv_gib: int = 1
    max_model_len: int = 2048
    block_tokens: int | None = None  # vLLM's default: 128 on CPU
    max_num_seqs: int | None = None
    policy: Policy = "recompute"

    def argv(self, port: int, tp: int = 1, kv_config: Mapping[str, Any] | None = None, *, dp: int = 1) -> list[str]:
        words = server_argv(self.python, self.model, self.served_name, port, max_model_len=self.max_model_len)
        for flag, value in (("--block-size", self.block_tokens), ("--max-num-seqs", self.max_num_seqs)):
            words += [] if value is None else [flag, str(value)]
        words += ["--tensor-parallel-size", str(tp)] if tp > 1 else []
        words += ["--data-parallel-size", str(dp)] if dp > 1 else []
        return words if kv_config is None else [*words, "--kv-transfer-config", msgspec.json.encode(kv_config).decode()]


async def serving(url: str, child: Child, within_s: float, say: Say, stop: asyncio.Event | None = None) -> None:
    """Wait until it is ready to serve."""

    async def missing() -> list[str]:
        await fetch(f"{url}/health")
        return []

    await ready(missing, [child], within_s, say, stop=stop, look_s=0.25)


async def fetch(url: str) -> str:
    """The body at a URL; OSError if there is none."""
    answer = await fetch_answer(url, GET_S)
    if answer.status != 200:
        raise OSError(f"{url}: status {answer.status}")
    return answer.text


TINY_KINDS = ("llama", "mla", "gemma3", *HYBRIDS)
TINY_SEED = 7
START_S, START_EACH_S = 180.0, 60.0  # one engine starts in 40 s, a pair on a busy machine in 150 s


class VllmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM servers. `handoff` has the shared settings; name, keys, registry and address are filled in."""

    places: tuple[ClusterPlace, ...]
    server: ServerOptions
    handoff: VllmHandoff
    settings: RouterSettings
    host: str = "127.0.0.1"
    port: int = 0
    router_processes: int = 1

    @property
    def start_s(self) -> float:
        return START_S + START_EACH_S * sum(place.tp * place.dp for place in self.places)

    def names(self) -> list[str]:
        both = Role.BOTH if self.handoff.turn_s else None  # a P that takes turns reads, and a D that keeps them grants
        return [f"{name}:{both or place.role}" for place in self.places for name in place.members]

    def members(self, directory: str, registry: str) -> list[Program]:
        ports = free_ports(len(self.places))
        return [self._member(place, port, directory, registry) for place, port in zip(self.places, ports, strict=True)]

    def _member(self, place: ClusterPlace, port: int, directory: str, registry: str) -> Program:
        address = f"{HOST}:{port}"
        changes = {"name": place.name, "keys": directory, "registry": registry, "http_address": address}
        plays = place.role
        if self.handoff.turn_s and plays == "prefill":  # it loads too, and vLLM must know
            changes["role"], plays = plays, "both"
        own = msgspec.to_builtins(msgspec.structs.replace(self.handoff, **changes))
        config = kv_transfer_config(KV_ROLES[plays], self.server.policy, own)
        return member(place, self.server.argv(port, place.tp, config, dp=place.dp), self.server.kv_gib)


def member(place: ClusterPlace, argv: list[str], kv_gib: int) -> Program:
    """A server as a child process that ends with this program."""
    variables = environment(kv_gib=kv_gib)
    guarded = [*GUARD, *argv]
    return Program(place.name, place.role, guarded, shown(argv, variables), variables)
