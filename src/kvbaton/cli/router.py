"""`kvbaton router`: the front of a cluster whose workers register, announce themselves, or are given as URLs."""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
from typing import Any

import msgspec

from kvbaton.api.http import run as run_loop
from kvbaton.api.params import Mode
from kvbaton.api.tokens import is_loopback
from kvbaton.cli import traces
from kvbaton.cli.arguments import host_port, port, seconds, whole
from kvbaton.control import keyring
from kvbaton.control.plain import Fleet, PlainSettings
from kvbaton.control.registry import Networks
from kvbaton.local_cluster.router_front import RouterFront, Sources, dumping, fronted
from kvbaton.processes.open_files import raise_file_limit
from kvbaton.processes.operator_control import told_to_stop
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.ids import WorkerId
from kvbaton.router.http import http_client
from kvbaton.router.policy import POLICIES
from kvbaton.router.router_settings import Fallback, OperatorPages, RouterSettings, is_origin
from kvbaton.router.workers.directory import ListedEngine

_DEFAULT = RouterSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser.add_argument_group("where workers come from (at least one)"))
    _add_choices(parser.add_argument_group("how requests are sent on"))
    _add_bounds(parser.add_argument_group("bounds"))
    parser.add_argument("--host", default="127.0.0.1", help="address for clients")
    parser.add_argument("--port", type=port, default=8000, help="port for clients, 0 for a free one")
    parser.add_argument(
        "--operator-pages",
        choices=list(OperatorPages),
        default=_DEFAULT.operator_pages.value,
        help="who may see single requests: clients on this machine, every client, none",
    )
    parser.add_argument(
        "--allow-origin",
        type=_origin,
        action="append",
        default=[],
        metavar="ORIGIN",
        help="accept requests from web pages of this origin, such as https://chat.example",
    )
    parser.add_argument(
        "--flight-dir",
        metavar="DIR",
        default="",
        help="write records of failed requests here; SIGUSR2 writes all records",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout once it serves")
    traces.add_arguments(parser.add_argument_group("traces"))


def _origin(text: str) -> str:
    """An argument type."""
    if not is_origin(text.lower()):
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}, expected as https://host or http://host:port")
    return text.lower()


def _networks(text: str) -> Networks:
    """An argument type."""
    try:
        return Networks.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _add_sources(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--keys", metavar="DIR", help="directory made by kvbaton keys new: workers register here")
    group.add_argument("--name", default="router", help="its name in the key directory")
    group.add_argument("--registry-host", metavar="HOST", default="127.0.0.1", help="address where workers register")
    group.add_argument("--registry-port", metavar="PORT", type=port, default=7700, help="port where workers register")
    group.add_argument(
        "--worker-networks",
        type=_networks,
        default=None,
        metavar="CIDRS",
        help="allowed worker addresses, such as 10.1.0.0/16,fd12::/16, or any "
        "(default: the address that each connects from, or another of the same kind of network)",
    )
    group.add_argument(
        "--plain-discovery",
        type=host_port,
        metavar="HOST:PORT",
        help="accept workers that announce themselves as MoRI-IO's and P2pNccl's do. Not authenticated",
    )
    group.add_argument("--plain-open", action="store_true", help="accept them on addresses other than loopback")
    group.add_argument(
        "--plain-fleet", metavar="KIND", choices=list(Fleet), help=f"accept only one kind of them: {', '.join(Fleet)}"
    )
    for flag in ("--prefill-url", "--decode-url"):
        group.add_argument(flag, action="append", default=[], metavar="URL", help="a static worker; pull only")


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode", choices=list(Mode), default=_DEFAULT.mode.value, help="default mode, if the client names none"
    )
    group.add_argument("--only-mode", action="store_true", help="refuse requests that ask for another mode")
    group.add_argument(
        "--policy", metavar="P", choices=list(POLICIES), default=_DEFAULT.policy, help=", ".join(POLICIES)
    )
    group.add_argument("--no-same-host", action="store_true", help="do not prefer pairs on one host")
    group.add_argument(
        "--fallback",
        choices=list(Fallback),
        default=_DEFAULT.fallback.value,
        help="if no prefill worker is left: refuse, or aggregated serving by D",
    )
    group.add_argument(
        "--disagg-min-tokens",
        type=whole(0, 1 << 30),
        default=_DEFAULT.disagg_min_tokens,
        metavar="N",
        help="aggregated serving by D for shorter prompts (estimated)",
    )
    group.add_argument("--show-pair", action="store_true", help="name the pair in the header x-kvbaton-pair")


def _add_bounds(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--deadline-s", metavar="S", type=seconds, default=_DEFAULT.deadline_s, help="deadline of a whole request"
    )
    group.add_argument(
        "--first-byte-s",
        metavar="S",
        type=seconds,
        default=_DEFAULT.first_byte_s,
        help="time to first byte of one attempt",
    )
    group.add_argument(
        "--connect-s", metavar="S", type=seconds, default=_DEFAULT.connect_s, help="time to connect to a worker"
    )
    group.add_argument(
        "--drain-s", metavar="S", type=seconds, default=_DEFAULT.drain_s, help="time for requests in flight at SIGTERM"
    )
    for flag, field, what in (
        ("--prefill-retries", "prefill_retries", "further prefill workers that are asked for one request"),
        ("--decode-retries", "decode_retries", "further decode workers that are asked for one request"),
    ):
        group.add_argument(flag, type=whole(0, 64), default=getattr(_DEFAULT, field), metavar="N", help=what)
    group.add_argument(
        "--breaker-failures",
        type=whole(1, 1 << 20),
        default=_DEFAULT.breaker_failures,
        metavar="N",
        help="consecutive failures that open a worker's circuit breaker",
    )
    group.add_argument(
        "--in-flight-max",
        metavar="N",
        type=whole(1, 1 << 20),
        default=_DEFAULT.in_flight_max,
        help="more get status 429",
    )
    group.add_argument(
        "--held-bytes-max",
        metavar="N",
        type=whole(1 << 20, 1 << 50),
        default=_DEFAULT.held_bytes_max,
        help="bytes of requests and answers held at once; more get status 503",
    )


def run(args: argparse.Namespace) -> int:
    raise_file_limit()
    if not (args.keys or args.prefill_url or args.decode_url or args.plain_discovery):
        said = "workers must come from somewhere: give --keys DIR, --prefill-url and --decode-url, or --plain-discovery"
        raise CommandError(f"{said}; see: kvbaton router --help")
    if args.only_mode and args.mode != Mode.PULL and not (args.keys or args.plain_discovery):
        raise CommandError(
            f"argument --only-mode: workers given by URL serve pull only, not {args.mode}; give --keys DIR"
        )
    _check_plain(args)
    args.otlp_endpoint = traces.endpoint_of(args.otlp_endpoint, os.environ)
    sources = sources_of(args)
    gc.freeze()  # what is there now stays; requests leave few cycles behind, so look for them rarely
    gc.set_threshold(20_000, 20, 50)
    return run_loop(_serve(args, sources))


def _check_plain(args: argparse.Namespace) -> None:
    """Whoever reaches that address can have requests sent where he likes, so it is not opened by the way."""
    host = (args.plain_discovery or "127.0.0.1:0").rpartition(":")[0]
    if not is_loopback(host) and not args.plain_open:
        raise CommandError(
            f"argument --plain-discovery: {host} is not loopback and announcements have no keys, so anybody there could"
            " list a worker; have workers register (--keys DIR), or give --plain-open"
        )


