"""`cuda_move.cu` on a CPU: compiled by a C++ compiler with a handful of definitions, and compared with the reference.

    python -m tests.transports.device.kernel_emulation

For who changes the kernels and has no GPU at hand: every thread of a grid runs, those of a warp at the same time where
they exchange values. It shows that the arithmetic is right, not that it is fast. `cuda_check` shows both.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from kvbaton.protocol.geometry.spans import Weave
from kvbaton.transports.checksum.checksum_device import digest_of
from kvbaton.transports.core.mover import Rows
from kvbaton.transports.cuda import cuda_driver
from kvbaton.transports.cuda.cuda_table import LaunchGroup, write_table

DEFINITIONS = r"""
#include <pthread.h>
#include <thread>
#include <vector>
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx, gridDim;
struct uint4 { unsigned x, y, z, w; };
#define __device__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __restrict__
struct Exchange { pthread_barrier_t barrier; unsigned long long values[32]; };
static thread_local Exchange* exchange;
static unsigned long long __shfl_down_sync(unsigned, unsigned long long value, int away) {
    const unsigned lane = threadIdx.x % 32;
    exchange->values[lane] = value;
    pthread_barrier_wait(&exchange->barrier);
    const unsigned long long found = lane + away < 32 ? exchange->values[lane + away] : value;
    pthread_barrier_wait(&exchange->barrier);
    return found;
}
"""
LAUNCHES = r"""
typedef void (*Kernel)(const long long*, int, unsigned, unsigned);
static void launch(Kernel kernel, const long long* table, int groups, unsigned first, unsigned end, unsigned grid) {
    for (unsigned warp = 0; warp < grid * (THREADS / 32); ++warp) {
        Exchange shared;
        pthread_barrier_init(&shared.barrier, nullptr, 32);
        std::vector<std::thread> lanes;
        for (unsigned lane = 0; lane < 32; ++lane)
            lanes.emplace_back([&, lane] {
                gridDim.x = grid, blockIdx.x = warp / (THREADS / 32), threadIdx.x = warp % (THREADS / 32) * 32 + lane;
                exchange = &shared;
                kernel(table, groups, first, end);
            });
        for (auto& lane : lanes) lane.join();
        pthread_barrier_destroy(&shared.barrier);
    }
}
extern "C" void move(const long long* table, int groups, unsigned first, unsigned end, unsigned grid) {
    launch(kvbaton_move, table, groups, first, end, grid);
}
extern "C" void digest(const long long* table, int groups, unsigned first, unsigned end, unsigned grid) {
    launch(kvbaton_digest, table, groups, first, end, grid);
}
"""
SIZE = 1 << 20


def compiled(folder: Path) -> ctypes.CDLL:
    kernel = Path(cuda_driver.__file__).with_name("cuda_move.cu").read_text()
    source, library = folder / "kernel.cpp", folder / "kernel.so"
    source.write_text(DEFINITIONS + kernel + LAUNCHES)
    subprocess.run(["c++", "-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def check(kernels: ctypes.CDLL, seed: int, grid: int) -> None:
    rng = random.Random(seed)
    near = np.frombuffer(bytearray(rng.randbytes(SIZE)), np.uint8)
    far, table = np.zeros(SIZE, np.uint8), np.zeros(4096, np.int64)
    sizes = (0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 33, 64, 127, 256, 511, 512, 2000, 2048, 2064, 4096, 8192, 8200)
    places = [
        (slot * 9000 + rng.randrange(32), slot * 9000 + rng.randrange(32), rng.choice(sizes)) for slot in range(90)
    ]
    weave = Weave(array("q", (900_000, 16, 64, 901_000, 33, 77)), array("q", (0, 0, 4096, 1000, 8192, 5)))
    groups = [
        LaunchGroup(far.ctypes.data, near.ctypes.data, triples(places)),
        LaunchGroup(far.ctypes.data, near.ctypes.data, weave),
    ]
    write_table(table, groups)
    launch(kernels.move, table, grid)
    wanted, woven = np.zeros(SIZE, np.uint8), weave.flat()
    for to, at, size in (*places, *zip(woven[0::3], woven[1::3], woven[2::3], strict=True)):
        wanted[to : to + size] = near[at : at + size]
    assert (far == wanted).all(), "copies differ"
    digested = [(8 * row, at, size) for row, (_, at, size) in enumerate(places)]
    digested += [(8 * row, at & ~15, size) for row, (_, at, size) in enumerate(places, len(places))]
    write_table(table, [LaunchGroup(far.ctypes.data, near.ctypes.data, triples(digested))])
    launch(kernels.digest, table, grid, 2 * len(places), 1)
    for place, at, size in digested:
        found = int.from_bytes(far[place : place + 8].tobytes(), "little")
        assert found == digest_of(near[at : at + size].tobytes()), f"the digest of {size} bytes at {at} differs"


def launch(kernel: Any, table: Rows, grid: int, rows: int = 96, groups: int = 2) -> None:
    for first, end in ((0, rows // 3), (rows // 3, rows)):
        kernel(ctypes.c_void_p(table.ctypes.data), groups, first, end, grid)


def triples(places: list[tuple[int, int, int]]) -> array[int]:
    return array("q", [number for place in places for number in place])


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        kernels = compiled(Path(folder))
        for seed, grid in ((1, 1), (2, 3)):
            check(kernels, seed, grid)
            print(f"seed {seed}, {grid} blocks: copies and digests are right", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
