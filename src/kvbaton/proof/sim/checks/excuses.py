"""Legitimate causes of failure: for each reason, the faults of which at least one must have been in that world.

Law: a reason without an entry has no excuse, in any world. Where members lie (`lie…` among the faults), what they can
bring about is excused by that. Faults are named as worlds count them; a name stands for all that begin with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from kvbaton.protocol.errors import Reason

if TYPE_CHECKING:
    from kvbaton.proof.sim.hardship.world_plan import Plan

TIGHT = "tight bounds"
OTHER_NEEDS = "other needs"
LATE_TICKETS = "late tickets"
SHORT = "short times"
"""Said of a plan, beside its world's faults."""

_R = Reason
_RANKS = "rank_"  # whatever befalls ranks in processes of their own
_CUT = ("lost", "partitioned", "delayed", "paused_process", "paused_loop", "crashed", "retired", "port_threw", _RANKS)
_LEFT = ("aborted", "client_left", "discard", "retired", "cache_replaced")
_APART = ("crashed", "retired", "registry_flaps", "port_threw", "plane_shut", _RANKS)
_STUCK = ("slow_copy", "stalled_copy", "failed_copy", "paused", *_CUT)

EXCUSES: dict[Reason, tuple[str, ...]] = {
    _R.ABORTED: ("not_needed", *_LEFT),
    _R.BAD_SPAN: (_RANKS,),  # parts of what a rank was told were lost
    _R.BUSY: (TIGHT, _RANKS),
    _R.CLAIM_TIMEOUT: _CUT,
    _R.CONTENT_MISMATCH: ("ticket_other_prompt",),
    _R.DEFER_TIMEOUT: (SHORT, "preempted", *_LEFT, *_STUCK, *_APART),
    _R.DISCARDED: ("discard",),
    _R.DRAINING: ("retired",),
    _R.DUPLICATE: ("ticket_twice", "ticket_replayed"),
    _R.HANDSHAKE_TIMEOUT: _CUT,
    _R.LEASE_EXPIRED: (SHORT, LATE_TICKETS, "preempted", *_LEFT, *_STUCK, *_APART),
    _R.PEER_GONE: (*_APART, *_STUCK),
    _R.PEER_UNKNOWN: ("ticket_of_nobody", *_APART, *_STUCK),
    _R.PINS_FULL: ("pins_refused",),
    _R.QUARANTINE_FULL: (TIGHT, *_STUCK),  # a push that was delivered is not at rest before its loans are back
    _R.SOURCE_ABORTED: (*_LEFT, *_STUCK, *_APART),  # also a Quiesced of which only the repetition came
    _R.SOURCE_PREEMPTED: ("preempted",),
    _R.STALE: (SHORT, "nibbled", "cache_replaced", *_STUCK, *_APART),
    _R.TICKET_EXPIRED: (LATE_TICKETS, "ticket_replayed", "paused", *_CUT),
    _R.TICKET_SPENT: ("ticket_", "discard", TIGHT, *_STUCK, *_APART),
    _R.TRANSFER_FAILED: ("failed_copy", *_APART, *_STUCK),
    _R.TRANSFER_TIMEOUT: _STUCK,
    _R.UNKNOWN_LEASE: (SHORT, TIGHT, "ticket_", "preempted", *_LEFT, *_STUCK, *_APART),
    _R.UNREACHABLE: ("plane_shut", "port_threw", _RANKS),
    _R.WRONG_INCARNATION: (*_APART, *_STUCK, TIGHT),
    _R.WRONG_VERSION: ("other_versions", OTHER_NEEDS),
}


def wrongs(plan: Plan, faults: Iterable[str]) -> set[str]:
    """All that is wrong with a world."""
    everybody = (*plan.prefill, *plan.decode)
    settings = [each.settings for each in everybody]
    said = {
        TIGHT: any(each.sessions_max <= 4 for each in settings),
        OTHER_NEEDS: any(each.required for each in everybody),
        LATE_TICKETS: plan.late_ticket > 0,
        SHORT: any(each.max_hold_s < 10 for each in settings),
    }
    return {name for name, is_so in said.items() if is_so} | set(faults)


def is_excused(reason: str, wrong: Iterable[str]) -> bool:
    excuses = EXCUSES.get(Reason(reason), ())
    return any(each.startswith(excuses) for each in wrong) or are_lies_told(wrong)


def are_lies_told(wrong: Iterable[str]) -> bool:
    """Whether members with a valid key say what is not so: then anything may be said to anybody."""
    return any(each.startswith("lie") for each in wrong)


def are_ranks_apart(wrong: Iterable[str]) -> bool:
    return any(each.startswith(_RANKS) for each in wrong)
