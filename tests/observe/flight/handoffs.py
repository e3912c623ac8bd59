"""Records of one handoff as its three sides write them, for tests to bend."""

from __future__ import annotations

from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment

NOW = 1_700_000_000.0
HANDOFF = f"{'ab' * 16}.0"
LIFE = f"{7:016x}"

ROUTER = (
    ("received", 0.0), ("chosen", 0.001), ("prefill_sent", 0.002), ("prefill_answered", 0.050), ("decode_sent", 0.051),
    ("first_byte", 0.100), ("ended", 0.150),
)  # fmt: skip
PREFILL = (
    ("accepted", 0.004), ("scheduled", 0.009), ("begun", 0.010), ("complete", 0.045), ("seated", 0.056),
    ("committed", 0.085), ("closed", 0.086), ("rested", 0.087),
)  # fmt: skip
DECODE = (
    ("asked", 0.053), ("claimed", 0.054), ("granted", 0.058), ("allocated", 0.060), ("first_byte", 0.065),
    ("copied", 0.080), ("ended", 0.088), ("taken", 0.090), ("rested", 0.091),
)  # fmt: skip


def moments(steps: tuple[tuple[str, float], ...], skew: float = 0.0) -> tuple[Moment, ...]:
    return tuple(Moment(step, NOW + at + skew) for step, at in steps)


def router(**more: object) -> Flight:
    given: dict[str, object] = {
        "seat": FlightSeat.ROUTER, "worker": "router", "handoff": HANDOFF, "request": "mine", "peers": ("p0", "d0"),
        "mode": "pull", "tokens": 20, "moments": moments(ROUTER), "end": "ok",
    }  # fmt: skip
    return Flight(**(given | more))  # type: ignore[arg-type]


def prefill(skew: float = 0.0, **more: object) -> Flight:
    given: dict[str, object] = {
        "seat": FlightSeat.PREFILL, "worker": "p0", "incarnation": LIFE, "handoff": HANDOFF, "request": "cmpl-mine-p",
        "peers": ("d0",), "mode": "pull", "tokens": 24, "moments": moments(PREFILL, skew), "end": "delivered",
    }  # fmt: skip
    return Flight(**(given | more))  # type: ignore[arg-type]


def decode(skew: float = 0.0, **more: object) -> Flight:
    given: dict[str, object] = {
        "seat": FlightSeat.DECODE, "worker": "d0", "incarnation": LIFE, "handoff": HANDOFF, "request": "cmpl-mine-d",
        "peers": ("p0",), "mode": "pull", "transport": "shm", "tokens": 24, "blocks": 3, "bytes": 2_000_000,
        "moments": moments(DECODE, skew), "end": "delivered",
    }  # fmt: skip
    return Flight(**(given | more))  # type: ignore[arg-type]
