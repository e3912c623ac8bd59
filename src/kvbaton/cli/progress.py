"""Progress of a command that takes longer than a few seconds: one line of a terminal, with a bar and the time.

Laws: it is drawn on a terminal only, and not with --json: a pipe, a file and a dumb terminal get none of it. It is
cleared before anything else is written there, and when it ends. A terminal that goes away costs the line, not the work.

    with progress.shown("sim", quiet=args.json) as tell:
        tell("17 of 200 seeds, 3 broken")      # as often as you like; the bar follows "N of M" or "N/M"
"""

from __future__ import annotations

import contextlib
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator

from kvbaton.cli.screen import Screen, stderr

CLEAR_LINE = "\r\x1b[K"
_REDRAW_S = 0.2
_BAR_CELLS = 24
_COUNTED = re.compile(r"\b(\d+)(?: of |/)(\d+)\b ?")

_LOCK = threading.RLock()  # of the terminal, of which there is one
_LINES: list[StatusLine] = []


class StatusLine:
    """The line of one command. It is redrawn by itself, so that the time goes on while nothing is told."""

    def __init__(self, screen: Screen, label: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._screen = screen
        self._label = label
        self._clock = clock
        self._begun = clock()
        self._counted: tuple[int, int] | None = None
        self._text = ""
        self._ended = threading.Event()

    def tell(self, text: str) -> None:
        """What goes on now."""
        found = _COUNTED.search(text)
        if found is not None and int(found[2]):
            self._counted = int(found[1]), int(found[2])
            text = text[: found.start()] + text[found.end() :]
        self._text = " ".join(text.split())

    def draw(self) -> None:
        with _LOCK:
            if not self._ended.is_set():
                self._write(CLEAR_LINE + self.line()[: self._screen.width() - 1])

    def line(self) -> str:
        words = [self._label]
        if self._counted is not None:
            words += [bar(self._screen, *self._counted), f"{self._counted[0]}/{self._counted[1]}"]
        return " ".join([*words, f"{self._clock() - self._begun:.0f} s", self._text]).rstrip()

    def clear(self) -> None:
        self._write(CLEAR_LINE)

    def run(self) -> None:
        """Until `end`; on a thread of its own."""
        while not self._ended.wait(_REDRAW_S):
            self.draw()

    def end(self) -> None:
        with _LOCK:
            self._ended.set()
            self.clear()

    def _write(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal went away
            self._screen.stream.write(text)
            self._screen.stream.flush()


@contextlib.contextmanager
def shown(label: str, screen: Screen | None = None, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """A line while the context lasts; gives what tells it how far the work is."""
    screen = stderr() if screen is None else screen
    if quiet or not screen.is_live:
        yield lambda _: None
        return
    line = StatusLine(screen, label)
    thread = threading.Thread(target=line.run, name="kvbaton-progress", daemon=True)
    _LINES.append(line)
    thread.start()
    try:
        yield line.tell
    finally:
        _LINES.remove(line)
        line.end()


@contextlib.contextmanager
def aside(text: str = "") -> Iterator[None]:
    """Write something else to the terminal meanwhile; `text` is what the line tells from then on."""
    with _LOCK:
        for line in _LINES:
            line.clear()
            if text:
                line.tell(text)
        yield


def bar(screen: Screen, done: int, total: int) -> str:
    filled = min(_BAR_CELLS, _BAR_CELLS * max(0, done) // total)
    return screen.either("█", "#") * filled + screen.either("░", ".") * (_BAR_CELLS - filled)


def note(command: str, text: str) -> None:
    """Progress of `kvbaton command`: one line on stderr, never part of the result; JSON where the log is."""
    import logging  # --help does without

    from kvbaton.processes import process_logs

    if process_logs.current().format == "json":
        logger = logging.getLogger(f"kvbaton.{command}")
        logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, "%s", (text,), None))  # whatever the level
        return
    with aside(text):
        print(f"kvbaton {command}: {text}", file=sys.stderr, flush=True)
