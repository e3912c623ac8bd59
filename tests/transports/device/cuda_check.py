"""The planes of device memory on a real GPU: the whole contract between two processes and within one, and what only
hardware can tell. Exit status 0 when all holds.

    python -m tests.transports.device.cuda_check [kernel cuda nixl staged-shm staged-tcp cuda+sums staged-tcp+sums]

Not a part of `make test`, which runs the same cases on a device made of host memory
(tests/transports/device/fake_gpu.py).
"""

from __future__ import annotations

import random
import sys
import time
import traceback
import unittest
from array import array
from typing import cast

from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.ranks.device_store import DeviceRankStore
from kvbaton.ranks.rank_store import RankValues, Run
from kvbaton.store.interface import OrderEnded, OrderId, Space
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.testing import Log, TransportHarness, check_transport
from kvbaton.testing.transport_case import READ, SMALL_BYTES, Case, Cases, copy, fill, moved
from kvbaton.testing.transport_harness import poll
from kvbaton.transports import catalogue
from kvbaton.transports.catalogue import SUMS
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import Copy
from kvbaton.transports.cuda.cuda_transport import CudaConfig, CudaTransport
from tests.transports.device import device_death
from tests.transports.device.device_harness import DeviceHarness, DeviceView, FarDevice
from tests.transports.device.device_peer import make_gpu
from tests.transports.device.kernel_check import KERNEL, a_wrong_byte_is_a_mismatch_and_only_then, check_kernels
from tests.transports.process_harness import PeerProcess

EXTRA = Cases()
PLANES = ("cuda", "nixl", "staged-shm", "staged-tcp", "cuda+sums", "staged-tcp+sums")
"""NIXL is left out where it is not installed."""


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
def a_killed_owners_memory_is_free_within_5_s(harness: TransportHarness) -> None:
    """Counted by the driver. The harness opens the far side's memory itself, so this has a process of its own."""
    if harness.capabilities.name != "cuda":
        return
    import torch

    free_before, size = torch.cuda.mem_get_info()[0], 4 << 30
    owner, reader = (PeerId(WorkerId(name), Incarnation(1)) for name in ("owner", "reader"))
    gpu = make_gpu("cuda")
    near = CudaTransport(reader, CudaConfig(), gpu)
    with gpu:
        address = gpu.allocate(1 << 20)
    near.register(0, DeviceMemory(address, 1 << 20))
    process = PeerProcess("device.device_peer", "cuda")
    try:
        far = FarDevice(process, owner, "cuda", size, 5.0)
        lend_everything(far, reader)
        near.connect(owner, far.endpoint(reader))
        assert near.submit(Copy(JobId(1), owner, READ, 0, 0, array("q", (0, size - 64, 64))))
        ends: list[object] = []
        assert poll(lambda: bool(ends.extend(near.drain()) or ends), 20), "no end"  # type: ignore[func-returns-value]
        assert near.mapped_bytes == size, ends
        process.kill()
        killed = time.monotonic()
        back = poll(lambda: torch.cuda.mem_get_info()[0] > free_before - (256 << 20), 5)
        missing = (free_before - torch.cuda.mem_get_info()[0]) >> 20
        print(
            f"  {missing} MiB missing {time.monotonic() - killed:.2f} s after kill -9 of the owner of {size >> 20} MiB"
        )
        assert back and not near.mapped_bytes
    finally:
        if process.alive():
            process.kill()
        near.close()
        with gpu:
            gpu.free(address)


@EXTRA.add("kill")
def what_opening_memory_of_another_process_costs(harness: TransportHarness) -> None:
    """No bound: printed, since it is what the first copy after a minute of silence pays."""
    if harness.capabilities.name != "cuda":
        return
    pair = harness.pair(SMALL_BYTES, 4 << 30)
    log, took_ms = Log(harness, pair.near), []
    for job in range(3):
        begun = time.monotonic()
        assert pair.near.transport.submit(copy(job, pair.far, READ, [(0, 0, 64)]))
        assert log.end(job).reason is None
        took_ms.append(1000 * (time.monotonic() - begun))
    print("  copies of 64 bytes out of 4 GiB, the first opens it: " + ", ".join(f"{each:.2f} ms" for each in took_ms))


@EXTRA.add()
def a_store_gives_back_what_it_was_given(harness: TransportHarness) -> None:
    """Blocks of 2 MiB in 32 layers, as the cache of an 8B model has them; through pinned memory both ways."""
    gpu, blocks, layers, page = cast(DeviceHarness, harness).gpu, 32, 32, 64 << 10
    values = RankValues(
        Space(
            compat="c" * 32, block_tokens=16, value_bytes=layers * page, group="a", layer_start=0, layer_stop=layers,
            part=0, layout="any",
        ),
        2 * blocks,
        tuple(Run(layer, 0, page, page) for layer in range(layers)),
    )  # fmt: skip
    with gpu:
        memory = [DeviceMemory(gpu.allocate(2 * blocks * page), 2 * blocks * page) for _ in range(layers)]
    views = [DeviceView(gpu, each.address, each.nbytes) for each in memory]
    right = [random.Random(layer).randbytes(blocks * page) for layer in range(layers)]
    for view, data in zip(views, right, strict=True):
        view[0 : blocks * page] = data
    shelf = DeviceRankStore(MemoryBackend(1 << 30), values, memory, gpu)
    hashes = [bytes([number]) * 32 for number in range(blocks)]
    took_s = []
    for number, act in enumerate((shelf.put, shelf.get)):
        begun, ends = time.monotonic(), list[OrderEnded]()
        first = number * blocks
        assert act(OrderId(number), hashes, range(first, first + blocks), 20.0)
        assert poll(lambda ends=ends: bool(ends.extend(shelf.drain()) or ends), 20)  # type: ignore[misc]
        took_s.append(time.monotonic() - begun)
        assert [(each.order, each.count, each.reason) for each in ends] == [(number, blocks, None)], ends
    for view, data in zip(views, right, strict=True):
        assert view[blocks * page :] == data
    shelf.close()
    with gpu:
        for each in memory:
            gpu.free(each.address)
    rates = ", ".join(f"{blocks * layers * page / each / 1e9:.1f} GB/s" for each in took_s)
    print(f"  put and get of {blocks * layers * page >> 20} MiB: {rates}")


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


EXTRA.add()(a_wrong_byte_is_a_mismatch_and_only_then)


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
    wanted = sys.argv[1:] or [
        KERNEL,
        *(name for name in PLANES if not catalogue.PLANES[name.removesuffix(SUMS)].usable()),
    ]
    failed = check_kernels() if KERNEL in wanted else 0
    for plane in (name for name in wanted if name != KERNEL):
        for together in (False, True):
            harness = DeviceHarness(plane, "cuda", together=together)
            begun, found = time.monotonic(), dict[str, list[str]]()
            for case in (*check_transport.cases, *EXTRA, *device_death.CASES):
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
