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
from kvbaton.control.addressing import RegistryPlace
from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_door import JoinDoor
from kvbaton.control.keyring import Keyring
from kvbaton.control.plain import PlainListener, PlainSettings
from kvbaton.control.registry import Networks, RegistryReaders, RegistryServer, RosterEntry
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.observe.flight.collector import Gathering
from kvbaton.observe.flight.dumps import Dumps, default_directory
from kvbaton.observe.flight.flight_records import ReportError, decode
from kvbaton.observe.metrics.handoff_metrics import connections
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.app import Pages, RunningRouter, router_app
from kvbaton.router.dashboard_page import dashboard
from kvbaton.router.front_secrets import FrontSecrets
from kvbaton.router.processes.router_parent import router_processes
from kvbaton.router.router_settings import RouterSettings
from kvbaton.router.workers.directories import AnnouncedDirectory, Directories, FullWorkers, RegistryDirectory
from kvbaton.router.workers.directory import ListedEngine, StaticDirectory, WorkerDirectory

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


class RouterHandle(msgspec.Struct, frozen=True):
    """A listening router."""

    url: str
    registry_endpoint: str  # "" without a registry
    plain_endpoint: str  # "" without plain discovery
    join_endpoint: str  # "" without a join door
    directory: WorkerDirectory
    app: RunningRouter


class _Discovery:
    """The sources of workers of one router, opened in the order of their dependencies."""

    def __init__(self, sources: Sources, gathering: Gathering) -> None:
        self.registry: RegistryServer | None = None
        self.readers: RegistryReaders | None = None
        self.plain: PlainListener | None = None
        self.door: JoinDoor | None = None
        self._sources = sources
        self._full: list[FullWorkers] = []  # once there is a list to mark them in
        self._listed = functools.partial(_listed, gathering)
        self._reported = functools.partial(_reported, gathering, self._full)

    @property
    def registered(self) -> RegistryServer | RegistryReaders | None:
        """Where registered workers are read from."""
        return self.readers or self.registry

    def open_registry(self, keyring: Keyring, stack: contextlib.AsyncExitStack) -> None:
        sources = self._sources
        admission = Admission(keyring) if sources.join_bind else None
        self.registry = RegistryServer(
            keyring,
            sources.registry_bind,
            # beside registries that run elsewhere it is read as they are: one rule makes the list
            on_change=_ignore if sources.registries else self._listed,
            on_report=None if sources.registries else self._reported,
            networks=sources.networks,
            admission=admission,
        )
        stack.push_async_callback(asyncio.to_thread, self.registry.close)
        if admission is not None:
            self.door = JoinDoor(admission, sources.join_bind, self.registry)
            stack.push_async_callback(asyncio.to_thread, self.door.close)

    async def read_registries(self, keyring: Keyring, stack: contextlib.AsyncExitStack, authority: str) -> None:
        """Read those that run elsewhere, and our own like them; `authority` is where this router will listen."""
        registry = self.registry
        here = [] if registry is None else [(keyring.name, dialled(registry.endpoint))]
        self.readers = readers = RegistryReaders(
            keyring,
            [*self._sources.registries, *here],
            on_change=self._listed,
            on_report=self._reported,
            networks=self._sources.networks,
        )
        stack.push_async_callback(asyncio.to_thread, readers.close)
        if registry is not None:
            registry.refuse([authority] if authority else [])
            registry.start()  # it is read like the others, and needed by those that start beside it
        if self.door is not None:
            self.door.start()
        readers.start()
        # A router that knows of no worker answers 503: where others serve the same cluster, better not to be asked
        if not await asyncio.to_thread(readers.wait_until_read, READ_S):
            log.warning("[registry-silent] no registry has told of a worker within %g s; serving without", READ_S)

    def directories(self, stack: contextlib.AsyncExitStack) -> tuple[WorkerDirectory, RegistryDirectory | None]:
        """All workers, and those among them that are registered."""
        parts: list[WorkerDirectory] = []
        registered = None if self.registered is None else RegistryDirectory(self.registered)
        if registered is not None:
            self._full.append(FullWorkers(registered))
            parts += self._full
        if self._sources.workers:
            parts.append(StaticDirectory(self._sources.workers))
        if self._sources.plain_bind:
            self.plain = PlainListener(self._sources.plain_bind, settings=self._sources.plain)
            stack.push_async_callback(asyncio.to_thread, self.plain.close)
            parts.append(AnnouncedDirectory(self.plain))
        return parts[0] if len(parts) == 1 else Directories(*parts), registered

    def start(self, app: RunningRouter, authority: str) -> None:
        """Take workers, now that the router listens at `authority`, which no worker may claim as its own address."""
        for source in (self.registry, self.readers):
            if source is not None:
                source.refuse([authority])
        if self.registered is not None:
            self.registered.on_keys = lambda fresh: app.set_ticket_key(fresh.ticket_keys[0])
        if self.readers is not None:  # they follow the key directory since before there was anyone to tell
            app.set_ticket_key(self.readers.keyring.ticket_keys[0])
        for part in (self.plain,) if self.readers is not None else (self.registry, self.plain, self.door):
            if part is not None:
                part.start()


@contextlib.asynccontextmanager
async def run_router(
    sources: Sources,
    settings: RouterSettings,
    *,
    host: str,
    port: int,
    pages: Pages | None = dashboard,
    processes: int = 1,
    secrets: FrontSecrets | None = None,
) -> AsyncIterator[RouterHandle]:
    """A router and its sources of workers, while the context lasts; `pages` are further operator pages."""
    keyring, gathering = sources.keyring, Gathering()
    discovery = _Discovery(sources, gathering)
    async with contextlib.AsyncExitStack() as stack:
        if keyring is not None and sources.registry_bind:
            discovery.open_registry(keyring, stack)
        if keyring is not None and sources.registries:
            await discovery.read_registries(keyring, stack, f"{_bracketed(host)}:{port}" if port else "")
        directory, registered = discovery.directories(stack)
        if pages is dashboard and registered is not None:
            pages = functools.partial(dashboard, drain=_drain_command(sources, discovery.registry))
        given = (
            directory,
            settings,
            None if keyring is None else keyring.ticket_keys[0],
            None if registered is None else registered.discard,
        )
        secrets = secrets or FrontSecrets()
        more: dict[str, Any] = {
            "name": "router" if keyring is None else keyring.name,
            "gathering": gathering,
            "show": None if registered is None else registered.show,
            "pages": pages,
            "secrets": secrets,
        }
        app: RunningRouter
        if processes > 1:
            app = parent = await stack.enter_async_context(router_processes(processes, host, port, *given, **more))
            url = parent.url
        else:
            app = site = await stack.enter_async_context(router_app(*given, **more))
            url = await stack.enter_async_context(serving(site, host, port, secrets.tls_files()))
        app.stats.elsewhere = functools.partial(_beside, gathering, discovery.registry)
        discovery.start(app, _authority(url))
        yield RouterHandle(
            url,
            "" if discovery.registry is None else discovery.registry.endpoint,
            "" if discovery.plain is None else discovery.plain.endpoint,
            "" if discovery.door is None else discovery.door.endpoint,
            directory,
            app,
        )


async def drained(front: RouterHandle, drain_s: float, stop: asyncio.Event) -> bool:
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
