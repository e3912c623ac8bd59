"""Device memory between two processes on one GPU, all methods compared in one run.

`contiguous` is one plain copy of as many bytes out of the same opened memory; `cuda` the plane's copy of scattered
segments, from `submit` until its end is known, told as blocks by layers (and once more span by span); `handoff` all of
it, from wanting a prompt to the engine's report, with claim and commit over the real control plane; `staged-shm` and
`staged-tcp` through pinned memory of the host, beside what the bus does. Each repetition measures all of them one after
the other; ratios are taken within it and their medians reported. `handoff, again` follows another at once, when both
processes are awake and have it in their caches. Every way's result is compared, byte by byte, before it is timed.

Results of the device benchmark for reading, and what has to hold.

Law: a claim is a number with its bound, at the largest size, from one run. A missed bound is reported as such; so is a
missed aim, which fails nothing. Staging is judged by what the bus does both ways at once, since P and D share one GPU,
and so one link, here.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator

import msgspec

from kvbaton.control import keyring
from kvbaton.control.key_room import key_room
from kvbaton.protocol.geometry.spans import Weave
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.core.transport import Copy, CopyEnded, DeviceTransport, Direction, Spans
from kvbaton_proof.bench.device import device_nixl
from kvbaton_proof.bench.device.device_nixl import Reads
from kvbaton_proof.bench.device.device_peer import PLANES, Offer, Order, P, Prompts, device_side, make_plane
from kvbaton_proof.bench.device.device_world import (
    BLOCK_BYTES,
    COUNTS,
    DEVICE,
    Cache,
    TimedGpu,
    blocks_of,
    pattern,
    spans_of,
    weave_of,
)
from kvbaton_proof.bench.kit.handoff_side import Want
from kvbaton_proof.bench.kit.lab_pages import NOT_MEASURED, Check, Findings, Table, check, line_plot
from kvbaton_proof.bench.kit.piped_children import PipedChild
from kvbaton_proof.bench.kit.run_facts import RunFacts

COPY_DEADLINE_S = 30.0
BUS_BYTES = 256 << 20
SLOW = {"staged-tcp"}
"""Ways that are measured a few times only: they take a hundred times as long."""

SLOW_REPETITIONS = 3
LAUNCHES = ("contiguous", "cuda", "cuda, span by span")
"""Ways that the device itself can time."""


class Size(msgspec.Struct, frozen=True):
    """One number of blocks: milliseconds by the clock on the wall and by the device's own, and ratios."""

    blocks: int
    bytes: int
    wall_ms: dict[str, float]
    device_ms: dict[str, float]
    gb_s: dict[str, float]
    of_contiguous: dict[str, float]  # of the device's time for launches, of the wall's for all else
    handoff_over_copy: float
    right: bool


class Bus(msgspec.Struct, frozen=True):
    """Pinned memory, 256 MiB at a time: GB/s each way alone, and each way while the other runs too."""

    to_host_gb_s: float
    to_device_gb_s: float
    both_gb_s: float


class DeviceReport(msgspec.Struct, frozen=True):
    """Everything that the command prints."""

    device: str
    sizes: list[Size]
    bus: Bus
    nixl: list[device_nixl.Reads]
    repetitions: int


