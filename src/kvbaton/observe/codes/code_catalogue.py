"""All codes by kind, and their lookup.

Law: lookup ignores case, brackets and the difference between `-` and `_`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kvbaton.observe.codes import alone_reasons, api, findings, logs, reasons, statuses
from kvbaton.observe.codes.entry import CodeEntry, CodeKind

CATALOGUE: dict[CodeKind, tuple[CodeEntry, ...]] = {
    CodeKind.REASON: reasons.entries(),
    CodeKind.ALONE: alone_reasons.entries(),
    CodeKind.API: api.CODES,
    CodeKind.STATUS: statuses.CODES,
    CodeKind.LOG: tuple(sorted(logs.CODES, key=lambda entry: entry.code)),
    CodeKind.FINDING: tuple(sorted(findings.CODES, key=lambda entry: entry.code)),
}
TITLES: dict[CodeKind, str] = {
    CodeKind.REASON: "Failure reasons",
    CodeKind.ALONE: "Reasons why D computes a prompt itself",
    CodeKind.API: "API error codes",
    CodeKind.STATUS: "HTTP statuses of workers",
    CodeKind.LOG: "Log codes",
    CodeKind.FINDING: "Findings of kvbaton doctor",
}
CLOSE_ENOUGH = 0.6


def every() -> Iterator[CodeEntry]:
    return (entry for entries in CATALOGUE.values() for entry in entries)


def find(word: str) -> list[CodeEntry]:
    """The entries of a code; a reason and an error code may share one."""
    wanted = _plain(word)
    known = [entry for entry in every() if _plain(entry.code) == wanted]
    other = None if known else statuses.find(wanted)
    return known if other is None else [other]


def close(word: str, count: int = 1) -> list[str]:
    """Known codes that are spelled similarly, for "did you mean"."""
    known = {_plain(entry.code): entry.code for entry in every()}
    return [known[each] for each in difflib.get_close_matches(_plain(word), known, count, CLOSE_ENOUGH)]


def _plain(word: str) -> str:
    return word.strip().strip("[]").lower().replace("-", "_")
