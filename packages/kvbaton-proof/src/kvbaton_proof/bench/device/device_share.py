"""The share of a device that copies should have: their time at each share, and the slowdown of a model's steps.

    python -m kvbaton_proof.bench.device.device_share [--shares 1,0.5,0.25,0.125] [--launch-mib 128] [--fill 1]
    [--alone] [--ptx FILE ...]

One process, one device. *alone*: 16, 128 and 1,000 scattered blocks of 2 MiB, by the device's clock. *beside*: steps of
a victim on a stream of its own, each begun together with a copy of 128 blocks (a prompt of 2,000 tokens or so); the
median and the worst of a hundred steps, over the median of steps alone. Victims: with PyTorch `decode` (a CUDA graph of
64 products of 32 rows with 4096 x 14336 weights: bound by memory, as a batch of 32 is) and `prefill` (products of 8192:
bound by computing); without it plain copies of 512 MiB. Bytes are compared once at each share.
`--ptx` measures other shapes of the kernel too (`tools/cuda_ptx.py --set`), `--launch-mib` other bounds of a launch,
`--fill` grids of so many blocks for each multiprocessor. With `--alone` nothing is beside: a line takes some seconds,
most of them for comparing bytes. A file that cannot be loaded costs its own line only.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.protocol.geometry.spans import Weave
from kvbaton.transports.cuda import cuda_runner
from kvbaton.transports.cuda.cuda_driver import CudaError
from kvbaton.transports.cuda.cuda_driver import kernels as kernels_of_package
from kvbaton.transports.cuda.cuda_runner import LaunchGroup, Tables
from kvbaton_proof.bench.device.device_world import DEVICE, Cache, TimedGpu, blocks_of, pattern, weave_of

COUNTS = (16, 128, 1000)
BESIDE = 128
STEPS = 100
COPY_BYTES = 512 << 20

Step = Callable[[], tuple[Callable[[], None], Callable[[], float]]]
"""Begins a step of a victim; what waits for its end, and what then tells its milliseconds."""


class Row(msgspec.Struct, frozen=True):
    """One share: milliseconds of copies alone by blocks, and by victim how much longer its steps take."""

    kernel: str
    share: float
    blocks: int  # of the grid
    launch_mib: int
    alone_ms: dict[int, float]
    victim_ms: dict[str, float]  # a step alone
    median: dict[str, float]  # beside copies, over alone
    worst: dict[str, float]
    copy_ms: dict[str, float]  # of a copy beside the victim
    right: bool


class Mover:
    """Copies between two caches, on a stream."""

    def __init__(self, gpu: TimedGpu, near: Cache, far: Cache) -> None:
        self.gpu = gpu
        self._near, self._far = near, far
        self._tables = Tables(gpu, 1)
        self._stream, self._event = gpu.stream(), gpu.event()

    def begin(self, weave: Weave) -> None:
        self._tables.launch([LaunchGroup(self._near.address, self._far.address, weave)], 0, self._stream)
        self.gpu.record(self._event, self._stream)

    def wait(self) -> float:
        """Milliseconds, by the device's clock."""
        self.gpu.wait(self._event)
        return self.gpu.last_ms()

    def time(self, count: int, repetitions: int = 15) -> float:
        weave, times = weave_of(blocks_of(1, count), blocks_of(2, count)), []
        for _ in range(repetitions):
            self.begin(weave)
            times.append(self.wait())
        return round(statistics.median(times), 4)

    def close(self) -> None:
        self._tables.clear()
        self.gpu.drop_event(self._event)
        self.gpu.drop_stream(self._stream)


def torch_victims() -> dict[str, Step]:
    import torch

    def timed(replay: Callable[[], None]) -> Step:
        stream = torch.cuda.Stream()
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def step() -> tuple[Callable[[], None], Callable[[], float]]:
            with torch.cuda.stream(stream):
                begun.record()
                replay()
                ended.record()
            return ended.synchronize, lambda: float(begun.elapsed_time(ended))

        return step

    def graph_of(run: Callable[[], Any]) -> Callable[[], None]:
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        replay: Callable[[], None] = graph.replay
        return replay

    options: dict[str, Any] = {"device": f"cuda:{DEVICE}", "dtype": torch.bfloat16}
    rows, weights = torch.randn(32, 4096, **options), [torch.randn(4096, 14336, **options) for _ in range(64)]
    square = torch.randn(8192, 8192, **options)
    return {
        "decode": timed(graph_of(lambda: [rows @ weight for weight in weights])),
        "prefill": timed(graph_of(lambda: [square @ square for _ in range(2)])),
    }


def copying_victim(gpu: TimedGpu, near: Cache) -> dict[str, Step]:
    """Copies by the driver, where there is nothing else."""
    other = TimedGpu(DEVICE)  # has its own pair of timing events
    stream, event = gpu.stream(), gpu.event()

    def step() -> tuple[Callable[[], None], Callable[[], float]]:
        other.timed_copy(near.address + COPY_BYTES, near.address, COPY_BYTES, stream)
        other.record(event, stream)
        return lambda: other.wait(event), other.last_ms

    return {"copies": step}


