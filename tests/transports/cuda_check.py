"""The planes of device memory on a real GPU: the whole contract between two processes and within one, and what only
hardware can tell. Exit status 0 when all holds.

    python -m tests.transports.cuda_check [kernel cuda staged-shm staged-tcp cuda+sums staged-tcp+sums]

Not a part of `make test`, which runs the same cases on a device made of host memory (tests/transports/fake_gpu.py).
"""

from __future__ import annotations

import random
import sys
import time
import traceback
import unittest
from array import array

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId
from kvbaton.protocol.weave import Weave
from kvbaton.testing import Log, TransportHarness, check_transport
from kvbaton.testing.transport_case import READ, SMALL_BYTES, Case, Cases, copy, fill, moved
from kvbaton.transports import cuda_launch
from kvbaton.transports.base import Copy
from kvbaton.transports.cuda_digest import digest_of
from kvbaton.transports.cuda_driver import CudaGpu, Gpu
from kvbaton.transports.cuda_launch import Tables
from kvbaton.transports.cuda_table import Group

from .device_harness import DeviceHarness, DeviceView

EXTRA = Cases()
PLANES = ("cuda", "staged-shm", "staged-tcp", "cuda+sums", "staged-tcp+sums")
KERNEL = "kernel"


@EXTRA.add()
def every_alignment_and_length_arrives(harness: TransportHarness) -> None:
    rng = random.Random(3)
    places = []
    for slot in range(256):
        size = rng.choice((1, 3, 4, 15, 16, 17, 31, 33, 64, 127, 255, 256, 2000, 4000))
        places.append((slot * 8192 + rng.randrange(32), slot * 8192 + rng.randrange(32), size))
    places.append((256 * 8192 + 5, 256 * 8192 + 5, 300_001))  # longer than one team of the grid takes
    pair = harness.pair(4 << 20, 4 << 20)
    near, far = fill(pair.near.memory, 1), fill(pair.far.memory, 2)
    assert pair.near.transport.submit(copy(1, pair.far, READ, places))
    assert Log(harness, pair.near).end(1).reason is None
    assert bytes(pair.near.memory) == moved(near, far, places, READ)


@EXTRA.add("kill")
def what_was_opened_stays_readable_when_its_owner_dies(harness: TransportHarness) -> None:
    """For cuda alone: by IPC the memory lives as long as someone has it open."""
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    log = Log(harness, pair.near)
    far = fill(pair.far.memory, 2)
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 64)]))
    assert log.end(1).reason is None
    harness.kill(pair.far)
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, SMALL_BYTES)]))
    end = log.end(2)
    if harness.capabilities.name == "cuda":
        assert end.reason is None and bytes(pair.near.memory) == far, end
    else:
        assert end.reason is not None and end.at_rest, end


@EXTRA.add()
def nothing_moves_before_the_event_that_it_waits_for(harness: TransportHarness) -> None:
    import torch

    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    fill(pair.near.memory, 1)
    fill(pair.far.memory, 2)
    log = Log(harness, pair.near)
    slow = torch.cuda.Stream()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(2_000_000_000)  # about a second of the device's clock
        event = torch.cuda.Event()
        event.record()
    begun, cpu = time.monotonic(), time.process_time()
    assert pair.near.transport.submit(
        Copy(JobId(1), pair.far.peer, READ, 0, 0, copy(1, pair.far, READ, [(0, 0, 64)]).spans, event)
    )
    while not event.query():
        assert not pair.near.transport.drain(), "it ended before the event"
        time.sleep(0.05)  # only looks: the event is what is waited for
    assert log.end(1).reason is None
    waited, spent = time.monotonic() - begun, time.process_time() - cpu
    assert spent < 0.3 * waited, f"{spent:.2f} s of CPU to wait {waited:.2f} s"


@EXTRA.add()
def a_wrong_byte_is_a_mismatch_and_only_then(harness: TransportHarness) -> None:
    """Harmed between the copy and its digest, on the device: the last byte of a span that begins at an odd place."""
    if not harness.capabilities.name.endswith("+sums"):
        raise unittest.SkipTest("without checksums nobody looks")
    assert isinstance(harness, DeviceHarness)
    pair, gpu = harness.pair(SMALL_BYTES, SMALL_BYTES), harness.gpu
    fill(pair.near.memory, 1)
    fill(pair.far.memory, 2)
    log, original, places = Log(harness, pair.near), gpu.digest_rows, [(1, 3, 4001), (8192, 16, 4096)]

    def harmed(table: int, groups: int, rows: range, stream: int) -> None:
        gpu.digest_rows = original  # type: ignore[method-assign]
        pair.near.memory[4001:4002] = bytes([pair.near.memory[4001] ^ 0x80])
        original(table, groups, rows, stream)

    for job, wrong in enumerate((False, True, False)):
        if wrong:
            gpu.digest_rows = harmed  # type: ignore[method-assign]
        assert pair.near.transport.submit(copy(job, pair.far, READ, places))
        end = log.end(job)
        assert end.reason is (Reason.CHECKSUM_MISMATCH if wrong else None), end