class DeviceBench:
    """The decode side: its cache, its planes, its node, and the peer process."""

    def __init__(self, peer: PipedChild, key_directory: str) -> None:
        self._peer = peer
        self._gpu = TimedGpu(DEVICE)
        self._gpu.enter()
        self._cache = Cache(self._gpu)
        self._words = pattern()
        readers = {name: PeerId(WorkerId(f"bench-{name}"), Incarnation(1)) for name in PLANES}
        order = Order(key_directory, readers)
        offer = peer.ask(order, Offer)
        self._far = self._gpu.open(offer.handle)
        self._planes: dict[str, tuple[DeviceTransport, threading.Event]] = {}
        self._jobs = 0
        for name, me in readers.items():
            plane = make_plane(name, me, self._gpu, order.slots)
            plane.register(0, self._cache.memory)
            plane.connect(P, offer.endpoints[name])
            event = threading.Event()
            plane.set_waker(event.set)
            self._planes[name] = plane, event
        self._side = device_side("d", key_directory, self._cache.memory, self._gpu)
        self._side.knows("p", offer.address)

    def told(self) -> str:
        return self._gpu.told()

    def close(self) -> None:
        self._side.close()
        for plane, _ in self._planes.values():
            plane.close()
        self._gpu.close(self._far)

    def measure(self, count: int, repetitions: int) -> Size:
        source, target = blocks_of(1, count), blocks_of(2, count)
        spans, total = spans_of(source, target), count * BLOCK_BYTES
        ways: dict[str, Callable[[], float]] = {
            "contiguous": lambda: self._cache.copy(self._cache.address, self._far, total),
            "cuda": lambda: self._copy("cuda", array("q"), weave_of(source, target)),
            "cuda, span by span": lambda: self._copy("cuda", spans),
            "staged-shm": lambda: self._copy("staged-shm", spans),
            "staged-tcp": lambda: self._copy("staged-tcp", spans),
            "handoff": lambda: self._handoff(source, target),
            "handoff, again": lambda: self._handoff(source, target),
        }
        right = True
        for name, way in ways.items():
            self._cache.wipe()
            way()
            if name == "contiguous":
                right &= self._cache.begins_with(self._words, total)
            else:
                right &= self._cache.holds(self._words, source, target)
        rounds: list[dict[str, tuple[float, float]]] = []
        for index in range(repetitions):
            timed = {name: way for name, way in ways.items() if name not in SLOW or index < SLOW_REPETITIONS}
            rounds.append({name: (way() * 1000, self._gpu.last_ms()) for name, way in timed.items()})
        return _size(count, rounds, right)

    def bus(self) -> Bus:
        """What pinned memory does when nothing else is asked of the bus."""
        gpu = self._gpu
        near, far = (gpu.allocate_pinned(BUS_BYTES) for _ in range(2))
        streams, done = (gpu.stream(), gpu.stream()), gpu.event()

        def both() -> float:
            begun = time.perf_counter()
            for _ in range(4):
                gpu.copy(near, self._cache.address, BUS_BYTES, streams[0])
                gpu.copy(self._cache.address + BUS_BYTES, far, BUS_BYTES, streams[1])
            for stream in streams:
                gpu.record(done, stream)
                gpu.wait(done)
            return (time.perf_counter() - begun) / 4

        def rate(way: Callable[[], float]) -> float:
            return round(BUS_BYTES / 1e9 / statistics.median(way() for _ in range(9)), 1)

        measured = Bus(
            rate(lambda: self._cache.copy(near, self._cache.address, BUS_BYTES)),
            rate(lambda: self._cache.copy(self._cache.address, near, BUS_BYTES)),
            rate(both),
        )
        gpu.free_pinned(near)
        gpu.free_pinned(far)
        return measured

    def _copy(self, name: str, spans: Spans, weave: Weave | None = None) -> float:
        plane, event = self._planes[name]
        event.clear()
        self._jobs += 1
        begun = time.perf_counter()
        plane.submit(Copy(JobId(self._jobs), P, Direction.READ, 0, 0, spans, weave=weave))
        event.wait(COPY_DEADLINE_S)
        seconds = time.perf_counter() - begun
        ended = plane.drain()
        if not ended or not isinstance(ended[0], CopyEnded) or ended[0].reason is not None:
            raise RuntimeError(f"{name} did not deliver: {ended}")
        return seconds

    def _handoff(self, source: list[int], target: list[int]) -> float:
        ticket = self._peer.ask(Prompts([source]), list[str])[0]
        return self._side.fetch([Want(ticket, source, target)])[0]


def _size(count: int, rounds: list[dict[str, tuple[float, float]]], right: bool) -> Size:
    total = count * BLOCK_BYTES

    def median(name: str, which: int) -> float:
        return round(statistics.median(each[name][which] for each in rounds if name in each), 4)

    def ratio(name: str, which: int) -> float:
        return round(statistics.median(each["contiguous"][which] / each[name][which] for each in rounds), 3)

    names = list(rounds[0])
    wall = {name: median(name, 0) for name in names}
    device = {name: median(name, 1) for name in LAUNCHES}
    over = statistics.median(each["handoff"][0] / each["cuda"][0] for each in rounds)
    return Size(
        count,
        total,
        wall,
        device,
        {name: round(total / 1e6 / ms, 1) for name, ms in wall.items()},
        {
            **{f"{name}, launch": ratio(name, 1) for name in LAUNCHES[1:]},
            **{name: ratio(name, 0) for name in (*LAUNCHES[1:], "handoff")},
        },
        round(over, 3),
        right,
    )


@contextlib.contextmanager
def _bench() -> Iterator[DeviceBench]:
    with key_room() as scratch:
        directory = str(scratch / "keys")
        keyring.mint(directory, ["p", "d"])
        with PipedChild("kvbaton_proof.bench.device.device_peer") as peer:
            bench = DeviceBench(peer, directory)
            try:
                yield bench
            finally:
                bench.close()