def settings_of(args: argparse.Namespace) -> RouterSettings:
    mode = Mode(args.mode)
    allowed = (mode,) if args.only_mode else tuple(Mode)
    return RouterSettings(
        mode=mode,
        modes_allowed=allowed,
        policy=args.policy,
        same_host=not args.no_same_host,
        fallback=Fallback(args.fallback),
        disagg_min_tokens=args.disagg_min_tokens,
        deadline_s=args.deadline_s,
        first_byte_s=args.first_byte_s,
        connect_s=args.connect_s,
        drain_s=args.drain_s,
        prefill_retries=args.prefill_retries,
        decode_retries=args.decode_retries,
        breaker_failures=args.breaker_failures,
        in_flight_max=args.in_flight_max,
        held_bytes_max=args.held_bytes_max,
        show_pair=args.show_pair,
        operator_pages=OperatorPages(args.operator_pages),
        origins_allowed=tuple(args.allow_origin),
        trace=bool(args.otlp_endpoint),
        trace_sample=args.trace_sample,
    )


def sources_of(args: argparse.Namespace) -> Sources:
    host = f"[{args.registry_host}]" if ":" in args.registry_host else args.registry_host
    return Sources(
        keyring=keyring.load(args.keys, args.name) if args.keys else None,
        registry_bind=f"tcp://{host}:{args.registry_port}",
        networks=args.worker_networks or Networks(),
        workers=_static(args),
        plain_bind=f"tcp://{args.plain_discovery}" if args.plain_discovery else "",
        plain=PlainSettings(fleet=Fleet(args.plain_fleet) if args.plain_fleet else None),
    )


async def _serve(args: argparse.Namespace, sources: Sources) -> int:
    """Until a signal comes; then what is under way is finished, unless a second one comes."""
    with told_to_stop() as stop:
        async with (
            fronted(sources, settings_of(args), host=args.host, port=args.port) as front,
            traces.exported(args.otlp_endpoint, args.name, front.app.gathering),
            dumping(front.app.gathering, args.name, args.flight_dir),
        ):
            told = msgspec.json.encode(_facts(args, front)).decode() if args.json else "\n".join(_told(args, front))
            print(told, flush=True)
            await stop.wait()
            stop.clear()
            ending = asyncio.ensure_future(front.app.drained(args.drain_s))
            again = asyncio.ensure_future(stop.wait())
            await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            again.cancel()
    return 0


def _facts(args: argparse.Namespace, front: RouterFront) -> dict[str, Any]:
    return {
        "name": args.name, "url": front.url, "pid": os.getpid(), "registry": front.registry_endpoint,
        "plain_discovery": front.plain_endpoint, "prefill_urls": args.prefill_url, "decode_urls": args.decode_url,
    }  # fmt: skip


def _told(args: argparse.Namespace, front: RouterFront) -> list[str]:
    """What an operator needs to know, and what to do next."""
    told = [f"clients {front.url}/v1"]
    if front.registry_endpoint:
        told.append(f"registry {front.registry_endpoint}")
    if front.plain_endpoint:
        told.append(f"plain discovery {front.plain_endpoint}")
    if args.prefill_url or args.decode_url:
        told.append(f"{len(args.prefill_url)} prefill and {len(args.decode_url)} decode by URL")
    lines = [f"kvbaton router: {', '.join(told)}"]
    if front.registry_endpoint:
        worker = f"kvbaton worker --keys {args.keys} --registry {front.registry_endpoint}"
        lines.append(f"next: {worker} --role prefill --name NAME")
    return lines


def _static(args: argparse.Namespace) -> list[ListedEngine]:
    workers = []
    for role, urls in (("prefill", args.prefill_url), ("decode", args.decode_url)):
        for number, url in enumerate(urls):
            try:
                http_client.origin(url.rstrip("/"))
            except ValueError:
                raise CommandError(f"argument --{role}-url: got {url!r}, expected http://host:port") from None
            name = WorkerId(f"{role}{number}")
            workers.append(ListedEngine(name, role, url.rstrip("/"), modes=(Mode.PULL,)))  # type: ignore[arg-type]
    return workers
