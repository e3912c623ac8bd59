"""One handoff as router, P and D recorded it, by hand."""

from __future__ import annotations

from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT, TRY = "c" * 16, "1" * 16
LEG_P, LEG_D = "a" * 16, "b" * 16
HANDOFF = f"{'7' * 32}.0"
T0 = 1_700_000_000.0


def header(span_id: str, flags: str = "01") -> str:
    return f"00-{TRACE}-{span_id}-{flags}"


def moments(*steps: tuple[str, float] | tuple[str, float, str]) -> tuple[Moment, ...]:
    """In milliseconds after T0."""
    return tuple(Moment(step, T0 + at / 1000, *more) for step, at, *more in steps)


def at_ns(milliseconds: float) -> int:
    return int(T0) * 10**9 + round(milliseconds * 1000) * 1000


def router(**changes: object) -> Flight:
    values: dict[str, object] = {
        "seat": FlightSeat.ROUTER, "worker": "router", "handoff": HANDOFF, "request": "req-1", "peers": ("p0", "d0"),
        "mode": "pull", "tokens": 100, "end": "ok", "trace": header(TRY), "parent": header(CLIENT),
        "legs": (LEG_P, LEG_D), "path": "/v1/chat/completions", "model": "tiny", "status": 200, "output_tokens": 4,
        "moments": moments(
            ("received", 0), ("chosen", 1), ("prefill_sent", 2), ("prefill_answered", 30), ("decode_sent", 31),
            ("first_byte", 60), ("ended", 100),
        ),
    }  # fmt: skip
    return Flight(**{**values, **changes})  # type: ignore[arg-type]


def prefill(**changes: object) -> Flight:
    values: dict[str, object] = {
        "seat": FlightSeat.PREFILL, "worker": "p0", "incarnation": "00ff", "handoff": HANDOFF, "request": "p-req",
        "peers": ("d0",), "mode": "pull", "transport": "shm", "tokens": 100, "blocks": 7, "end": "delivered",
        "trace": header(LEG_P),
        "moments": moments(
            ("begun", 5), ("complete", 25), ("seated", 35, "d0"), ("committed", 55, "d0"), ("closed", 56),
            ("rested", 57),
        ),
    }  # fmt: skip
    return Flight(**{**values, **changes})  # type: ignore[arg-type]


def decode(**changes: object) -> Flight:
    values: dict[str, object] = {
        "seat": FlightSeat.DECODE, "worker": "d0", "incarnation": "00aa", "handoff": HANDOFF, "request": "d-req",
        "peers": ("p0",), "mode": "pull", "transport": "shm", "tokens": 100, "blocks": 7, "bytes": 4096,
        "retries": 1, "end": "delivered", "trace": header(LEG_D),
        "moments": moments(
            ("asked", 33), ("claimed", 34), ("granted", 36), ("allocated", 40), ("first_byte", 44), ("copied", 50),
            ("ended", 54), ("rested", 54), ("taken", 58),
        ),
    }  # fmt: skip
    return Flight(**{**values, **changes})  # type: ignore[arg-type]
