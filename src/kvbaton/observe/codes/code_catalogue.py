"""All words by kind, and how one is looked up.

Law: whoever types a word finds it however they write it: case, brackets and `-` against `_` do not matter.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kvbaton.observe.codes import api, findings, logs, reasons
from kvbaton.observe.codes.entry import Entry, Kind

CATALOGUE: dict[Kind, tuple[Entry, ...]] = {
    Kind.REASON: reasons.entries(),
    Kind.API: api.CODES,
    Kind.LOG: tuple(sorted(logs.CODES, key=lambda entry: entry.code)),
    Kind.FINDING: tuple(sorted(findings.CODES, key=lambda entry: entry.code)),
}
TITLES: dict[Kind, str] = {
    Kind.REASON: "Failure reasons",
    Kind.API: "API error codes",
    Kind.LOG: "Log codes",
    Kind.FINDING: "Findings of kvbaton doctor",
}
CLOSE_ENOUGH = 0.6


def every() -> Iterator[Entry]:
    return (entry for entries in CATALOGUE.values() for entry in entries)


def find(word: str) -> list[Entry]:
    """What is known of a word; a reason and an error code may share one."""
    wanted = _plain(word)
    return [entry for entry in every() if _plain(entry.code) == wanted]


def close(word: str, count: int = 1) -> list[str]:
    """The codes that may have been meant."""
    known = {_plain(entry.code): entry.code for entry in every()}
    return [known[each] for each in difflib.get_close_matches(_plain(word), known, count, CLOSE_ENOUGH)]


def _plain(word: str) -> str:
    return word.strip().strip("[]").lower().replace("-", "_")