# --- the kernels themselves


def digests_are_the_references(share: float) -> None:
    """Every alignment and length, one launch; woven rows too."""
    with Bench(share) as bench:
        rng, places = random.Random(7), list[tuple[int, int, int]]()
        for row in range(600):
            size = rng.choice((0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 511, 512, 2047, 2048, 2049, 4096, 32768, 65536))
            places.append((8 * row, rng.choice((16 * rng.randrange(1000), rng.randrange(16000))), size))
        weave = Weave(triples([(4800, 5, 300), (4808, 32, 65536)]), array("q", (0, 0, 16, 1024)))
        bench.tables.digest(
            [Group(bench.far, bench.near, triples(places)), Group(bench.far, bench.near, weave)], 0, bench.stream
        )
        bench.wait()
        found = bench.read(bench.far, 8 * 604)
        for at, offset, size in (*places, *rows_of(weave.flat())):
            wanted = digest_of(bench.data[offset : offset + size])
            assert int.from_bytes(found[at : at + 8], "little") == wanted, (offset, size)


def copies_are_right_by_many_launches(share: float) -> None:
    with Bench(share) as bench:
        rng, places, wanted = random.Random(9), list[tuple[int, int, int]](), bytearray(Bench.SIZE)
        for slot in range(200):
            size = rng.choice((0, 1, 4, 15, 16, 17, 33, 127, 2000, 8191, 8192))
            places.append((slot * 10_000 + rng.randrange(32), slot * 10_000 + rng.randrange(32), size))
        before = cuda_launch.LAUNCH_BYTES
        cuda_launch.LAUNCH_BYTES = 10_000
        try:
            bench.tables.launch([Group(bench.far, bench.near, triples(places))], 0, bench.stream)
        finally:
            cuda_launch.LAUNCH_BYTES = before
        bench.wait()
        for to, at, size in places:
            wanted[to : to + size] = bench.data[at : at + size]
        assert bench.read(bench.far, Bench.SIZE) == wanted


class Bench:
    """Two stretches of device memory, one of them with random bytes, and a stream."""

    SIZE = 2 << 20

    def __init__(self, share: float) -> None:
        self.gpu: Gpu = CudaGpu(0, share)

    def __enter__(self) -> Bench:
        gpu = self.gpu
        gpu.enter()
        self.near, self.far = gpu.allocate(self.SIZE), gpu.allocate(self.SIZE)
        self.stream, self.event, self.tables = gpu.stream(), gpu.event(), Tables(gpu, 1)
        self.data = random.Random(1).randbytes(self.SIZE)
        view = DeviceView(gpu, self.near, self.SIZE), DeviceView(gpu, self.far, self.SIZE)
        view[0][:], view[1][:] = self.data, bytes(self.SIZE)
        return self

    def wait(self) -> None:
        self.gpu.record(self.event, self.stream)
        self.gpu.wait(self.event)

    def read(self, address: int, size: int) -> bytes:
        return bytes(DeviceView(self.gpu, address, size))

    def __exit__(self, *_: object) -> None:
        self.tables.clear()
        for address in (self.near, self.far):
            self.gpu.free(address)


def triples(places: list[tuple[int, int, int]]) -> array[int]:
    return array("q", [number for place in places for number in place])


def rows_of(spans: array[int]) -> list[tuple[int, int, int]]:
    return list(zip(spans[0::3], spans[1::3], spans[2::3], strict=True))


def check_kernels() -> int:
    failed = 0
    for check in (digests_are_the_references, copies_are_right_by_many_launches):
        for share in (1.0, 0.5, 0.01):
            try:
                check(share)
            except Exception:  # noqa: BLE001 - a report of all of them, whatever each raises
                traceback.print_exc()
                failed += 1
                print(f"{KERNEL}: {check.__name__} FAILED at share {share}", flush=True)
    print(f"{KERNEL}: {6 - failed} of 6 ok", flush=True)
    return failed


def run(case: Case, harness: DeviceHarness) -> str:
    try:
        case(harness)
    except unittest.SkipTest:
        return "skipped"
    except Exception:  # noqa: BLE001 - a report of all cases, whatever each raises
        traceback.print_exc()
        return "FAILED"
    return "ok"


def main() -> int:
    wanted = sys.argv[1:] or [KERNEL, *PLANES]
    failed = check_kernels() if KERNEL in wanted else 0
    for plane in (name for name in wanted if name != KERNEL):
        for together in (False, True):
            harness = DeviceHarness(plane, "cuda", together=together)
            begun, found = time.monotonic(), dict[str, list[str]]()
            for case in (*check_transport.cases, *EXTRA):
                found.setdefault(run(case, harness), []).append(case.name)
            harness.close()
            counts = {name: len(cases) for name, cases in found.items()}
            where = "one process" if together else "two processes"
            took_s = time.monotonic() - begun
            print(f"{plane}, {where}: {counts} in {took_s:.0f} s", *found.get("FAILED", ()), flush=True)
            failed += counts.get("FAILED", 0)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
