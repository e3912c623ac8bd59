"""The cost of checksums of device memory: the digest alone, and whole handoffs with and without, between two processes.

    python -m kvbaton_proof.bench.device.device_checksums [cuda staged-tcp]

For each plane one pair of processes hands over with checksums and one without, one after the other in each repetition;
the ratio is taken within it and its median reported. The digest alone is one launch over the same rows, by the device's
own clock. `planes.BETWEEN_HOSTS` may be `full` where the plane between hosts (`staged-tcp`) stays within `BOUND` at
every size. P and D share one GPU here, so their digests run one after the other; on two they run at once.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from array import array
from collections.abc import Iterator, Sequence

import msgspec

from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import JobId
from kvbaton.transports.catalogue import SUMS
from kvbaton.transports.checksum.checksum_device import DIGEST_BYTES, PART_BYTES, PIECE_BYTES
from kvbaton.transports.checksum.checksum_memory import Checksum, portions
from kvbaton.transports.core.transport import Copy, Direction
from kvbaton.transports.cuda.cuda_runner import LaunchGroup, Tables
from kvbaton_proof.bench.device.device_peer import Offer, Order, P, Prompts, device_side
from kvbaton_proof.bench.device.device_world import BLOCK_BYTES, DEVICE, Cache, TimedGpu, blocks_of, pattern, weave_of
from kvbaton_proof.bench.kit.handoff_side import Want
from kvbaton_proof.bench.kit.piped_children import PipedChild

PLANES = ("cuda", "staged-tcp")
COUNTS = (32, 1000)
"""Blocks of 2 MiB: 67 MB and 2.1 GB, as of 512 and of 16,384 tokens of an 8B model."""

REPETITIONS = {32: 15, 1000: 7}
BOUND = 1.10


class Cost(msgspec.Struct, frozen=True):
    """One plane and size; milliseconds, medians."""

    plane: str
    bytes: int
    digest_ms: float  # one launch over all of it, by the device's clock
    cut_ms: float  # what the CPU does to cut it into questions
    plain_ms: float  # the whole handoff without checksums
    summed_ms: float
    ratio: float
    right: bool

    @property
    def ok(self) -> bool:
        return self.right and self.ratio <= BOUND


class Pair:
    """A handoff's two ends over one plane: P in a process of its own, D here."""

    def __init__(self, plane: str, peer: PipedChild, directory: str, gpu: TimedGpu, cache: Cache) -> None:
        keyring.mint(directory, ["p", "d"])
        self._peer = peer
        order = Order(directory, {}, handoffs=plane)
        offer = peer.ask(order, Offer)
        self.side = device_side("d", directory, cache.memory, gpu, plane, order.slots)
        self.side.knows("p", offer.address)

    def hand_over(self, source: list[int], target: list[int]) -> float:
        """Milliseconds, from wanting it to the report."""
        ticket = self._peer.ask(Prompts([source]), list[str])[0]
        return 1000 * self.side.fetch([Want(ticket, source, target)])[0]


@contextlib.contextmanager
def pairs(plane: str, gpu: TimedGpu, cache: Cache) -> Iterator[tuple[Pair, Pair]]:
    with contextlib.ExitStack() as stack:
        made = []
        for name in (plane, plane + SUMS):
            scratch = stack.enter_context(key_room())
            peer = stack.enter_context(PipedChild("kvbaton_proof.bench.device.device_peer"))
            made.append(Pair(name, peer, str(scratch / "keys"), gpu, cache))
            stack.callback(made[-1].side.close)
        yield made[0], made[1]


def measure(planes: Sequence[str] = PLANES, counts: Sequence[int] = COUNTS) -> list[Cost]:
    """ImportError without a driver, CudaError without a device."""
    gpu = TimedGpu(DEVICE)
    gpu.enter()
    cache, words, found = Cache(gpu), pattern(), list[Cost]()
    for plane in planes:
        with pairs(plane, gpu, cache) as (plain, summed):
            for count in counts:
                source, target = blocks_of(1, count), blocks_of(2, count)
                right = True
                for pair in (plain, summed):
                    cache.wipe()
                    pair.hand_over(source, target)
                    right &= cache.holds(words, source, target)
                rounds = [
                    (plain.hand_over(source, target), summed.hand_over(source, target))
                    for _ in range(REPETITIONS.get(count, 7))
                ]
                found.append(_cost(plane, count, rounds, right, gpu, cache, weave_of(source, target)))
                print(shown(found[-1]), flush=True)
    return found


def _cost(
    plane: str, count: int, rounds: list[tuple[float, float]], right: bool, gpu: TimedGpu, cache: Cache, weave: Weave
) -> Cost:
    copy = Copy(JobId(1), P, Direction.READ, 0, 0, array("q"), weave=weave)
    begun = time.perf_counter()
    portions(copy, Checksum.FULL, PIECE_BYTES, PART_BYTES)
    cut_ms = 1000 * (time.perf_counter() - begun)
    return Cost(
        plane,
        count * BLOCK_BYTES,
        round(digest_ms(gpu, cache.address, weave), 3),
        round(cut_ms, 2),
        round(statistics.median(plain for plain, _ in rounds), 2),
        round(statistics.median(summed for _, summed in rounds), 2),
        round(statistics.median(each[1] / each[0] for each in rounds), 3),
        right,
    )


def digest_ms(gpu: TimedGpu, address: int, weave: Weave, repetitions: int = 9) -> float:
    """One launch that digests every row of the weave's local side."""
    column, shifts, rows = weave.column[:], weave.shifts[:], len(weave.column) // 3
    column[0::3], column[1::3] = array("q", range(0, DIGEST_BYTES * rows, DIGEST_BYTES)), weave.column[0::3]
    shifts[0::2] = array("q", (DIGEST_BYTES * rows * layer for layer in range(len(shifts) // 2)))
    shifts[1::2] = weave.shifts[0::2]
    found, tables = gpu.allocate_pinned(DIGEST_BYTES * weave.rows), Tables(gpu, 1)
    stream, event = gpu.stream(), gpu.event()
    times = []
    for _ in range(repetitions):
        tables.digest([LaunchGroup(found, address, Weave(column, shifts))], 0, stream)
        gpu.record(event, stream)
        gpu.wait(event)
        times.append(gpu.last_ms())
    tables.clear()
    gpu.drop_event(event)
    gpu.drop_stream(stream)
    gpu.free_pinned(found)
    return statistics.median(times)


def shown(cost: Cost) -> str:
    return (
        f"{cost.plane}, {cost.bytes / 1e6:,.0f} MB: digest {cost.digest_ms} ms on the device, {cost.cut_ms} ms to cut, "
        f"handoff {cost.plain_ms} ms without and {cost.summed_ms} ms with checksums: {cost.ratio} of it "
        f"({'within' if cost.ok else 'NOT WITHIN'} {BOUND}{'' if cost.right else '; WRONG BYTES'})"
    )


def main() -> int:
    found = measure(sys.argv[1:] or PLANES)
    print(msgspec.json.encode(found).decode())
    return 0 if all(cost.ok for cost in found if cost.plane != "cuda") else 1


if __name__ == "__main__":
    sys.exit(main())
