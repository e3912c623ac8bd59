"""The timeline of a handoff, as the ledger records it: one mark for each step, in the order in which they happened.

Law: marks are write-only: nothing is decided by them. Each key starts once; `ENDED` comes once on D's side and `CLOSED`
once on P's, whatever the outcome; nothing is recorded after `RESTED`.
"""

from __future__ import annotations

import enum

import msgspec

from kvbaton.protocol.effects import End
from kvbaton.protocol.ids import HandoffId, RequestId, WorkerId


class Side(enum.StrEnum):
    """The side that took the step."""

    PREFILL = "prefill"  # the key is the lease's number
    DECODE = "decode"  # the key is the attempt's number


class Step(enum.StrEnum):
    """Every step that appears on a timeline."""

    # D
    ASKED = "asked"  # the engine wants the KV; `Begun`
    CLAIMED = "claimed"  # the link is up and the first claim was sent
    GRANTED = "granted"  # P holds the blocks for us
    ALLOCATED = "allocated"  # and the engine found blocks for it, now or before
    OFFERED = "offered"  # push: P may write into them. On P: D's offer came
    FIRST_BYTE = "first_byte"  # the first copy has ended well. Also P's, in push
    COPIED = "copied"  # every byte is here; the commit was sent
    ENDED = "ended"  # delivered, or failed; `Ended`
    RESTED = "rested"  # nothing can land in D's blocks any more; or P has released its own
    # P
    BEGUN = "begun"  # the prompt is scheduled, or computed already; `Begun`
    PARKED = "parked"  # a claim came first
    SEATED = "seated"  # a reader's claim was granted; names it
    COMPLETE = "complete"  # the whole prompt is computed
    WRITTEN = "written"  # push: the last byte is visible at D
    COMMITTED = "committed"  # a reader's copy was proven right; names it
    STALE = "stale"  # a reader's copy was proven wrong
    LEFT = "left"  # a reader went without a commit; says why
    CLOSED = "closed"  # no more use for the lease; `Ended`


class Begun(msgspec.Struct, frozen=True):
    """Identity of the handoff, as this side knows it."""

    handoff: HandoffId
    request: RequestId  # this engine's own name for it
    peer: WorkerId  # its source; on P its target, "" for any
    tokens: int
    push: bool = False
    deferred: bool = False  # both got the request at once
    trace: str = ""  # a W3C traceparent


class Ended(msgspec.Struct, frozen=True):
    """How it finished on this side."""

    end: End
    bytes: int = 0  # that this side copied
    blocks: int = 0
    transport: str = ""
    retries: int = 0  # repeated messages, and hellos


class Mark(msgspec.Struct, frozen=True):
    side: Side
    key: int
    step: Step
    at: float  # on the node's clock
    what: Begun | Ended | None = None
    detail: str = ""
