"""`kvbaton router`: the front of a cluster whose workers register, announce themselves, or are given as URLs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvbaton.api.http import run as run_loop
from kvbaton.api.params import Mode
from kvbaton.cli.arguments import CommandError, port, seconds, whole
from kvbaton.cli.fronting import fronted, told_to_stop
from kvbaton.cli.limits import raise_file_limit
from kvbaton.control import keys
from kvbaton.protocol.ids import WorkerId
from kvbaton.router import wire
from kvbaton.router.app import Router, router_app
from kvbaton.router.directory import StaticDirectory, Worker
from kvbaton.router.door import serving
from kvbaton.router.policy import Policy
from kvbaton.router.settings import Fallback, RouterSettings

_DEFAULT = RouterSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_sources(parser.add_argument_group("where workers come from (at least one)"))
    _add_choices(parser.add_argument_group("how requests are sent on"))
    _add_bounds(parser.add_argument_group("bounds"))
    parser.add_argument("--host", default="127.0.0.1", help="address for clients")
    parser.add_argument("--port", type=port, default=8000, help="port for clients, 0 for a free one")


def _add_sources(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--keys", metavar="DIR", help="directory made by kvbaton keys new: workers register here")
    group.add_argument("--name", default="router", help="its name in the key directory")
    group.add_argument("--registry-host", default="127.0.0.1", help="address where workers register")
    group.add_argument("--registry-port", type=port, default=7700, help="port where workers register")
    for flag in ("--prefill-url", "--decode-url"):
        group.add_argument(
            flag, action="append", default=[], metavar="URL", help="a worker that never changes; pull only"
        )


def _add_choices(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--mode", choices=list(Mode), default=_DEFAULT.mode.value, help="where the client names none")
    group.add_argument("--only-mode", action="store_true", help="refuse requests that ask for another mode")
    group.add_argument("--policy", choices=list(Policy), default=_DEFAULT.policy.value, help="who is asked")
    group.add_argument("--no-same-host", action="store_true", help="do not prefer pairs on one host")
    group.add_argument(
        "--fallback",
        choices=list(Fallback),
        default=_DEFAULT.fallback.value,
        help="when no prefill worker is left: let D compute the prompt (local), or refuse (strict)",
    )
    group.add_argument(
        "--disagg-min-tokens",
        type=whole(0, 1 << 30),
        default=_DEFAULT.disagg_min_tokens,
        metavar="N",
        help="prompts with fewer tokens to compute go to D alone; texts are estimated at 4 characters a token",
    )
    group.add_argument("--show-pair", action="store_true", help="name the pair in the header x-kvbaton-pair")


def _add_bounds(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--deadline-s", type=seconds, default=_DEFAULT.deadline_s, help="of a whole request")
    group.add_argument("--first-byte-s", type=seconds, default=_DEFAULT.first_byte_s, help="of one try on one pair")
    group.add_argument("--connect-s", type=seconds, default=_DEFAULT.connect_s, help="of a connection to a worker")
    group.add_argument("--drain-s", type=seconds, default=_DEFAULT.drain_s, help="for requests under way at SIGTERM")
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
        help="a worker that fails this often in a row is probed instead of asked",
    )
    group.add_argument(
        "--in-flight-max", type=whole(1, 1 << 20), default=_DEFAULT.in_flight_max, help="more get status 429"
    )


def run(args: argparse.Namespace) -> int:
    raise_file_limit()
    if bool(args.keys) == bool(args.prefill_url or args.decode_url):
        raise CommandError("give either --keys DIR, or --prefill-url and --decode-url; see: kvbaton router --help")
    return run_loop(_serve(args))


def settings_of(args: argparse.Namespace) -> RouterSettings:
    mode = Mode(args.mode)
    allowed = (mode,) if args.only_mode else tuple(Mode)
    return RouterSettings(
        mode=mode,
        modes_allowed=allowed,
        policy=Policy(args.policy),
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
        show_pair=args.show_pair,
    )


async def _serve(args: argparse.Namespace) -> int:
    """Until a signal comes; then what is under way is finished, unless a second one comes."""
    serve = _registered(args) if args.keys else _listed(args)
    with told_to_stop() as stop:
        async with serve as (app, lines):
            print("\n".join(lines), flush=True)
            await stop.wait()
            stop.clear()
            ending = asyncio.ensure_future(app.drained(args.drain_s))
            again = asyncio.ensure_future(stop.wait())
            await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
            ending.cancel()
            again.cancel()
    return 0


@contextlib.asynccontextmanager
async def _registered(args: argparse.Namespace) -> AsyncIterator[tuple[Router, list[str]]]:
    keyring = keys.load(args.keys, args.name)
    host = f"[{args.registry_host}]" if ":" in args.registry_host else args.registry_host
    bind = f"tcp://{host}:{args.registry_port}"
    async with fronted(keyring, settings_of(args), host=args.host, port=args.port, registry_bind=bind) as front:
        worker = f"kvbaton worker --keys {args.keys} --registry {front.registry_endpoint}"
        first = f"kvbaton router: clients {front.url}/v1, registry {front.registry_endpoint}"
        yield front.app, [first, f"next: {worker} --role prefill --name NAME"]


@contextlib.asynccontextmanager
async def _listed(args: argparse.Namespace) -> AsyncIterator[tuple[Router, list[str]]]:
    workers = _static(args)
    async with (
        router_app(StaticDirectory(workers), settings_of(args)) as app,
        serving(app, args.host, args.port) as url,
    ):
        counts = f"{len(args.prefill_url)} prefill and {len(args.decode_url)} decode"
        yield app, [f"kvbaton router: clients {url}/v1, {counts}"]


def _static(args: argparse.Namespace) -> list[Worker]:
    workers = []
    for role, urls in (("prefill", args.prefill_url), ("decode", args.decode_url)):
        for number, url in enumerate(urls):
            try:
                wire.origin(url.rstrip("/"))
            except ValueError:
                raise CommandError(f"argument --{role}-url: got {url!r}, expected http://host:port") from None
            name = WorkerId(f"{role}{number}")
            workers.append(Worker(name, role, url.rstrip("/"), modes=(Mode.PULL,)))  # type: ignore[arg-type]
    return workers
