"""P's write into one reservation of D's (push). One writer, one attempt, and an end that D can rely on.

Laws: after Written or Quiesced has been sent, P never touches the spans again. Neither is sent while a write of
any rank is moving. The blocks written from stay pinned until then.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import LeaseId, Reader, ReservationId
from kvbaton.protocol.machines.context import Parts
from kvbaton.protocol.table import Table, pairs


class OutletState(enum.Enum):
    WRITING = "writing"
    STOPPING = "stopping"  # no new writes; waiting for those in flight
    FLUSHED = "flushed"  # Written sent, repeated until acknowledged
    CLOSED = "closed"


class OutletEvent(enum.Enum):
    FLUSHED = "flushed"
    STOPPED = "stopped"
    RESTED = "rested"
    ACKED = "acked"


_S, _E = OutletState, OutletEvent
OUTLET = Table(
    "outlet",
    OutletState,
    OutletEvent,
    next={
        (_S.WRITING, _E.FLUSHED): _S.FLUSHED,
        (_S.WRITING, _E.STOPPED): _S.STOPPING,
        (_S.STOPPING, _E.RESTED): _S.CLOSED,
        (_S.FLUSHED, _E.ACKED): _S.CLOSED,
        (_S.FLUSHED, _E.STOPPED): _S.CLOSED,
    },
    late=pairs({_S.CLOSED}, OutletEvent)
    | {(_S.STOPPING, _E.STOPPED), (_S.STOPPING, _E.FLUSHED), (_S.STOPPING, _E.ACKED)}
    | {(_S.FLUSHED, _E.RESTED), (_S.WRITING, _E.RESTED)},
    illegal={(_S.WRITING, _E.ACKED), (_S.FLUSHED, _E.FLUSHED)},
)


@dataclass(slots=True)
class Outlet:
    """P's state of one reservation."""

    lease: LeaseId
    reader: Reader
    reservation: ReservationId
    digest: bytes
    first_token: int
    blocks: tuple[tuple[int, ...], ...]  # D's
    sent: Progress  # what has been handed to the ranks to write
    parts: Parts
    state: OutletState = OutletState.WRITING
    reason: Reason | None = None  # why P stopped, if of its own accord
    deadline: float = 0.0
