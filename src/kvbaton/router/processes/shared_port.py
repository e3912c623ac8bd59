"""A port that several processes accept on: whichever has fewest connections takes the next one.

Laws: a connection that waits is taken by some process, at the latest `YIELD_S` after all that have fewer connections
were given the chance; a process that hangs or ended keeps none waiting. A process takes what waits until it has more
connections than another: so a burst is shared, and is not left waiting for as many turns of a busy event loop as it has
connections. A process whose descriptors ran out tries again later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Sequence

from kvbaton.api.http.http_server import HttpServer
from kvbaton.api.http.server_loop import BACKLOG, port_error
from kvbaton.router.processes.shared_counts import CONNECTIONS, OPEN, SharedCounts

log = logging.getLogger(__name__)

YIELD_S = 0.002
SLACK = 8
"""A process is ahead of another if it has more connections by one in so many: small differences are let be."""
ACCEPTED_MAX = 64
"""In one turn of the event loop, so that requests under way go on."""
EXHAUSTED_S = 0.1


async def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets that listen on all addresses of `host`; `PortInUseError` if the port cannot be had."""
    loop = asyncio.get_running_loop()
    found: list[socket.socket] = []
    with contextlib.ExitStack() as undo:
        try:
            infos = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(infos):
                listener = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                taken = found[0].getsockname()[1] if found and not port else port
                listener.bind((address[0], taken, *address[2:]))
                listener.listen(BACKLOG)
                listener.setblocking(False)
                found.append(listener)
        except OSError as error:
            raise port_error(host, port, error) from None
        undo.pop_all()
    return found


class SharedPort:
    """One process's part in accepting. `close` before the door closes."""

    def __init__(self, door: HttpServer, listeners: Sequence[socket.socket], counts: SharedCounts, index: int) -> None:
        self._door = door
        self._listeners = listeners
        self._counts = counts
        self._row = counts.row(index)
        self._loop = asyncio.get_running_loop()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}
        self._opening: set[asyncio.Task[object]] = set()
        self._row[OPEN] = 1
        for listener in listeners:
            self._loop.add_reader(listener, self._knocked, listener)

    def close(self) -> None:
        self._row[OPEN] = 0
        for pause in self._pauses.values():
            pause.cancel()
        self._pauses.clear()
        for listener in self._listeners:
            self._loop.remove_reader(listener)

    def _knocked(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTED_MAX):
            if self._is_ahead():
                self._pause(listener, YIELD_S)
                return
            if not self._accept(listener):
                return

    def _is_ahead(self) -> bool:
        counts, mine = self._counts, len(self._door.crowd) + len(self._opening)
        self._row[CONNECTIONS] = mine
        others = [count for is_open, count in zip(counts.each(OPEN), counts.each(CONNECTIONS), strict=True) if is_open]
        fewest = min(others)
        return mine > fewest + fewest // SLACK

    def _pause(self, listener: socket.socket, seconds: float) -> None:
        self._loop.remove_reader(listener)
        self._pauses[listener] = self._loop.call_later(seconds, self._resume, listener)

    def _resume(self, listener: socket.socket) -> None:
        """It is this process's turn, if nobody else has come for it."""
        del self._pauses[listener]
        self._loop.add_reader(listener, self._knocked, listener)
        self._accept(listener)

    def _accept(self, listener: socket.socket) -> bool:
        """Take one connection; False if none could be had."""
        try:
            connection, _ = listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            log.warning("[accept-failed] a connection cannot be taken: %s; trying again", error.strerror)
            if listener not in self._pauses:
                self._pause(listener, EXHAUSTED_S)
            return False
        connection.setblocking(False)
        opening = self._loop.create_task(self._open(connection))
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)
        self._row[CONNECTIONS] = len(self._door.crowd) + len(self._opening)
        return True

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._door.connection, connection)
        except OSError:
            connection.close()  # its client is gone already
