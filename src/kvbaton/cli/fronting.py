"""The router with whatever tells it of workers, as `up` and `router` both run it.

Law: ports are taken before anything else is started, so that a port in use costs one line and no process. Whoever is
authenticated goes before whoever was listed by hand, and both before whoever only says who he is.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator, Sequence

import msgspec

from kvbaton.control.keys import Keyring
from kvbaton.control.plain import PlainListener, PlainSettings
from kvbaton.control.registry import RegistryServer
from kvbaton.router.announced import AnnouncedDirectory, Directories
from kvbaton.router.app import Router, router_app
from kvbaton.router.directory import StaticDirectory, Worker, WorkerDirectory
from kvbaton.router.door import serving
from kvbaton.router.registered import RegistryDirectory
from kvbaton.router.settings import RouterSettings


class Sources(msgspec.Struct, frozen=True, kw_only=True):
    """Where workers come from; any of them, at least one."""

    keyring: Keyring | None = None  # with `registry_bind`: workers register here
    registry_bind: str = ""
    workers: Sequence[Worker] = ()  # that never change
    plain_bind: str = ""  # workers announce themselves here, in the formats of other systems
    plain: PlainSettings = PlainSettings()


class Front(msgspec.Struct, frozen=True):
    """A router that listens."""

    url: str
    registry_endpoint: str  # "" without a registry
    plain_endpoint: str  # "" without plain discovery
    directory: WorkerDirectory
    app: Router


@contextlib.asynccontextmanager
async def fronted(sources: Sources, settings: RouterSettings, *, host: str, port: int) -> AsyncIterator[Front]:
    """A router and what tells it of workers, while the context lasts."""
    keyring = sources.keyring
    async with contextlib.AsyncExitStack() as stack:
        parts: list[WorkerDirectory] = []
        registry = plain = discard = None
        if keyring is not None:
            registry = RegistryServer(keyring, sources.registry_bind)
            stack.push_async_callback(asyncio.to_thread, registry.close)
            registered = RegistryDirectory(registry)
            parts.append(registered)
            discard = registered.discard
        if sources.workers:
            parts.append(StaticDirectory(sources.workers))
        if sources.plain_bind:
            plain = PlainListener(sources.plain_bind, settings=sources.plain)
            stack.push_async_callback(asyncio.to_thread, plain.close)
            parts.append(AnnouncedDirectory(plain))
        directory = parts[0] if len(parts) == 1 else Directories(*parts)
        ticket_key = None if keyring is None else keyring.ticket_keys[0]
        app = await stack.enter_async_context(router_app(directory, settings, ticket_key, discard))
        if registry is not None:
            registry.on_keys = lambda fresh: app.set_ticket_key(fresh.ticket_keys[0])
        url = await stack.enter_async_context(serving(app, host, port))
        for each in (registry, plain):
            if each is not None:
                each.start()
        yield Front(
            url,
            "" if registry is None else registry.endpoint,
            "" if plain is None else plain.endpoint,
            directory,
            app,
        )


@contextlib.contextmanager
def told_to_stop() -> Iterator[asyncio.Event]:
    """An event that Ctrl-C and SIGTERM set, while the context lasts."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
