"""Why a handoff failed: one closed list, shared by messages, metrics, logs and documentation.

A new way to fail needs a new member here and a row in `MEANING`; reasons are defined nowhere else.
"""

from __future__ import annotations

import enum


class Blame(enum.Enum):
    """Who must act."""

    CALLER = "caller"  # the client or router that sent the request
    PEER = "peer"  # the other engine
    OPERATOR = "operator"  # configuration, capacity, network
    NOBODY = "nobody"  # part of normal operation


class Reason(enum.StrEnum):
    """Every way a handoff can fail."""

    ABORTED = "aborted"
    BAD_MESSAGE = "bad_message"
    BAD_SPAN = "bad_span"
    BUSY = "busy"
    CANCELLED = "cancelled"
    CHECKSUM_MISMATCH = "checksum_mismatch"
    CLAIM_TIMEOUT = "claim_timeout"
    CONTENT_MISMATCH = "content_mismatch"
    DEFER_TIMEOUT = "defer_timeout"
    DISCARDED = "discarded"
    DRAINING = "draining"
    DUPLICATE = "duplicate"
    FORBIDDEN = "forbidden"
    HANDSHAKE_TIMEOUT = "handshake_timeout"
    INCOMPATIBLE = "incompatible"
    LEASE_EXPIRED = "lease_expired"
    NO_TRANSPORT = "no_transport"
    NOT_WRITTEN = "not_written"
    ORIGIN_GONE = "origin_gone"
    OTHER = "other"
    PEER_GONE = "peer_gone"
    PEER_UNKNOWN = "peer_unknown"
    PINS_FULL = "pins_full"
    QUARANTINE_FULL = "quarantine_full"
    SOURCE_PREEMPTED = "source_preempted"
    SOURCE_ABORTED = "source_aborted"
    STALE = "stale"
    STORE_FAILED = "store_failed"
    TICKET_EXPIRED = "ticket_expired"
    TICKET_FORGED = "ticket_forged"
    TICKET_SPENT = "ticket_spent"
    TRANSFER_FAILED = "transfer_failed"
    TRANSFER_TIMEOUT = "transfer_timeout"
    UNKNOWN_LEASE = "unknown_lease"
    UNREACHABLE = "unreachable"
    WRONG_INCARNATION = "wrong_incarnation"
    WRONG_VERSION = "wrong_version"


MEANING: dict[Reason, tuple[Blame, str]] = {
    Reason.ABORTED: (Blame.NOBODY, "The engine aborted the request while its KV was in transfer."),
    Reason.BAD_MESSAGE: (Blame.PEER, "A control message could not be decoded or exceeded a limit."),
    Reason.BAD_SPAN: (Blame.PEER, "A copy named memory outside the registered regions."),
    Reason.BUSY: (Blame.OPERATOR, "A bounded queue is full; try again later or elsewhere."),
    Reason.CANCELLED: (Blame.NOBODY, "The copy was cancelled because its handoff had ended."),
    Reason.CHECKSUM_MISMATCH: (Blame.OPERATOR, "Data changed on the way: suspect memory, NIC or network."),
    Reason.CLAIM_TIMEOUT: (Blame.PEER, "P did not answer the claim in time."),
    Reason.CONTENT_MISMATCH: (Blame.CALLER, "The ticket or offer is for a different prompt than the request's."),
    Reason.DEFER_TIMEOUT: (Blame.PEER, "The other side received the request too late, or never."),
    Reason.DISCARDED: (Blame.NOBODY, "The router took the ticket back: client gone, or another pair chosen."),
    Reason.DRAINING: (Blame.OPERATOR, "The peer takes no new handoffs because it is shutting down."),
    Reason.DUPLICATE: (Blame.CALLER, "The transfer id is already in use by a live handoff."),
    Reason.FORBIDDEN: (Blame.OPERATOR, "The member's role does not allow this; create its key with another."),
    Reason.HANDSHAKE_TIMEOUT: (Blame.PEER, "The peer did not answer the handshake in time."),
    Reason.INCOMPATIBLE: (Blame.OPERATOR, "P and D differ in a field that the KV depends on; the detail names it."),
    Reason.LEASE_EXPIRED: (Blame.OPERATOR, "The lease expired before D could read."),
    Reason.NO_TRANSPORT: (Blame.OPERATOR, "P and D have no data plane in common."),
    Reason.NOT_WRITTEN: (Blame.PEER, "P said that it had written all blocks of a push, and had not."),
    Reason.ORIGIN_GONE: (Blame.OPERATOR, "P's cache still holds KV of a member that was removed."),
    Reason.OTHER: (Blame.PEER, "The peer gave a reason that this version does not know."),
    Reason.PEER_GONE: (Blame.PEER, "The peer shut down or was replaced by a new incarnation."),
    Reason.PEER_UNKNOWN: (Blame.CALLER, "No registered peer has that name."),
    Reason.PINS_FULL: (Blame.OPERATOR, "P's cache has no room that may be pinned for handoffs; pin_share limits it."),
    Reason.QUARANTINE_FULL: (Blame.OPERATOR, "Too many blocks wait for transfers that are not at rest."),
    Reason.SOURCE_PREEMPTED: (Blame.NOBODY, "P preempted the request while streaming its KV."),
    Reason.SOURCE_ABORTED: (Blame.NOBODY, "P's request ended before its prefill was complete."),
    Reason.STALE: (Blame.OPERATOR, "P's blocks were reused before the copy was confirmed."),
    Reason.STORE_FAILED: (Blame.OPERATOR, "The shared store refused, failed or timed out."),
    Reason.TICKET_EXPIRED: (Blame.CALLER, "The ticket is past its expiry."),
    Reason.TICKET_FORGED: (Blame.CALLER, "The ticket cannot be read or its signature does not verify."),
    Reason.TICKET_SPENT: (Blame.CALLER, "The ticket's readers have all used it."),
    Reason.TRANSFER_FAILED: (Blame.OPERATOR, "The data plane reported an error."),
    Reason.TRANSFER_TIMEOUT: (Blame.PEER, "The bytes did not arrive within transfer_timeout."),
    Reason.UNKNOWN_LEASE: (Blame.PEER, "P has no such lease, or has forgotten it."),
    Reason.UNREACHABLE: (Blame.OPERATOR, "The peer cannot be reached over this data plane; the next best is tried."),
    Reason.WRONG_INCARNATION: (Blame.PEER, "The message or ticket belongs to an earlier incarnation of this worker."),
    Reason.WRONG_VERSION: (
        Blame.OPERATOR,
        "P and D have no protocol version in common, or one requires a feature that the other lacks.",
    ),
}


def reason_of(text: str) -> Reason:
    """The reason that a peer named, `OTHER` where a newer peer knows one that this version does not."""
    try:
        return Reason(text)
    except ValueError:
        return Reason.OTHER


class ProtocolError(Exception):
    """A peer, caller or operator did something that the protocol refuses; carries the reason and a detail."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail
