"""Tables of figures: one grid of cells, drawn in columns for a terminal or as Markdown for a page.

Laws: pure. Names stand to the left in their column and figures to the right; what was not measured is a dash. A cell
never breaks its row: a bar or a line break in it is replaced in Markdown.
"""

from __future__ import annotations

from collections.abc import Sequence

Grid = Sequence[Sequence[str]]
NOT_MEASURED = "-"
_LEFT = ("target", "target / base")


def number(value: float | None, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:.{digits}f}"


def plain(head: Sequence[str], lines: Grid) -> str:
    """Columns as wide as they must be."""
    widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]

    def drawn(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if name in _LEFT else cell.rjust(width)
            for name, cell, width in zip(head, cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join(map(drawn, [head, *lines]))


def markdown(head: Sequence[str], lines: Grid) -> str:
    rows = [f"| {' | '.join(cell.replace('|', '/').replace(chr(10), ' ') for cell in cells)} |" for cells in lines]
    return "\n".join([f"| {' | '.join(head)} |", "|---" * len(head) + "|", *rows])


def spaced(cells: Sequence[str], width: int) -> str:
    """One row of columns that are all alike, for tables that grow while they are shown."""
    return "".join(f"{cell:>{width}}" for cell in cells)
