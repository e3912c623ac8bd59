"""One connection through the relay, and what the wires do to its two streams.

Laws: bytes keep their order, and none is dropped or made up: a stream ends whole, or its connection is reset. What
waits in a stream is bounded; past that the sender has to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from kvbaton_proof.chaos.network.hub_policy import Count, Way, Wires

CHUNK_BYTES = 65536
CHUNKS_WAITING_MAX = 256
STALL_S = 0.2  # Linux's shortest time before it sends again
LOST_IN_A_ROW_MAX = 4
CONNECTIONS_MAX = 4096
_RESET = struct.pack("ii", 1, 0)


class _Broken(Exception):
    """One side was reset, or lost too much: so is the other."""


class Streams:
    """All connections of a network."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self.counts: dict[Way, Count] = {}
        self._open = 0
        self._turn = asyncio.Event()

    def changed(self) -> None:
        """The wires are not what they were: who waits for one looks again."""
        self._turn.set()
        self._turn = asyncio.Event()

    async def carry(
        self,
        way: Way,
        own: tuple[str, int],
        place: tuple[str, int],
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        """From a dialler that was accepted to `place`, until both streams ended."""
        back = (way[1], way[0])
        writers = [writer]
        self._open += 1
        try:
            if self._open > CONNECTIONS_MAX:
                raise _Broken
            for each in (way, back):
                await self._pass(each)
                await asyncio.sleep(self.wires.get(each).delay_s)
            there, far = await asyncio.open_connection(*place, local_addr=own)
            writers.append(far)
            async with asyncio.TaskGroup() as both:
                both.create_task(self._stream(way, reader, far))
                both.create_task(self._stream(back, there, writer))
        except (OSError, _Broken, ExceptionGroup):
            for each_writer in writers:
                _reset(each_writer)
        finally:
            self._open -= 1
            for each_writer in writers:
                each_writer.close()

    async def _stream(self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue(CHUNKS_WAITING_MAX)
        async with asyncio.TaskGroup() as both:
            both.create_task(self._take(way, reader, queue))
            both.create_task(self._give(way, queue, writer))

    async def _take(
        self, way: Way, reader: asyncio.StreamReader, queue: asyncio.Queue[tuple[float, bytes | None]]
    ) -> None:
        now = asyncio.get_running_loop().time
        end: bytes | None = b""
        try:
            while chunk := await reader.read(CHUNK_BYTES):
                await queue.put((now() + self.wires.get(way).delay_s, chunk))
        except OSError:
            end = None
        await queue.put((now() + self.wires.get(way).delay_s, end))

    async def _give(
        self, way: Way, queue: asyncio.Queue[tuple[float, bytes | None]], writer: asyncio.StreamWriter
    ) -> None:
        now = asyncio.get_running_loop().time
        count = self.counts.setdefault(way, Count())
        while True:
            due, chunk = await queue.get()
            await asyncio.sleep(max(0.0, due - now()))
            await self._lose(way)
            await self._pass(way)
            if chunk is None:
                raise _Broken
            if not chunk:
                with contextlib.suppress(OSError):
                    writer.write_eof()
                return
            writer.write(chunk)
            await writer.drain()
            count.packets += 1
            count.payload_bytes += len(chunk)

    async def _lose(self, way: Way) -> None:
        for _ in range(LOST_IN_A_ROW_MAX):
            loss = self.wires.get(way).loss
            if not loss or not self.wires.loses(way, loss):
                return
            self.counts.setdefault(way, Count()).lost += 1
            await asyncio.sleep(STALL_S)
        raise _Broken

    async def _pass(self, way: Way) -> None:
        """Wait until the way is not cut."""
        if self.wires.get(way).cut:
            self.counts.setdefault(way, Count()).lost += 1
        while self.wires.get(way).cut:
            await self._turn.wait()


def _reset(writer: asyncio.StreamWriter) -> None:
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    writer.transport.abort()
