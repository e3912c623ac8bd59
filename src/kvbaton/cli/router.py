"""`kvbaton router`: serves clients in front of workers that register, announce themselves, or are given as URLs."""

from __future__ import annotations

import argparse
import gc
import logging
import os
from typing import Any

import msgspec

from kvbaton.api.http import http_client
from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.api.params import Mode
from kvbaton.api.tokens import is_loopback
from kvbaton.cli.arguments import host_port, networks, port, registries, seconds, seconds_or_off, whole
from kvbaton.cli.flags import log as log_flags
from kvbaton.cli.flags import router_access, streams, traces
from kvbaton.control import keyring
from kvbaton.control.joining.join_door import door_bind
from kvbaton.control.plain import Fleet, PlainSettings
from kvbaton.control.registry import Networks, registry_places
from kvbaton.local_cluster.router_front import RouterHandle, Sources, drained, dumping, run_router
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.operator_control import told_to_stop
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.ids import WorkerId
from kvbaton.router.flow.request_admission import BODY_COPIES
from kvbaton.router.front_secrets import FrontSecrets
from kvbaton.router.policy import POLICIES
from kvbaton.router.processes.router_parent import PROCESSES_MAX
from kvbaton.router.router_settings import Fallback, OperatorPages, RouterSettings
from kvbaton.router.workers.directory import ListedEngine

log = logging.getLogger(__name__)

