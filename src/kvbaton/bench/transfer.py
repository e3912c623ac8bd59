"""How fast shm and tcp move scattered segments, beside what the machine can do, in the same run.

shm is held against a single-threaded C memcpy of the same blocks inside one process; tcp against a raw copy of as many
bytes, contiguous, over as many sockets. Each repetition measures all of them one after the other and ratios are taken
within it; medians over the quieter half of the repetitions are reported, and how much of the machine others used even
then. The prefill side is a process of its own (`--peer`), and every way's result is compared byte for byte.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping
from typing import IO

import msgspec
import numpy as np

from kvbaton.bench.quiet import foreign_cpu_s
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.base import Copy, CopyEnded, Direction, HostTransport, Spans
from kvbaton.transports.memory import allocate
from kvbaton.transports.mover import choose_mover
from kvbaton.transports.shm import ShmConfig, ShmTransport
from kvbaton.transports.tcp import TcpConfig, TcpTransport

SEGMENT_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
REGION_BYTES = 256 << 20
MOVED_BYTES = 128 << 20
RAW_CHUNK_BYTES = 1 << 20
COPY_DEADLINE_S = 30.0
STREAMS = 2
P = PeerId(WorkerId("bench-p"), Incarnation(1))


class Order(msgspec.Struct, frozen=True):
    """What the peer process needs to know, on its standard input."""

    region_bytes: int
    moved_bytes: int
    shm_readers: tuple[PeerId, ...]
    tcp_reader: PeerId
    raw_port: int


class Offer(msgspec.Struct, frozen=True):
    """What it answers, on its standard output."""

    shm: tuple[bytes, ...]
    tcp: bytes


class Round(msgspec.Struct, frozen=True):
    """One repetition: how long each way took, and how many cores others kept busy."""

    seconds: dict[str, float]
    foreign_cores: float


class Result(msgspec.Struct, frozen=True):
    """One segment size: GB/s of everything, and how the transports compare within the repetitions."""

    segment_bytes: int
    gb_s: dict[str, float]
    ratio: dict[str, float]
    foreign_cores: float  # that others kept busy in the repetitions that count


def pattern(size: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The same bytes in both processes; no two 8-byte words of a region are equal."""
    words = np.arange(size // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)


def serve() -> None:
    """The peer process: offers its memory, then sends it over raw sockets once per line of input."""
    order = msgspec.json.decode(sys.stdin.readline(), type=Order)
    memory = allocate(order.region_bytes)
    memory.view[:] = pattern(order.region_bytes).data
    shm, tcp = ShmTransport(P), TcpTransport(P, TcpConfig(streams=STREAMS))
    for transport in (shm, tcp):
        transport.register(0, memory.view)
    offer = Offer(tuple(shm.endpoint(reader) for reader in order.shm_readers), tcp.endpoint(order.tcp_reader))
    print(msgspec.json.encode(offer).decode(), flush=True)
    socks = [socket.create_connection(("127.0.0.1", order.raw_port)) for _ in range(STREAMS)]
    share = order.moved_bytes // STREAMS
    for _line in sys.stdin:
        in_threads(lambda index: _send(socks[index], memory.view[index * share : (index + 1) * share]))


def in_threads(work: Callable[[int], None]) -> None:
    """`work(0)` … `work(STREAMS - 1)`, one thread each."""
    threads = [threading.Thread(target=work, args=(index,)) for index in range(1, STREAMS)]
    for thread in threads:
        thread.start()
    work(0)
    for thread in threads:
        thread.join()


def _send(sock: socket.socket, view: memoryview) -> None:
    for start in range(0, len(view), RAW_CHUNK_BYTES):
        sock.sendall(view[start : start + RAW_CHUNK_BYTES])


def _receive(sock: socket.socket, view: memoryview) -> None:
    while view:
        view = view[sock.recv_into(view, min(len(view), RAW_CHUNK_BYTES)) :]


class Bench:
    """The decode side: its memory, its transports, and the peer process."""

    def __init__(self, peer: subprocess.Popen[str], region_bytes: int, moved_bytes: int) -> None:
        self._moved_bytes = moved_bytes
        self._target = allocate(region_bytes)
        self._local = allocate(region_bytes)
        self._local.view[:] = pattern(region_bytes).data
        self._mover = choose_mover()
        self._peer = peer
        self._jobs = 0
        self._transports: dict[str, tuple[HostTransport, threading.Event]] = {}
        self._raw: list[socket.socket] = []

    def connect(self) -> None:
        made: dict[str, tuple[PeerId, HostTransport]] = {}
        for name, make in (
            ("shm_1_thread", lambda me: ShmTransport(me, ShmConfig(threads=1))),
            ("shm_2_threads", lambda me: ShmTransport(me, ShmConfig(threads=2))),
            ("tcp", lambda me: TcpTransport(me, TcpConfig(streams=STREAMS))),
        ):
            me = PeerId(WorkerId(name), Incarnation(1))
            made[name] = me, make(me)
        with socket.create_server(("127.0.0.1", 0)) as listener:
            ids = [me for me, _ in made.values()]
            port = listener.getsockname()[1]
            order = Order(len(self._target.view), self._moved_bytes, tuple(ids[:-1]), ids[-1], port)
            self._tell(msgspec.json.encode(order).decode())
            offer = msgspec.json.decode(_pipe(self._peer.stdout).readline() or "null", type=Offer)
            self._raw = [listener.accept()[0] for _ in range(STREAMS)]
        for (name, (_, transport)), endpoint in zip(made.items(), (*offer.shm, offer.tcp), strict=True):
            transport.register(0, self._target.view)
            transport.connect(P, endpoint)
            event = threading.Event()
            transport.set_waker(event.set)
            self._transports[name] = transport, event

    def close(self) -> None:
        for transport, _ in self._transports.values():
            transport.close()
        for sock in self._raw:
            sock.close()
        self._target.close()
        self._local.close()

    def measure(self, segment_bytes: int, repetitions: int, seed: int) -> Result:
        """Interleaved repetitions of one segment size, after one that is checked and not counted."""
        spans = scattered(len(self._target.view), self._moved_bytes, segment_bytes, seed)
        ways: dict[str, Callable[[], None]] = {"memcpy": lambda: self._memcpy(spans)}
        for name in self._transports:
            ways[name] = lambda name=name: self._copy(name, spans)  # type: ignore[misc]
        ways["raw_sockets"] = self._raw_copy
        for name, way in ways.items():
            self._target.view[:] = bytes(len(self._target.view))
            way()
            self._verify(name, spans if name != "raw_sockets" else contiguous(self._moved_bytes))
        rounds = [self._round(ways) for _ in range(repetitions)]
        return _result(segment_bytes, self._moved_bytes, rounds)

    def _round(self, ways: dict[str, Callable[[], None]]) -> Round:
        """Every way once, and what others did to the machine meanwhile."""
        pids = (os.getpid(), self._peer.pid)
        seconds: dict[str, float] = {}
        begun, before_s = time.perf_counter(), foreign_cpu_s(*pids)
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            seconds[name] = time.perf_counter() - start
        return Round(seconds, max(0.0, foreign_cpu_s(*pids) - before_s) / (time.perf_counter() - begun))

    def _memcpy(self, spans: Spans) -> None:
        self._mover.copy_spans(self._target.view, self._local.view, spans, False, 0, len(spans) // 3, bytearray(1))

    def _copy(self, name: str, spans: Spans) -> None:
        transport, event = self._transports[name]
        event.clear()
        self._jobs += 1
        transport.submit(Copy(JobId(self._jobs), P, Direction.READ, 0, 0, spans))
        event.wait(COPY_DEADLINE_S)
        ended = transport.drain()
        if not ended or not isinstance(ended[0], CopyEnded) or ended[0].reason is not None:
            raise RuntimeError(f"{name} did not deliver: {ended}")

    def _raw_copy(self) -> None:
        share = self._moved_bytes // STREAMS
        view = self._target.view
        self._tell("go")
        in_threads(lambda index: _receive(self._raw[index], view[index * share : (index + 1) * share]))

    def _verify(self, name: str, spans: Spans) -> None:
        got = np.frombuffer(self._target.view, np.uint8)
        want = np.frombuffer(self._local.view, np.uint8)
        for local, remote, size in np.frombuffer(spans, np.int64).reshape(-1, 3).tolist():
            if not np.array_equal(got[local : local + size], want[remote : remote + size]):
                raise RuntimeError(f"{name} delivered wrong bytes at {local}")

    def _tell(self, line: str) -> None:
        pipe = _pipe(self._peer.stdin)
        pipe.write(line + "\n")
        pipe.flush()


def scattered(region_bytes: int, moved_bytes: int, segment_bytes: int, seed: int) -> Spans:
    """Segments at random places on both sides, in random order, none twice."""
    rng = np.random.default_rng(seed)
    places = region_bytes // segment_bytes
    count = moved_bytes // segment_bytes
    columns = (rng.permutation(places)[:count], rng.permutation(places)[:count], np.ones(count, np.int64))
    spans = array("q")
    spans.frombytes((np.stack(columns, axis=1).astype(np.int64) * segment_bytes).tobytes())
    return spans


def contiguous(moved_bytes: int) -> Spans:
    return array("q", (0, 0, moved_bytes))


def _result(segment_bytes: int, moved_bytes: int, rounds: list[Round]) -> Result:
    """Medians over the quieter half of the rounds."""
    quiet = sorted(rounds, key=lambda each: each.foreign_cores)[: -(-len(rounds) // 2)]

    def ratio(name: str, limit: str) -> float:
        return round(statistics.median(each.seconds[limit] / each.seconds[name] for each in quiet), 3)

    names = list(rounds[0].seconds)
    gb_s = {name: moved_bytes / 1e9 / statistics.median(each.seconds[name] for each in quiet) for name in names}
    ratios = {name: ratio(name, "memcpy") for name in names if name.startswith("shm")}
    ratios["tcp"] = ratio("tcp", "raw_sockets")
    foreign = statistics.median(each.foreign_cores for each in quiet)
    return Result(segment_bytes, {name: round(speed, 2) for name, speed in gb_s.items()}, ratios, round(foreign, 2))


def _pipe(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


@contextlib.contextmanager
def _peer_process() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "kvbaton.bench.transfer", "--peer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        try:
            yield peer
        finally:
            peer.kill()


def measure(
    repetitions: int = 20,
    region_bytes: int = REGION_BYTES,
    moved_bytes: int = MOVED_BYTES,
    segments: tuple[int, ...] = SEGMENT_BYTES,
) -> dict[str, object]:
    """Everything, as plain values; progress on standard error."""
    results: list[Result] = []
    with _peer_process() as peer:
        bench = Bench(peer, region_bytes, moved_bytes)
        try:
            bench.connect()
            for seed, segment_bytes in enumerate(segments):
                print(f"transfer: segments of {segment_bytes >> 10} KiB …", file=sys.stderr, flush=True)
                results.append(bench.measure(segment_bytes, repetitions, seed))
        finally:
            bench.close()
    return {
        "moved_bytes": moved_bytes,
        "repetitions": repetitions,
        "native_mover": choose_mover().native,
        "segments": msgspec.to_builtins(results),
    }


def table(report: Mapping[str, object]) -> str:
    """The same for reading."""
    return _table(msgspec.convert(report["segments"], list[Result]))


def _table(results: list[Result]) -> str:
    names = list(results[0].gb_s)
    lines = ["GB/s, and the ratio to memcpy (shm) or to raw sockets (tcp)"]
    lines.append("".join(f"{name:>20}" for name in ("segment", *names, "cores of others")))
    for result in results:
        cells = [f"{result.segment_bytes >> 10} KiB"]
        for name in names:
            ratio = f" ({result.ratio[name]:.2f})" if name in result.ratio else ""
            cells.append(f"{result.gb_s[name]:.2f}{ratio}")
        cells.append(f"{result.foreign_cores:.2f}")
        lines.append("".join(f"{cell:>20}" for cell in cells))
    return "\n".join(lines)


if __name__ == "__main__":
    if "--peer" in sys.argv:
        serve()
