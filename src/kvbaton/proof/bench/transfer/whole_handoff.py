"""Handoffs through the whole stack, without a model: doorway, node, CurveZMQ, claim, copy, commit, report.

The prefill side is a process of its own (`python -m kvbaton.proof.bench.transfer.whole_handoff`) that leases one-block prompts; this side
wants them, one at a time for the latency and many at once for the rate. Every delivered block is compared.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import msgspec

from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.control.zmq import ZmqControl
from kvbaton.node.doorway import Doorway, DoorwayConfig, DropBlocks, LoadReport, MatchState
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node
from kvbaton.node.node_loop import NodeLoop
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, Kind, Rank, Share, places, planes
from kvbaton.protocol.ids import Incarnation, PeerId, RequestId, TransferId, WorkerId, rank_peer
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.transports.core.shared_memory import Region, allocate
from kvbaton.transports.core.transport import HostTransport
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpTransport

BLOCKS = 256
BLOCK_TOKENS = 16
PAGE_BYTES = 16 << 10
LAYERS = 2
CONCURRENT = 64
DEADLINE_S = 30.0


class Address(msgspec.Struct, frozen=True):
    endpoint: str
    public_key: str


class HandoffResult(msgspec.Struct, frozen=True):
    """One data plane's figures."""

    transport: str
    p50_ms: float
    p99_ms: float
    handoffs_per_s: float
    concurrent: int
    handoffs: int
    delivered: int


