"""The router with its registry, as `up` and `router` both run it: one HTTP port, one registry port, one key directory.

Law: ports are taken before anything else is started, so that a port in use costs one line and no process.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Iterator

import msgspec

from kvbaton.control.keys import Keyring
from kvbaton.control.registry import RegistryServer
from kvbaton.router.app import Router, router_app
from kvbaton.router.directory import WorkerDirectory
from kvbaton.router.door import serving
from kvbaton.router.registered import RegistryDirectory
from kvbaton.router.settings import RouterSettings


class Front(msgspec.Struct, frozen=True):
    """A router that listens."""

    url: str
    registry_endpoint: str
    directory: WorkerDirectory
    app: Router


@contextlib.asynccontextmanager
async def fronted(
    keyring: Keyring, settings: RouterSettings, *, host: str, port: int, registry_bind: str
) -> AsyncIterator[Front]:
    """A router and its registry, while the context lasts."""
    registry = RegistryServer(keyring, registry_bind)
    directory = RegistryDirectory(registry)
    try:
        async with (
            router_app(directory, settings, keyring.ticket_keys[0]) as app,
            serving(app, host, port) as url,
        ):
            registry.start()
            yield Front(url, registry.endpoint, directory, app)
    finally:
        await asyncio.to_thread(registry.close)


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
