"""Terminal output beyond plain text: colours, the width, tables, a progress line.

Law: a pipe, a file and a dumb terminal get plain text and nothing that moves; a colour says nothing that the words
do not say.

How a command uses it:

    screen = stdout()                                # or stderr(); cheap, make one per run
    print(screen.style("right", "good"), "12 of 12")
    for line in screen.table(["name", "pins"], [["p0", "3"], ["d0", screen.style("-", "dim")]], right=[1]):
        print(line)
    with stderr().progress("requests", total=500) as progress:
        progress.update(17, "3 failed")              # as often as you like; drawn at most 10 times a second
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Literal, TextIO

Style = Literal["good", "bad", "warn", "dim", "bold"]
Color = Literal["auto", "always", "never"]

COLORS: tuple[Color, ...] = ("auto", "always", "never")
WIDTH_WHEN_PIPED = 80
_WIDTH_MIN = 20
_BAR_CELLS = 24
_REDRAW_S = 0.1
_CODES: Mapping[Style, str] = {"good": "32", "bad": "31", "warn": "33", "dim": "2", "bold": "1"}
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_CLEAR_LINE = "\r\x1b[K"

_ASKED: list[Color] = ["auto"]  # of this process: there is one command line


def choose_color(color: Color) -> None:
    """What `--color` said; it holds for every screen made from here on."""
    _ASKED[0] = color


def stdout() -> Screen:
    """The screen of results."""
    return Screen(sys.stdout, os.environ, _ASKED[0])


def stderr() -> Screen:
    """The screen of progress and complaints."""
    return Screen(sys.stderr, os.environ, _ASKED[0])


def note(command: str, text: str) -> None:
    """Progress of `kvbaton command`: one line on stderr, which is never the answer."""
    print(f"kvbaton {command}: {text}", file=sys.stderr, flush=True)


class Screen:
    """One output stream, and what may be done on it."""

    def __init__(self, stream: TextIO, environ: Mapping[str, str], color: Color = "auto") -> None:
        self.stream = stream
        self._environ = environ
        self.is_live = is_terminal(stream) and environ.get("TERM") != "dumb"  # a line may be drawn over
        self.has_color = wants_color(color, environ, self.is_live)

    def style(self, text: str, style: Style) -> str:
        """The text in a colour or weight, where there are any; otherwise the text."""
        return f"\x1b[{_CODES[style]}m{text}\x1b[0m" if self.has_color and text else text

    def verdict(self, ok: bool) -> str:
        """`ok` in green or `NOT ok` in red, as the last line of a proof says it."""
        return self.style("ok", "good") if ok else self.style("NOT ok", "bad")

    def width(self) -> int:
        """Columns: what COLUMNS says, what the terminal says, or 80."""
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
        """Lines in columns, the header bold; cells may be styled, `right` names the columns set to the right."""
        widths = [max(visible(row[index]) for row in (header, *rows)) for index in range(len(header))]
        lines = []
        for row in ([self.style(cell, "bold") for cell in header], *rows):
            cells = []
            for index, cell in enumerate(row):
                pad = " " * (widths[index] - visible(cell))
                cells.append(pad + cell if index in right else cell + pad)
            lines.append((" " * gap).join(cells).rstrip())
        return lines

    def progress(self, label: str, total: int | None = None, clock: Callable[[], float] = time.monotonic) -> Progress:
        """A line that is drawn over while work goes on, and is gone afterwards; nothing at all when piped."""
        return Progress(self, label, total, clock)


class Progress:
    """One line of progress; a `with` block, since the line must be gone before the next words."""

    def __init__(self, screen: Screen, label: str, total: int | None, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._label = label
        self._total = total
        self._clock = clock
        self._drawn_at: float | None = None

    def update(self, done: int, note: str = "") -> None:
        """Say how far it is; the last one, done == total, is always drawn."""
        if not self._screen.is_live:
            return
        now = self._clock()
        if self._drawn_at is not None and now - self._drawn_at < _REDRAW_S and done != self._total:
            return
        self._drawn_at = now
        self._write(_CLEAR_LINE + self._line(done, note)[: self._screen.width() - 1])

    def close(self) -> None:
        """Take the line away."""
        if self._drawn_at is not None:
            self._drawn_at = None
            self._write(_CLEAR_LINE)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _line(self, done: int, note: str) -> str:
        words = [self._label, f"{done}"]
        if self._total:
            filled = min(_BAR_CELLS, _BAR_CELLS * max(0, done) // self._total)
            full, empty = self._screen.either("█", "#"), self._screen.either("░", ".")
            words = [self._label, full * filled + empty * (_BAR_CELLS - filled), f"{done}/{self._total}"]
        return " ".join([*words, *note.split()])

    def _write(self, text: str) -> None:
        try:
            self._screen.stream.write(text)
            self._screen.stream.flush()
        except (OSError, ValueError):
            return  # the terminal went away; the work did not


def is_terminal(stream: TextIO | None) -> bool:
    """Whether somebody may be looking; a closed or missing stream is nobody."""
    try:
        return stream is not None and stream.isatty()
    except (ValueError, AttributeError):
        return False


def wants_color(color: Color, environ: Mapping[str, str], is_live: bool) -> bool:
    """--color first, then NO_COLOR, then FORCE_COLOR and CLICOLOR_FORCE, then what the terminal is."""
    if color != "auto":
        return color == "always"
    if environ.get("NO_COLOR"):
        return False
    if any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return is_live and environ.get("CLICOLOR") != "0"


def visible(text: str) -> int:
    """How many columns the text takes, styles aside."""
    return len(_ESCAPES.sub("", text))
