"""`kvbaton up --engine vllm`: vLLM servers as the workers of a cluster on this machine's CPU.

Law: an option that the engine at hand cannot honour is refused by name, never ignored.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

import kvbaton.cli.vllm_engine as server_words
from kvbaton.cli.arguments import CommandError, whole
from kvbaton.cli.cluster import Member, Place, places
from kvbaton.cli.vllm_engine import Handoff, ServerOptions, free_ports, tiny_model
from kvbaton.router.router_settings import RouterSettings

ENGINES = ("embedded", "vllm")
TINY_KINDS = ("llama", "mla", "gemma3")
TINY_SEED = 7
START_S, START_EACH_S = 180.0, 60.0  # one engine starts in 40 s, a pair on a busy machine in 150 s
_INSTEAD: Mapping[str, str] = {"blocks": "--kv-gib bounds the KV of vLLM"}
_ONLY_VLLM = ("model", "tiny", "vllm_python", "kv_gib", "max_model_len")


def add_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--engine", choices=ENGINES, default="embedded", help="what computes: a small engine of our own, or vLLM")
    add("--model", default=None, metavar="PATH", help="vllm: directory of the model (default: a tiny one is made)")
    add("--tiny", choices=TINY_KINDS, default=None, help="vllm: which kind of tiny model (default: llama)")
    add("--vllm-python", default=None, metavar="PATH", help="vllm: the Python that has it (default: looked for)")
    add("--kv-gib", type=whole(1, 1024), default=None, metavar="N", help="vllm: KV cache of each worker (default: 1)")
    add("--max-model-len", type=whole(16, 1 << 20), default=None, metavar="N", help="vllm: tokens (default: 2048)")


def refuse_foreign(args: argparse.Namespace) -> None:
    """Refuse what only the other engine understands."""
    names = tuple(_INSTEAD) if args.engine == "vllm" else _ONLY_VLLM
    for name in names:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else "; add: --engine vllm"
            raise CommandError(f"argument {flag}: not an option of the {args.engine} engine{instead}")
    if args.model is not None and (args.tiny is not None or args.seed is not None):
        raise CommandError("argument --model: a model of its own has its own weights; leave out --tiny and --seed")


def server_of(args: argparse.Namespace, say: Callable[[str], None]) -> ServerOptions:
    """What all servers share, with a model that is there: the operator's, or a tiny one, made now if need be."""
    python = server_words.find_python(args.vllm_python)
    if args.model is None:
        kind = args.tiny or TINY_KINDS[0]
        model = tiny_model(python, kind, TINY_SEED if args.seed is None else args.seed)
        say(f"no --model: serving a tiny {kind} of random weights, {model}")
    else:
        model = Path(args.model).expanduser().resolve()
        if not (model / "config.json").is_file():
            raise CommandError(f"argument --model: {model} has no config.json; name the directory of a model")
    given = {"kv_gib": args.kv_gib, "max_model_len": args.max_model_len, "block_tokens": args.block_tokens}
    given |= {"max_num_seqs": args.max_num_seqs, "policy": args.policy}
    chosen = {name: value for name, value in given.items() if value is not None}
    return ServerOptions(python=python, model=str(model), served_name=_served_name(model), **chosen)


class VllmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """vLLM servers. `handoff` holds what all share; name, keys, registry and address are filled in."""

    places: tuple[Place, ...]
    server: ServerOptions
    handoff: Handoff
    settings: RouterSettings
    host: str = "127.0.0.1"
    port: int = 0

    @property
    def start_s(self) -> float:
        return START_S + START_EACH_S * sum(place.tp for place in self.places)

    def names(self) -> list[str]:
        return [f"{place.name}:{place.role}" for place in self.places]

    def members(self, directory: str, registry: str) -> list[Member]:
        ports = free_ports(len(self.places))
        return [self._member(place, port, directory, registry) for place, port in zip(self.places, ports, strict=True)]

    def _member(self, place: Place, port: int, directory: str, registry: str) -> Member:
        address = f"{server_words.HOST}:{port}"
        changes = {"name": place.name, "keys": directory, "registry": registry, "http_address": address}
        own = msgspec.to_builtins(msgspec.structs.replace(self.handoff, **changes))
        config = server_words.kv_transfer_config(server_words.KV_ROLES[place.role], self.server.policy, own)
        return member(place, self.server.argv(port, place.tp, config), self.server.kv_gib)


def member(place: Place, argv: list[str], kv_gib: int) -> Member:
    """A server as a child that ends with this program."""
    variables = server_words.environment(kv_gib=kv_gib)
    guarded = [sys.executable, "-m", "kvbaton.cli.vllm_child", *argv]
    return Member(place.name, place.role, guarded, server_words.shown(argv, variables), variables)


def plan_of(args: argparse.Namespace, server: ServerOptions, settings: RouterSettings, **more: Any) -> VllmPlan:
    """`more`: transport, timings and the port for clients."""
    port = more.pop("port")
    handoff = Handoff(name="-", keys="-", registry="-", http_address="-", mode=str(settings.mode), **more)
    where = tuple(places(args.prefill, args.decode, args.tp_prefill, args.tp_decode))
    return VllmPlan(places=where, server=server, handoff=handoff, settings=settings, host=args.host, port=port)


def _served_name(model: Path) -> str:
    """What clients may give as `model`: the directory's name, without the version of a tiny one's format."""
    return re.sub(r"^(tiny-\w+)-\d+-v\d+$", r"\1", model.name) or "model"
