"""Records on disk: failures as they happen, and all records on a signal.

Laws: files are written on their own thread, so that a slow disk delays no handoff; the queue, each file and the number
of files are bounded; a disk error is logged once and has no other effect. A file is readable by its owner only, with
one JSON object per line: `kvbaton inspect --files` joins those of several processes.

Sanitises workers' reports before they are stored or shown: printable, bounded, under the reporter's own name.

Law: pure. An authenticated peer may still be wrong, or compromised: its texts end up on an operator's screen and its
numbers in arithmetic, so texts are escaped and invalid numbers are dropped.
"""

from __future__ import annotations

import logging
import os
import queue
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from kvbaton.observe.flight.flight_records import (
    NAME_CHARS_MAX,
    TEXT_CHARS_MAX,
    Flight,
    FlightReport,
    FlightSeat,
    Moment,
)
from kvbaton.protocol.ids import is_handoff_id

YEAR_9999 = 253_402_300_800.0
GAUGE_MAX = 2.0**63
"""Beyond it nothing is counted; sums and differences of what is left stay finite."""
_MOMENT_BYTES = 160
_FLIGHT_BYTES = 700


def clean(report: FlightReport, worker: str, incarnation: str) -> tuple[FlightReport, int]:
    """The sanitised report, and how many flights were dropped."""
    flights = [found for flight in report.flights if (found := clean_flight(flight, worker, incarnation)) is not None]
    tidy = FlightReport(
        at=_instant(report.at),
        gauges={printable(name): value for name, value in report.gauges.items() if abs(value) <= GAUGE_MAX},
        links={printable(name): printable(value) for name, value in report.links.items()},
        flights=tuple(flights),
        share=report.share if 0.0 <= report.share <= 1.0 else 1.0,
        missed=max(report.missed, 0),
        version=printable(report.version),
        host=printable(report.host),
    )
    return tidy, len(report.flights) - len(flights)


def clean_flight(flight: Flight, worker: str, incarnation: str) -> Flight | None:
    """The flight under the authenticated name; None if a worker cannot report it."""
    if flight.seat is FlightSeat.ROUTER or not flight.moments:
        return None
    if not is_handoff_id(flight.handoff) and (flight.handoff or not flight.failed):  # "": refused at D's door
        return None
    if not all(0.0 < moment.at < YEAR_9999 for moment in flight.moments):  # also where it is no number
        return None
    odd = not all(moment.step.isprintable() and moment.detail.isprintable() for moment in flight.moments)
    moments = flight.moments
    if odd:
        moments = tuple(
            Moment(printable(each.step), each.at, printable(each.detail, TEXT_CHARS_MAX)) for each in moments
        )
    return msgspec.structs.replace(
        flight,
        mistake=False,  # the router's to judge
        worker=worker,
        incarnation=incarnation,
        moments=moments,
        request=printable(flight.request),
        peers=tuple(printable(peer) for peer in flight.peers),
        mode=printable(flight.mode),
        transport=printable(flight.transport),
        end=printable(flight.end),
        detail=printable(flight.detail, TEXT_CHARS_MAX),
        trace=printable(flight.trace),
        parent=printable(flight.parent),
        legs=tuple(printable(leg) for leg in flight.legs),
    )


def printable(text: str, chars_max: int = NAME_CHARS_MAX) -> str:
    """The text with all terminal control characters escaped."""
    if text.isprintable():
        return text
    shown = "".join(
        char if char.isprintable() else char.encode("unicode_escape", "backslashreplace").decode() for char in text
    )
    return shown[:chars_max]


