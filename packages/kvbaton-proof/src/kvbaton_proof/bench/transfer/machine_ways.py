"""The machine's own limits, and kvbaton's shm and tcp: the methods that every run of `bench transfer` has.

    python -m kvbaton_proof.bench.transfer.machine_ways       P, in a process of its own

shm is held against a single-threaded C memcpy of the same blocks inside one process, tcp against a raw copy of as many
bytes, contiguous, over as many sockets, and encrypted tcp (as between hosts) against tcp.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable

import msgspec

from kvbaton.protocol.geometry.pages import Band, PageTable
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.core.mover import choose_mover
from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.core.transport import Direction, HostTransport, Loan
from kvbaton.transports.shm.shm_transport import ShmConfig, ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpConfig, TcpTransport
from kvbaton_proof.bench.kit.piped_children import Parent, PipedChild
from kvbaton_proof.bench.transfer.workload import Driven, P, contiguous, pattern, scattered, verify

RAW_CHUNK_BYTES = 1 << 20
STREAMS = 2
PAGE_BYTES = 16 << 10
"""Of a block as it is lent; larger segments lie in several."""
RAW_S = 60.0
MEMCPY, RAW, TCP, ENCRYPTED = "memcpy", "raw_sockets", "tcp", "tcp_encrypted"
SHM = {"shm_1_thread": 1, "shm_2_threads": 2}
AS_INSTALLED = next(name for name, threads in SHM.items() if threads == ShmConfig().threads)


class Order(msgspec.Struct, frozen=True):
    """What P needs to know."""

    region_bytes: int
    moved_bytes: int
    raw_port: int


class Send(msgspec.Struct, frozen=True, tag=True):
    """Everything over the raw sockets, once."""


class Offer(msgspec.Struct, frozen=True):
    """How P's memory is reached."""

    shm: dict[str, bytes]
    tcp: bytes
    encrypted: bytes


def serve(parent: Parent) -> None:
    """P: offers its memory, then sends it over raw sockets when told."""
    order = next(parent.questions(Order))
    memory = allocate(order.region_bytes)
    memory.view[:] = pattern(order.region_bytes).data
    shm, tcp = ShmTransport(P), TcpTransport(P, TcpConfig(streams=STREAMS))
    encrypted = TcpTransport(P, TcpConfig(streams=STREAMS, encrypt="on"))
    for transport in (shm, tcp, encrypted):
        transport.register(0, memory.view)
    for transport, name in ((tcp, TCP), (encrypted, ENCRYPTED)):  # as an engine lends: block by block
        blocks = order.region_bytes // PAGE_BYTES
        transport.lay_out([PageTable(0, 0, blocks, (Band(0, PAGE_BYTES, PAGE_BYTES),))])
        transport.lend(Loan(JobId(1), _reader(name), Direction.READ, (tuple(range(blocks)),)))
    for number, name in enumerate(SHM):
        shm.lend(Loan(JobId(number), _reader(name), Direction.READ, ((0,),)))
    by_name = {name: shm.endpoint(_reader(name)) for name in SHM}
    parent.answer(Offer(by_name, tcp.endpoint(_reader(TCP)), encrypted.endpoint(_reader(ENCRYPTED))))
    socks = [socket.create_connection(("127.0.0.1", order.raw_port), RAW_S) for _ in range(STREAMS)]
    share = order.moved_bytes // STREAMS
    for _ in parent.questions(Send):
        in_threads(lambda index: _send(socks[index], memory.view[index * share : (index + 1) * share]))


class Machine:
    """D: its memory and its transports, in this process."""

    names = (MEMCPY, *SHM, TCP, ENCRYPTED, RAW)

    def __init__(self, region_bytes: int, moved_bytes: int) -> None:
        self._moved_bytes = moved_bytes
        self._target = allocate(region_bytes)
        self._local = allocate(region_bytes)
        self._local.view[:] = pattern(region_bytes).data
        self._mover = choose_mover()
        self._peer = PipedChild("kvbaton_proof.bench.transfer.machine_ways")
        self._driven: dict[str, Driven] = {}
        self._raw: list[socket.socket] = []
        self.pids = (os.getpid(), self._peer.pid)
        try:
            self._connect(region_bytes)
        except BaseException:
            self.close()
            raise

    def prepare(self, segment_bytes: int, seed: int) -> None:
        self._spans = scattered(len(self._target.view), self._moved_bytes, segment_bytes, seed)

    def check(self, way: str) -> None:
        """Copy into memory that held nothing, and compare."""
        self._target.view[:] = bytes(len(self._target.view))
        self.run(way)
        verify(way, self._target.view, self._local.view, contiguous(self._moved_bytes) if way == RAW else self._spans)

    def run(self, way: str) -> float:
        work = self._way(way)
        begun = time.perf_counter()
        work()
        return time.perf_counter() - begun

    def close(self) -> None:
        for driven in self._driven.values():
            driven.close()
        for sock in self._raw:
            sock.close()
        self._peer.close()
        self._target.close()
        self._local.close()

    def _connect(self, region_bytes: int) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(RAW_S)
            offer = self._peer.ask(Order(region_bytes, self._moved_bytes, listener.getsockname()[1]), Offer)
            self._raw = [listener.accept()[0] for _ in range(STREAMS)]
        for sock in self._raw:
            sock.settimeout(RAW_S)
        for name, threads in SHM.items():
            self._drive(name, ShmTransport(_reader(name), ShmConfig(threads=threads)), offer.shm[name])
        self._drive(TCP, TcpTransport(_reader(TCP), TcpConfig(streams=STREAMS)), offer.tcp)
        self._drive(ENCRYPTED, TcpTransport(_reader(ENCRYPTED), TcpConfig(streams=STREAMS)), offer.encrypted)

    def _drive(self, name: str, transport: HostTransport, endpoint: bytes) -> None:
        self._driven[name] = Driven(name, transport, self._target.view, endpoint)

    def _way(self, name: str) -> Callable[[], None]:
        if name in self._driven:
            return lambda: self._driven[name].read(self._spans)
        return self._memcpy if name == MEMCPY else self._raw_copy

    def _memcpy(self) -> None:
        spans, count = self._spans, len(self._spans) // 3
        self._mover.copy_spans(self._target.view, self._local.view, spans, False, 0, count, bytearray(1))

    def _raw_copy(self) -> None:
        share = self._moved_bytes // STREAMS
        view = self._target.view
        self._peer.tell(Send())
        in_threads(lambda index: _receive(self._raw[index], view[index * share : (index + 1) * share]))


def in_threads(work: Callable[[int], None]) -> None:
    """`work(0)` … `work(STREAMS - 1)`, one thread each."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, STREAMS)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()


def _reader(name: str) -> PeerId:
    return PeerId(WorkerId(name), Incarnation(1))


def _send(sock: socket.socket, view: memoryview) -> None:
    for start in range(0, len(view), RAW_CHUNK_BYTES):
        sock.sendall(view[start : start + RAW_CHUNK_BYTES])


def _receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view, min(len(view), RAW_CHUNK_BYTES))
        if not count:
            raise RuntimeError("the peer closed a raw socket")
        view = view[count:]


if __name__ == "__main__":
    serve(Parent())
