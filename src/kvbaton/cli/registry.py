"""`kvbaton registry`: the list of a cluster's workers, in a process of its own.

Laws: it keeps nothing on disk and needs nothing of any other registry: workers register with each of them, and whoever
reads makes one list of theirs. One that is killed costs news, and one that comes back takes no one away. SIGTERM and
SIGINT end it.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import msgspec

from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.cli.arguments import host_port, networks, port
from kvbaton.cli.flags import log as log_flags
from kvbaton.control import keyring as keys
from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_door import JoinDoor, door_bind
from kvbaton.control.registry import Networks, RegistryServer, RosterEntry
from kvbaton.control.registry.roster_news import DRAINING, RosterNews, WorkerSeen
from kvbaton.observe.metrics.exposition import Family
from kvbaton.observe.metrics.process_metrics import registry_families
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.operator_control import told_to_stop
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.legality import Role

log = logging.getLogger(__name__)

_ROLES = (Role.REGISTRY, Role.ROUTER)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--keys", required=True, metavar="DIR", default=argparse.SUPPRESS, help="directory made by kvbaton keys new")
    add("--name", default="router", help="its name in the key directory: registry-… or router (the default of members)")
    add("--host", default="127.0.0.1", help="address where workers register and routers read")
    add("--port", type=port, default=7700, help="port for them, 0 for a free one")
    add(
        "--worker-networks",
        type=networks,
        default=None,
        metavar="CIDRS",
        help="allowed worker addresses, such as 10.1.0.0/16,fd12::/16, or any "
        "(default: the address that each connects from)",
    )
    add(
        "--join-port",
        metavar="PORT",
        type=port,
        default=None,
        help="port where members join with a token (default: the next port, if DIR has had a token made)",
    )
    add("--health", type=host_port, metavar="HOST:PORT", help="serve /health and /metrics there (default: off)")
    add("--json", action="store_true", help="print one JSON object on stdout once it serves")
    log_flags.add_arguments(parser, serves_http=False)


def refuse(args: argparse.Namespace) -> None:
    """Any settings of this command go together."""


def run(args: argparse.Namespace) -> int:
    raise_file_limit()
    keyring = keys.load(args.keys, args.name)
    role = keyring.role_of(keyring.name)
    if role not in _ROLES:
        raise CommandError(
            f"argument --name: the key of {args.name} is for {role}; use one for {' or '.join(_ROLES)}, "
            f"made with: kvbaton keys add {args.keys} registry-a"
        )
    host = f"[{args.host}]" if ":" in args.host else args.host
    with contextlib.ExitStack() as stack:
        bind = door_bind(args.keys, host, args.port, args.join_port)
        admission = Admission(keyring) if bind else None
        news = RosterNews()
        server = RegistryServer(
            keyring,
            f"tcp://{host}:{args.port}",
            on_change=lambda workers: news.look(map(_seen, workers)),
            networks=args.worker_networks or Networks(),
            admission=admission,
        )
        stack.callback(server.close)
        door = None
        if admission is not None:
            door = JoinDoor(admission, bind, server)
            stack.callback(door.close)
        return run_loop(_serve(args, server, door))


async def _serve(args: argparse.Namespace, server: RegistryServer, door: JoinDoor | None) -> int:
    with told_to_stop() as stop:
        async with _health(args, server) as url:
            server.start()
            if door is not None:
                door.start()
            at = "" if door is None else door.endpoint
            facts = {"name": args.name, "endpoint": server.endpoint, "join": at, "pid": os.getpid(), "health": url}
            beside = (f", join {at}" if at else "") + (f", health {url}" if url else "")
            said = f"kvbaton registry: {args.name} serves {server.endpoint}{beside}"
            print(msgspec.json.encode(facts).decode() if args.json else said, flush=True)
            await stop.wait()
    log.info("[stopping] stopped")
    return 0


def _seen(entry: RosterEntry) -> WorkerSeen:
    told = entry.registration
    role, state = _role_and_state(entry)
    return WorkerSeen(told.worker, told.incarnation, role, told.control_endpoint, state)


@contextlib.asynccontextmanager
async def _health(args: argparse.Namespace, server: RegistryServer) -> AsyncIterator[str]:
    if not args.health:
        yield ""
        return
    from kvbaton.api.http.path_site import status_page

    def families() -> list[Family]:
        workers: Counter[tuple[str, str]] = Counter(_role_and_state(entry) for entry in server.workers())
        state = (server.readers, server.is_complete, server.counters, server.visits)
        return registry_families(args.name, workers, *state)

    async with status_page(args.health, lambda: health_of(server), families) as url:
        yield f"{url}/health"


def _role_and_state(entry: RosterEntry) -> tuple[str, str]:
    return entry.registration.role, DRAINING if entry.draining else entry.state.value


def health_of(server: RegistryServer) -> dict[str, Any]:
    """The registry as a probe or an operator sees it. It is well as soon as it answers."""
    workers: dict[str, dict[str, int]] = {}
    for role, state in map(_role_and_state, server.workers()):
        states = workers.setdefault(role, {})
        states[state] = states.get(state, 0) + 1
    return {
        "status": "ok",
        "complete": server.is_complete,  # whether everybody has had the time to register
        "workers": workers,
        "routers": server.readers,
        "counters": {**server.counters, **server.visits},
    }