def layout() -> EngineLayout:
    """Pages of 16 KiB, so that one block is two segments of that size."""
    cell = Cell("kv", PAGE_BYTES // BLOCK_TOKENS)
    group = Group("full", Kind.FULL, BLOCK_TOKENS, tuple(map(str, range(LAYERS))), 1, (cell,), "bytes")
    stride = BLOCKS * PAGE_BYTES
    share = Share(0, 1, BLOCKS, places(range(LAYERS), 0, stride, PAGE_BYTES), planes("PHN", (cell,), 1, BLOCK_TOKENS))
    return EngineLayout((group,), (Rank(0, 0, 0, (LAYERS * stride,), (share,)),))


class Side:
    """One end: a node with memory and a door, and nobody who computes."""

    def __init__(self, name: str, key_directory: str, transport: str) -> None:
        self.keyring = keyring.load(key_directory, name)
        self.peer = PeerId(WorkerId(name), Incarnation(secrets.randbits(63)))
        self.region: Region = allocate(LAYERS * BLOCKS * PAGE_BYTES)
        self.news = threading.Event()
        config = DoorwayConfig(
            me=self.peer, ranks=1, groups=1, ticket_keys=self.keyring.ticket_keys, ticket_ttl_s=600.0,
            mint=lambda: TransferId(secrets.token_hex(16)), wall=time.time,
        )  # fmt: skip
        self.door = Doorway(config, EpochTable(BLOCKS))
        self.door.wake_engine = self.news.set
        me = rank_peer(self.peer, 0)
        plane: HostTransport = ShmTransport(me) if transport == "shm" else TcpTransport(me)
        plane.register(0, self.region.view)
        self.control = ZmqControl(self.keyring)
        identity = Identity(
            self.peer, "bench", {"model": "none"}, layout(), (plane.capabilities,), self.keyring.ticket_keys,
            time.time() - time.monotonic(),
        )  # fmt: skip
        ledger = Ledger(identity, Settings(lease_s=60.0), self.door.epochs.all_of)
        self.loop = NodeLoop(Node(ledger, self.control, [{transport: plane}], self.door), self.control)
        self.loop.start()

    @property
    def address(self) -> Address:
        return Address(self.control.endpoint, self.keyring.public)

    def knows(self, name: str, address: Address) -> None:
        self.control.set_directory({WorkerId(name): (address.endpoint, address.public_key)})

    def close(self) -> None:
        self.loop.stop()
        self.region.close()


def content(block: int) -> bytes:
    """What a block holds: different for each, and in each layer."""
    return bytes([block % 251 + 1]) * PAGE_BYTES


def serve(key_directory: str, transport: str) -> None:
    """P: a line with a number asks for that many tickets, an empty one for the end."""
    side = Side("p", key_directory, transport)
    for block in range(BLOCKS):
        for layer in range(LAYERS):
            at = (layer * BLOCKS + block) * PAGE_BYTES
            side.region.view[at : at + PAGE_BYTES] = content(block)
    _print(side.address)
    for line in sys.stdin:
        count = int(line or 0)
        if not count:
            break
        side.door.duties()
        block_of = [1 + n % (BLOCKS - 1) for n in range(count)]
        tickets = [side.door.grant(_digest(n), BLOCK_TOKENS, ((block_of[n],),))[0] for n in range(count)]
        _print(tickets)
    side.close()


class Reader:
    """D: keeps a number of handoffs on their way and notes how long each took."""

    def __init__(self, side: Side) -> None:
        self.side = side
        self.seconds: list[float] = []
        self.delivered = 0
        self._begun: dict[RequestId, tuple[float, int]] = {}
        self._waiting: dict[RequestId, int] = {}
        self._free = list(range(1, BLOCKS))

    def run(self, tickets: list[str], concurrent: int) -> float:
        """All tickets, at most `concurrent` at a time; returns the seconds it took."""
        started = time.monotonic()
        todo = list(enumerate(tickets))[::-1]
        while todo or self._begun:
            while todo and len(self._begun) < concurrent:
                self._want(*todo.pop())
            self.side.news.wait(1.0)
            self.side.news.clear()
            self._turn()
            if time.monotonic() - started > DEADLINE_S:
                raise TimeoutError(f"{len(self._begun)} handoffs did not end within {DEADLINE_S:.0f} s")
        return time.monotonic() - started

    def _want(self, number: int, ticket: str) -> None:
        request = RequestId(secrets.token_hex(8))
        self._begun[request] = (time.monotonic(), 1 + number % (BLOCKS - 1))
        self._waiting[request] = self._free.pop()
        self.side.door.want(request, ticket, _digest(number), BLOCK_TOKENS)

    def _turn(self) -> None:
        door = self.side.door
        for duty in door.duties():
            if isinstance(duty, LoadReport):
                begun, source = self._begun.pop(duty.request)
                self.seconds.append(time.monotonic() - begun)
                self.delivered += duty.end.delivered and self._same(self._waiting[duty.request], source)
            elif isinstance(duty, DropBlocks):
                self._free.append(self._waiting.pop(duty.request))
        for request, block in list(self._waiting.items()):
            if request in self._begun and door.match(request).state is MatchState.FOUND:
                door.allocated(request, ((block,),), 0)

    def _same(self, block: int, source: int) -> bool:
        at = ((LAYERS - 1) * BLOCKS + block) * PAGE_BYTES
        return self.side.region.view[at : at + PAGE_BYTES] == content(source)


def measure(transport: str, latency_handoffs: int = 300, rate_handoffs: int = 3000) -> HandoffResult:
    """One data plane: latency alone, rate with many at once."""
    with key_room() as scratch:
        directory = str(scratch / "keys")
        keyring.mint(directory, ["p", "d"])
        with _peer(directory, transport) as peer:
            side = Side("d", directory, transport)
            try:
                side.knows("p", msgspec.json.decode(_line(peer), type=Address))
                reader = Reader(side)
                reader.run(_tickets(peer, 20), 1)  # greet, dial, map
                reader.seconds.clear()
                reader.run(_tickets(peer, latency_handoffs), 1)
                alone = sorted(reader.seconds)
                seconds = reader.run(_tickets(peer, rate_handoffs), CONCURRENT)
            finally:
                side.close()
    total = 20 + latency_handoffs + rate_handoffs
    return HandoffResult(
        transport,
        round(statistics.median(alone) * 1000, 3),
        round(alone[int(len(alone) * 0.99)] * 1000, 3),
        round(rate_handoffs / seconds, 1),
        CONCURRENT,
        total,
        reader.delivered,
    )


def _digest(number: int) -> bytes:
    return number.to_bytes(16, "little")


@contextlib.contextmanager
def _peer(key_directory: str, transport: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kvbaton.proof.bench.transfer.whole_handoff", key_directory, transport]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield peer
    finally:
        assert peer.stdin is not None
        peer.stdin.close()
        try:
            peer.wait(10)
        except subprocess.TimeoutExpired:
            peer.kill()


def _tickets(peer: subprocess.Popen[str], count: int) -> list[str]:
    assert peer.stdin is not None
    peer.stdin.write(f"{count}\n")
    peer.stdin.flush()
    return msgspec.json.decode(_line(peer), type=list[str])


def _line(peer: subprocess.Popen[str]) -> str:
    assert peer.stdout is not None
    line = peer.stdout.readline()
    if not line:
        raise RuntimeError("the prefill side of the benchmark ended early")
    return line


def _print(value: object) -> None:
    print(msgspec.json.encode(value).decode(), flush=True)


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2])
