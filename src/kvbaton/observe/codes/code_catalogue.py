"""All words by kind, and how one is looked up.

Law: whoever types a word finds it however they write it: case, brackets and `-` against `_` do not matter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kvbaton.observe.codes import api, findings, logs, reasons
from kvbaton.observe.codes.entry import CodeEntry, CodeKind

CATALOGUE: dict[CodeKind, tuple[CodeEntry, ...]] = {
    CodeKind.REASON: reasons.entries(),
    CodeKind.API: api.CODES,
    CodeKind.LOG: tuple(sorted(logs.CODES, key=lambda entry: entry.code)),
    CodeKind.FINDING: tuple(sorted(findings.CODES, key=lambda entry: entry.code)),
}
TITLES: dict[CodeKind, str] = {
    CodeKind.REASON: "Failure reasons",
    CodeKind.API: "API error codes",
    CodeKind.LOG: "Log codes",
    CodeKind.FINDING: "Findings of kvbaton doctor",
}
CLOSE_ENOUGH = 0.6


def every() -> Iterator[CodeEntry]:
    return (entry for entries in CATALOGUE.values() for entry in entries)


def find(word: str) -> list[CodeEntry]:
    """What is known of a word; a reason and an error code may share one."""
    wanted = _plain(word)
    return [entry for entry in every() if _plain(entry.code) == wanted]


def close(word: str, count: int = 1) -> list[str]:
    """The codes that may have been meant."""
    known = {_plain(entry.code): entry.code for entry in every()}
    return [known[each] for each in difflib.get_close_matches(_plain(word), known, count, CLOSE_ENOUGH)]


def _plain(word: str) -> str:
    return word.strip().strip("[]").lower().replace("-", "_")
