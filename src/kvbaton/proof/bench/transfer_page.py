"""The figures of `kvbaton bench transfer` for reading: lines for a terminal, and the lab page that `--out` writes.

Laws: pure. Everything that a reader needs to judge or repeat the figures is on the page; a claim that does not hold is
told in the same words as one that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvbaton.proof.bench.transfer import BASES, Result
from kvbaton.proof.bench.transfer_checks import Check
from kvbaton.proof.bench.vllm_table import markdown
from kvbaton.proof.bench.whole_handoff import HandoffResult

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
QUIET_CORES = 0.1
FEW = 5
LIMITS = (
    "Loopback and one machine: nothing here speaks of a network card or of RDMA, which is what NIXL is for.",
    "Ratios are taken within a repetition, between ways measured right after each other, and only then the median.",
)


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What is told besides the figures."""

    date: str
    machine: str
    cores: int
    load_before: float
    load_after: float
    versions: Mapping[str, str]
    command: str
    seconds: float
    plot: str = ""  # a file beside the page


class Report(msgspec.Struct, frozen=True):
    """The object that `--json` prints, as far as the page is concerned."""

    moved_bytes: int
    repetitions: int
    segments: Sequence[Result]
    handoffs: Sequence[HandoffResult] = ()
    checks: Sequence[Check] = ()
    idle_percent: Mapping[str, float] = {}


def check_lines(checks: Sequence[Check]) -> list[str]:
    return [
        f"{'holds' if each.ok else 'DOES NOT HOLD'}: {each.name}: {each.value:g} ({each.relation} {each.bound:g})"
        for each in checks
    ]


def page(facts: Facts, report: Report) -> str:
    """The whole page."""
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    taken = sorted({each.repetitions for each in report.segments})
    return "\n".join(
        [
            f"# {facts.date}: data planes side by side",
            "",
            f"{facts.machine}; load {facts.load_before:.2f} before and {facts.load_after:.2f} after. {versions}. "
            f"{report.moved_bytes >> 20} MiB a copy, scattered in segments over a region twice as large on both sides; "
            f"{' to '.join(map(str, taken))} interleaved repetitions, medians over the quieter half; "
            f"{facts.seconds:.0f} s in all. Every way's bytes were compared before it was measured.",
            "",
            f"    {facts.command}",
            "",
            *([f"![GB/s of every way]({facts.plot})", ""] if facts.plot else []),
            "## Copies",
            "GB/s; in brackets how fast beside what the second column names, within the same repetition.",
            "",
            markdown(
                ("way", "beside", *(f"{each.segment_bytes >> 10} KiB" for each in report.segments)), _grid(report)
            ),
            "",
            *(f"- `{name}`: {what}" for name, what in WAYS.items() if name in report.segments[0].gb_s),
            *_idle(report),
            *_handoffs(report),
            *_checks(report),
            "",
            "## What this says and does not say",
            *(f"- {line}" for line in (*_doubts(report), *LIMITS)),
            "",
        ]
    )


def _doubts(report: Report) -> list[str]:
    """How much the figures are worth."""
    said = []
    if min(each.repetitions for each in report.segments) < FEW:
        said.append("Few repetitions: differences of a few percent mean nothing here.")
    busiest = max(each.foreign_cores for each in report.segments)
    if busiest > QUIET_CORES:
        said.append(f"The machine was not quiet: others used up to {busiest:.2f} cores even in the quieter half.")
    return said


def _grid(report: Report) -> list[list[str]]:
    lines = []
    for name in report.segments[0].gb_s:
        cells = [name, BASES.get(name, "")]
        for each in report.segments:
            beside = f" ({each.ratio[name]:.2f})" if name in each.ratio else ""
            cells.append(f"{each.gb_s[name]:.2f}{beside}")
        lines.append(cells)
    return [*lines, ["cores of others", "", *(f"{each.foreign_cores:.2f}" for each in report.segments)]]


def _idle(report: Report) -> list[str]:
    if not report.idle_percent:
        return []
    said = ", ".join(f"{name} {percent:g} %" for name, percent in report.idle_percent.items())
    return ["", "## Idle", f"Connected and left alone for 10 s, of a core, the busier of two processes: {said}."]


def _handoffs(report: Report) -> list[str]:
    if not report.handoffs:
        return []
    lines = [
        [each.transport, f"{each.p50_ms:.2f} ms", f"{each.p99_ms:.2f} ms", f"{each.handoffs_per_s:.0f}/s",
         f"{each.delivered} of {each.handoffs}"]
        for each in report.handoffs
    ]  # fmt: skip
    head = ("", "p50 alone", "p99 alone", "64 at once", "delivered, bytes compared")
    return ["", "## One-block handoffs through the whole stack", "", markdown(head, lines)]


def _checks(report: Report) -> list[str]:
    return ["", "## What is claimed", *(f"- {line}" for line in check_lines(report.checks))] if report.checks else []
