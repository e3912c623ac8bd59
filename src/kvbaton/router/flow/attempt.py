"""One request's attempts: its body, the workers that were tried, and the outcomes so far.

When D refuses a request for the KV that P handed over: a failed handoff, and no mistake of the client's.

Law: what a client could not have sent is never held against it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.api.api_errors import ApiError
from kvbaton.api.bodies import BodyKind
from kvbaton.api.http.client_quotas import Tab
from kvbaton.api.http.http_types import Header
from kvbaton.api.params import FIELD, Mode
from kvbaton.observe.flight.flight_records import Traceparent
from kvbaton.protocol.ids import PeerId
from kvbaton.router.flow.continuing import StreamLife
from kvbaton.router.flow.kv_params import Written
from kvbaton.router.flow.worker_leg import LegError
from kvbaton.router.policy import NO_DOUBTS, Doubts
from kvbaton.router.router_flights import Trip
from kvbaton.router.workers.directory import ListedEngine


class RoutedCall(msgspec.Struct, frozen=True):
    """One prompt, one choice."""

    kind: BodyKind
    fields: Mapping[str, Any]
    headers: Sequence[Header]
    modes: tuple[Mode, ...]  # the first that some pair can serve is taken
    stream: bool
    deadline: float  # on the event loop's clock
    name: str  # the request id
    data: bytes | None = None  # the client's body, where it stands for this one request
    alone: str = ""  # why D must answer by itself, if it must
    trace: Traceparent | None = None  # whose trace it belongs to
    begins_trace: bool = False  # nobody before this router knows of that trace
    tab: Tab | None = None  # counts what is held for it
    size: int = 0  # bytes of the client's body
    written: Written | None = None  # shared by all choices of one prompt
    life: StreamLife | None = None  # of a stream that another D may go on with

    def named(self, request_id: str | None, traceparent: str) -> Sequence[Header]:
        """The headers of a leg, under the client's request id or another."""
        name = (b"X-Request-Id", (request_id or self.name).encode())
        if not traceparent:
            return [*self.headers, name]
        return [*self.headers, name, (b"traceparent", traceparent.encode())]


class ChosenRoute(msgspec.Struct, frozen=True):
    """Who was asked."""

    mode: Mode
    decode: ListedEngine
    prefill: ListedEngine | None  # None: D computed the prompt itself

    def __str__(self) -> str:
        return f"{'-' if self.prefill is None else self.prefill.name}/{self.decode.name}"


@dataclass(slots=True)
class Tries:
    """What one call has been through."""

    tokens: int  # of the prompt, estimated
    trip: Trip  # the record of the try that is under way
    names: tuple[int, ...] = ()  # of the prompt's beginnings
    seen: Mapping[PeerId, float] = field(default_factory=dict)  # the share of it that workers know
    home: bytes = b""  # digest of its beginning, by which all routers send it to one worker
    prefill_failures: int = 0
    decode_failures: int = 0
    stale: int = 0
    earlier: int = 0  # attempts before a stream moved
    doubts: Doubts = NO_DOUBTS
    last: LegError | None = None
    refusals: list[LegError] = field(default_factory=list)  # of workers that are alive
    alone: str = ""  # why no P is asked any more
    behind: StreamLife | None = None  # what is asked for goes on behind a history

    @property
    def count(self) -> int:
        """How many have come to nothing."""
        return self.earlier + self.prefill_failures + self.decode_failures + self.stale

    def doubt(self, route: ChosenRoute, error: LegError) -> None:
        """Do not ask the same again."""
        before = self.doubts
        if error.is_handoff and route.prefill is not None:
            # either may be to blame; with one P or one D the other may still pair anew
            p, d = route.prefill.peer, error.worker.peer if error.side == "decode" else route.decode.peer
            doubts = msgspec.structs.replace(before, shun={*before.shun, p, d}, tried={*before.tried, (p, d)})
        else:
            doubts = msgspec.structs.replace(before, avoid={*before.avoid, error.worker.peer})
        self.doubts = doubts


def is_of_the_handoff(route: ChosenRoute, error: LegError) -> bool:
    """Whether D refuses what P answered: clients cannot send that field, nor is a prompt too large that P took."""
    if (error.fault.param or "").startswith(FIELD):
        return True
    return (
        error.side == "decode" and error.fault.status == 413 and route.prefill is not None and route.mode is Mode.PULL
    )


def not_the_clients(error: LegError) -> LegError:
    what = f"{error.side} worker {error.worker.name} refuses the handed-over KV: {error.fault.message}"
    said = f"{error.fault.recorded}, for the handed-over KV"
    fault = ApiError(502, what, type="handoff_failed", code=error.fault.code, recorded=said)
    return LegError(error.side, error.worker, fault)
