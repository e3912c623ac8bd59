"""The machine's own limits, and kvbaton's shm and tcp: the ways that every run of `bench transfer` has.

shm is held against a single-threaded C memcpy of the same segments inside one process, tcp against a raw copy of as
many bytes, contiguous, over as many sockets, and encrypted tcp (as between hosts) against tcp.
"""

from __future__ import annotations

import socket
import struct
import threading
from array import array
from collections.abc import Callable

import msgspec

from kvbaton.protocol.geometry.layout import Band, PageTable
from kvbaton.protocol.ids import JobId
from kvbaton.transports.core.mover import choose_mover
from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.core.transport import Direction, HostTransport, Loan, Spans
from kvbaton.transports.shm.shm_transport import ShmConfig, ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpConfig, TcpTransport
from kvbaton_proof.bench.transfer.workload import Driven, P, pattern, reader_id

RAW_CHUNK_BYTES = 1 << 20
STREAMS = 2
PAGE_BYTES = 16 << 10
"""Of a block as it is lent; larger segments lie in several."""
RAW_S = 60.0
MEMCPY, RAW, TCP, ENCRYPTED = "memcpy", "raw_sockets", "tcp", "tcp_encrypted"
SHM = {"shm_1_thread": 1, "shm_2_threads": 2}
AS_INSTALLED = next(name for name, threads in SHM.items() if threads == ShmConfig().threads)
_ASKED = struct.Struct("<QQ")
"""What D sends over a raw socket: from which byte on, and up to which."""


class Source:
    """P: its memory over shm, tcp plain and encrypted, and raw sockets."""

    def __init__(self, memory: memoryview) -> None:
        self._shm = ShmTransport(P)
        self._tcp = {TCP: TcpTransport(P, TcpConfig(streams=STREAMS)),
                     ENCRYPTED: TcpTransport(P, TcpConfig(streams=STREAMS, encrypt="on"))}  # fmt: skip
        self._transports: tuple[HostTransport, ...] = (self._shm, *self._tcp.values())
        for transport in self._transports:
            transport.register(0, memory)
        for name, transport in self._tcp.items():  # as an engine lends: block by block
            blocks = memory.nbytes // PAGE_BYTES
            transport.lay_out([PageTable(0, 0, blocks, (Band(0, PAGE_BYTES, PAGE_BYTES),))])
            transport.lend(Loan(JobId(1), reader_id(name), Direction.READ, (tuple(range(blocks)),)))
        for number, name in enumerate(SHM):
            self._shm.lend(Loan(JobId(number), reader_id(name), Direction.READ, ((0,),)))
        self._listener = socket.create_server(("127.0.0.1", 0))
        for _ in range(STREAMS):
            threading.Thread(target=self._send_raw, args=(memory,), daemon=True).start()

    def offer(self) -> dict[str, bytes]:
        raw = msgspec.json.encode(self._listener.getsockname()[1])
        over = {name: self._shm.endpoint(reader_id(name)) for name in SHM}
        return {RAW: raw, **over, **{name: each.endpoint(reader_id(name)) for name, each in self._tcp.items()}}

    def spin(self, way: str) -> None:
        """Its threads wait for events: nobody has to."""

    def close(self) -> None:
        self._listener.close()
        for transport in self._transports:
            transport.close()

    def _send_raw(self, memory: memoryview) -> None:
        """Whatever D asks for over one socket, until it closes that."""
        sock, _ = self._listener.accept()
        while asked := sock.recv(_ASKED.size, socket.MSG_WAITALL):
            first, last = _ASKED.unpack(asked)
            for start in range(first, last, RAW_CHUNK_BYTES):
                sock.sendall(memory[start : min(start + RAW_CHUNK_BYTES, last)])


class Reader:
    """D: its memory and its transports."""

    spins = frozenset[str]()
    ways = (MEMCPY, *SHM, TCP, ENCRYPTED, RAW)

    def __init__(self, memory: memoryview, offer: dict[str, bytes]) -> None:
        self._memory = memory
        self._local = allocate(memory.nbytes)
        self._local.view[:] = pattern(memory.nbytes).data
        self._mover = choose_mover()
        made: dict[str, HostTransport] = {
            **{name: ShmTransport(reader_id(name), ShmConfig(threads=threads)) for name, threads in SHM.items()},
            TCP: TcpTransport(reader_id(TCP), TcpConfig(streams=STREAMS)),
            ENCRYPTED: TcpTransport(reader_id(ENCRYPTED), TcpConfig(streams=STREAMS, encrypt="on")),
        }
        self._driven = {name: Driven(name, each, memory, offer[name]) for name, each in made.items()}
        address = ("127.0.0.1", msgspec.json.decode(offer[RAW], type=int))
        self._raw = [socket.create_connection(address, RAW_S) for _ in range(STREAMS)]

    def prepare(self, segment_bytes: int, spans: Spans) -> None:
        self._spans = spans

    def moved(self, way: str) -> Spans:
        return array("q", (0, 0, self._moved_bytes)) if way == RAW else self._spans

    def run(self, way: str) -> None:
        if way in self._driven:
            self._driven[way].read(self._spans)
        elif way == MEMCPY:
            spans = self._spans
            self._mover.copy_spans(self._memory, self._local.view, spans, False, 0, len(spans) // 3, bytearray(1))
        else:
            in_threads(self._receive_raw)

    def close(self) -> None:
        for driven in self._driven.values():
            driven.close()
        for sock in self._raw:
            sock.close()
        self._local.close()

    @property
    def _moved_bytes(self) -> int:
        return sum(self._spans[2::3])

    def _receive_raw(self, index: int) -> None:
        sock, share = self._raw[index], self._moved_bytes // STREAMS
        sock.sendall(_ASKED.pack(index * share, (index + 1) * share))
        view = self._memory[index * share : (index + 1) * share]
        while view:
            count = sock.recv_into(view, min(len(view), RAW_CHUNK_BYTES))
            if not count:
                raise RuntimeError("the peer closed a raw socket")
            view = view[count:]


def in_threads(work: Callable[[int], None]) -> None:
    """`work(0)` … `work(STREAMS - 1)`, one thread each."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, STREAMS)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()