_DEFAULT = RouterSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser.add_argument_group("worker sources (at least one)"))
    _add_choices(parser.add_argument_group("routing"))
    _add_bounds(parser.add_argument_group("bounds"))
    streams.add_arguments(parser.add_argument_group("streams that outlive their decode worker"))
    parser.add_argument("--host", default="127.0.0.1", help="address for clients")
    parser.add_argument("--port", type=port, default=8000, help="port for clients, 0 for a free one")
    parser.add_argument(
        "--processes",
        metavar="N",
        type=whole(1, PROCESSES_MAX),
        default=1,
        help="processes that serve this port; as many as cores where one core is not enough",
    )
    parser.add_argument(
        "--operator-pages",
        choices=list(OperatorPages),
        default=_DEFAULT.operator_pages.value,
        help="who may see individual requests: this machine and operators' keys, every client, none",
    )
    parser.add_argument(
        "--flight-dir",
        metavar="DIR",
        default="",
        help="write records of failed requests here; SIGUSR2 writes all records",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout once it serves")
    router_access.add_arguments(parser.add_argument_group("who may ask, and how"))
    traces.add_arguments(parser.add_argument_group("traces"))
    log_flags.add_arguments(parser)


def _add_sources(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--keys", metavar="DIR", help="key directory (kvbaton keys new); workers register here")
    group.add_argument("--name", default="router", help="its name in the key directory")
    group.add_argument(
        "--registry",
        type=registries,
        metavar="ENDPOINTS",
        default=None,
        help="read the workers from registries that run elsewhere, tcp://a:7700,NAME@tcp://b:7700 "
        "(NAME in the key directory, where it is not router), instead of keeping a list here",
    )
    group.add_argument("--own-registry", action="store_true", help="with --registry: let workers register here too")
    group.add_argument("--registry-host", metavar="HOST", default="127.0.0.1", help="address where workers register")
    group.add_argument("--registry-port", metavar="PORT", type=port, default=7700, help="port where workers register")
    group.add_argument(
        "--join-port",
        metavar="PORT",
        type=port,
        default=None,
        help="port where members join with a token (default: the registry's and 1, if DIR has had a token made)",
    )
    group.add_argument(
        "--worker-networks",
        type=networks,
        default=None,
        metavar="CIDRS",
        help="allowed worker addresses, such as 10.1.0.0/16,fd12::/16, or any "
        "(default: the address that each connects from)",
    )
    group.add_argument(
        "--plain-discovery",
        type=host_port,
        metavar="HOST:PORT",
        help="accept workers that announce themselves like MoRI-IO's and P2pNccl's. Not authenticated",
    )
    group.add_argument("--plain-open", action="store_true", help="accept them on addresses other than loopback")
    group.add_argument(
        "--plain-fleet", metavar="KIND", choices=list(Fleet), help=f"accept only one kind of them: {', '.join(Fleet)}"
    )
    for flag in ("--prefill-url", "--decode-url"):
        group.add_argument(flag, action="append", default=[], metavar="URL", help="a static worker; pull only")


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--mode", choices=list(Mode), default=_DEFAULT.mode.value, help="default mode, if the client requests none"
    )
    group.add_argument("--only-mode", action="store_true", help="refuse requests for another mode")
    group.add_argument(
        "--policy", metavar="P", choices=list(POLICIES), default=_DEFAULT.policy, help=", ".join(POLICIES)
    )
    group.add_argument("--no-same-host", action="store_true", help="do not prefer pairs on one host")
    group.add_argument(
        "--fallback",
        choices=list(Fallback),
        default=_DEFAULT.fallback.value,
        help="if no prefill worker is left: aggregated serving by D, or refuse",
    )
    group.add_argument(
        "--disagg-min-tokens",
        type=whole(0, 1 << 30),
        default=_DEFAULT.disagg_min_tokens,
        metavar="N",
        help="aggregated serving by D for shorter prompts (estimated)",
    )
    group.add_argument(
        "--turn-s",
        type=seconds_or_off,
        default=_DEFAULT.turn_s,
        metavar="S",
        help="have decode workers keep a conversation's KV so long for its next turn, and prefill workers take it; "
        "0: off",
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
        ("--prefill-retries", "prefill_retries", "further prefill workers to try for one request"),
        ("--decode-retries", "decode_retries", "further decode workers to try for one request"),
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
        "--body-limit",
        metavar="BYTES",
        type=whole(1 << 10, 1 << 40),
        default=_DEFAULT.body_bytes_max,
        help="a client's body; a larger one gets status 413. Raise it for images",
    )
    group.add_argument(
        "--held-bytes-max",
        metavar="N",
        type=whole(1 << 20, 1 << 50),
        default=_DEFAULT.held_bytes_max,
        help="bytes of requests and responses in memory; more get status 503",
    )


def refuse(args: argparse.Namespace) -> None:
    """`CommandError` for settings that do not go together; opens nothing."""
    if not (args.keys or args.prefill_url or args.decode_url or args.plain_discovery):
        said = "no source of workers: give --keys DIR, --prefill-url and --decode-url, or --plain-discovery"
        raise CommandError(f"{said}; see: kvbaton router --help")
    if args.only_mode and args.mode != Mode.PULL and not (args.keys or args.plain_discovery):
        raise CommandError(
            f"argument --only-mode: workers given by URL serve pull only, not {args.mode}; give --keys DIR"
        )
    if args.registry and not args.keys:
        raise CommandError("argument --registry: a registry lets in who has a key; give --keys DIR")
    if args.own_registry and not args.registry:
        raise CommandError("argument --own-registry: there is one here already, unless --registry names others")
    _check_plain(args)
    _check_bounds(args)
    _static(args)
    settings_of(args)


def run(args: argparse.Namespace) -> int:
    refuse(args)
    raise_file_limit()
    args.otlp_endpoint = traces.endpoint_of(args.otlp_endpoint, os.environ)
    settings, sources, secrets = settings_of(args), sources_of(args), router_access.secrets_of(args)
    gc.freeze()  # what is there now stays; requests leave few cycles behind, so look for them rarely
    gc.set_threshold(50_000, 20, 50)
    return run_loop(_serve(args, settings, sources, secrets))


def _check_plain(args: argparse.Namespace) -> None:
    """Anyone who can reach that address can redirect requests, so opening it needs a flag of its own."""
    host = (args.plain_discovery or "127.0.0.1:0").rpartition(":")[0]
    if not is_loopback(host) and not args.plain_open:
        raise CommandError(
            f"argument --plain-discovery: {host} is not loopback and announcements have no keys, so anyone could "
            "add a worker; have workers register (--keys DIR), or give --plain-open"
        )


def _check_bounds(args: argparse.Namespace) -> None:
    """A body is held four times while it is under way, and one client may hold half of what there is."""
    least = 2 * BODY_COPIES * args.body_limit
    if args.body_limit != _DEFAULT.body_bytes_max and args.held_bytes_max < least:
        raise CommandError(
            f"argument --body-limit: bodies of {args.body_limit} bytes need --held-bytes-max {least} or more"
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
        turn_s=args.turn_s,
        deadline_s=args.deadline_s,
        first_byte_s=args.first_byte_s,
        connect_s=args.connect_s,
        drain_s=args.drain_s,
        prefill_retries=args.prefill_retries,
        decode_retries=args.decode_retries,
        breaker_failures=args.breaker_failures,
        in_flight_max=args.in_flight_max,
        held_bytes_max=args.held_bytes_max,
        body_bytes_max=args.body_limit,
        show_pair=args.show_pair,
        operator_pages=OperatorPages(args.operator_pages),
        **router_access.cors_of(args),
        **streams.settings_of(args),
        trace=bool(args.otlp_endpoint),
        trace_sample=args.trace_sample,
    )


def sources_of(args: argparse.Namespace) -> Sources:
    host = f"[{args.registry_host}]" if ":" in args.registry_host else args.registry_host
    is_registry = not args.registry or args.own_registry
    return Sources(
        keyring=keyring.load(args.keys, args.name) if args.keys else None,
        registry_bind=f"tcp://{host}:{args.registry_port}" if is_registry else "",
        registries=registry_places(args.registry) if args.registry else (),
        join_bind=door_bind(args.keys, host, args.registry_port, args.join_port) if is_registry else "",
        networks=args.worker_networks or Networks(),
        workers=_static(args),
        plain_bind=f"tcp://{args.plain_discovery}" if args.plain_discovery else "",
        plain=PlainSettings(fleet=Fleet(args.plain_fleet) if args.plain_fleet else None),
    )


async def _serve(args: argparse.Namespace, settings: RouterSettings, sources: Sources, secrets: FrontSecrets) -> int:
    """Until a signal comes; then what is under way is finished, unless a second one comes."""
    with told_to_stop() as stop:
        async with (
            run_router(
                sources, settings, host=args.host, port=args.port, processes=args.processes, secrets=secrets
            ) as front,
            traces.exported(args.otlp_endpoint, args.name, front.app.gathering),
            dumping(front.app.gathering, args.name, args.flight_dir),
        ):
            told = msgspec.json.encode(_facts(args, front)).decode() if args.json else "\n".join(_told(args, front))
            print(told, flush=True)
            await stop.wait()
            await drained(front, args.drain_s, stop)
    log.info("[stopping] stopped")
    return 0


def _facts(args: argparse.Namespace, front: RouterHandle) -> dict[str, Any]:
    return {
        "name": args.name, "url": front.url, "pid": os.getpid(), "processes": args.processes,
        "registry": front.registry_endpoint, "registries": args.registry or "", "join": front.join_endpoint,
        "plain_discovery": front.plain_endpoint, "prefill_urls": args.prefill_url, "decode_urls": args.decode_url,
    }  # fmt: skip


def _told(args: argparse.Namespace, front: RouterHandle) -> list[str]:
    """What an operator needs to know, and what to do next."""
    told = [f"clients {front.url}/v1" + (f" ({args.processes} processes)" if args.processes > 1 else "")]
    if front.registry_endpoint:
        told.append(f"registry {front.registry_endpoint}")
    if front.join_endpoint:
        told.append(f"join {front.join_endpoint}")
    if args.registry:
        told.append(f"workers from {args.registry}")
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
