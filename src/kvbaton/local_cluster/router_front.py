"""The router with whatever tells it of workers, as `up` and `router` both run it.

Law: ports are taken before anything else is started, so that a port in use costs one line and no process. Whoever is
authenticated goes before whoever was listed by hand, and both before whoever only says who he is.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from kvbaton.control.keyring import Keyring
from kvbaton.control.plain import PlainListener, PlainSettings
from kvbaton.control.registry import Networks, RegistryServer, RosterEntry
from kvbaton.observe.codes.saying import worth_saying
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.dumps import Dumps, default_directory
from kvbaton.observe.flight.report import ReportError, decode
from kvbaton.observe.metrics.node_metrics import connections
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import Pages, Router, router_app
from kvbaton.router.dashboard_page import live_page
from kvbaton.router.http.http_server import serving
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.announced import AnnouncedDirectory, Directories
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory, WorkerDirectory
from kvbaton.router.workers.registered import RegistryDirectory

log = logging.getLogger(__name__)


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where workers come from; any of them, at least one."""

    keyring: Keyring | None = None  # with `registry_bind`: workers register here
    registry_bind: str = ""
    networks: Networks = Networks()  # where registered workers may be
    workers: Sequence[ListedEngine] = ()  # that never change
    plain_bind: str = ""  # workers announce themselves here, in the formats of other systems
    plain: PlainSettings = PlainSettings()


class RouterFront(msgspec.Struct, frozen=True):
    """A router that listens."""

    url: str
    registry_endpoint: str  # "" without a registry
    plain_endpoint: str  # "" without plain discovery
    directory: WorkerDirectory
    app: Router


@contextlib.asynccontextmanager
async def fronted(
    sources: Sources, settings: RouterSettings, *, host: str, port: int, pages: Pages | None = live_page
) -> AsyncIterator[RouterFront]:
    """A router and what tells it of workers, while the context lasts; `pages` are further pages for operators."""
    keyring = sources.keyring
    gathering = Gathering()
    async with contextlib.AsyncExitStack() as stack:
        parts: list[WorkerDirectory] = []
        registry = plain = discard = show = None
        if keyring is not None:
            registry = RegistryServer(
                keyring,
                sources.registry_bind,
                on_change=functools.partial(_listed, gathering),
                on_report=functools.partial(_reported, gathering),
                networks=sources.networks,
            )
            stack.push_async_callback(asyncio.to_thread, registry.close)
            registered = RegistryDirectory(registry)
            parts.append(registered)
            discard, show = registered.discard, registered.show
        if sources.workers:
            parts.append(StaticDirectory(sources.workers))
        if sources.plain_bind:
            plain = PlainListener(sources.plain_bind, settings=sources.plain)
            stack.push_async_callback(asyncio.to_thread, plain.close)
            parts.append(AnnouncedDirectory(plain))
        directory = parts[0] if len(parts) == 1 else Directories(*parts)
        ticket_key = None if keyring is None else keyring.ticket_keys[0]
        name = "router" if keyring is None else keyring.name
        routing = router_app(
            directory, settings, ticket_key, discard, name=name, gathering=gathering, show=show, pages=pages
        )
        app = await stack.enter_async_context(routing)
        if registry is not None:
            registry.on_keys = lambda fresh: app.set_ticket_key(fresh.ticket_keys[0])
            app.stats.elsewhere = functools.partial(connections, registry.visits)
        url = await stack.enter_async_context(serving(app, host, port))
        for each in (registry, plain):
            if each is not None:
                each.start()
        yield RouterFront(
            url,
            "" if registry is None else registry.endpoint,
            "" if plain is None else plain.endpoint,
            directory,
            app,
        )


def _listed(gathering: Gathering, workers: Sequence[RosterEntry]) -> None:
    told = [entry.registration for entry in workers]
    gathering.listed({each.worker: (each.incarnation, each.role) for each in told})


def _reported(gathering: Gathering, worker: WorkerId, incarnation: Incarnation, data: bytes) -> None:
    """On the registry's thread. One that cannot be read costs that worker's report, and is counted."""
    try:
        report = decode(data)
    except ReportError as error:
        gathering.counters["bad_reports"] += 1
        if worth_saying(gathering.counters["bad_reports"]):
            log.warning("[member-message] a report of %s was skipped: %s", worker, error)
        return
    gathering.heard(worker, incarnation, report)


@contextlib.asynccontextmanager
async def dumping(gathering: Gathering, name: str, directory: str = "") -> AsyncIterator[None]:
    """SIGUSR2 has the router's records written down; with a directory of their own, failures are as they happen."""
    dumps = Dumps(Path(directory) if directory else default_directory(), name, gathering.records)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGUSR2, dumps.ask)
    if directory:
        gathering.on_flight.append(dumps.on_flight)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGUSR2)
        if directory:
            gathering.on_flight.remove(dumps.on_flight)
        await asyncio.to_thread(dumps.close)
