"""Terminal output beyond plain text: colours, width, tables. Progress is in `progress`.

Law: a pipe, a file and a dumb terminal get plain text without animation; a colour carries no information that the words
lack.

How to use it:

    screen = stdout()                                # or stderr(); cheap, one per run
    print(screen.style("right", "good"), "12 of 12")
    for line in screen.table(["name", "pins"], [["p0", "3"], ["d0", screen.style("-", "dim")]], right=[1]):
        print(line)
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Literal, TextIO

Style = Literal["good", "bad", "warn", "dim", "bold"]
Color = Literal["auto", "always", "never"]

COLORS: tuple[Color, ...] = ("auto", "always", "never")
WIDTH_WHEN_PIPED = 80
_WIDTH_MIN = 20
_CODES: Mapping[Style, str] = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "bold": "1"}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")

_ASKED: list[Color] = ["auto"]  # per process: there is one command line


def choose_color(color: Color) -> None:
    """Set the value of `--color`; it applies to every screen made from here on."""
    _ASKED[0] = color


def stdout() -> Screen:
    """The screen for results."""
    return Screen(sys.stdout, os.environ, _ASKED[0])


def stderr() -> Screen:
    """The screen for progress and errors."""
    return Screen(sys.stderr, os.environ, _ASKED[0])


class Screen:
    """One output stream and its capabilities."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str], color: Color = "auto") -> None:
        self.stream = stream
        self._environ = environ
        self.is_live = is_terminal(stream) and environ.get("TERM") != "dumb"  # a line may be redrawn
        self.has_color = wants_color(color, environ, self.is_live)

    def style(self, text: str, style: Style) -> str:
        """The text in a colour or weight, if the stream supports it; otherwise the plain text."""
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self.has_color and text else text

    def verdict(self, ok: bool) -> str:
        """`ok` in green or `NOT ok` in red, as in the last line of a proof."""
        return self.style("ok", "good") if ok else self.style("NOT ok", "bad")

    def width(self) -> int:
        """Columns: from COLUMNS, from the terminal, or 80."""
        said = self._environ.get("COLUMNS", "")
        if said.isascii() and said.isdigit() and int(said) > 0:
            return max(_WIDTH_MIN, int(said))
        if self.is_live:
            try:
                return max(_WIDTH_MIN, os.get_terminal_size(self.stream.fileno()).columns)
            except OSError:
                return WIDTH_WHEN_PIPED
        return WIDTH_WHEN_PIPED

    def either(self, fancy: str, plain: str) -> str:
        """The first where the stream's encoding has its characters, else the second: `either("─", "-")`."""
        try:
            fancy.encode(getattr(self.stream, "encoding", None) or "utf-8")
        except (UnicodeEncodeError, LookupError):
            return plain
        return fancy

    def table(
        self, header: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = (), gap: int = 2
    ) -> list[str]:
        """Lines in columns, the header bold; cells may be styled, `right` lists the right-aligned columns."""
        widths = [max(visible(row[index]) for row in (header, *rows)) for index in range(len(header))]
        lines = []
        for row in ([self.style(cell, "bold") for cell in header], *rows):
            cells = []
            for index, cell in enumerate(row):
                pad = " " * (widths[index] - visible(cell))
                cells.append(pad + cell if index in right else cell + pad)
            lines.append((" " * gap).join(cells).rstrip())
        return lines


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a person may be looking; a closed or missing stream has no reader."""
    try:
        return stream is not None and stream.isatty()
    except (ValueError, AttributeError):
        return False


def wants_color(color: Color, environ: Mapping[str, str], is_live: bool) -> bool:
    """--color first, then NO_COLOR, then FORCE_COLOR and CLICOLOR_FORCE, then the terminal."""
    if color != "auto":
        return color == "always"
    if environ.get("NO_COLOR"):
        return False
    if any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return is_live and environ.get("CLICOLOR") != "0"


def visible(text: str) -> int:
    """Columns that the text occupies, styles excluded."""
    return len(_ESCAPES.sub("", text))
