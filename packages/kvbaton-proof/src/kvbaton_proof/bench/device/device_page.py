"""Results of the device benchmark for reading, and what has to hold.

Law: a claim is a number with its bound, at the largest size, from one run. A missed bound is reported as such; so is a
missed aim, which fails nothing. Staging is judged by what the bus does both ways at once, since P and D share one GPU,
and so one link, here.
"""

from __future__ import annotations

from kvbaton_proof.bench.device.device_nixl import Reads
from kvbaton_proof.bench.device.device_ways import DeviceReport, Size
from kvbaton_proof.bench.kit.lab_pages import NOT_MEASURED, Check, Findings, Table, check
from kvbaton_proof.bench.kit.line_plot import line_plot
from kvbaton_proof.bench.kit.run_facts import RunFacts

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
