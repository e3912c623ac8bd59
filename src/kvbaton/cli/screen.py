"""Terminal output beyond plain text: colours, width, tables, a progress line.

Law: a pipe, a file and a dumb terminal get plain text without animation; a colour carries no information that the words
lack.

How to use it:

    screen = stdout()                                # or stderr(); cheap, one per run
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

from kvbaton.cli import progress

Style = Literal["good", "bad", "warn", "dim", "bold"]
Color = Literal["auto", "always", "never"]

COLORS: tuple[Color, ...] = ("auto", "always", "never")
WIDTH_WHEN_PIPED = 80
_WIDTH_MIN = 20
_REDRAW_S = 0.1
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


def note(command: str, text: str) -> None:
    """Progress of `kvbaton command`: one line on stderr, never part of the result; JSON where the log is."""
    import logging  # --help does without

    from kvbaton.processes import process_logs

    if process_logs.current().format == "json":
        logger = logging.getLogger(f"kvbaton.{command}")
        logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, "%s", (text,), None))  # whatever the level
        return
    with progress.aside(text):
        print(f"kvbaton {command}: {text}", file=sys.stderr, flush=True)


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

    def progress(self, label: str, total: int | None = None, clock: Callable[[], float] = time.monotonic) -> Progress:
        """A line that is redrawn while work goes on, and is cleared afterwards; nothing at all when piped."""
        return Progress(self, label, total, clock)


class Progress:
    """One line of progress; a `with` block, since the line must be cleared before other output."""

    def __init__(self, screen: Screen, label: str, total: int | None, clock: Callable[[], float]) -> None:
        self._screen = screen
        self._label = label
        self._total = total
        self._clock = clock
        self._drawn_at: float | None = None

    def update(self, done: int, note: str = "") -> None:
        """Report progress; the last update, done == total, is always drawn."""
        if not self._screen.is_live:
            return
        now = self._clock()
        if self._drawn_at is not None and now - self._drawn_at < _REDRAW_S and done != self._total:
            return
        self._drawn_at = now
        self._write(progress.CLEAR_LINE + self._line(done, note)[: self._screen.width() - 1])

    def close(self) -> None:
        """Clear the line."""
        if self._drawn_at is not None:
            self._drawn_at = None
            self._write(progress.CLEAR_LINE)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def _line(self, done: int, note: str) -> str:
        words = [self._label, f"{done}"]
        if self._total:
            words = [self._label, progress.bar(self._screen, done, self._total), f"{done}/{self._total}"]
        return " ".join([*words, *note.split()])

    def _write(self, text: str) -> None:
        try:
            self._screen.stream.write(text)
            self._screen.stream.flush()
        except (OSError, ValueError):
            return  # the terminal went away; the work did not


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