def measure(repetitions: int, counts: tuple[int, ...] = COUNTS, nixl: bool = True) -> DeviceReport:
    """Everything; progress on standard error. ImportError without a driver, CudaError without a device."""
    sizes = []
    with _bench() as bench:
        told = bench.told()
        say(told)
        for count in counts:
            say(f"{count} blocks of {BLOCK_BYTES >> 20} MiB …")
            sizes.append(bench.measure(count, repetitions))
        say("the bus …")
        bus = bench.bus()
    reads: list[device_nixl.Reads] = []
    if nixl and device_nixl.installed():
        reads = device_nixl.measure(counts, 5, say)
    return DeviceReport(told, sizes, bus, reads, repetitions)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


LAUNCH_MIN = 0.93
HANDOFF_MAX, HANDOFF_AIM = 2.5, 1.5
STAGED_MIN = 0.85


def checks(report: DeviceReport) -> list[Check]:
    """Judged at the largest number of blocks."""
    size = largest(report)
    staged = size.gb_s["staged-shm"] / report.bus.both_gb_s
    right = all(each.right for each in report.sizes) and all(each.right for each in report.nixl if not each.problem)
    at = f"at {size.blocks} blocks"
    return [
        check("every byte right", float(right), "=", 1.0),
        check(f"one launch, of the contiguous copy {at}", size.of_contiguous["cuda, launch"], ">=", LAUNCH_MIN),
        check(f"whole handoff, over the copy alone {at}", size.handoff_over_copy, "<=", HANDOFF_MAX, aim=HANDOFF_AIM),
        check(f"staged by shm, of the bus both ways at once {at}", staged, ">=", STAGED_MIN),
    ]


def largest(report: DeviceReport) -> Size:
    return max(report.sizes, key=lambda each: each.blocks)


def best_nixl(report: DeviceReport) -> Reads | None:
    """The fastest setting that moved scattered segments, by the largest size that it finished."""
    scattered = [each for each in report.nixl if each.ms and "one descriptor" not in each.setting]
    return min(scattered, key=lambda each: (-max(each.ms), each.ms[max(each.ms)]), default=None)


def findings(facts: RunFacts, report: DeviceReport) -> Findings:
    size, bus = largest(report), report.bus
    rows = [[name, *(_cell(each, name) for each in report.sizes)] for name in report.sizes[0].wall_ms]
    for reads in report.nixl:
        cells = [_time(reads.ms.get(each.blocks), each.bytes) for each in report.sizes]
        rows.append([f"NIXL, {reads.setting} {reads.problem[-80:]}".rstrip(), *cells])
    alone = size.gb_s["staged-shm"] / min(bus.to_host_gb_s, bus.to_device_gb_s)
    return Findings(
        title=f"{facts.date}: device memory between two processes on one GPU",
        about=f"{report.device}; {facts.machine}. {facts.version_line}. {report.repetitions} repetitions, "
        f"{facts.seconds:.0f} s in all.",
        command=facts.command,
        tables=[
            Table(
                ("way", *(f"{each.blocks} blocks" for each in report.sizes)), rows, report.device,
                "milliseconds (GB/s) by the clock on the wall; in brackets the device's own time for a copy or launch",
            )
        ],
        lines=[
            f"the bus, pinned: {bus.to_host_gb_s} GB/s to the host, {bus.to_device_gb_s} to the device, "
            f"{bus.both_gb_s} each way with both at once",
            f"staged-shm at {size.blocks} blocks, of one way alone: {alone:.3f}",
            *(f"{each.blocks} blocks, of the contiguous copy: {each.of_contiguous}" for each in report.sizes),
        ],
        checks=checks(report),
    )  # fmt: skip


def plot(report: DeviceReport) -> str:
    """GB/s by the clock on the wall."""
    lines = {name: [(each.blocks, each.gb_s[name]) for each in report.sizes] for name in report.sizes[0].gb_s}
    nixl = best_nixl(report)
    if nixl is not None:
        sizes = [each for each in report.sizes if each.blocks in nixl.ms]
        lines["NIXL, best found"] = [(each.blocks, each.bytes / 1e6 / nixl.ms[each.blocks]) for each in sizes]
    title = "GB/s of blocks of 64 x 32 KiB, wall clock"
    return line_plot(lines, title, "blocks", "GB/s", log_x=True, log_y=True)


def _cell(size: Size, name: str) -> str:
    device = f" [{size.device_ms[name]:.3f}]" if name in size.device_ms else ""
    return _time(size.wall_ms.get(name), size.bytes) + device


def _time(ms: float | None, total: int) -> str:
    return NOT_MEASURED if ms is None else f"{ms:.3f} ({total / 1e6 / ms:.1f})"
