"""Every number an operator may set, as one frozen value handed down. Durations in seconds, bounds in counts."""

from __future__ import annotations

import math

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.numbers import DURATION_S_MIN, TERM_S_MAX

LEASE_S_MIN = 0.15
"""A reader renews when a third is over, and never more often than every `DURATION_S_MIN`."""


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Timeouts and bounds of one node. Defaults of the first two follow reports from the field."""

    transfer_timeout: float = 30.0  # D: bytes must make progress within this; P: its writes likewise
    defer_timeout: float = 60.0  # waiting for the other side to get the request, or for D to allocate blocks
    claim_timeout: float = 10.0  # D: an answer to handshake and claim (pull)
    lease_s: float = 15.0  # P holds blocks this long after the reader's last message
    max_hold_s: float = 180.0  # no renewal takes a lease, nor a handoff, past this
    retry_s: float = 0.5  # unanswered messages are sent again at this interval
    probe_timeout: float = 3.0  # D: to open the best transport, where there is an alternative
    shun_s: float = 60.0  # how long a transport that could not be opened to a worker is omitted
    revoke_timeout: float = 5.0  # D waits this long for Quiesced, then fences
    tombstones_max: int = 4096  # ended leases that can still judge a late commit
    parked_max: int = 2048  # claims that arrived before P had the request
    parked_per_peer_max: int = 1024  # of them, of one worker
    seats_per_peer_max: int = 8192  # leases that one worker reads, or is written, at a time
    bytes_per_peer_max: int = 1 << 50  # granted, not committed; a prompt counts whole, whatever it shares with others
    greetings_per_s_max: float = 50.0  # of one worker in the long run; each costs a plan of the pair's geometry
    greetings_burst_max: float = 500.0
    unconfirmed_per_peer_max: int = 8  # sessions that one worker has not confirmed
    revoked_max: int = 1024  # revocations remembered per peer before a floor replaces them
    sessions_max: int = 1024
    intakes_max: int = 16384
    leases_max: int = 65536
    quarantine_blocks_max: int = 4096  # destination blocks not at rest before new handoffs are refused
    puts_max: int = 4096

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ProtocolError(Reason.BAD_MESSAGE, f"{name}: got {value!r}, expected a finite number above 0")
            least = LEASE_S_MIN if name == "lease_s" else DURATION_S_MIN
            if name.endswith(("_s", "_timeout")) and not least <= value <= TERM_S_MAX:
                expected = f"{least:g} to {TERM_S_MAX:g} seconds"
                raise ProtocolError(Reason.BAD_MESSAGE, f"{name}: got {value!r}, expected {expected}")
        if self.max_hold_s < self.lease_s:
            raise ProtocolError(Reason.BAD_MESSAGE, f"max_hold_s: {self.max_hold_s} is below lease_s {self.lease_s}")