def beside(step: Step, mover: Mover | None) -> tuple[list[float], list[float]]:
    """The times of a victim's steps, each begun together with a copy, and of the copies."""
    weave = weave_of(blocks_of(1, BESIDE), blocks_of(2, BESIDE))
    steps, copies = [], []
    for _ in range(STEPS):
        if mover is not None:
            mover.begin(weave)
        wait, told = step()
        wait()
        steps.append(told())
        if mover is not None:
            copies.append(mover.wait())
    return steps, copies


def row_of(kernel: str, share: float, mover: Mover, victims: dict[str, Step], right: bool) -> Row:
    alone = {count: mover.time(count) for count in COUNTS}
    base, median, worst, copy_ms = dict[str, float](), dict[str, float](), dict[str, float](), dict[str, float]()
    for name, step in victims.items():
        beside(step, None)  # warm
        base[name] = round(statistics.median(beside(step, None)[0]), 3)
        steps, copies = beside(step, mover)
        median[name] = round(statistics.median(steps) / base[name], 3)
        worst[name] = round(max(steps) / base[name], 3)
        copy_ms[name] = round(statistics.median(copies), 3)
    launch_mib = cuda_runner.LAUNCH_BYTES >> 20
    return Row(kernel, share, mover.gpu.blocks, launch_mib, alone, base, median, worst, copy_ms, right)


@contextlib.contextmanager
def mover_of(share: float, fill: int, ptx: str, near: Cache, far: Cache) -> Iterator[Mover]:
    gpu = TimedGpu(DEVICE, share, ptx)
    gpu.blocks *= fill
    gpu.enter()
    mover = Mover(gpu, near, far)
    try:
        yield mover
    finally:
        mover.close()


def is_right(mover: Mover, near: Cache, words: Any) -> bool:
    source, target = blocks_of(1, COUNTS[-1]), blocks_of(2, COUNTS[-1])
    near.wipe()
    mover.begin(weave_of(source, target))
    mover.wait()
    return near.holds(words, source, target)


def measure(grids: list[tuple[float, int]], launches: list[int], kernels: dict[str, str], alone: bool) -> list[Row]:
    """`grids`: shares, and blocks for each multiprocessor."""
    gpu = TimedGpu(DEVICE)
    gpu.enter()
    near, far, words = Cache(gpu), Cache(gpu), pattern()
    far.fill(words)
    victims: dict[str, Step] = {}
    if not alone:
        victims = torch_victims() if importlib.util.find_spec("torch") else copying_victim(gpu, near)
    told = f"{gpu.told()}, {gpu.multiprocessors} multiprocessors; victims: {', '.join(victims) or 'none'}"
    print(told, file=sys.stderr, flush=True)
    found = []
    for (name, ptx), launch_mib, (share, fill) in itertools.product(kernels.items(), launches, grids):
        cuda_runner.LAUNCH_BYTES = launch_mib << 20
        try:
            with mover_of(share, fill, ptx, near, far) as mover:
                found.append(row_of(name, share, mover, victims, is_right(mover, near, words)))
        except CudaError as error:
            print(f"{name}, share {share}: {error}", flush=True)
        else:
            print(shown(found[-1]), flush=True)
    return found


def shown(row: Row) -> str:
    alone = ", ".join(f"{count} blocks {ms} ms" for count, ms in row.alone_ms.items())
    victims = "; ".join(
        f"{name} {row.victim_ms[name]} ms, beside copies x{row.median[name]} (worst x{row.worst[name]}), "
        f"the copy {row.copy_ms[name]} ms"
        for name in row.victim_ms
    )
    right = "" if row.right else " WRONG BYTES"
    where = f"{row.kernel}, share {row.share} ({row.blocks} blocks), launches of {row.launch_mib} MiB"
    return f"{where}:{right} {alone}" + (f"; {victims}" if victims else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shares", default="1,0.5,0.25,0.125")
    parser.add_argument("--launch-mib", default=str(cuda_runner.LAUNCH_BYTES >> 20))
    parser.add_argument("--fill", default="1", help="blocks for each multiprocessor")
    parser.add_argument("--alone", action="store_true", help="only copies, nothing beside them")
    parser.add_argument("--ptx", type=Path, nargs="*", default=[], metavar="FILE")
    args = parser.parse_args()
    kernels = {"kernel": kernels_of_package(), **{path.stem: path.read_text() for path in args.ptx}}
    fills = [int(text) for text in args.fill.split(",")]
    grids = list(itertools.product(map(float, args.shares.split(",")), fills))
    launches = [int(text) for text in args.launch_mib.split(",")]
    found = measure(grids, launches, kernels, args.alone)
    print(msgspec.json.encode(found).decode())
    whole = len(found) == len(grids) * len(launches) * len(kernels)
    return 0 if whole and all(row.right for row in found) else 1


if __name__ == "__main__":
    sys.exit(main())
