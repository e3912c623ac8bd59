"""`kvbaton up --engine vllm`: options of its servers.

Law: an option that the chosen engine cannot honour is refused by name, never ignored.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.cli.arguments import whole
from kvbaton.local_cluster.embedded_cluster import places
from kvbaton.local_cluster.vllm_cluster import TINY_KINDS, TINY_SEED, VllmPlan
from kvbaton.local_cluster.vllm_engine import ServerOptions, VllmHandoff, find_python, tiny_model
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.router_settings import RouterSettings

ENGINES = ("embedded", "vllm")
_INSTEAD: Mapping[str, str] = {"blocks": "--kv-gib bounds the KV of vLLM"}
_ONLY_VLLM = ("model", "tiny", "vllm_python", "kv_gib", "max_model_len", "dp_prefill", "dp_decode")


def add_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--engine", choices=ENGINES, default="embedded", help="the engine: kvbaton's own small one, or vLLM")
    add("--model", default=None, metavar="PATH", help="vllm: directory of the model (default: a tiny one is generated)")
    add("--tiny", choices=TINY_KINDS, default=None, help="vllm: kind of tiny model (default: llama)")
    add("--vllm-python", default=None, metavar="PATH", help="vllm: its Python interpreter (default: searched for)")
    add("--kv-gib", type=whole(1, 1024), default=None, metavar="N", help="vllm: KV cache of each worker (default: 1)")
    for role in ("prefill", "decode"):
        what = f"vllm: data-parallel ranks of each {role} worker (default: 1)"
        add(f"--dp-{role}", type=whole(1, 16), default=None, metavar="N", help=what)
    add("--max-model-len", type=whole(16, 1 << 20), default=None, metavar="N", help="vllm: tokens (default: 2048)")


def refuse_foreign(args: argparse.Namespace) -> None:
    """Refuse options of the other engine."""
    names = tuple(_INSTEAD) if args.engine == "vllm" else _ONLY_VLLM
    for name in names:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else "; add: --engine vllm"
            raise CommandError(f"argument {flag}: not an option of the {args.engine} engine{instead}")
    if args.model is not None and (args.tiny is not None or args.seed is not None):
        raise CommandError("argument --model: a model has its own weights; remove --tiny and --seed")


def server_of(args: argparse.Namespace, say: Callable[[str], None]) -> ServerOptions:
    """The settings that all servers share, with a model: the operator's, or a tiny one, generated now if need be."""
    python = find_python(args.vllm_python)
    if args.model is None:
        kind = args.tiny or TINY_KINDS[0]
        model = tiny_model(python, kind, TINY_SEED if args.seed is None else args.seed)
        say(f"no --model: serving a tiny {kind} with random weights, {model}")
    else:
        model = Path(args.model).expanduser().resolve()
        if not (model / "config.json").is_file():
            raise CommandError(f"argument --model: {model} has no config.json; name the directory of a model")
    given = {"kv_gib": args.kv_gib, "max_model_len": args.max_model_len, "block_tokens": args.block_tokens}
    given |= {"max_num_seqs": args.max_num_seqs, "policy": args.policy}
    chosen = {name: value for name, value in given.items() if value is not None}
    return ServerOptions(python=python, model=str(model), served_name=_served_name(model), **chosen)


def plan_of(args: argparse.Namespace, server: ServerOptions, settings: RouterSettings, **more: Any) -> VllmPlan:
    """`more`: transport, timings and the port for clients."""
    port = more.pop("port")
    handoff = VllmHandoff(name="-", keys="-", registry="-", http_address="-", mode=str(settings.mode), **more)
    sizes = {"prefill": args.dp_prefill or 1, "decode": args.dp_decode or 1}
    found = places(args.prefill, args.decode, args.tp_prefill, args.tp_decode)
    where = tuple(msgspec.structs.replace(place, dp=sizes[place.role]) for place in found)
    return VllmPlan(
        places=where, server=server, handoff=handoff, settings=settings, host=args.host, port=port,
        router_processes=args.router_processes,
    )  # fmt: skip


def _served_name(model: Path) -> str:
    """The name that clients give as `model`: the directory's, without the version of a tiny one's format."""
    return re.sub(r"^(tiny-\w+)-\d+-v\d+$", r"\1", model.name) or "model"
