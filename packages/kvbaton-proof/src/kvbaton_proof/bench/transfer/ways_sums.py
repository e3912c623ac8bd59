"""The cost of `checksum: sample` and `full` relative to `off`, on shm and tcp, in the same run.

    python -m kvbaton_proof.bench.transfer.ways_sums

Two processes, as in a handoff: D reads scattered segments out of P's memory. Each repetition makes every copy, one way
after the other, and ratios to `off` are taken within it; medians over the quieter half of the repetitions are reported.
CPU time is of both processes together. Bytes are compared once per way, by neither transport nor checksum.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import sys
from collections.abc import Sequence

import msgspec

from kvbaton.protocol.ids import PeerId
from kvbaton.transports.checksum.checksum_memory import Checksum
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport
from kvbaton.transports.core.transport import HostTransport
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpTransport
from kvbaton_proof.bench.kit.lab_pages import plain
from kvbaton_proof.bench.transfer.peers import Peer
from kvbaton_proof.bench.transfer.transfer_rounds import Rounds
from kvbaton_proof.bench.transfer.workload import DrivenReader, DrivenSource

SEGMENT_BYTES = (16 << 10, 64 << 10, 256 << 10)
COPY_BYTES = (2 << 20, 128 << 20)
REGION_BYTES = 256 << 20
TRANSPORTS = ("shm", "tcp")
WAYS = tuple(f"{transport} {mode}" for transport in TRANSPORTS for mode in Checksum)
HEAD = ("copy", "segment", "transport", "checksum", "GB/s", "of off", "added ms", "CPU ms/GB", "others' cores")


def make(way: str, me: PeerId, regions: Sequence[memoryview]) -> HostTransport:
    """`off` is the transport alone, as it runs without checksums."""
    name, mode = way.split()
    transport: HostTransport = ShmTransport(me) if name == "shm" else TcpTransport(me)
    if mode != Checksum.OFF:
        transport = SummedTransport(transport, me, SumConfig(Checksum(mode)))
    for number, region in enumerate(regions):
        transport.register(number, region)
    return transport


Source = functools.partial(DrivenSource, ways=WAYS, make=make)
Reader = functools.partial(DrivenReader, ways=WAYS, make=make)


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


def measure(
    repetitions: int = 20,
    region_bytes: int = REGION_BYTES,
    copies: tuple[int, ...] = COPY_BYTES,
    segments: tuple[int, ...] = SEGMENT_BYTES,
) -> list[Row]:
    """A row for every way, size of copy and size of segment; progress on standard error."""
    rows: list[Row] = []
    with contextlib.closing(Peer("sums", region_bytes)) as peer:
        for copy_bytes in copies:
            for seed, segment_bytes in enumerate(segments):
                sizes = f"{copy_bytes >> 20} MiB in segments of {segment_bytes >> 10} KiB"
                print(f"checksum: {sizes} …", file=sys.stderr, flush=True)
                rounds = Rounds([peer], copy_bytes, segment_bytes, seed)
                rounds.add(repetitions)
                rows += [_row(rounds, way, copy_bytes, segment_bytes) for way in WAYS]
    return rows


def _row(rounds: Rounds, way: str, copy_bytes: int, segment_bytes: int) -> Row:
    plane, mode = way.split()
    off, quiet = f"{plane} {Checksum.OFF}", rounds.quiet()
    added_s = statistics.median(each.seconds[way] - each.seconds[off] for each in quiet)
    cpu_s = statistics.median(each.cpu_s[way] for each in quiet)
    return Row(
        plane, mode, segment_bytes, copy_bytes, gb_s=round(rounds.speed(way), 2),
        ratio=round(rounds.ratio(way, off), 3), added_ms=round(added_s * 1e3, 2),
        cpu_ms_gb=round(cpu_s * 1e3 / (copy_bytes / 1e9), 1), foreign_cores=rounds.foreign_cores,
    )  # fmt: skip


def table(rows: Sequence[Row]) -> str:
    lines = [
        [f"{row.copy_bytes >> 20} MiB", f"{row.segment_bytes >> 10} KiB", row.plane, row.checksum, f"{row.gb_s:.2f}",
         f"{row.ratio:.2f}", f"{row.added_ms:.2f}", f"{row.cpu_ms_gb:.0f}", f"{row.foreign_cores:.2f}"]
        for row in rows
    ]  # fmt: skip
    return plain(HEAD, lines)


if __name__ == "__main__":
    print(table(measure()))
