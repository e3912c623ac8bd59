"""The timeline of a handoff, as the ledger tells it: one mark for each step, in the order in which they happened.

Law: marks are said, never read back: nothing decides by them. Each key is begun once; `ENDED` comes once on D's side
and `CLOSED` once on P's, whatever became of the handoff; nothing is said after `RESTED`.
"""

from __future__ import annotations

import enum

import msgspec

from kvbaton.protocol.effects import End
from kvbaton.protocol.ids import HandoffId, RequestId, WorkerId


class Side(enum.StrEnum):
    """Whose step it was."""

    PREFILL = "prefill"  # the key is the lease's number
    DECODE = "decode"  # the key is the attempt's number


class Step(enum.StrEnum):
    """Every step that is worth a line on a timeline."""

    # D
    ASKED = "asked"  # the engine wants the KV; `Begun`
    CLAIMED = "claimed"  # the link is up and the first claim is on its way
    GRANTED = "granted"  # P keeps the blocks for us
    ALLOCATED = "allocated"  # and the engine found blocks for it, now or before
    OFFERED = "offered"  # push: P may write into them. Also P's: D's offer came
    FIRST_BYTE = "first_byte"  # the first copy has ended well. Also P's, in push
    COPIED = "copied"  # every byte is here; the commit is on its way
    ENDED = "ended"  # delivered, or failed; `Ended`
    RESTED = "rested"  # nothing can land in D's blocks any more; or P has let go of its own
    # P
    BEGUN = "begun"  # the prompt is scheduled, or computed already; `Begun`
    PARKED = "parked"  # a claim came first
    SEATED = "seated"  # a reader's claim was granted; says who
    COMPLETE = "complete"  # the whole prompt is computed
    WRITTEN = "written"  # push: the last byte is visible at D
    COMMITTED = "committed"  # a reader's copy was proven right; says whose
    STALE = "stale"  # a reader's copy was proven wrong
    LEFT = "left"  # a reader went without a commit; says why
    CLOSED = "closed"  # no more use for the lease; `Ended`


class Begun(msgspec.Struct, frozen=True):
    """Who and what, as this side knows it."""

    handoff: HandoffId
    request: RequestId  # this engine's own name for it
    peer: WorkerId  # whom it is read from; at P whom it is meant for, "" for anybody
    tokens: int
    push: bool = False
    deferred: bool = False  # both were asked at once
    trace: str = ""  # a W3C traceparent


class Ended(msgspec.Struct, frozen=True):
    """How it finished on this side."""

    end: End
    bytes: int = 0  # that this side copied
    blocks: int = 0
    transport: str = ""
    retries: int = 0  # messages that had to be said again, and greetings


class Mark(msgspec.Struct, frozen=True):
    side: Side
    key: int
    step: Step
    at: float  # on the node's clock
    what: Begun | Ended | None = None
    detail: str = ""
