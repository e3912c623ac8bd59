"""D's side of one handoff: from wanting a prompt's KV to one end, and on to rest.

Laws: it ends once, by its deadline, on the first failure or the last success. D's blocks are released on entering DONE
and nowhere else, and DONE is entered only when no copy into them, ours or the peer's, can touch them any more.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.events import Allocated, Wanted
from kvbaton.protocol.geometry.layout import Group
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import LeaseId, ReservationId
from kvbaton.protocol.machines.context import Parts
from kvbaton.protocol.machines.pairing_state import Link
from kvbaton.protocol.marks import Ended
from kvbaton.protocol.table import Table, pairs


class IntakeState(enum.Enum):
    GREETING = "greeting"  # waiting for the link to the source
    CLAIMING = "claiming"  # Claim sent, repeated
    GRANTED = "granted"  # the lease is ours, renewed; waiting for the engine to find blocks
    COPYING = "copying"  # reading behind what is ready
    COMMITTING = "committing"  # all bytes are here; Commit sent, repeated; nothing is read again
    OFFERED = "offered"  # the source writes into our blocks
    JUDGING = "judging"  # the source says that it has written everything; our ranks say what they have
    REVOKING = "revoking"  # ended; the source must confirm that it has stopped writing, or be fenced
    SETTLING = "settling"  # ended; our own copies come to rest
    DONE = "done"


class IntakeEvent(enum.Enum):
    LINKED = "linked"
    UNLINKED = "unlinked"
    GRANTED = "granted"
    PULL_BEGUN = "pull_begun"
    PUSH_BEGUN = "push_begun"
    COPIED = "copied"
    COMMITTED = "committed"
    WRITTEN = "written"
    JUDGED = "judged"
    FAILED = "failed"
    QUIESCED = "quiesced"
    RESTED = "rested"


_S, _E = IntakeState, IntakeEvent
_LIVE = {_S.GREETING, _S.CLAIMING, _S.GRANTED, _S.COPYING, _S.COMMITTING, _S.OFFERED, _S.JUDGING}
_OVER = {_S.REVOKING, _S.SETTLING, _S.DONE}
_NEXT = {
    (_S.GREETING, _E.LINKED): _S.CLAIMING,
    (_S.CLAIMING, _E.UNLINKED): _S.GREETING,
    (_S.CLAIMING, _E.GRANTED): _S.GRANTED,
    (_S.GRANTED, _E.PULL_BEGUN): _S.COPYING,
    (_S.GRANTED, _E.PUSH_BEGUN): _S.OFFERED,
    (_S.COPYING, _E.COPIED): _S.COMMITTING,
    (_S.COMMITTING, _E.COMMITTED): _S.SETTLING,
    (_S.OFFERED, _E.WRITTEN): _S.JUDGING,
    (_S.JUDGING, _E.JUDGED): _S.SETTLING,
    (_S.GREETING, _E.FAILED): _S.SETTLING,
    (_S.CLAIMING, _E.FAILED): _S.SETTLING,
    (_S.GRANTED, _E.FAILED): _S.SETTLING,
    (_S.COPYING, _E.FAILED): _S.SETTLING,
    (_S.COMMITTING, _E.FAILED): _S.SETTLING,
    (_S.OFFERED, _E.FAILED): _S.REVOKING,
    (_S.JUDGING, _E.FAILED): _S.SETTLING,  # its loans were taken back, so it can write no more
    (_S.REVOKING, _E.QUIESCED): _S.SETTLING,
    (_S.REVOKING, _E.WRITTEN): _S.SETTLING,  # a Written that crosses a Revoke counts as Quiesced
    (_S.SETTLING, _E.RESTED): _S.DONE,
}
_ILLEGAL = (
    pairs(_LIVE - {_S.GRANTED}, {_E.PULL_BEGUN, _E.PUSH_BEGUN})
    | pairs(_LIVE - {_S.COPYING}, {_E.COPIED})
    | pairs(_LIVE - {_S.COMMITTING}, {_E.COMMITTED})
    | pairs(_LIVE - {_S.OFFERED, _S.JUDGING}, {_E.WRITTEN})
    | pairs(_LIVE - {_S.JUDGING}, {_E.JUDGED, _E.QUIESCED})  # one that stops of its own accord fails the handoff first
)
INTAKE = Table(
    "intake",
    IntakeState,
    IntakeEvent,
    next=_NEXT,
    late=(
        pairs(_LIVE, {_E.LINKED, _E.UNLINKED, _E.GRANTED, _E.RESTED})
        | pairs({_S.JUDGING}, {_E.WRITTEN, _E.QUIESCED})  # it repeats a Written until that is acknowledged
        | pairs(_OVER, IntakeEvent)
    )
    - set(_NEXT),
    illegal=_ILLEGAL,
)


@dataclass(slots=True)
class Source:
    """P's blocks, as far as D knows them."""

    lease: LeaseId
    tokens: int
    blocks: tuple[list[int], ...]
    progress: Progress
    final: bool
    work: int = 0
    ttl_s: float = 0.0
    copied: Progress = ()  # what of it has been handed to the ranks to read

    def check(self, groups: Sequence[Group]) -> None:
        """Refuse what cannot be this prompt: too many blocks, more ready than listed, or less than all when final."""
        if not len(groups) == len(self.blocks) == len(self.progress):
            raise ProtocolError(Reason.BAD_MESSAGE, "blocks: not one list and one progress per group of the source")
        for group, ids, ready in zip(groups, self.blocks, self.progress, strict=True):
            _, needed = group.needed(self.tokens)
            if len(ids) > needed:
                raise ProtocolError(
                    Reason.BAD_MESSAGE, f"blocks: {len(ids)} of {group.name!r}, {needed} make the prompt"
                )
            if max(ready.blocks_done, ready.blocks_ahead) > len(ids):
                raise ProtocolError(Reason.BAD_MESSAGE, f"progress: more of {group.name!r} is ready than is listed")
            if self.final and ready.blocks_done < needed:
                raise ProtocolError(
                    Reason.BAD_MESSAGE, f"final: {ready.blocks_done} of {needed} blocks of {group.name!r}"
                )


