"""`kvbaton up`: a whole cluster on this machine in one command, until Ctrl-C; with `--check`, its verification.

Law: an option that the chosen engine cannot honour is refused by name, never ignored.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.api.params import Mode
from kvbaton.cli import main, progress
from kvbaton.cli.arguments import planes_choice, port, seconds, seconds_or_off, whole
from kvbaton.cli.flags import log as log_flags
from kvbaton.cli.flags import traces
from kvbaton.cli.progress import note
from kvbaton.cli.screen import stdout
from kvbaton.engines.embedded.worker_options import POLICIES, WorkerOptions, flag_of
from kvbaton.local_cluster import restart_orders
from kvbaton.local_cluster.embedded_cluster import Cluster, ClusterPlan, Startable, places, running, shown_command
from kvbaton.local_cluster.router_front import drained
from kvbaton.local_cluster.vllm_engine import (
    TINY_KINDS,
    TINY_SEED,
    ServerOptions,
    VllmHandoff,
    VllmPlan,
    find_python,
    tiny_model,
)
from kvbaton.processes.child_process import free_ports, raise_file_limit
from kvbaton.processes.operator_control import told_to_stop, unless_stopped
from kvbaton.processes.operator_errors import CommandError, StoppedError
from kvbaton.router.processes.router_parent import PROCESSES_MAX
from kvbaton.router.router_settings import Fallback, RouterSettings
from kvbaton.security.sealing import ENCRYPT
from kvbaton.transports.catalogue import CHECKSUMS

_ROUTER = RouterSettings()
_WORKER = WorkerOptions(name="p0", role="prefill", keys="-", registry="tcp://127.0.0.1:1")
_TIMES = ("lease_s", "transfer_timeout", "defer_timeout", "claim_timeout")
_SIZES = ("blocks", "block_tokens", "max_num_seqs", "seed")
_VLLM_DEFAULTS = {"blocks": "", "block_tokens": "; vllm: its own", "max_num_seqs": "; vllm: its own", "seed": ""}
ENGINES = ("embedded", "vllm")
_INSTEAD: Mapping[str, str] = {"blocks": "--kv-gib bounds the KV of vLLM"}
_ONLY_VLLM = ("model", "tiny", "vllm_python", "kv_gib", "max_model_len", "dp_prefill", "dp_decode")
MEMORY = "memory"
ORDERS_S = 0.25
"""How often orders to restart a worker are looked for."""

_note = functools.partial(note, "up")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--check", action="store_true", help="compare answers with a single engine's in every mode, then exit")
    add("--json", action="store_true", help="print one JSON object on stdout, all else on stderr")
    add = parser.add_argument_group("the cluster").add_argument
    add("--prefill", type=whole(1, 16), default=1, metavar="N", help="prefill workers")
    add("--decode", type=whole(1, 16), default=1, metavar="M", help="decode workers")
    add(
        "--turn-s",
        type=seconds_or_off,
        default=_WORKER.turn_s,
        metavar="S",
        help="decode workers keep a conversation so long for its next turn, prefill workers take it; 0: off",
    )
    add("--host", default="127.0.0.1", help="address for clients")
    add("--port", type=port, default=None, help="port for clients, 0 for a free one (default: 8000)")
    add(
        "--router-processes",
        type=whole(1, PROCESSES_MAX),
        default=1,
        metavar="N",
        help="processes of the router, as of kvbaton router --processes",
    )
    add(
        "--fallback",
        choices=list(Fallback),
        default=Fallback.LOCAL.value,
        help="if no prefill worker is left: aggregated serving by D, or refuse, as --check always does",
    )
    add("--tp-prefill", type=whole(1, 64), default=1, metavar="N", help="ranks of each prefill worker")
    add("--tp-decode", type=whole(1, 64), default=1, metavar="N", help="ranks of each decode worker")
    add("--deadline-s", type=seconds, default=300.0, metavar="SECONDS", help="deadline of a whole request")
    add("--drain-s", type=seconds, default=30.0, metavar="SECONDS", help="time for requests in flight at Ctrl-C")
    add(
        "--store",
        default=None,
        metavar="WHERE",
        help="a shared store: memory starts one here; otherwise as for kvbaton worker",
    )
    add = parser.add_argument_group("handoffs").add_argument
    add("--mode", choices=list(Mode), default=None, help="handoff mode, if the client requests none (default: pull)")
    add(
        "--transport",
        type=planes_choice,
        default=None,
        metavar="NAMES",
        help="transports: auto, or e.g. shm,tcp (default: auto)",
    )
    add("--require-enforcement", action="store_true", help="only transports that confine peers to leases (not vllm)")
    add("--encrypt", choices=ENCRYPT, default=_WORKER.encrypt, help="encrypt KV that crosses TCP (not vllm)")
    add("--checksum", choices=CHECKSUMS, default=_WORKER.checksum, help="compare copies with their source (not vllm)")
    add("--policy", choices=POLICIES, default=_WORKER.policy, help="of decode workers, if a handoff fails")
    for name, text in (
        ("lease_s", "P holds blocks this long after the reader's last message"),
        ("transfer_timeout", "time within which a transfer must progress"),
        ("defer_timeout", "time to wait for the other side to get the request"),
        ("claim_timeout", "time to wait for the answer to a claim"),
    ):
        flag = f"--{name.replace('_', '-')}"
        add(flag, type=seconds, default=getattr(_WORKER, name), metavar="SECONDS", help=text)
    traces.add_arguments(parser.add_argument_group("traces"))
    log_flags.add_arguments(parser)
    group = parser.add_argument_group("the engine")
    add = group.add_argument
    _add_vllm(group)
    for name, low, high, text in (
        ("blocks", 2, 1 << 20, "KV cache blocks per worker"),
        ("block_tokens", 1, 4096, "tokens per block"),
        ("max_num_seqs", 1, 4096, "concurrently running requests"),
        ("seed", 0, (1 << 32) - 1, "seed of the model's weights"),
    ):
        help_text = f"{text} (default: {getattr(_WORKER, name)}{_VLLM_DEFAULTS[name]})"
        add(f"--{name.replace('_', '-')}", type=whole(low, high), default=None, metavar="N", help=help_text)


def refuse(args: argparse.Namespace) -> None:
    """`CommandError` for settings that do not go together; opens nothing."""
    _refuse_foreign(args)
    if args.store is not None and args.engine == "vllm":
        raise CommandError("argument --store: set it in vLLM's own configuration; see docs/store.md")
    _worker_of(args, args.transport or "auto", args.store if args.store not in (None, MEMORY) else "")


def run(args: argparse.Namespace) -> int:
    refuse(args)
    args.otlp_endpoint = _otlp_endpoint(args)
    raise_file_limit()
    if args.engine == "vllm":
        server = _server_of(args)
        return run_loop(_check_vllm(args, server) if args.check else _serve(args, server))
    main.need("numpy")
    return run_loop(_check(args) if args.check else _serve(args))


def _otlp_endpoint(args: argparse.Namespace) -> str:
    if args.otlp_endpoint and args.check:
        raise CommandError("argument --otlp-endpoint: --check sends no spans; remove one of them")
    return "" if args.check else traces.endpoint_of(args.otlp_endpoint, os.environ)


def plan_of(args: argparse.Namespace, transport: str, *, http_port: int, mode: Mode) -> ClusterPlan:
    store_port = free_ports(1)[0] if args.store == MEMORY else 0
    worker = _worker_of(args, transport, f"tcp://127.0.0.1:{store_port}" if store_port else args.store or "")
    try:
        settings = _router_settings(args, mode)
    except ValueError as error:
        raise CommandError(f"{error}; see: kvbaton up --help") from None
    return ClusterPlan(
        prefills=args.prefill, decodes=args.decode, tp_prefill=args.tp_prefill, tp_decode=args.tp_decode,
        worker=worker, settings=settings, host=args.host, port=http_port, store_port=store_port,
        router_processes=args.router_processes,
    )  # fmt: skip


def _router_settings(args: argparse.Namespace, mode: Mode) -> RouterSettings:
    return RouterSettings(
        mode=mode, deadline_s=args.deadline_s, show_pair=True, turn_s=args.turn_s, trace=bool(args.otlp_endpoint),
        trace_sample=args.trace_sample,
        # An answer that D made alone would hide from the check why there was no handoff.
        fallback=Fallback.STRICT if args.check else Fallback(args.fallback),
        streams_continue=True if args.check else _ROUTER.streams_continue,  # the check kills a D under streams
    )  # fmt: skip


def _worker_of(args: argparse.Namespace, transport: str, store: str) -> WorkerOptions:
    names = ("policy", "checksum", "encrypt", "require_enforcement", "turn_s", *_TIMES)
    values = {name: getattr(args, name) for name in names}
    values |= {name: getattr(args, name) for name in _SIZES if getattr(args, name) is not None}
    values |= {"otlp_endpoint": args.otlp_endpoint, "store": store, "transport": transport}
    try:
        return msgspec.structs.replace(_WORKER, **values)
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        raise CommandError(f"argument {flag_of(name)}:{rest}; see: kvbaton up --help") from None


def vllm_plan_of(
    args: argparse.Namespace, server: ServerOptions, transport: str, *, http_port: int, mode: Mode
) -> VllmPlan:
    times = {name: getattr(args, name) for name in (*_TIMES, "otlp_endpoint", "turn_s")}
    handoff = VllmHandoff(
        name="-", keys="-", registry="-", http_address="-", mode=str(mode), transport=transport, **times
    )
    sizes = {"prefill": args.dp_prefill or 1, "decode": args.dp_decode or 1}
    found = places(args.prefill, args.decode, args.tp_prefill, args.tp_decode)
    where = tuple(msgspec.structs.replace(place, dp=sizes[place.role]) for place in found)
    return VllmPlan(
        places=where, server=server, handoff=handoff, settings=_router_settings(args, mode), host=args.host,
        port=http_port, router_processes=args.router_processes,
    )  # fmt: skip


async def _check(args: argparse.Namespace) -> int:
    from kvbaton.local_cluster.answer_check import check, summary

    modes = list(Mode) if args.mode is None else [Mode(args.mode)]
    transports = ["shm", "tcp"] if args.transport is None else [args.transport]
    plans = {each: plan_of(args, each, http_port=args.port or 0, mode=modes[0]) for each in transports}
    with told_to_stop() as stop, progress.shown("check", quiet=args.json) as tell:
        show = _shower(args, tell, len(modes) * len(transports))
        verdict = await check(plans, modes, say=_note, show=show, stop=stop)
    return _told(args, verdict, f"{summary(verdict, modes, transports)}\nverdict: {stdout().verdict(verdict['ok'])}")


async def _check_vllm(args: argparse.Namespace, server: ServerOptions) -> int:
    from kvbaton.local_cluster import vllm_check

    modes = list(Mode) if args.mode is None else [Mode(args.mode)]
    plan = vllm_plan_of(args, server, args.transport or "auto", http_port=args.port or 0, mode=modes[0])
    with told_to_stop() as stop, progress.shown("check", quiet=args.json) as tell:
        verdict = await vllm_check.check(plan, modes, say=_note, show=_shower(args, tell, len(modes)), stop=stop)
    return _told(args, verdict, f"verdict: {stdout().verdict(verdict['ok'])} ({verdict['seconds']} s)")


def _shower(args: argparse.Namespace, tell: Callable[[str], None], rows: int) -> Callable[[str], None]:
    """Rows as they come; with --json they go to stderr."""
    table = sys.stderr if args.json else sys.stdout
    numbers = itertools.count(1)

    def show(line: str) -> None:
        with progress.aside():
            print(line, file=table, flush=True)
        tell(f"{min(next(numbers), rows)} of {rows} rows")

    return show


def _told(args: argparse.Namespace, verdict: Mapping[str, Any], plain: str) -> int:
    print(msgspec.json.encode(verdict).decode() if args.json else plain, flush=True)
    return 0 if verdict["ok"] else 1


async def _serve(args: argparse.Namespace, server: ServerOptions | None = None) -> int:
    mode = Mode(args.mode or Mode.PULL)
    transport = args.transport or "auto"
    http_port = 8000 if args.port is None else args.port
    plan: Startable
    if server is None:
        plan = plan_of(args, transport, http_port=http_port, mode=mode)
    else:
        plan = vllm_plan_of(args, server, transport, http_port=http_port, mode=mode)
    with told_to_stop() as stop:
        async with (
            running(plan, _note, stop) as cluster,
            traces.exported(args.otlp_endpoint, "router", cluster.front.app.gathering),
        ):
            if args.json:
                print(msgspec.json.encode(_facts(cluster)).decode(), flush=True)
            else:
                print("\n".join(_welcome(cluster, plan, transport)), flush=True)
            await _watch(cluster, stop)
            _note(f"stopping: requests in flight have {args.drain_s:g} s; Ctrl-C again ends them at once")
            await drained(cluster.front, args.drain_s, stop)
    _note("all workers have exited")
    return 0


def _facts(cluster: Cluster) -> dict[str, Any]:
    children = [
        {"name": child.name, "role": child.program.role, "pid": child.pid, "command": child.command}
        for child in cluster.children
    ]
    front = cluster.front
    places = {"url": front.url, "registry": front.registry_endpoint, "dir": str(cluster.directory)}
    return {"pid": os.getpid(), **places, "workers": children}


def _welcome(cluster: Cluster, plan: Startable, transport: str) -> Sequence[str]:
    url = cluster.front.url
    roles = [child.program.role for child in cluster.children]
    body = '{"prompt": "Once upon a time", "max_tokens": 32, "temperature": 0, "stream": true}'
    return [
        f"kvbaton is up at {url}/v1: {roles.count('prefill')} prefill, {roles.count('decode')} decode, "
        f"mode {plan.settings.mode}, transport {transport}",
        "",
        *(
            ["  note  the weights are random: answers are noise, the same as one engine's"]
            * isinstance(plan, ClusterPlan)
        ),
        f"  try   curl -N {url}/v1/completions -H 'Content-Type: application/json' -d '{body}'",
        f"  mode  the same with -H 'x-kvbaton-mode: {' | '.join(Mode)}'",
        f"  see   {url}/dashboard",
        f"  trace {shlex.join([*shown_command(), 'inspect', '--last', '1', '--router', url])}",
        f"  look  {url}/workers  {url}/health  {url}/metrics",
        f"  logs  {cluster.directory}/*.log",
        f"  drain {shlex.join([*shown_command(), 'drain'])} NAME --keys {cluster.directory}/keys "
        f"--registry {cluster.front.registry_endpoint}",
        "  again the same with restart in place of drain",
        "  stop  Ctrl-C",
        "",
        "Nothing is restarted silently. To start a worker that died:",
        *(f"  {child.name}  {child.command}" for child in cluster.children),
    ]


async def _watch(cluster: Cluster, stop: asyncio.Event) -> None:
    """Report workers that died and restart those that `kvbaton restart` names, until stopped; the router's log has the
    rest."""
    stopped = asyncio.create_task(stop.wait())
    try:
        while not stopped.done():
            death = asyncio.create_task(cluster.deaths.get())
            await asyncio.wait((stopped, death), timeout=ORDERS_S, return_when=asyncio.FIRST_COMPLETED)
            for name in restart_orders.take(cluster.directory):
                if stop.is_set():  # `restart` ends what is left of the worker, with its requests
                    break
                _note(f"starting {name} again, as ordered")
                with contextlib.suppress(StoppedError):
                    await unless_stopped(cluster.restart(name), stop)
            if death.done():
                child = death.result()
                _note(f"worker {child.name} {child.how_it_ended()}; to start it again: {child.command}")
                for line in child.last_lines():
                    _note(f"  {child.name}: {line}")
            else:
                death.cancel()
    finally:
        stopped.cancel()


def _add_vllm(group: argparse._ArgumentGroup) -> None:
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


def _refuse_foreign(args: argparse.Namespace) -> None:
    """Refuse options of the other engine."""
    names = tuple(_INSTEAD) if args.engine == "vllm" else _ONLY_VLLM
    for name in names:
        if getattr(args, name) is not None:
            flag = f"--{name.replace('_', '-')}"
            instead = f"; {_INSTEAD[name]}" if name in _INSTEAD else "; add: --engine vllm"
            raise CommandError(f"argument {flag}: not an option of the {args.engine} engine{instead}")
    if args.model is not None and (args.tiny is not None or args.seed is not None):
        raise CommandError("argument --model: a model has its own weights; remove --tiny and --seed")


def _server_of(args: argparse.Namespace) -> ServerOptions:
    """The settings that all servers share, with a model: the operator's, or a tiny one, generated now if need be."""
    python = find_python(args.vllm_python)
    if args.model is None:
        kind = args.tiny or TINY_KINDS[0]
        model = tiny_model(python, kind, TINY_SEED if args.seed is None else args.seed)
        _note(f"no --model: serving a tiny {kind} with random weights, {model}")
    else:
        model = Path(args.model).expanduser().resolve()
        if not (model / "config.json").is_file():
            raise CommandError(f"argument --model: {model} has no config.json; name the directory of a model")
    given = {"kv_gib": args.kv_gib, "max_model_len": args.max_model_len, "block_tokens": args.block_tokens}
    given |= {"max_num_seqs": args.max_num_seqs, "policy": args.policy}
    chosen = {name: value for name, value in given.items() if value is not None}
    return ServerOptions(python=python, model=str(model), served_name=_served_name(model), **chosen)


def _served_name(model: Path) -> str:
    """The name that clients give as `model`: the directory's, without the version of a tiny one's format."""
    return re.sub(r"^(tiny-\w+)-\d+-v\d+$", r"\1", model.name) or "model"
