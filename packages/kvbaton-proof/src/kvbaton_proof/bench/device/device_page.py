"""Results of the device benchmark: verdicts, a table for reading, and a plain plot.

Law: a verdict is a number with its bound, at the largest size, from one run. A missed bound is reported as such; so is
a missed goal, which fails nothing.
Staging is judged by what the bus does both ways at once, since P and D share one GPU, and so one link, here.
"""

from __future__ import annotations

import math

import msgspec

from kvbaton_proof.bench.device.device_nixl import Reads
from kvbaton_proof.bench.device.device_ways import DeviceReport, Size
from kvbaton_proof.bench.kit import svg_plots
from kvbaton_proof.bench.kit.text_tables import spaced

LAUNCH_MIN = 0.93
HANDOFF_MAX, HANDOFF_AIM = 2.5, 1.5
STAGED_MIN = 0.85
COLUMN = 26


class Verdict(msgspec.Struct, frozen=True):
    what: str
    value: float
    bound: float
    ok: bool
    aim: float | None = None


def verdicts(report: DeviceReport) -> list[Verdict]:
    """Judged at the largest number of blocks."""
    size = max(report.sizes, key=lambda each: each.blocks)
    launch = size.of_contiguous["cuda, launch"]
    staged = round(size.gb_s["staged-shm"] / report.bus.both_gb_s, 3)
    right = all(each.right for each in report.sizes) and all(each.right for each in report.nixl if not each.problem)
    at = f"at {size.blocks} blocks"
    return [
        Verdict("every byte right", float(right), 1.0, right),
        Verdict(f"one launch, of the contiguous copy {at}", launch, LAUNCH_MIN, launch >= LAUNCH_MIN),
        Verdict(
            f"whole handoff, over the copy alone {at}",
            size.handoff_over_copy,
            HANDOFF_MAX,
            size.handoff_over_copy <= HANDOFF_MAX,
            HANDOFF_AIM,
        ),
        Verdict(f"staged by shm, of the bus both ways at once {at}", staged, STAGED_MIN, staged >= STAGED_MIN),
    ]


def best_nixl(report: DeviceReport) -> Reads | None:
    """The fastest setting that moved scattered segments, by the largest size that it finished."""
    scattered = [each for each in report.nixl if each.ms and "one descriptor" not in each.setting]
    return min(scattered, key=lambda each: (-max(each.ms), each.ms[max(each.ms)]), default=None)


def table(report: DeviceReport) -> str:
    lines = [
        report.device,
        "milliseconds (GB/s) by the clock on the wall; in brackets the device's own time for a copy or launch",
    ]
    lines.append(spaced(["", *(f"{size.blocks} blocks" for size in report.sizes)], COLUMN))
    for name in report.sizes[0].wall_ms:
        lines.append(spaced([name, *(_cell(size, name) for size in report.sizes)], COLUMN))
    for reads in report.nixl:
        cells = [_time(reads.ms.get(size.blocks), size.bytes) for size in report.sizes]
        lines.append(spaced(["NIXL", *cells], COLUMN) + f"   {reads.setting} {reads.problem[-80:]}")
    bus = report.bus
    lines.append(
        f"the bus, pinned: {bus.to_host_gb_s} GB/s to the host, {bus.to_device_gb_s} to the device, "
        f"{bus.both_gb_s} each way with both at once"
    )
    largest = max(report.sizes, key=lambda each: each.blocks)
    alone = largest.gb_s["staged-shm"] / min(bus.to_host_gb_s, bus.to_device_gb_s)
    lines.append(f"staged-shm at {largest.blocks} blocks, of one way alone: {alone:.3f}")
    for size in report.sizes:
        lines.append(f"{size.blocks} blocks, of the contiguous copy: {size.of_contiguous}")
    return "\n".join((*lines, *map(said, verdicts(report))))


def said(verdict: Verdict) -> str:
    aim = "" if verdict.aim is None else f", aim {verdict.aim}"
    return f"{'holds ' if verdict.ok else 'MISSED'}  {verdict.what}: {verdict.value:.3f} (bound {verdict.bound}{aim})"


def plot(report: DeviceReport) -> str:
    """GB/s at the largest size, on a logarithmic scale, as SVG."""
    size = max(report.sizes, key=lambda each: each.blocks)
    rates = dict(size.gb_s)
    nixl = best_nixl(report)
    if nixl is not None and size.blocks in nixl.ms:
        rates["NIXL, best found"] = size.bytes / 1e6 / nixl.ms[size.blocks]
    title = f"GB/s at {size.blocks} blocks of 64 x 32 KiB, wall clock, logarithmic"
    ordered = dict(sorted(rates.items(), key=lambda each: -each[1]))
    return svg_plots.bars(
        {title: ordered}, lambda _: "#4477aa", scale=lambda rate: max(0.01, math.log10(max(rate, 1.0)))
    )


def _cell(size: Size, name: str) -> str:
    device = f" [{size.device_ms[name]:.3f}]" if name in size.device_ms else ""
    return _time(size.wall_ms.get(name), size.bytes) + device


def _time(ms: float | None, total: int) -> str:
    return "-" if ms is None else f"{ms:.3f} ({total / 1e6 / ms:.1f})"
