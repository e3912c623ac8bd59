"""The figures of `kvbaton bench transfer` for reading: lines for a terminal, and the lab page that `--out` writes.

Laws: pure. Everything that a reader needs to judge or repeat the figures is on the page; a claim that does not hold is
told in the same words as one that does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kvbaton_proof.bench.kit import svg_plots
from kvbaton_proof.bench.kit.lab_pages import SAYS, bullets, indented, lab_page, section
from kvbaton_proof.bench.kit.run_facts import QUIET_CORES, RunFacts, load_line, named
from kvbaton_proof.bench.kit.text_tables import markdown
from kvbaton_proof.bench.transfer.transfer_checks import Check
from kvbaton_proof.bench.transfer.transfer_rounds import BASES, Result
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
OWN, DRIVEN, DIRECT, OTHER = "#1f618d", "#7fb3d5", "#ca6f1e", "#909497"
COLOURS = {"kvbaton_": DRIVEN, "shm": OWN, "tcp": OWN, "nixl": DIRECT, "mooncake": DIRECT}
LEGEND = {
    "kvbaton's own": OWN, "a library driven by kvbaton": DRIVEN, "a library driven directly": DIRECT,
    "the machine": OTHER,
}  # fmt: skip
FEW = 5
LIMITS = (
    "Loopback and one machine: nothing here speaks of a network card or of RDMA, which is what NIXL is for.",
    "Ratios are taken within a repetition, between ways measured right after each other, and only then the median.",
)


class TransferFacts(RunFacts, frozen=True, kw_only=True):
    """And how busy the machine was."""

    cores: int
    load_before: float
    load_after: float
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


def page(facts: TransferFacts, report: Report) -> str:
    """The whole page."""
    taken = sorted({each.repetitions for each in report.segments})
    return lab_page(
        f"{facts.date}: data planes side by side",
        f"{facts.machine}; {load_line(facts.load_before, facts.load_after)}. {facts.version_line}. "
        f"{report.moved_bytes >> 20} MiB a copy, scattered in segments over a region twice as large on both sides; "
        f"{' to '.join(map(str, taken))} interleaved repetitions, medians over the quieter half; "
        f"{facts.seconds:.0f} s in all. Every way's bytes were compared before it was measured.",
        indented(facts.command),
        [f"![GB/s of every way]({facts.plot})"] if facts.plot else [],
        section(
            "Copies",
            "GB/s; in brackets how fast beside what the second column names, within the same repetition.",
            "",
            markdown(
                ("way", "beside", *(f"{each.segment_bytes >> 10} KiB" for each in report.segments)), _grid(report)
            ),
        ),
        [f"- `{name}`: {what}" for name, what in WAYS.items() if name in report.segments[0].gb_s],
        _idle(report),
        _handoffs(report),
        bullets("What is claimed", check_lines(report.checks)),
        bullets(SAYS, (*_doubts(report), *LIMITS)),
    )


def plot(results: Sequence[Result]) -> str:
    """A panel for each segment size, a bar for each way."""
    panels = {f"segments of {each.segment_bytes >> 10} KiB, GB/s": each.gb_s for each in results}
    return svg_plots.bars(panels, _colour, LEGEND)


def _colour(name: str) -> str:
    return next((colour for start, colour in COLOURS.items() if name.startswith(start)), OTHER)


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
    percent = named({name: f"{used:g} %" for name, used in report.idle_percent.items()})
    return section("Idle", f"Connected and left alone for 10 s, of a core, the busier of two processes: {percent}.")


def _handoffs(report: Report) -> list[str]:
    if not report.handoffs:
        return []
    lines = [
        [each.transport, f"{each.p50_ms:.2f} ms", f"{each.p99_ms:.2f} ms", f"{each.handoffs_per_s:.0f}/s",
         f"{each.delivered} of {each.handoffs}"]
        for each in report.handoffs
    ]  # fmt: skip
    head = ("", "p50 alone", "p99 alone", "64 at once", "delivered, bytes compared")
    return section("One-block handoffs through the whole stack", "", markdown(head, lines))
