"""Results in the JSON: verdicts, tables and notes, by part; and as Markdown, in the form of the pages of docs/lab.

Laws: a part that is run again replaces what it had found; parts of other calls stay. The file is whole at any time
(written beside and renamed), and a file of another plan or device is not added to. The page is pure: the same record
gives the same page, and what was missed and what was not run stands first, in the same words as what holds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton_proof.bench.kit.lab_pages import markdown

FILE = "gpu-test.json"
FORMAT = 1


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One bound and whether it holds. `judged` is False for what is told and not held against anybody (a peer's)."""

    name: str
    reached: str
    bound: str
    ok: bool
    judged: bool = True


class Table(msgspec.Struct, kw_only=True):
    title: str
    head: list[str]
    rows: list[list[str]] = []


class Part(msgspec.Struct, kw_only=True):
    """What one part has found so far. `ended` is False while it runs, and stays so if it was killed."""

    name: str
    seconds: float = 0.0
    ended: bool = False
    verdicts: list[Verdict] = []
    tables: list[Table] = []
    notes: list[str] = []
    figures: dict[str, Any] = {}
    commands: list[str] = []

    @property
    def ok(self) -> bool:
        judged = [each for each in self.verdicts if each.judged]
        return self.ended and bool(judged) and all(each.ok for each in judged)


class Record(msgspec.Struct, kw_only=True):
    """All calls into one directory."""

    format: int = FORMAT
    plan: str
    device: str
    date: str = ""
    machine: dict[str, str] = {}
    commands: list[str] = []  # as they were typed
    parts: dict[str, Part] = {}

    @property
    def ok(self) -> bool:
        return bool(self.parts) and all(part.ok for part in self.parts.values())


class Book:
    """A record that is on disk."""

    def __init__(self, directory: Path, plan: str, device: str, machine: dict[str, str], command: str) -> None:
        self.path = directory / FILE
        directory.mkdir(parents=True, exist_ok=True)
        self.record = _earlier(self.path, plan, device) or Record(plan=plan, device=device)
        self.record.machine = machine
        self.record.date = time.strftime("%Y-%m-%d", time.gmtime())
        self.record.commands.append(command)
        self.save()

    def begin(self, name: str) -> Page:
        part = Part(name=name)
        self.record.parts[name] = part
        self.save()
        return Page(self, part)

    def save(self) -> None:
        draft = self.path.with_suffix(".part")
        draft.write_bytes(msgspec.json.format(msgspec.json.encode(self.record), indent=1) + b"\n")
        os.replace(draft, self.path)


class Page:
    """Where a part writes; every line is saved at once."""

    def __init__(self, book: Book, part: Part) -> None:
        self._book = book
        self._begun = time.monotonic()
        self.part = part

    def verdict(self, name: str, reached: object, bound: str, ok: bool, *, judged: bool = True) -> Verdict:
        found = Verdict(name=name, reached=str(reached), bound=bound, ok=bool(ok), judged=judged)
        self.part.verdicts.append(found)
        self._save()
        return found

    def table(self, title: str, head: Sequence[str]) -> Table:
        """A table; `row` adds to it."""
        found = Table(title=title, head=list(head), rows=[])
        self.part.tables.append(found)
        return found

    def row(self, table: Table, *cells: object) -> None:
        table.rows.append([str(cell) for cell in cells])
        self._save()

    def note(self, text: str) -> None:
        self.part.notes.append(text)
        self._save()

    def figure(self, name: str, value: object) -> None:
        self.part.figures[name] = value
        self._save()

    def commands(self, lines: Sequence[str]) -> None:
        self.part.commands += [line for line in lines if line not in self.part.commands]
        self._save()

    def end(self) -> None:
        self.part.ended = True
        self._save()

    def _save(self) -> None:
        self.part.seconds = round(time.monotonic() - self._begun, 1)
        self._book.save()


def read(path: Path) -> Record:
    """ValueError if the file is something else."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Record)
    except msgspec.DecodeError as error:
        raise ValueError(f"{path}: not a record of kvbaton_proof.gpu_test: {error}") from None


def _earlier(path: Path, plan: str, device: str) -> Record | None:
    if not path.exists():
        return None
    try:
        found = read(path)
    except ValueError:
        return None
    return found if (found.format, found.plan, found.device) == (FORMAT, plan, device) else None


def drawn(record: Record, about: Mapping[str, str]) -> str:
    """The whole page; `about` says what each part shows."""
    machine = ", ".join(f"{name} {what}" for name, what in record.machine.items())
    lines = [f"# {record.date}: kvbaton under vLLM, {record.plan} plan", ""]
    if record.device != "cuda":
        lines += ["**A rehearsal on a CPU: what is timed here says nothing of a GPU.**", ""]
    lines += [f"{machine}.", "", "<!-- run: needs=gpu -->", "```console"]
    lines += [*(f"$ {command}" for command in record.commands), "```", "", "## Verdicts", ""]
    lines += [_verdicts(record), ""]
    for part in record.parts.values():
        lines += _part(part, about)
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


def _part(part: Part, about: Mapping[str, str]) -> list[str]:
    lines = [
        f"## {part.name}",
        "",
        f"{about.get(part.name, part.name)} Took {part.seconds:.0f} s, the start of servers included.",
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
