"""`kvbaton router`: the front of a cluster whose workers register with it, or are given as a list of URLs."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator

from kvbaton.api.http import serving
from kvbaton.api.params import Mode
from kvbaton.cli.arguments import CommandError, port, seconds, whole
from kvbaton.cli.fronting import fronted, told_to_stop
from kvbaton.cli.limits import raise_file_limit
from kvbaton.control import keys
from kvbaton.protocol.ids import WorkerId
from kvbaton.router.app import router_app
from kvbaton.router.directory import StaticDirectory, Worker
from kvbaton.router.settings import RouterSettings

_DEFAULT = RouterSettings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--keys", metavar="DIR", help="directory made by kvbaton keys new")
    parser.add_argument("--name", default="router", help="its name in the key directory")
    parser.add_argument("--host", default="127.0.0.1", help="address for clients")
    parser.add_argument("--port", type=port, default=8000, help="port for clients, 0 for a free one")
    parser.add_argument("--registry-host", default="127.0.0.1", help="address where workers register")
    parser.add_argument("--registry-port", type=port, default=7700, help="port where workers register")
    parser.add_argument("--mode", choices=list(Mode), default=_DEFAULT.mode.value, help="where the client names none")
    parser.add_argument("--only-mode", action="store_true", help="refuse requests that ask for another mode")
    parser.add_argument("--deadline-s", type=seconds, default=_DEFAULT.deadline_s, help="of a whole request")
    parser.add_argument("--first-byte-s", type=seconds, default=_DEFAULT.first_byte_s, help="of one try on one pair")
    parser.add_argument(
        "--in-flight-max", type=whole(1, 1 << 20), default=_DEFAULT.in_flight_max, help="more get status 429"
    )
    for flag in ("--prefill-url", "--decode-url"):
        parser.add_argument(flag, action="append", default=[], metavar="URL", help="instead of a registry; pull only")


def run(args: argparse.Namespace) -> int:
    raise_file_limit()
    if bool(args.keys) == bool(args.prefill_url or args.decode_url):
        raise CommandError("give either --keys DIR, or --prefill-url and --decode-url; see: kvbaton router --help")
    return asyncio.run(_serve(args))


def settings_of(args: argparse.Namespace) -> RouterSettings:
    mode = Mode(args.mode)
    allowed = (mode,) if args.only_mode else tuple(Mode)
    return RouterSettings(
        mode=mode,
        modes_allowed=allowed,
        deadline_s=args.deadline_s,
        first_byte_s=args.first_byte_s,
        in_flight_max=args.in_flight_max,
    )


async def _serve(args: argparse.Namespace) -> int:
    serve = _registered(args) if args.keys else _listed(args)
    with told_to_stop() as stop:
        async with serve as lines:
            print("\n".join(lines), flush=True)
            await stop.wait()
    return 0


@contextlib.asynccontextmanager
async def _registered(args: argparse.Namespace) -> AsyncIterator[list[str]]:
    keyring = keys.load(args.keys, args.name)
    host = f"[{args.registry_host}]" if ":" in args.registry_host else args.registry_host
    bind = f"tcp://{host}:{args.registry_port}"
    async with fronted(keyring, settings_of(args), host=args.host, port=args.port, registry_bind=bind) as front:
        yield [
            f"kvbaton router: clients {front.url}/v1, registry {front.registry_endpoint}",
            f"next: kvbaton worker --keys {args.keys} --registry {front.registry_endpoint} --role prefill --name NAME",
        ]


@contextlib.asynccontextmanager
async def _listed(args: argparse.Namespace) -> AsyncIterator[list[str]]:
    workers = []
    for role, urls in (("prefill", args.prefill_url), ("decode", args.decode_url)):
        for number, url in enumerate(urls):
            if not url.startswith(("http://", "https://")):
                raise CommandError(f"argument --{role}-url: got {url!r}, expected http://host:port")
            name = WorkerId(f"{role}{number}")
            workers.append(Worker(name, role, url.rstrip("/"), modes=(Mode.PULL,)))  # type: ignore[arg-type]
    async with (
        router_app(StaticDirectory(workers), settings_of(args)) as app,
        serving(app, args.host, args.port) as url,
    ):
        yield [f"kvbaton router: clients {url}/v1, {len(args.prefill_url)} prefill and {len(args.decode_url)} decode"]
