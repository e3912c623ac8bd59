"""The record as Markdown, in the form of the pages of docs/lab. Pure: the same record gives the same page.

Law: what was missed and what was not run stands first, in the same words as what holds.
"""

from __future__ import annotations

from kvbaton_proof.bench.kit.text_tables import markdown
from kvbaton_proof.gpu_test.gpu_plan import ABOUT
from kvbaton_proof.gpu_test.gpu_record import Part, Record, Table


def drawn(record: Record) -> str:
    """The whole page."""
    machine = ", ".join(f"{name} {what}" for name, what in record.machine.items())
    lines = [f"# {record.date}: kvbaton under vLLM, {record.plan} plan", ""]
    if record.device != "cuda":
        lines += ["**A rehearsal on a CPU: what is timed here says nothing of a GPU.**", ""]
    lines += [f"{machine}.", "", "<!-- run: needs=gpu -->", "```console"]
    lines += [*(f"$ {command}" for command in record.commands), "```", "", "## Verdicts", ""]
    lines += [_verdicts(record), ""]
    for part in record.parts.values():
        lines += _part(part)
    return "\n".join(lines).rstrip() + "\n"


def _verdicts(record: Record) -> str:
    rows: list[list[str]] = []
    for part in record.parts.values():
        for each in sorted(part.verdicts, key=lambda each: each.ok):
            word = ("holds" if each.ok else "**missed**") if each.judged else "told, not judged"
            rows.append([f"`{part.name}`", each.name, each.reached, each.bound, word])
        if not part.ended:
            rows.append([f"`{part.name}`", "ended", "no: it was ended from outside or failed", "yes", "**missed**"])
    rows.sort(key=lambda row: row[-1] != "**missed**")
    return markdown(["part", "what", "reached", "bound", ""], rows)


def _part(part: Part) -> list[str]:
    lines = [
        f"## {part.name}",
        "",
        f"{ABOUT.get(part.name, part.name)} Took {part.seconds:.0f} s, the start of servers included.",
        "",
    ]
    for table in part.tables:
        lines += _table(table)
    for note in part.notes:
        head, *rest = note.splitlines()
        lines.append(f"- {head}")
        lines += [f"  {line}" for line in rest]
    lines += [""] if part.notes else []
    if part.commands:
        lines += ["<!-- run: needs=gpu -->", "```console", *(f"$ {line}" for line in part.commands), "```", ""]
    return lines


def _table(table: Table) -> list[str]:
    return [f"**{table.title}**", "", markdown(table.head, table.rows), ""]
