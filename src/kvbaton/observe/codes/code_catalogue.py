"""All codes by kind, and their lookup.

Laws: lookup ignores case, brackets and the difference between `-` and `_`. Any status of an error is known: a worker's
own answer is passed on, whatever it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from kvbaton.observe.codes import findings, logs, reasons
from kvbaton.observe.codes.entry import CodeEntry, CodeKind, Who
from kvbaton.observe.codes.reasons import CODES as API_CODES
from kvbaton.observe.codes.reasons import INSPECT

_READ = "read error.message in the client's answer: it is the worker's own text, and is kept in no record"
_ADVICE: dict[int, tuple[str, str]] = {
    400: ("A field of the request is missing, out of range or not supported by the engine.",
          "change the field that the message names; a prompt that is too long is shortened, or max_tokens lowered"),
    401: ("The worker wants a key that was not shown.",
          "give the router --worker-api-key-file, or see that its clients send the engine's key"),
    403: ("The worker does not allow this.", "see the message and the worker's log"),
    404: ("The worker does not serve that model or path.",
          "use a name of curl ROUTER/v1/models; P and D must serve the same models under the same names"),
    408: ("The worker did not get the body in time.", "find what delays it between router and worker"),
    413: ("The request is larger than the worker accepts.", "send less, or raise the worker's limit"),
    422: ("The body does not have the form that the worker's API asks for.",
          "compare it with curl ROUTER/openapi.json"),
    429: ("The worker is full.", "let clients wait for Retry-After and retry; add workers if it persists"),
    500: ("The worker failed while it computed the answer.", "read the worker's log at that time"),
    501: ("The worker does not have this feature.", "leave the field out, or start the engine with the feature"),
    502: ("The worker, or a proxy before it, got no good answer.", "read the worker's log at that time"),
    503: ("The worker takes no requests now.", "see its state: curl ROUTER/workers"),
    504: ("The worker, or a proxy before it, waited too long.", "see whether it is overloaded: queues on /dashboard"),
}  # fmt: skip


def _of_status(status: int) -> CodeEntry:
    """The entry of a status, 400 to 599, with the API codes that have it."""
    means, do = _ADVICE.get(status) or ("An error of the worker's own.", "read the worker's log at that time")
    codes = ", ".join(entry.code for entry in API_CODES if entry.status == status)
    is_clients = status < 500 and status not in (408, 429)
    return CodeEntry(
        code=str(status),
        kind=CodeKind.STATUS,
        who=Who.CALLER if is_clients else Who.OPERATOR,
        means=means,
        do=(_READ, do, *([f"codes with this status: {codes}"] if codes else [])),
        look=INSPECT,
        status=status,
    )


def _status(word: str) -> CodeEntry | None:
    """The entry of any status of an error, also of one that has no advice of its own."""
    is_status = len(word) == 3 and word.isascii() and word.isdigit() and word[0] in "45"
    return _of_status(int(word)) if is_status else None


STATUSES = tuple(_of_status(status) for status in _ADVICE)

CATALOGUE: dict[CodeKind, tuple[CodeEntry, ...]] = {
    CodeKind.REASON: reasons.entries(),
    CodeKind.ALONE: reasons.alone_entries(),
    CodeKind.API: reasons.CODES,
    CodeKind.STATUS: STATUSES,
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
    other = None if known else _status(wanted)
    return known if other is None else [other]


def close(word: str, count: int = 1) -> list[str]:
    """Known codes that are spelled similarly, for "did you mean"."""
    known = {_plain(entry.code): entry.code for entry in every()}
    return [known[each] for each in difflib.get_close_matches(_plain(word), known, count, CLOSE_ENOUGH)]


def _plain(word: str) -> str:
    return word.strip().strip("[]").lower().replace("-", "_")
