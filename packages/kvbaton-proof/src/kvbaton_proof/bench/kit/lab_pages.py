"""What a benchmark found, ready for reading: tables, verdicts and a page, drawn for a terminal or as Markdown.

Laws: pure. A benchmark makes one `Findings` of its figures, and both readers get the same of it. Names stand left in a
table and figures right; what was not measured is a dash. Every page names its command and what ran, so that a reader
can repeat it; what speaks against kvbaton is told in the same words as what speaks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from kvbaton_proof.bench.kit.run_facts import public

Grid = Sequence[Sequence[str]]
NOT_MEASURED = "-"
SAYS = "What this says and does not say"
CLAIMS = "What has to hold"
_LEFT = ("", "target", "target / base", "way", "store")

Relation = Literal[">=", ">", "<=", "<", "="]
_HOLDS: Mapping[Relation, Callable[[float, float], bool]] = {
    ">=": lambda value, bound: value >= bound,
    ">": lambda value, bound: value > bound,
    "<=": lambda value, bound: value <= bound,
    "<": lambda value, bound: value < bound,
    "=": lambda value, bound: value == bound,
}


class Check(msgspec.Struct, frozen=True):
    """One claim: it holds when `value relation bound`. What was not measured holds nothing."""

    name: str
    value: float | None
    relation: Relation
    bound: float
    ok: bool
    ways: tuple[str, ...] = ()  # that it is about
    aim: float | None = None  # better than the bound; missing it fails nothing

    def __str__(self) -> str:
        value = "not measured" if self.value is None else f"{self.value:g}"
        aim = "" if self.aim is None else f", aim {self.aim:g}"
        return f"{'holds' if self.ok else 'DOES NOT HOLD'}: {self.name}: {value} ({self.relation} {self.bound:g}{aim})"


def check(
    name: str,
    value: float | None,
    relation: Relation,
    bound: float,
    ways: Sequence[str] = (),
    aim: float | None = None,
) -> Check:
    """A claim, judged on the figure before it is rounded."""
    ok = value is not None and _HOLDS[relation](value, bound)
    return Check(name, None if value is None else round(value, 3), relation, bound, ok, tuple(ways), aim)


class Table(msgspec.Struct, frozen=True):
    """Figures in rows, with a title and what a reader needs to understand them."""

    head: Sequence[str]
    rows: Grid
    title: str = ""
    legend: str = ""


class Findings(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that a reader is shown of a run."""

    title: str
    about: str  # on what and how it was measured, as one paragraph
    command: str
    tables: Sequence[Table]
    lines: Sequence[str] = ()  # further figures, a line each
    checks: Sequence[Check] = ()
    wrong: Sequence[str] = ()
    doubts: Sequence[str] = ()  # how much the figures are worth
    limits: Sequence[str] = ()  # what no run of this benchmark says; for the page alone
    commands: Mapping[str, str] = {}  # of what was started
    picture: str = ""  # a file beside the page

    @property
    def ok(self) -> bool:
        return not self.wrong and all(each.ok for each in self.checks)

    def as_text(self) -> str:
        """For a terminal, without the verdict."""
        drawn = []
        for each in self.tables:
            drawn += [*([each.title] if each.title else []), plain(each.head, each.rows), ""]
        legends = [each.legend for each in self.tables if each.legend]
        rest = [*self.lines, *map(str, self.checks), *self.doubts, *self.wrong]
        return "\n".join([*drawn, *legends, *([""] if legends and rest else []), *rest]).rstrip()

    def as_page(self) -> str:
        """For docs/lab."""
        parts: list[Iterable[str]] = [[f"![{self.title}]({self.picture})"]] if self.picture else []
        for each in self.tables:
            title = [f"## {each.title}", ""] if each.title else []
            parts.append([*title, markdown(each.head, each.rows), *(["", each.legend] if each.legend else [])])
        parts.append([f"- {line}" for line in self.lines])
        parts.append(bullets(CLAIMS, map(str, self.checks)))
        parts.append(bullets(SAYS, (*(f"**{line}**" for line in self.wrong), *self.doubts, *self.limits)))
        parts.append(what_ran(self.commands))
        return lab_page(self.title, self.about, indented(self.command), *parts)


def number(value: float | None, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def plain(head: Sequence[str], rows: Grid) -> str:
    """Columns as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]

    def drawn(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(head, cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(drawn, [head, *rows]))


def markdown(head: Sequence[str], rows: Grid) -> str:
    """A cell never breaks its row: a bar or a line break in it is replaced."""
    lines = [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |" for cells in rows]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *lines])


def lab_page(title: str, about: str, command: Iterable[str], *parts: Iterable[str]) -> str:
    """`about`: one paragraph; each part is lines, with a blank line after it."""
    lines = [f"# {title}", "", about, "", *command, ""]
    for part in parts:
        shown = list(part)
        lines += [*shown, ""] if shown else []
    return "\n".join(lines)


def indented(command: str) -> list[str]:
    return [f"    {command}"]


def section(title: str, *lines: str) -> list[str]:
    return [f"## {title}", *lines] if lines else []


def bullets(title: str, lines: Iterable[str]) -> list[str]:
    return section(title, *(f"- {line}" for line in lines))


def what_ran(commands: Mapping[str, str]) -> list[str]:
    return bullets("What ran", (f"{name}: `{public(line)}`" for name, line in commands.items()))
