"""vLLM servers as the workers of a cluster on this machine's CPU."""

from __future__ import annotations

import msgspec

import kvbaton.local_cluster.vllm_engine as server_words
from kvbaton.engines.vllm.models.tiny_hybrids import HYBRIDS
from kvbaton.local_cluster.embedded_cluster import ClusterPlace
from kvbaton.local_cluster.vllm_engine import ServerOptions, VllmHandoff
from kvbaton.processes.child_process import GUARD, Program
from kvbaton.processes.free_ports import free_ports
from kvbaton.protocol.privileges import Role
from kvbaton.router.router_settings import RouterSettings

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
        address = f"{server_words.HOST}:{port}"
        changes = {"name": place.name, "keys": directory, "registry": registry, "http_address": address}
        plays = place.role
        if self.handoff.turn_s and plays == "prefill":  # it loads too, and vLLM must know
            changes["role"], plays = plays, "both"
        own = msgspec.to_builtins(msgspec.structs.replace(self.handoff, **changes))
        config = server_words.kv_transfer_config(server_words.KV_ROLES[plays], self.server.policy, own)
        return member(place, self.server.argv(port, place.tp, config, dp=place.dp), self.server.kv_gib)


def member(place: ClusterPlace, argv: list[str], kv_gib: int) -> Program:
    """A server as a child process that ends with this program."""
    variables = server_words.environment(kv_gib=kv_gib)
    guarded = [*GUARD, *argv]
    return Program(place.name, place.role, guarded, server_words.shown(argv, variables), variables)
