"""The router with its sources of workers, as both `up` and `router` run it.

Law: ports are bound before anything else is started, so that a port in use costs one line and no process. Authenticated
workers take precedence over static ones, and both over self-announced ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import shlex
import signal
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.api.http.http_server import serving
from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_door import JoinDoor
from kvbaton.control.keyring import Keyring
from kvbaton.control.plain import PlainListener, PlainSettings
from kvbaton.control.registry import Networks, RegistryReaders, RegistryServer, RosterEntry
from kvbaton.control.registry.registry_places import RegistryPlace
from kvbaton.observe.codes.saying import worth_saying
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.dumps import Dumps, default_directory
from kvbaton.observe.flight.report import ReportError, decode
from kvbaton.observe.metrics.node_metrics import connections
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import Pages, RunningRouter, router_app
from kvbaton.router.dashboard_page import live_page
from kvbaton.router.front_secrets import FrontSecrets
from kvbaton.router.processes.router_parent import router_processes
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.announced import AnnouncedDirectory, Directories
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory, WorkerDirectory
from kvbaton.router.workers.full_workers import FullWorkers
from kvbaton.router.workers.registered import RegistryDirectory

log = logging.getLogger(__name__)

READ_S = 5.0
"""How long a router that reads registries waits for the first of them before it listens."""


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """The sources of workers; at least one."""

    keyring: Keyring | None = None  # with `registry_bind`, workers register here; with `registries`, elsewhere
    registry_bind: str = ""
    join_bind: str = ""  # where members join with a token; "": nowhere
    registries: Sequence[RegistryPlace] = ()  # that run elsewhere; with `registry_bind` too, the list is of all
    networks: Networks = Networks()  # where registered workers may be
    workers: Sequence[ListedEngine] = ()  # that never change
    plain_bind: str = ""  # workers announce themselves here, in the formats of other systems
    plain: PlainSettings = PlainSettings()


class RouterFront(msgspec.Struct, frozen=True):
    """A listening router."""

    url: str
    registry_endpoint: str  # "" without a registry
    plain_endpoint: str  # "" without plain discovery
    join_endpoint: str  # "" without a join door
    directory: WorkerDirectory
    app: RunningRouter


@contextlib.asynccontextmanager
async def fronted(
    sources: Sources,
    settings: RouterSettings,
    *,
    host: str,
    port: int,
    pages: Pages | None = live_page,
    processes: int = 1,
    secrets: FrontSecrets | None = None,
) -> AsyncIterator[RouterFront]:
    """A router and its sources of workers, while the context lasts; `pages` are further operator pages."""
    keyring = sources.keyring
    secrets = secrets or FrontSecrets()
    gathering = Gathering()
    async with contextlib.AsyncExitStack() as stack:
        parts: list[WorkerDirectory] = []
        registry = readers = plain = door = discard = show = None
        full: list[FullWorkers] = []  # once there is a list to mark them in
        listed, reported = functools.partial(_listed, gathering), functools.partial(_reported, gathering, full)
        if keyring is not None and sources.registry_bind:
            admission = Admission(keyring) if sources.join_bind else None
            registry = RegistryServer(
                keyring,
                sources.registry_bind,
                # beside registries that run elsewhere it is read as they are: one rule makes the list
                on_change=_ignore if sources.registries else listed,
                on_report=None if sources.registries else reported,
                networks=sources.networks,
                admission=admission,
            )
            stack.push_async_callback(asyncio.to_thread, registry.close)
            if admission is not None:
                door = JoinDoor(admission, sources.join_bind, registry)
                stack.push_async_callback(asyncio.to_thread, door.close)
        if keyring is not None and sources.registries:
            here = [] if registry is None else [(keyring.name, dialled(registry.endpoint))]
            places = [*sources.registries, *here]
            readers = RegistryReaders(keyring, places, on_change=listed, on_report=reported, networks=sources.networks)
            stack.push_async_callback(asyncio.to_thread, readers.close)
            if registry is not None:
                registry.refuse([f"{_bracketed(host)}:{port}"] if port else [])
                registry.start()  # it is read like the others, and needed by those that start beside it
            if door is not None:
                door.start()
            readers.start()
            # A router that knows of no worker answers 503: where others serve the same cluster, better not to be asked
            if not await asyncio.to_thread(readers.wait_until_read, READ_S):
                log.warning("[registry-silent] no registry has told of a worker within %g s; serving without", READ_S)
        if (source := readers or registry) is not None:
            registered = RegistryDirectory(source)
            full.append(FullWorkers(registered))
            parts.append(full[0])
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
        given = (directory, settings, ticket_key, discard)
        if pages is live_page and source is not None:
            pages = functools.partial(live_page, drain=_drain_command(sources, registry))
        more: dict[str, Any] = {"name": name, "gathering": gathering, "show": show, "pages": pages}
        more["secrets"] = secrets
        app: RunningRouter
        if processes > 1:
            app = parent = await stack.enter_async_context(router_processes(processes, host, port, *given, **more))
            url = parent.url
        else:
            app = site = await stack.enter_async_context(router_app(*given, **more))
            url = await stack.enter_async_context(serving(site, host, port, secrets.tls_files()))
        for each_list in (registry, readers):
            if each_list is not None:
                each_list.refuse([_authority(url)])
        if source is not None:
            source.on_keys = lambda fresh: app.set_ticket_key(fresh.ticket_keys[0])
        if readers is not None:  # they follow the key directory since before there was anyone to tell
            app.set_ticket_key(readers.keyring.ticket_keys[0])
        app.stats.elsewhere = functools.partial(_beside, gathering, registry)
        for each in (plain,) if readers is not None else (registry, plain, door):
            if each is not None:
                each.start()
        yield RouterFront(
            url,
            "" if registry is None else registry.endpoint,
            "" if plain is None else plain.endpoint,
            "" if door is None else door.endpoint,
            directory,
            app,
        )


async def drained(front: RouterFront, drain_s: float, stop: asyncio.Event) -> bool:
    """Take nothing new, and wait until all is answered: for `drain_s` at most, or until `stop` is set again."""
    stop.clear()
    ending, again = asyncio.ensure_future(front.app.drained(drain_s)), asyncio.ensure_future(stop.wait())
    await asyncio.wait((ending, again), return_when=asyncio.FIRST_COMPLETED)
    all_answered = ending.done() and ending.result()
    log.info("[stopping] %s", "drained: every request was answered" if all_answered else "requests are broken off")
    ending.cancel()
    again.cancel()
    return all_answered


def _drain_command(sources: Sources, registry: RegistryServer | None) -> str:
    """As an operator types it on this machine, but for the worker's name at its end."""
    here = "" if registry is None else dialled(registry.endpoint)
    places = ",".join(f"{name}@{endpoint}" for name, endpoint in sources.registries) or here
    keys = "DIR" if sources.keyring is None or not sources.keyring.directory else sources.keyring.directory
    return f"kvbaton drain --keys {shlex.quote(keys)} --registry {places}"


