"""One request to one worker as it is sent, and how it can fail: what a worker or the wire says, as the router's error.

Law: whatever a worker says leaves as one `LegError` that says whether another worker may be asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from kvbaton.api.api_errors import RETRY_AFTER_S, ApiError, bare, no_room, read_error
from kvbaton.api.http import http_client, http_types
from kvbaton.api.http.client_quotas import Tab
from kvbaton.api.http.http_types import Header
from kvbaton.api.tokens import NOT_THE_ROUTER
from kvbaton.router.workers.directory import ListedEngine

Side = Literal["prefill", "decode"]
RETRY_AFTER_S_MAX = 3600
BRIEF_BYTES_MAX = 4 << 20
"""Of what is no client's answer: P's, which only carries parameters, errors, lists of models."""
ECHOES = 8
"""They may be longer by so many times what was asked: some repeat it."""
LARGE_BYTES = 8 << 20
"""An answer that has no room in the router is the worker's fault from here on: another's may be smaller."""
_BUSY = (429, 503)
_HANDOFF_FAILED = "handoff_failed"


class LegError(Exception):
    """A worker did not do its part."""

    def __init__(
        self,
        side: Side,
        worker: ListedEngine,
        fault: ApiError,
        *,
        final: bool = False,
        lost: bool = False,
        stale: bool = False,
        busy: bool = False,
    ) -> None:
        super().__init__(fault.message)
        self.side: Side = side
        self.worker = worker
        self.fault = fault  # what the client is told if nobody else is asked
        self.final = final  # the request itself is at fault: others would say the same
        self.lost = lost  # nothing was heard of the worker, so it is suspect
        self.stale = stale  # an idle connection had been closed: the worker is not to blame
        self.busy = busy  # it says that it is full, which is a sign of life

    @property
    def is_handoff(self) -> bool:
        """Whether D says that the handoff failed, for which P may be as much to blame."""
        return self.fault.type == _HANDOFF_FAILED


class Leg(msgspec.Struct, frozen=True):
    """One request to be sent."""

    side: Side
    worker: ListedEngine
    path: str
    headers: Sequence[Header]
    body: bytes | None
    tab: Tab | None = None  # counts what is held of the answer
    content_type: bytes = http_client.JSON

    def bytes_max(self, status: int, answer_bytes_max: int) -> int:
        """How much of an answer is read."""
        if status == 200 and self.side == "decode" and self.body is not None:
            return answer_bytes_max
        return min(BRIEF_BYTES_MAX + ECHOES * len(self.body or b""), answer_bytes_max)

    def failed(self, status: int, what: str, code: str, *, lost: bool = False, stale: bool = False) -> LegError:
        message = f"{self.side} worker {self.worker.name} {what}"
        fault = ApiError(status, message, type="worker_error", code=code)
        return LegError(self.side, self.worker, fault, lost=lost, stale=stale)


class WorkerAnswer(msgspec.Struct, frozen=True):
    """A whole answer of status 200."""

    data: bytes
    headers: Sequence[Header]


def told(leg: Leg, error: http_types.WireError, timeout_s: float | None) -> LegError:
    """The wire's error as the router's."""
    bare(error)  # the exchange has it too
    match error:
        case http_types.LateError():
            return leg.failed(504, f"did not respond within {timeout_s} s", "worker_timeout", lost=True)
        case http_types.UnreachableError():
            return leg.failed(502, f"cannot be reached ({error})", "worker_unreachable", lost=True)
        case http_types.StaleError():
            return leg.failed(502, str(error), "worker_died", stale=True)
        case http_types.GarbageError():
            return leg.failed(502, str(error), "bad_answer")
        case http_types.NoRoomError():
            return crowded_out(leg, error)
    return leg.failed(502, f"disconnected before its response was complete ({error})", "worker_died", lost=True)


def crowded_out(leg: Leg, error: http_types.NoRoomError) -> LegError:
    """The router itself could not take it: nobody is blamed, but for an answer that would crowd out others'."""
    full = no_room(str(error)) if leg.tab is None or not error.answered_bytes else leg.tab.room.full("answer")
    if error.answered_bytes >= LARGE_BYTES:
        return leg.failed(502, str(error), "bad_answer")
    return LegError(leg.side, leg.worker, full, final=True)


def refusal(leg: Leg, status: int, data: bytes, retry_after: str | None) -> LegError:
    """A worker's own error: the client's fault passes as it is, all else is told as the worker's."""
    fault = read_error(status, data)
    fault.recorded = f"{leg.side} worker {leg.worker.name} answered {status}"
    if status == 401 and fault.code == NOT_THE_ROUTER:
        said = "does not accept this router's token; check that both have the same tickets.json"
        return leg.failed(502, said, NOT_THE_ROUTER, lost=True)
    if 400 <= status < 500 and status not in (408, *_BUSY) and fault.type != _HANDOFF_FAILED:
        return LegError(leg.side, leg.worker, fault, final=True)
    busy = status in _BUSY
    if busy:
        given = retry_after is not None and retry_after.isascii() and retry_after.isdigit()
        fault.retry_after_s = min(int(str(retry_after)[:9]), RETRY_AFTER_S_MAX) if given else RETRY_AFTER_S
    known = fault.type not in ("unknown_error", "")
    message = f"{leg.side} worker {leg.worker.name} answered {status}: {fault.message}"
    told = ApiError(
        status if busy else 502,
        message,
        type=fault.type if known else "worker_error",
        code=fault.code or "worker_failed",
        retry_after_s=fault.retry_after_s,
        recorded=fault.recorded,
    )
    return LegError(leg.side, leg.worker, told, busy=busy)


def status_in(payload: bytes) -> int:
    """The status that vLLM puts into the error event of a stream that it has begun with 200."""
    code = read_error(500, payload).code or ""
    return int(code) if len(code) == 3 and code.isascii() and code.isdigit() and code[0] in "45" else 500