def printable_all(value: Any) -> Any:
    """Plain data with every text made printable."""
    if isinstance(value, str):
        return printable(value, TEXT_CHARS_MAX)
    if isinstance(value, dict):
        return {printable_all(name): printable_all(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_all(each) for each in value]
    return value


def size_of(flight: Flight) -> int:
    """About how much memory it takes."""
    texts = sum(len(moment.step) + len(moment.detail) for moment in flight.moments)
    return _FLIGHT_BYTES + _MOMENT_BYTES * len(flight.moments) + texts + len(flight.detail) + len(flight.request)


def _instant(at: float) -> float:
    return at if 0.0 < at < YEAR_9999 else 0.0


log = logging.getLogger(__name__)

QUEUED_MAX = 1024
FAILED_BYTES_MAX = 4 << 20
"""Of one file of failures; one older file is kept beside it."""
DUMPS_MAX = 8
DUMP = ".dump.jsonl"
CLOSE_S = 2.0


class DumpError(Exception):
    """The directory is unusable; the text says why, and what to do."""


def default_directory() -> Path:
    """The default directory of dumps: accessible to this user only."""
    return Path(tempfile.gettempdir()) / f"kvbaton-flights-{os.getuid()}"


def prepared(directory: Path) -> Path:
    """The directory, created if need be; `DumpError` if another user could have created it."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = directory.lstat()
    except OSError as error:
        raise DumpError(f"flight directory {directory}: {error.strerror}; name another with --flight-dir") from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise DumpError(f"flight directory {directory}: not a directory of this user; name another with --flight-dir")
    return directory


class Dumps:
    """One process's files. `on_flight` and `ask` may be called from any thread, and from a signal's handler."""

    def __init__(self, directory: Path, name: str, flights: Callable[[], Iterable[Flight]]) -> None:
        self.directory = directory
        self.dropped = 0
        self._name = name
        self._flights = flights
        self._work: queue.SimpleQueue[Flight | str | None] = queue.SimpleQueue()
        self._complained = False
        self._thread = threading.Thread(target=self._run, name="kvbaton-flights", daemon=True)
        self._thread.start()

    def on_flight(self, flight: Flight) -> None:
        """Write it to disk if it failed."""
        if not flight.failed:
            return
        if self._work.qsize() >= QUEUED_MAX:
            self.dropped += 1
        else:
            self._work.put(flight)

    def ask(self, why: str = "signal") -> None:
        """Write all records."""
        if self._work.qsize() < QUEUED_MAX:
            self._work.put(why)

    def close(self) -> None:
        """Requested dumps are written first, within a bounded time."""
        self._work.put(None)
        self._thread.join(CLOSE_S)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                if isinstance(work, Flight):
                    self._append(work)
                else:
                    log.warning("[flights-dumped] %d records (%s): %s", *self._dump(work))
            except Exception as error:  # noqa: BLE001 - of the disk, or of a record: one file is lost, and nothing else
                if not self._complained:
                    self._complained = True
                    log.warning("[flights-not-written] %s: %s", self.directory, error)

    def _append(self, flight: Flight) -> None:
        path = prepared(self.directory) / f"{self._name}.failed.jsonl"
        if path.exists() and path.stat().st_size >= FAILED_BYTES_MAX:
            path.replace(path.with_suffix(".jsonl.1"))
        with _opened(path, os.O_APPEND) as file:
            file.write(_line(flight))

    def _dump(self, why: str) -> tuple[int, str, Path]:
        flights = list(self._flights())
        stamp = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        path = prepared(self.directory) / f"{self._name}.{stamp}-{time.monotonic_ns() % 1_000_000:06}{DUMP}"
        part = path.with_suffix(".part")
        with _opened(part, os.O_TRUNC) as file:
            file.writelines(map(_line, flights))
        part.replace(path)  # a reader never sees a partial file
        own = re.compile(re.escape(self._name) + r"\.[0-9]{8}T[0-9]{6}-[0-9]{6}" + re.escape(DUMP))  # p is not p.1
        for old in sorted(each for each in self.directory.iterdir() if own.fullmatch(each.name))[:-DUMPS_MAX]:
            old.unlink(missing_ok=True)
        return len(flights), why, path


def _opened(path: Path, how: int) -> BinaryIO:
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | how, 0o600), "ab")


def _line(flight: Flight) -> bytes:
    return msgspec.json.encode(flight) + b"\n"


def read(path: Path) -> list[Flight]:
    """The records of one file: one to the line, or one JSON list. `ValueError` names the line that is none."""
    data = path.read_bytes()
    if data.lstrip().startswith(b"["):
        try:
            return msgspec.json.decode(data, type=list[Flight])
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}: {error}") from None
    found: list[Flight] = []
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(msgspec.json.decode(line, type=Flight))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return found