def _authority(url: str) -> str:
    return url.partition("://")[2].rstrip("/")


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def dialled(endpoint: str) -> str:
    """Where this process reaches its own listener."""
    return endpoint.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")


def _beside(gathering: Gathering, registry: RegistryServer | None) -> dict[str, Any]:
    """Figures that are not the router's own: what workers report of their queues, and the registry's port."""
    queues = {
        f"{worker.seat}:{worker.name}:{state}": int(worker.gauges[state])
        for worker in gathering.workers()
        if worker.here
        for state in ("running", "waiting", "loading")
        if state in worker.gauges
    }
    return {"worker_requests": queues, **({} if registry is None else connections(registry.visits))}


def _ignore(_: Sequence[RosterEntry]) -> None:
    pass


def _listed(gathering: Gathering, workers: Sequence[RosterEntry]) -> None:
    told = [entry.registration for entry in workers]
    gathering.listed({each.worker: (each.incarnation, each.role) for each in told})


def _reported(
    gathering: Gathering, full: Sequence[FullWorkers], worker: WorkerId, incarnation: Incarnation, data: bytes
) -> None:
    """On the registry's thread. A report that cannot be decoded is skipped and counted."""
    try:
        report = decode(data)
    except ReportError as error:
        gathering.counters["bad_reports"] += 1
        if worth_saying(gathering.counters["bad_reports"]):
            log.warning("[member-message] a report from %s was skipped: %s", worker, error)
        return
    for each in full:
        each.heard(worker, incarnation, report.gauges)
    gathering.heard(worker, incarnation, report)


@contextlib.asynccontextmanager
async def dumping(gathering: Gathering, name: str, directory: str = "") -> AsyncIterator[None]:
    """SIGUSR2 dumps the router's records; with a directory of their own, failures are written as they happen."""
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
