"""The figures of `kvbaton bench transfer` for reading."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton_proof.bench.kit.lab_pages import Findings, Table
from kvbaton_proof.bench.kit.line_plot import line_plot
from kvbaton_proof.bench.kit.run_facts import QUIET_CORES, RunFacts, named
from kvbaton_proof.bench.transfer.transfer_rounds import BASES, IDLE_S, Result, TransferReport
from kvbaton_proof.bench.transfer.whole_handoff import HandoffResult

WAYS = {
    "memcpy": "C memcpy of the same segments inside one process, one thread",
    "shm_1_thread": "kvbaton, shared memory, one thread copies",
    "shm_2_threads": "kvbaton, shared memory, two threads copy (as installed)",
    "tcp": "kvbaton, two TCP streams over loopback",
    "tcp_encrypted": "the same, encrypted (AES-128-GCM) as it is between hosts",
    "raw_sockets": "as many bytes, contiguous, over two plain sockets",
    "nixl": "NIXL as it chooses on one host (UCX: process_vm_readv), progress thread driven by events",
    "nixl_2_threads": "the same, `num_threads=2`",
    "nixl_no_thread": "the same, without a progress thread: the reader polls",
    "nixl_tcp": "NIXL, `TLS=tcp` with 256 KiB segments, progress threads driven by events, looked at every 0.2 ms",
    "nixl_tcp_spin": "the same without progress threads: both sides poll without a pause, a core each",
    "kvbaton_nixl": "kvbaton driving NIXL, configured as `nixl`",
    "kvbaton_nixl_tcp": "kvbaton driving NIXL, configured as `nixl_tcp`",
    "mooncake": "Mooncake's transfer engine over TCP, connection pool on, batches of 1,024 slices",
    "kvbaton_mooncake": "kvbaton driving Mooncake's transfer engine, configured alike",
}
FEW = 5
LIMITS = (
    "Loopback and one machine: nothing here speaks of a network card or of RDMA, which is what NIXL is for.",
    "Ratios are taken within a repetition, between ways measured right after each other, and only then the median.",
)


def findings(facts: RunFacts, report: TransferReport, picture: str = "") -> Findings:
    taken = sorted({each.repetitions for each in report.segments})
    return Findings(
        title=f"{facts.date}: data planes side by side",
        about=f"{facts.machine}; {facts.load_line}. {facts.version_line}. "
        f"{report.moved_bytes >> 20} MiB a copy, scattered in segments over a region twice as large on both sides; "
        f"{' to '.join(map(str, taken))} interleaved repetitions, medians over the quieter half; "
        f"{facts.seconds:.0f} s in all. Every way's bytes were compared before it was measured.",
        command=facts.command,
        tables=[_copies(report.segments), *([_handoffs(report.handoffs)] if report.handoffs else [])],
        lines=[*(f"`{name}`: {what}" for name, what in WAYS.items() if name in report.segments[0].gb_s),
               *_idle(report.idle_percent)],
        checks=report.checks,
        wrong=[f"{each.transport}: {each.delivered} of {each.handoffs} handoffs were delivered"
               for each in report.handoffs if each.delivered != each.handoffs],
        doubts=_doubts(report),
        limits=LIMITS,
        picture=picture,
    )  # fmt: skip


def plot(results: Sequence[Result]) -> str:
    lines = {name: [(each.segment_bytes / 1024, each.gb_s[name]) for each in results] for name in results[0].gb_s}
    return line_plot(lines, "GB/s of every way", "segments of KiB", "GB/s", log_x=True)


def _copies(results: Sequence[Result]) -> Table:
    rows = []
    for name in results[0].gb_s:
        cells = [name, BASES.get(name, "")]
        for each in results:
            beside = f" ({each.ratio[name]:.2f})" if name in each.ratio else ""
            cells.append(f"{each.gb_s[name]:.2f}{beside}")
        rows.append(cells)
    rows.append(["cores of others", "", *(f"{each.foreign_cores:.2f}" for each in results)])
    return Table(
        ("way", "beside", *(f"{each.segment_bytes >> 10} KiB" for each in results)), rows, "Copies",
        "GB/s; in brackets how fast beside what the second column names, within the same repetition.",
    )  # fmt: skip


def _handoffs(results: Sequence[HandoffResult]) -> Table:
    rows = [
        [each.transport, f"{each.p50_ms:.2f} ms", f"{each.p99_ms:.2f} ms", f"{each.handoffs_per_s:.0f}/s",
         f"{each.delivered} of {each.handoffs}"]
        for each in results
    ]  # fmt: skip
    head = ("way", "p50 alone", "p99 alone", "64 at once", "delivered, bytes compared")
    return Table(head, rows, "One-block handoffs through the whole stack")


def _idle(percent: dict[str, float]) -> list[str]:
    used = named({name: f"{each:g} %" for name, each in percent.items()})
    return [f"connected and left alone for {IDLE_S:.0f} s, of a core, the busier of two processes: {used}"] * bool(used)


def _doubts(report: TransferReport) -> list[str]:
    doubts = []
    if min(each.repetitions for each in report.segments) < FEW:
        doubts.append("Few repetitions: differences of a few percent mean nothing here.")
    busiest = max(each.foreign_cores for each in report.segments)
    if busiest > QUIET_CORES:
        doubts.append(f"The machine was not quiet: others used up to {busiest:.2f} cores even in the quieter half.")
    return doubts
