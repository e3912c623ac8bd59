"""Servers that say exactly the bytes that a test tells them."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

Script = Callable[["Conn"], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Conn:
    """One connection, seen from the server."""

    def __init__(self, number: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.number = number  # 0 is the first
        self._reader = reader
        self._writer = writer

    async def request(self) -> bytes:
        """Read one request to its end."""
        head = await self._reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        return head + (await self._reader.readexactly(int(length[1])) if length else b"")

    async def head(self) -> bytes:
        """Read no more than the request's head, and a little of what follows."""
        return await self._reader.readuntil(b"\r\n\r\n")

    async def say(self, *pieces: bytes) -> None:
        """Send the pieces, each in a turn of the loop of its own."""
        for piece in pieces:
            self._writer.write(piece)
            await self._writer.drain()
            await asyncio.sleep(0)

    async def gone(self) -> None:
        """Wait until the client has closed or reset the connection."""
        with contextlib.suppress(ConnectionError):
            while await self._reader.read(1 << 16):
                pass

    def close(self) -> None:
        self._writer.close()

    def reset(self) -> None:
        """Close in a way that the client sees as an error."""
        linger = struct.pack("ii", 1, 0)
        self._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self._writer.transport.abort()


class Server:
    """Where it listens, and how many have come."""

    def __init__(self, script: Script) -> None:
        self.url = ""
        self.conns = 0
        self.faults: list[BaseException] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self._script = script

    async def accepted(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        conn = Conn(self.conns, reader, writer)
        self.conns += 1
        try:
            await self._script(conn)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass  # the client is free to go, and the test to end
        except Exception as fault:  # noqa: BLE001
            self.faults.append(fault)
        finally:
            conn.close()


@contextlib.asynccontextmanager
async def listening(script: Script) -> AsyncIterator[Server]:
    """Every connection follows the script; when that ends, it is closed. A script that fails, fails the test."""
    server = Server(script)
    listener = await asyncio.start_server(server.accepted, "127.0.0.1", 0)
    server.url = "http://{}:{}".format(*listener.sockets[0].getsockname()[:2])
    try:
        yield server
    finally:
        listener.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)
    assert server.faults == []


def answers(*pieces: bytes, then: Callable[[Conn], Any] | None = None) -> Script:
    """Answer every request with the same bytes; after the first, do something else instead of waiting for more."""

    async def script(conn: Conn) -> None:
        while True:
            await conn.request()
            await conn.say(*pieces)
            if then is not None:
                await asyncio.sleep(0)
                done = then(conn)
                if done is not None:
                    await done
                return

    return script
