"""A registry and its workers over real sockets, all closed at the end."""

from __future__ import annotations

import itertools
from contextlib import ExitStack

from kvbaton.control.registry import (
    DirectoryEntry,
    Registration,
    RegistryGroup,
    RegistryServer,
    RegistrySettings,
    RosterEntry,
)
from kvbaton.protocol.ids import Incarnation, WorkerId

from ..rig import cluster, steady_bind

RINGS = cluster("router", "operator", "p0", "d0", "d1")
ROUTER = WorkerId("router")
CALM = RegistrySettings(ping_s=0.03, suspect_s=30.0, evict_s=60.0, settle_s=0.1)  # nobody is ever late
HASTY = RegistrySettings(ping_s=0.03, suspect_s=0.5, evict_s=4.0, settle_s=0.1)
_lives = itertools.count(1)


def reg(worker: str, incarnation: int | None = None, port: int = 5000) -> Registration:
    life = Incarnation(next(_lives) if incarnation is None else incarnation)
    return Registration(WorkerId(worker), life, "both", "127.0.0.1:80", f"tcp://127.0.0.1:{port}")


class Worker:
    """A registered worker that remembers what it was told."""

    def __init__(self, endpoint: str, registration: Registration, settings: RegistrySettings) -> None:
        self.directories: list[tuple[DirectoryEntry, ...]] = []
        self.departed: list[tuple[str, int]] = []
        self.drains = 0
        self.discards: list[str] = []
        self.registration = registration
        self.client = RegistryGroup(
            RINGS[registration.worker],
            [(ROUTER, endpoint)],
            registration,
            on_directory=lambda entries, _: self.directories.append(entries),
            settings=settings,
            on_departed=lambda worker, incarnation: self.departed.append((worker, incarnation)),
            on_drain=self._count_drain,
            on_discard=self.discards.extend,
        )
        self.client.start()

    def _count_drain(self) -> None:
        self.drains += 1

    def sees(self) -> dict[str, int]:
        return {entry.worker: entry.incarnation for entry in self.directories[-1]} if self.directories else {}


class Town:
    """One registry at a time, and any number of workers."""

    def __init__(self, settings: RegistrySettings = CALM) -> None:
        self.stack = ExitStack()
        self.changes: list[tuple[RosterEntry, ...]] = []
        self.settings = settings
        self.server = self.open_server()

    def open_server(self, bind: str | None = None) -> RegistryServer:
        bind = bind or steady_bind()
        self.server = RegistryServer(RINGS["router"], bind, settings=self.settings, on_change=self.changes.append)
        self.server.start()
        self.stack.callback(self.server.close)
        return self.server

    def worker(self, registration: Registration) -> Worker:
        worker = Worker(self.server.endpoint, registration, self.settings)
        self.stack.callback(worker.client.close)
        return worker

    def listed(self) -> dict[str, tuple[int, str]]:
        found = self.server.workers()
        return {e.registration.worker: (e.registration.incarnation, str(e.state)) for e in found}