@dataclass(slots=True)
class Repeats:
    """How often D had to repeat messages that need an answer."""

    greetings: int = 0  # repeated for it, after the first
    claims: int = 0  # sent


@dataclass(slots=True)
class Intake:
    """One handoff on its way in."""

    wanted: Wanted
    attempt: int
    link: Link
    parts: Parts
    state: IntakeState = IntakeState.GREETING
    source: Source | None = None
    target: Allocated | None = None
    reservation: ReservationId = ReservationId(0)
    accepted: bool = False  # the source has confirmed the offer
    end: End | None = None
    repeats: Repeats = field(default_factory=Repeats)
    deadline: float = 0.0
    hard_deadline: float = 0.0
    has_bytes: bool = False  # at least one copy has ended well

    def ended(self, end: End) -> Ended:
        plane, target = self.link.transport, self.target
        return Ended(
            end,
            self.parts.moved,
            sum(map(len, target.blocks)) if target is not None else 0,
            plane.name if plane is not None else "",
            self.repeats.greetings + max(self.repeats.claims - 1, 0),
        )


WAITED_FOR: dict[IntakeState, Reason] = {
    IntakeState.GREETING: Reason.HANDSHAKE_TIMEOUT,
    IntakeState.CLAIMING: Reason.CLAIM_TIMEOUT,
    IntakeState.GRANTED: Reason.DEFER_TIMEOUT,
    IntakeState.COPYING: Reason.TRANSFER_TIMEOUT,
    IntakeState.COMMITTING: Reason.TRANSFER_TIMEOUT,
    IntakeState.OFFERED: Reason.TRANSFER_TIMEOUT,
    IntakeState.JUDGING: Reason.TRANSFER_TIMEOUT,
}
"""The reason of a handoff that ran out of time: what it was waiting for."""
