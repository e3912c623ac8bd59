"""HTTP statuses, as ends of requests that a worker refused without a code that kvbaton knows.

Law: every status of an error leads somewhere: to its meaning here, and to the codes of `api` that have it.
"""

from __future__ import annotations

from kvbaton.observe.codes.api import CODES as API_CODES
from kvbaton.observe.codes.api import INSPECT
from kvbaton.observe.codes.entry import CodeEntry, CodeKind, Who

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


def of(status: int) -> CodeEntry:
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


def find(word: str) -> CodeEntry | None:
    """The entry of any status of an error, also of one that has no advice of its own."""
    is_status = len(word) == 3 and word.isascii() and word.isdigit() and word[0] in "45"
    return of(int(word)) if is_status else None


CODES = tuple(of(status) for status in _ADVICE)
