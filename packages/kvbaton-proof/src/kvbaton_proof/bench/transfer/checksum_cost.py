"""The cost of `checksum: sample` and `full` relative to `off`, on shm and tcp, in the same run.

Two processes, as in a handoff: D reads scattered segments out of P's memory. Each repetition makes every copy once, one
way after the other, and ratios to `off` are taken within it; medians over the quieter half of the repetitions are
reported. CPU time is of both processes together. Bytes are compared once per way, by neither plane nor checksum.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import time
from collections.abc import Mapping
from typing import cast

import msgspec

from kvbaton.processes.proc_stat import foreign_cpu_s
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.transports.checksum.checksum_portions import Checksum
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.core.transport import HostTransport, LendingTransport, Spans
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpTransport
from kvbaton_proof.bench.kit.piped_children import Parent, PipedChild
from kvbaton_proof.bench.kit.text_tables import spaced
from kvbaton_proof.bench.transfer.workload import Driven, P, pattern, scattered, verify

SEGMENT_BYTES = (16 << 10, 64 << 10, 256 << 10)
COPY_BYTES = (2 << 20, 128 << 20)
REGION_BYTES = 256 << 20
PLANES = ("shm", "tcp")
COLUMN = 16


class Order(msgspec.Struct, frozen=True):
    """What the peer process needs to know, on its standard input."""

    region_bytes: int
    readers: dict[str, PeerId]  # by way


class Row(msgspec.Struct, frozen=True):
    """One way, for one size of copy and segment."""

    plane: str
    checksum: str
    segment_bytes: int
    copy_bytes: int
    gb_s: float
    ratio: float  # of the speed with `off`, within the repetitions
    added_ms: float  # to a copy, over `off`
    cpu_ms_gb: float  # of both processes
    foreign_cores: float  # that others kept busy in the repetitions that count


class Round(msgspec.Struct, frozen=True):
    """One repetition."""

    seconds: dict[str, float]
    cpu_s: dict[str, float]
    foreign_cores: float


def ways() -> dict[str, tuple[str, Checksum]]:
    return {f"{plane} {mode}": (plane, mode) for plane in PLANES for mode in Checksum}


def make(plane: str, mode: Checksum, me: PeerId) -> HostTransport:
    """`off` is the plane alone, as it runs without this."""
    inner: HostTransport = ShmTransport(me) if plane == "shm" else TcpTransport(me)
    return inner if mode is Checksum.OFF else SummedTransport(inner, me, SumConfig(mode))


def serve(parent: Parent) -> None:
    """The peer process: offers its memory by every way, until its input ends."""
    order = next(parent.questions(Order))
    memory = allocate(order.region_bytes)
    memory.view[:] = pattern(order.region_bytes).data
    offers: dict[str, bytes] = {}
    transports = []
    for way, reader in order.readers.items():
        transports.append(make(*ways()[way], P))
        transports[-1].register(0, memory.view)
        if transports[-1].capabilities.lends_reads:
            lend_everything(cast(LendingTransport, transports[-1]), reader)
        offers[way] = transports[-1].endpoint(reader)
    parent.answer(offers)
    sys.stdin.read()
    for transport in transports:
        transport.close()


class Bench:
    """The decode side: its memory, a transport for each way, and the peer process."""

    def __init__(self, peer: PipedChild, region_bytes: int) -> None:
        self._peer = peer
        self._target = allocate(region_bytes)
        self._transports: list[HostTransport] = []
        self._driven: dict[str, Driven] = {}

    def connect(self) -> None:
        readers = {way: PeerId(WorkerId(way.replace(" ", "-")), Incarnation(1)) for way in ways()}
        offers = self._peer.ask(Order(len(self._target.view), readers), dict[str, bytes])
        for way, (plane, mode) in ways().items():
            self._transports.append(make(plane, mode, readers[way]))
            self._driven[way] = Driven(way, self._transports[-1], self._target.view, offers[way])

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
        self._target.close()

    def measure(self, copy_bytes: int, segment_bytes: int, repetitions: int, seed: int) -> list[Row]:
        """Interleaved repetitions, after one that is checked and not counted."""
        spans = scattered(len(self._target.view), copy_bytes, segment_bytes, seed)
        for way, driven in self._driven.items():
            self._target.view[:] = bytes(len(self._target.view))
            driven.read(spans)
            verify(way, self._target.view, pattern(len(self._target.view)), spans)
        return _rows(copy_bytes, segment_bytes, [self._round(spans) for _ in range(repetitions)])

    def _round(self, spans: Spans) -> Round:
        pids = (os.getpid(), self._peer.pid)
        seconds: dict[str, float] = {}
        cpu_s: dict[str, float] = {}
        begun, before_s = time.perf_counter(), foreign_cpu_s(*pids)
        for way, driven in self._driven.items():
            cpu, start = self._cpu_s(), time.perf_counter()
            driven.read(spans)
            seconds[way] = time.perf_counter() - start
            cpu_s[way] = self._cpu_s() - cpu
        return Round(seconds, cpu_s, max(0.0, foreign_cpu_s(*pids) - before_s) / (time.perf_counter() - begun))

    def _cpu_s(self) -> float:
        return time.process_time() + scheduled_s(self._peer.pid)


def scheduled_s(pid: int) -> float:
    """Seconds of CPU that all threads of a process have used, to the nanosecond: ticks are too coarse for one copy."""
    spent_ns = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/schedstat") as stat:
            spent_ns += int(stat.read().split()[0])
    return spent_ns / 1e9


def _rows(copy_bytes: int, segment_bytes: int, rounds: list[Round]) -> list[Row]:
    """Medians over the quieter half of the rounds."""
    quiet = sorted(rounds, key=lambda each: each.foreign_cores)[: -(-len(rounds) // 2)]
    foreign = round(statistics.median(each.foreign_cores for each in quiet), 2)
    rows = []
    for way, (plane, mode) in ways().items():
        off = f"{plane} {Checksum.OFF}"
        seconds = statistics.median(each.seconds[way] for each in quiet)
        ratio = statistics.median(each.seconds[off] / each.seconds[way] for each in quiet)
        added_s = statistics.median(each.seconds[way] - each.seconds[off] for each in quiet)
        cpu_s = statistics.median(each.cpu_s[way] for each in quiet)
        rows.append(
            Row(
                plane,
                str(mode),
                segment_bytes,
                copy_bytes,
                gb_s=round(copy_bytes / 1e9 / seconds, 2),
                ratio=round(ratio, 3),
                added_ms=round(added_s * 1e3, 2),
                cpu_ms_gb=round(cpu_s * 1e3 / (copy_bytes / 1e9), 1),
                foreign_cores=foreign,
            )
        )
    return rows


def measure(
    repetitions: int = 20,
    region_bytes: int = REGION_BYTES,
    copies: tuple[int, ...] = COPY_BYTES,
    segments: tuple[int, ...] = SEGMENT_BYTES,
) -> list[dict[str, object]]:
    """A row for every way, size of copy and size of segment, as plain values; progress on standard error."""
    rows: list[Row] = []
    with PipedChild("kvbaton_proof.bench.transfer.checksum_cost", "--peer") as peer:
        bench = Bench(peer, region_bytes)
        try:
            bench.connect()
            for copy_bytes in copies:
                for seed, segment_bytes in enumerate(segments):
                    sizes = f"{copy_bytes >> 20} MiB in segments of {segment_bytes >> 10} KiB"
                    print(f"checksum: {sizes} …", file=sys.stderr, flush=True)
                    rows += bench.measure(copy_bytes, segment_bytes, repetitions, seed)
        finally:
            bench.close()
    found: list[dict[str, object]] = msgspec.to_builtins(rows)
    return found


def table(rows: list[Mapping[str, object]] | list[dict[str, object]]) -> str:
    """The same for reading."""
    lines = ["checksum: GB/s (ratio to off), milliseconds added to a copy, CPU ms per GB of both sides together"]
    names = ("copy", "segment", "plane", "checksum", "GB/s", "added ms", "CPU ms/GB", "cores of others")
    lines.append(spaced(names, COLUMN))
    for row in msgspec.convert(rows, list[Row]):
        cells = (
            f"{row.copy_bytes >> 20} MiB",
            f"{row.segment_bytes >> 10} KiB",
            row.plane,
            row.checksum,
            f"{row.gb_s:.2f} ({row.ratio:.2f})",
            f"{row.added_ms:.2f}",
            f"{row.cpu_ms_gb:.0f}",
            f"{row.foreign_cores:.2f}",
        )
        lines.append(spaced(cells, COLUMN))
    return "\n".join(lines)


if __name__ == "__main__":
    if "--peer" in sys.argv:
        serve(Parent())
    else:
        print(table(measure()))
