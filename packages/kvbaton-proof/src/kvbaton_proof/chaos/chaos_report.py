"""The report of a run: one JSON object, one page of Markdown, one page of HTML with a timeline.

Law: the pages say nothing that the JSON does not; the HTML needs nothing but itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvbaton_proof.chaos.fault_catalogue import PROMISES
from kvbaton_proof.chaos.liars.lies import BY_NAME
from kvbaton_proof.chaos.outcome import Member, Outcome, Row
from kvbaton_proof.chaos.seen import Seen
from kvbaton_proof.chaos.timeline import page

OUTCOME, SEEN, MARKDOWN, HTML = "outcome.json", "seen.json", "report.md", "report.html"
WIDTH = 60


def write(out: Path, seen: Seen) -> None:
    told = msgspec.json.encode({"ok": seen.outcome.ok, **msgspec.to_builtins(seen.outcome)})
    (out / OUTCOME).write_bytes(msgspec.json.format(told, indent=1) + b"\n")
    (out / SEEN).write_bytes(msgspec.json.encode(seen) + b"\n")
    (out / MARKDOWN).write_text(markdown(seen))
    (out / HTML).write_text(page(seen))


def bare(outcome: Outcome) -> Seen:
    """Of a run of which nothing else was kept."""
    return Seen(outcome, {}, (), (), (), (), 0.0)


def headline(outcome: Outcome) -> str:
    return (
        f"{outcome.requests} requests in {outcome.seconds:.0f} s under {len(outcome.rows)} faults: "
        f"{outcome.right} right, {outcome.errors} errors, {outcome.wrong} wrong, {outcome.stolen} stolen, "
        f"{outcome.late} late, {outcome.dead} dead, {outcome.left_over} left over"
    )


def markdown(seen: Seen) -> str:
    outcome = seen.outcome
    lines = [
        f"# kvbaton chaos: {'every promise held' if outcome.ok else 'a promise broke'}",
        "",
        f"{headline(outcome)}.{f' The slowest request took {seen.slowest_s:.1f} s.' if seen.slowest_s else ''}",
        f"Plan {outcome.plan}, seed {outcome.seed}, engine {outcome.engine}, connector {outcome.connector}, network "
        f"{outcome.network or 'none'}. Again: `{outcome.replay}`",
        "",
        *_section("Problems", [f"- {_safe(each)}" for each in outcome.problems]),
        *_section("Wrong answers", [f"- {_safe(each)}" for each in seen.wrongs]),
        *_section("Late requests", [f"- {_safe(each)}" for each in seen.lates]),
        *_section("Deaths", [f"- {_safe(each)}" for each in seen.deaths]),
        *_section("Faults", _rows(outcome.rows)),
        *_section("Timeline", _timeline(seen)),
        *_section("Lies", _lies(outcome.lies)),
        *_section("Processes at rest, before and after", _members(outcome.members)),
        *_section("Errors by kind", [f"- {_safe(kind)}: {count}" for kind, count in outcome.errors_by_kind.items()]),
        *_section("The promises", [f"{number}. {text}" for number, text in PROMISES.items()]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", *lines, ""] if lines else []


def _rows(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| at | fault | tries | right | errors | wrong | late | dead | well after | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        well = "never" if row.recover_s is None else f"{row.recover_s:.1f} s"
        tries = ", ".join(map(str, row.promises))
        lines.append(
            f"| {row.at_s:.1f} s | {row.title} | {tries} | {row.right} | {row.errors} | {row.wrong} | {row.late} | "
            f"{row.dead} | {well} | {_safe(row.note)} |"
        )
    return lines


def _members(members: Sequence[Member]) -> list[str]:
    if not members:
        return []
    lines = [
        "| process | lives | descriptors | threads | MiB resident | MiB a minute | pins | used blocks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in members:
        slope = "" if each.rss_mib_per_minute is None else f"{each.rss_mib_per_minute:+.2f}"
        lines.append(
            f"| {each.name} | {each.lives} | {each.fds[0]} → {each.fds[1]} | {each.threads[0]} → {each.threads[1]} | "
            f"{each.rss_mib[0]:.0f} → {each.rss_mib[1]:.0f} | {slope} | {each.pins} | {each.used_blocks} |"
        )
    return lines


def _lies(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    if not found:
        return []
    lines = ["| lie | about | told | refused | believed |", "|---|---|---|---|---|"]
    for name, count in found.items():
        what = BY_NAME[name].what if name in BY_NAME else ""
        lines.append(f"| {name} | {what} | {count['told']} | {count['refused']} | {count['believed']} |")
    return lines


def _timeline(seen: Seen) -> list[str]:
    """One line for every few seconds: right answers as a bar, the rest as numbers, and what began."""
    step = max(1, len(seen.seconds) // 40)
    most = max((sum(each.right for each in seen.seconds[at : at + step]) for at in range(0, len(seen.seconds), step)),
               default=0)  # fmt: skip
    if not seen.seconds:
        return []
    lines = ["```", f"{'s':>5}  {'right':<{WIDTH // 2}} right errors bad"]
    for at in range(0, len(seen.seconds), step):
        piece = seen.seconds[at : at + step]
        right, errors, bad = (sum(getattr(each, name) for each in piece) for name in ("right", "errors", "bad"))
        begun = "; ".join(row.title for row in seen.outcome.rows if at <= row.at_s < at + step)
        bar = "#" * (right * (WIDTH // 2) // most if most else 0)
        lines.append(f"{at:>5}  {bar:<{WIDTH // 2}} {right:>5} {errors:>6} {bad:>3}  {begun}".rstrip())
    return [*lines, "```"]


def _safe(text: str) -> str:
    """One line, which no table takes for its own."""
    return " ".join(text.split()).replace("|", "/")[:600]
