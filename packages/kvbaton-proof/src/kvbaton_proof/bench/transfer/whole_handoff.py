"""Handoffs through the whole stack, without a model: doorway, node, CurveZMQ, claim, copy, commit, report.

The prefill side is a process of its own (`python -m kvbaton_proof.bench.transfer.whole_handoff`) that leases
one-block prompts; this side
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

from kvbaton.control import keyring as keys
from kvbaton.control.key_room import key_room
from kvbaton.node.cluster_node import ClusterNode, ClusterSettings, EngineFacts, make_doorway, new_life
from kvbaton.node.doorway import DropBlocks, LoadReport, MatchState
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind, Rank, Share, places, planes
from kvbaton.protocol.ids import RequestId, WorkerId, rank_peer
from kvbaton.protocol.settings import Settings
from kvbaton.transports.catalogue import PlaneSettings, make
from kvbaton.transports.core.shared_memory import Region, allocate

BLOCKS = 256
BLOCK_TOKENS = 16
PAGE_BYTES = 16 << 10
LAYERS = 2
CONCURRENT = 64
DEADLINE_S = 30.0


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
    group = Group("full", GroupKind.FULL, BLOCK_TOKENS, tuple(map(str, range(LAYERS))), 1, (cell,), "bytes")
    stride = BLOCKS * PAGE_BYTES
    share = Share(0, 1, BLOCKS, places(range(LAYERS), 0, stride, PAGE_BYTES), planes("PHN", (cell,), 1, BLOCK_TOKENS))
    return EngineLayout((group,), (Rank(0, 0, 0, (LAYERS * stride,), (share,)),))


class Side:
    """One end: a node with memory and a door, and no engine."""

    def __init__(self, name: str, key_directory: str, transport: str) -> None:
        keyring = keys.load(key_directory, name)
        facts = EngineFacts(me=new_life(name), role="both", blocks=BLOCKS, layout=layout(), compat={"model": "none"})
        self.region: Region = allocate(LAYERS * BLOCKS * PAGE_BYTES)
        self.news = threading.Event()
        self.door = make_doorway(facts, keyring, ticket_ttl_s=600.0)
        self.door.wake_engine = self.news.set
        plane = make(transport, rank_peer(facts.me, 0), PlaneSettings(), [self.region.view])
        settings = ClusterSettings(protocol=Settings(lease_s=60.0), records=False)
        self.node = ClusterNode(facts, keyring, [{transport: plane}], self.door, settings)
        self.node.start()

    def close(self) -> None:
        self.node.stop()
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
    _print(side.node.address)
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
        keys.mint(directory, ["p", "d"])
        with _peer(directory, transport) as peer:
            side = Side("d", directory, transport)
            try:
                side.node.know({WorkerId("p"): msgspec.json.decode(_line(peer), type=tuple[str, str])})
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
    command = [sys.executable, "-m", "kvbaton_proof.bench.transfer.whole_handoff", key_directory, transport]
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
