"""The network where namespaces are not allowed: members at loopback addresses, whose connections go through here.

Laws: it lives as long as the conductor's end of its standard input, and the members with it. It stands for a network as
far as a relay of streams can: a cut holds bytes, and new connections get no answer; delay is per chunk; a lost chunk
stalls its stream by `STALL_S`, as a retransmission would, and `LOST_IN_A_ROW_MAX` of them reset it. Unlike on a
network, a dialler is connected before its peer is, a refusal shows as a reset, and what was sent counts as received.
Only Python's own dialling (socket, asyncio, zmq) is turned this way; shared memory is not.

    python -m kvbaton_proof.chaos.network.relay    (started by kvbaton_proof.chaos.network.networks)
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import sys
from pathlib import Path

import msgspec

from kvbaton_proof.chaos.network import enter, reaper
from kvbaton_proof.chaos.network.hub_policy import Wires
from kvbaton_proof.chaos.network.net_control import Lines, Ready, Request, Setup, carry_out, serve
from kvbaton_proof.chaos.network.relay_stream import Streams

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
    reaper.end_all(lambda pid: mark in Path(f"/proc/{pid}/environ").read_bytes(), (os.getpid(), conductor))


def run(control: Lines, setup: Setup, conductor: int) -> int:
    network, taken = take_network()
    with taken:
        asyncio.run(relay(control, setup, network, conductor))
    return 0


if __name__ == "__main__":
    sys.exit(serve(run))
