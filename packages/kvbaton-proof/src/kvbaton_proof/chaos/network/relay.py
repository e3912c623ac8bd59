"""The network where namespaces are not allowed: members at loopback addresses, whose connections go through here.

Laws: it lives as long as the conductor's end of its standard input, and the members with it. It stands for a network as
far as a relay of streams can: a cut holds bytes, and new connections get no answer; delay is per chunk; a lost chunk
stalls its stream by `STALL_S`, as a retransmission would, and `LOST_IN_A_ROW_MAX` of them reset it. Unlike on a
network, a dialler is connected before its peer is, a refusal shows as a reset, and what was sent counts as received.
Only Python's own dialling (socket, asyncio, zmq) is turned this way; shared memory is not.

    python -m kvbaton_proof.chaos.network.relay    (started by kvbaton_proof.chaos.network.networks)

One connection through the relay, and what the wires do to its two streams.

Laws: bytes keep their order, and none is dropped or made up: a stream ends whole, or its connection is reset. What
waits in a stream is bounded; past that the sender has to wait.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import struct
import sys
from functools import partial
from pathlib import Path

import msgspec

from kvbaton_proof.chaos.network import enter, net_control
from kvbaton_proof.chaos.network.hub_policy import Count, Way, Wires
from kvbaton_proof.chaos.network.net_control import Lines, Ready, Request, Setup, carry_out, serve

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


LISTENERS_MAX = 4096
NETWORK_PORT = 19777  # bound at .254 by the relay that has the network
NETWORKS_MAX = 64 * 256


class Called(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What members say at the door: `pid` when they start, the rest to be told where to dial."""

    pid: int = 0
    source: str = ""
    host: str = ""
    port: int = 0


class Relay:
    def __init__(self, network: str, addresses: dict[str, str], streams: Streams) -> None:
        self._streams = streams
        self._at = f"{network}254"
        self._addresses = addresses
        self._names = {address: name for name, address in addresses.items()}
        self._listeners: dict[tuple[str, str, int], asyncio.Server] = {}
        self.members: dict[int, int] = {}  # descriptors of processes, by pid

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """A member at the door."""
        with contextlib.closing(writer):
            try:
                called = msgspec.json.decode(await asyncio.wait_for(reader.readline(), 10.0), type=Called)
                if called.pid:
                    self._know(called.pid)
                    writer.write(b"\n")
                else:
                    port = await self._listen(called.source, called.host, called.port)
                    writer.write(msgspec.json.encode({"host": self._at, "port": port}) + b"\n")
            except (OSError, ValueError, KeyError, TimeoutError, msgspec.MsgspecError) as error:
                writer.write(msgspec.json.encode({"error": str(error)}) + b"\n")
            with contextlib.suppress(ConnectionError):
                await writer.drain()

    def end_members(self) -> None:
        for fd in self.members.values():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGKILL)

    def _know(self, pid: int) -> None:
        if pid not in self.members:
            self.members[pid] = os.pidfd_open(pid)
        for other, fd in list(self.members.items()):
            try:
                signal.pidfd_send_signal(fd, 0)
            except ProcessLookupError:
                os.close(self.members.pop(other))

    async def _listen(self, source: str, host: str, port: int) -> int:
        key = (source, host, port)
        target = self._names[host]
        if key not in self._listeners:
            if len(self._listeners) >= LISTENERS_MAX:
                raise OSError(f"more than {LISTENERS_MAX} places were dialled")
            own = self._addresses[source]

            async def through(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                await self._streams.carry((source, target), (own, 0), (host, port), reader, writer)

            self._listeners[key] = await asyncio.start_server(through, self._at, 0)
        listener: int = self._listeners[key].sockets[0].getsockname()[1]
        return listener


def take_network() -> tuple[str, socket.socket]:
    """127.x.y. of nobody else, and the socket that says it is taken."""
    for number in range(NETWORKS_MAX):
        place = (os.getpid() + number) % NETWORKS_MAX
        network = f"127.{64 + place // 256}.{place % 256}."
        taken = socket.socket()
        try:
            taken.bind((f"{network}254", NETWORK_PORT))
        except OSError:
            taken.close()
            continue
        return network, taken
    raise OSError(f"all {NETWORKS_MAX} loopback networks are taken")


def _is_marked(mark: bytes, pid: int) -> bool | None:
    """None of a process in the middle of `execve`: it has memory, but no environment yet that could be read."""
    proc = Path(f"/proc/{pid}")
    has_words = bool((proc / "cmdline").read_bytes())  # before the environment, which comes into being right after it
    if mark in (proc / "environ").read_bytes():
        return True
    return False if has_words or (proc / "statm").read_bytes().startswith(b"0 ") else None


async def relay(control: Lines, setup: Setup, network: str, conductor: int) -> None:
    addresses = {name: f"{network}{number}" for number, name in enumerate(setup.names, 1)}
    streams = Streams(Wires(setup.names, setup.seed))
    members = Relay(network, addresses, streams)
    door = f"kvbaton-chaos-{secrets.token_hex(16)}"
    gone = asyncio.Event()

    def conducted() -> None:
        try:
            for line in control.ready():
                request = msgspec.json.decode(line, type=Request)
                reply = carry_out(request, streams.wires, streams.counts)
                streams.changed()
                control.send(reply)
        except EOFError:
            gone.set()

    server = await asyncio.start_unix_server(members.answer, "\0" + door)
    site = str(Path(enter.__file__).parent / "relay_site")
    before = [sys.executable, "-I", "-S", str(Path(enter.__file__)), "member", door, network]
    prefixes = {name: [*before, name, address, site] for name, address in addresses.items()}
    asyncio.get_running_loop().add_reader(control.sock.fileno(), conducted)
    control.send(Ready(addresses=addresses, prefixes=prefixes))
    await gone.wait()
    server.close()
    members.members.pop(conductor, None)
    members.end_members()
    mark = f"{enter.MEMBER}={door} ".encode()
    net_control.end_all(partial(_is_marked, mark), (os.getpid(), conductor))


def run(control: Lines, setup: Setup, conductor: int) -> int:
    network, taken = take_network()
    with taken:
        asyncio.run(relay(control, setup, network, conductor))
    return 0


if __name__ == "__main__":
    sys.exit(serve(run))
