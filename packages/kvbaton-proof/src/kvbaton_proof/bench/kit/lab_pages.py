"""What a benchmark found, ready for reading: tables, verdicts and a page, drawn for a terminal or as Markdown.

Laws: pure. A benchmark makes one `Findings` of its figures, and both readers get the same of it. Names stand left in a
table and figures right; what was not measured is a dash. Every page names its command and what ran, so that a reader
can repeat it; what speaks against kvbaton is told in the same words as what speaks for it.

Figures over a variable as SVG, no library needed: goodput over rate, GB/s over sizes, shares over times.

Laws: pure, and the same figures give the same bytes. Both axes are labelled; lines differ by their dashes too, for
readers who cannot tell colours apart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal
from xml.sax.saxutils import escape

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


WIDTH, HEIGHT = 860, 420
LEFT, RIGHT, BOTTOM = 70, 20, 50
LEGEND_TOP, LEGEND_STEP, LEGEND_COLUMNS = 46, 205, 4
TICKS = 5
COLOURS = ("#1f618d", "#ca6f1e", "#1e8449", "#7d3c98", "#b03a2e", "#566573", "#b7950b", "#17a589")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
_FLOOR = 1e-3
"""Smaller values stand at the edge of a logarithmic axis."""

Lines = Mapping[str, Sequence[tuple[float, float]]]
"""By name, points (x, y)."""


def line_plot(lines: Lines, title: str, across: str, up: str, *, log_x: bool = False, log_y: bool = False) -> str:
    """A line for each name; `across` and `up` say what the axes are."""
    top = LEGEND_TOP + 16 * -(-len(lines) // LEGEND_COLUMNS)
    x_at, x_ticks = _axis([x for points in lines.values() for x, _ in points], LEFT, WIDTH - RIGHT, log_x)
    y_at, y_ticks = _axis([y for points in lines.values() for _, y in points], HEIGHT - BOTTOM, top, log_y)
    drawn = [_text(LEFT, 20, title, ' font-weight="bold"')]
    for tick in x_ticks:
        at = x_at(tick)
        drawn += [_line(at, top, at, HEIGHT - BOTTOM), _text(at, HEIGHT - BOTTOM + 15, f"{tick:g}", _MIDDLE)]
    for tick in y_ticks:
        at = y_at(tick)
        drawn += [_line(LEFT, at, WIDTH - RIGHT, at), _text(LEFT - 6, at + 4, f"{tick:g}", ' text-anchor="end"')]
    drawn.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, across, _MIDDLE))
    drawn.append(_text(14, (top + HEIGHT - BOTTOM) / 2, up, f'{_MIDDLE} transform="rotate(-90 14 {HEIGHT / 2:g})"'))
    for index, (name, points) in enumerate(lines.items()):
        x, y = LEFT + LEGEND_STEP * (index % LEGEND_COLUMNS), 38 + 16 * (index // LEGEND_COLUMNS)
        drawn += [_line(x, y, x + 24, y, _stroke(index)), _text(x + 30, y + 4, name)]
        if points:
            places = " ".join(f"{x_at(x):.1f},{y_at(y):.1f}" for x, y in points)
            drawn.append(f'<polyline points="{places}" fill="none" {_stroke(index)}/>')
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'font-family="sans-serif" font-size="11" role="img"><title>{escape(title)}</title>'
    )
    return "\n".join([head, f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>', *drawn, "</svg>", ""])


def _axis(
    values: Sequence[float], begin: float, end: float, logarithmic: bool
) -> tuple[Callable[[float], float], list[float]]:
    """Where a value stands, and the values that are written beside the axis."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if logarithmic:
        least = math.floor(math.log10(max(low, _FLOOR)))
        most = max(least + 1, math.ceil(math.log10(max(high, _FLOOR))))
        powers = [10.0**power for power in range(least, most + 1)]
        return lambda value: _between(begin, end, (math.log10(max(value, _FLOOR)) - least) / (most - least)), powers
    step = _round_step(max(high, _FLOOR) / TICKS)
    last = step * math.ceil(max(high, _FLOOR) / step)
    return lambda value: _between(begin, end, value / last), [step * at for at in range(round(last / step) + 1)]


def _between(begin: float, end: float, share: float) -> float:
    return begin + (end - begin) * min(1.0, max(0.0, share))


def _round_step(value: float) -> float:
    """The next of 1, 2, 5, 10 …"""
    power = 10.0 ** math.floor(math.log10(value))
    return next(times * power for times in (1, 2, 5, 10) if times * power >= value * (1 - 1e-9))


_MIDDLE = ' text-anchor="middle"'


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{more}>{escape(words)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, stroke: str = 'stroke="#ddd"') -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {stroke}/>'


def _stroke(index: int) -> str:
    dash = DASHES[index % len(DASHES)]
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="1.8"{dashes}'
