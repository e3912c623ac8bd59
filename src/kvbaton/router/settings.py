"""Every number of the router that an operator may turn, as one frozen value. Durations in seconds."""

from __future__ import annotations

import math

import msgspec

from kvbaton.api.params import Mode


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How requests are sent on, how long anything may take, and how much is let in."""

    mode: Mode = Mode.PULL  # where the client names none
    modes_allowed: tuple[Mode, ...] = tuple(Mode)  # what the header x-kvbaton-mode may ask for
    deadline_s: float = 300.0  # of a whole request, its stream included
    first_byte_s: float = 120.0  # of one try: P's answer, and D's first event
    connect_s: float = 5.0
    body_s: float = 60.0  # of a client's body, from its first byte to its last
    prefill_retries: int = 2  # further tries after a P failed, each with another one
    decode_retries: int = 1  # further tries after a D failed before its first byte
    suspect_s: float = 2.0  # who failed a request is asked last for this long
    settle_s: float = 5.0  # P may finish this long after D's answer has ended
    ticket_ttl_s: float = 120.0
    in_flight_max: int = 2048  # requests to engines; beyond it clients get 429
    body_bytes_max: int = 4 << 20
    answer_bytes_max: int = 64 << 20
    show_pair: bool = False  # name the pair in the header x-kvbaton-pair

    def __post_init__(self) -> None:
        for field in msgspec.structs.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{field.name}: got {value!r}, expected seconds above 0")
            if type(value) is int and value < (0 if field.name.endswith("retries") else 1):
                raise ValueError(f"{field.name}: got {value!r}, expected a larger number")
        if self.mode not in self.modes_allowed:
            raise ValueError(f"mode: {self.mode} is not among the modes allowed")
