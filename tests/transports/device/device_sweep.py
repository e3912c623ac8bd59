"""How fast device memory crosses between two processes: one read and one write of the same spans, medians.

    python -m tests.transports.device.device_sweep cuda staged-tcp 1 2 4 8 16 [--bytes N] [--slots 16x12] [--encrypt on]
    python -m tests.transports.device.device_sweep cuda staged-shm 1
    python -m tests.transports.device.device_sweep cuda nixl 1 [--in-order]

The numbers are sockets to a peer, for staged-tcp. `--in-order`: neighbours stay neighbours, so NIXL gets few spans.

`fake` in place of `cuda` takes a device made of host memory: what the sockets and threads cost, without a bus.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import random
import statistics
import threading
import time
from array import array
from multiprocessing.connection import Connection

from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.core.transport import Copy, CopyEnded, DeviceTransport, Direction
from kvbaton.transports.staged.staged_listener import Carrier
from kvbaton.transports.staged.staged_transport import StagedConfig, StagedTransport
from tests.transports.device.device_peer import make_gpu, make_plane

P, D = (PeerId(WorkerId(name), Incarnation(1)) for name in ("p", "d"))
SPAN_BYTES = 64 << 10
REPETITIONS = 7
DEADLINE_S = 60.0


def side(kind: str, me: PeerId, other: PeerId, config: StagedConfig | None, size: int) -> DeviceTransport:
    """NIXL, without a configuration."""
    gpu = make_gpu(kind)
    gpu.enter()
    made = make_plane("nixl", me, gpu, 5.0) if config is None else StagedTransport(me, config, gpu)
    made.register(0, DeviceMemory(gpu.allocate(size), size))
    if isinstance(made, StagedTransport):
        lend_everything(made, other)
    return made


def serve(pipe: Connection, kind: str, config: StagedConfig | None, size: int) -> None:
    made = side(kind, P, D, config, size)
    pipe.send_bytes(made.endpoint(D))
    pipe.recv_bytes()
    made.close()


def timed(made: DeviceTransport, news: threading.Event, job: int, way: Direction, spans: array[int]) -> float:
    begun = time.perf_counter()
    assert made.submit(Copy(JobId(job), P, way, 0, 0, spans))
    while True:
        assert news.wait(DEADLINE_S), "nothing ended"
        news.clear()
        for event in made.drain():
            assert isinstance(event, CopyEnded) and event.reason is None, event
            return time.perf_counter() - begun


def measure(kind: str, config: StagedConfig | None, size: int, in_order: bool) -> str:
    pipe, theirs = mp.Pipe()
    child = mp.get_context("spawn").Process(target=serve, args=(theirs, kind, config, size), daemon=True)
    child.start()
    made, news = side(kind, D, P, config, size), threading.Event()
    made.set_waker(news.set)
    made.connect(P, pipe.recv_bytes())
    places = list(range(0, size, SPAN_BYTES))
    if not in_order:
        random.Random(1).shuffle(places)
    spans = array("q", [number for at, place in enumerate(places) for number in (place, at * SPAN_BYTES, SPAN_BYTES)])
    told = []
    for turn, way in enumerate(Direction):
        cpu = os.times()
        took = [timed(made, news, turn * 100 + each, way, spans) for each in range(REPETITIONS + 1)][1:]
        spent = sum(os.times()[:2]) - sum(cpu[:2])
        median_s, cpu_s_gb = statistics.median(took), spent / (REPETITIONS + 1) / (size / 1e9)
        told.append(f"{way.name} {size / 1e9 / median_s:.2f} GB/s ({1000 * median_s:.1f} ms, {cpu_s_gb:.2f} CPU s/GB)")
    made.close()
    pipe.send_bytes(b"")
    child.join(10)
    return "; ".join(told)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("kind", choices=("fake", "cuda"))
    parser.add_argument("plane", choices=("nixl", "staged-shm", "staged-tcp"))
    parser.add_argument("sockets", type=int, nargs="+")
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--slots", default="16x12", help="MiB of one, and how many")
    parser.add_argument("--encrypt", default="off", choices=("off", "on"))
    parser.add_argument("--in-order", action="store_true")
    args = parser.parse_args()
    slot_mib, slots = map(int, args.slots.split("x"))
    for sockets in args.sockets:
        carrier: Carrier = "shm" if args.plane == "staged-shm" else "tcp"
        config = StagedConfig(carrier, 0, slot_mib << 20, slots, sockets, encrypt=args.encrypt)
        rates = measure(args.kind, None if args.plane == "nixl" else config, args.bytes, args.in_order)
        print(f"{args.plane}, {sockets} sockets, {args.slots}: {rates}", flush=True)


if __name__ == "__main__":
    main()
