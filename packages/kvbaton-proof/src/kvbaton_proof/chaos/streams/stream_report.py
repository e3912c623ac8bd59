"""What a report says of long streams."""

from __future__ import annotations

from collections.abc import Mapping

from kvbaton_proof.chaos.streams.stream_judge import Fate
from kvbaton_proof.chaos.streams.stream_load import Counts

FATES: Mapping[Fate, str] = {
    Fate.LOST: "lost", Fate.WRONG: "wrong", Fate.TWICE: "with a token twice", Fate.MISSING: "with one missing",
    Fate.LATE: "late", Fate.ENDED: "ended by the error event, as their kind must", Fate.REFUSED: "refused",
    Fate.GONE: "hung up by their clients",
}  # fmt: skip


def streams_line(counts: Counts) -> str:
    """Of the long streams, in one line."""
    gap = f"; silent after a cut: p50 {counts.gap_p50_s} s, p99 {counts.gap_p99_s} s" if counts.gap_p50_s else ""
    gap += f", a prefill anew {counts.prefill_p50_s} s" if counts.prefill_p50_s else ""
    said = ", ".join(f"{counts.fates[fate]} {words}" for fate, words in FATES.items())
    moved = ", ".join(f"{count} {reason}" for reason, count in counts.moves.items()) or "none"
    return f"{counts.streams} long streams, {counts.cut} cut ({counts.cuts} cuts): {said}{gap}; moves: {moved}"


def streams_table(counts: Counts | None) -> list[str]:
    """By kind, as Markdown."""
    if counts is None:
        return []
    names = ("streams", "cut", *(fate for fate in Fate))
    lines = [f"| kind | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    for kind, row in counts.by_kind.items():
        lines.append(f"| {kind} | {' | '.join(str(row.get(name, 0)) for name in names)} |")
    return [f"{streams_line(counts)}.", "", *lines]
