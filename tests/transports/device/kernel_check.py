"""Of `cuda_check`: the kernels of copies and digests on a real GPU, and checksums that meet a wrong byte there."""

from __future__ import annotations

import random
import traceback
import unittest
from array import array

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.testing import Log, TransportHarness
from kvbaton.testing.transport_case import READ, SMALL_BYTES, copy, fill
from kvbaton.transports.checksum.checksum_device import digest_of
from kvbaton.transports.cuda import cuda_runner
from kvbaton.transports.cuda.cuda_driver import CudaGpu, Gpu
from kvbaton.transports.cuda.cuda_runner import LaunchGroup, Tables
from tests.transports.device.device_harness import DeviceHarness, DeviceView

KERNEL = "kernel"


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


def digests_are_the_references(share: float) -> None:
    """Every alignment and length, one launch; woven rows too."""
    with Bench(share) as bench:
        rng, places = random.Random(7), list[tuple[int, int, int]]()
        for row in range(600):
            size = rng.choice((0, 1, 7, 8, 9, 15, 16, 17, 63, 64, 511, 512, 2047, 2048, 2049, 4096, 32768, 65536))
            places.append((8 * row, rng.choice((16 * rng.randrange(1000), rng.randrange(16000))), size))
        weave = Weave(triples([(4800, 5, 300), (4808, 32, 65536)]), array("q", (0, 0, 16, 1024)))
        bench.tables.digest(
            [LaunchGroup(bench.far, bench.near, triples(places)), LaunchGroup(bench.far, bench.near, weave)],
            0,
            bench.stream,
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
        before = cuda_runner.LAUNCH_BYTES
        cuda_runner.LAUNCH_BYTES = 10_000
        try:
            bench.tables.launch([LaunchGroup(bench.far, bench.near, triples(places))], 0, bench.stream)
        finally:
            cuda_runner.LAUNCH_BYTES = before
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
