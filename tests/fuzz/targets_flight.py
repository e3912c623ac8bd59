"""What workers tell of handoffs, what viewers ask for, and what clients say of their traces."""

from __future__ import annotations

import re
from collections.abc import Iterator

import msgspec
from guided import Target
from mutators import Shape

from kvbaton.api.api_errors import ApiError
from kvbaton.observe.dashboard.pulse import Figures, ListedWorker
from kvbaton.observe.dashboard.state import STATE_BYTES_MAX
from kvbaton.observe.dashboard.watch import ClusterWatch
from kvbaton.observe.flight import flight_records
from kvbaton.observe.flight import flight_records as r
from kvbaton.observe.flight.collector import LAST_MAX, Gathering
from kvbaton.observe.flight.flight_records import Flight, FlightSeat, Moment
from kvbaton.observe.flight.journey import Journey
from kvbaton.router.operator_access import ID_CHARS_MAX, FlightsQuery

NOW = 1_800_000_000.0
HANDOFF = f"{'ab' * 16}.0"
ROUTERS = Flight(
    FlightSeat.ROUTER, "router", handoff=HANDOFF, request="r1", peers=("p0", "d0"), mode="pull", end="ok",
    moments=(Moment("received", NOW - 1), Moment("decode_sent", NOW - 0.5), Moment("first_byte", NOW - 0.1)),
)  # fmt: skip
JOURNEYS = 200


def told(data: bytes) -> None:
    """`ReportError`, or a report of which everything can be joined, counted, encoded and drawn; nothing unprintable."""
    try:
        report = r.decode(data)
    except r.ReportError as error:
        assert str(error).startswith("report: ") and len(str(error)) < 1000
        return
    now = [NOW]
    gathering = Gathering(clock=lambda: now[0])
    gathering.listed({"p0": (1, "prefill"), "d0": (2, "decode"), "b0": (3, "both")})
    listed = [ListedWorker("d0", "decode", "ready", f"{2:016x}"), ListedWorker("b0", "both", "ready", f"{3:016x}")]
    watch = ClusterWatch(gathering, lambda: listed, lambda: Figures(1), clock=lambda: now[0])
    gathering.note(ROUTERS)
    for worker, life in (("d0", 2), ("b0", 3), ("d0", 1), ("nobody", 9)):
        gathering.heard(worker, life, report, now[0])
    for _ in range(2):
        watch.state()
        now[0] += 1.0
        later = msgspec.structs.replace(report, at=report.at + 1.0)
        gathering.heard("d0", 2, later, now[0])
    shown = [*gathering.journeys(last=JOURNEYS), *gathering.journeys(JOURNEYS, True), *gathering.workers()]
    page = watch.state()
    assert len(page) <= STATE_BYTES_MAX
    journeys = gathering.journeys(last=JOURNEYS)
    assert len(msgspec.json.decode(msgspec.json.encode(journeys), type=list[Journey])) == len(
        journeys
    )  # as inspect does
    for text in texts_in([msgspec.json.decode(msgspec.json.encode(shown)), msgspec.json.decode(page)]):
        assert text.isprintable(), "a terminal would obey it"


def texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from value
        yield from texts_in(list(value.values()))
    elif isinstance(value, list):
        for each in value:
            yield from texts_in(each)


def told_seeds() -> list[bytes]:
    steps = ("asked", "granted", "allocated", "first_byte", "copied", "ended", "taken")
    moments = tuple(Moment(step, NOW + n / 1000, "\x1b[2J" * (n == 3)) for n, step in enumerate(steps))
    d0 = Flight(
        FlightSeat.DECODE,
        "d0",
        f"{2:016x}",
        HANDOFF,
        "r1-0",
        ("p0",),
        "pull",
        "shm",
        100,
        7,
        4096,
        1,
        moments,
        "delivered",
    )
    failed = msgspec.structs.replace(d0, end="claim_timeout", detail="p0 did not answer", moments=moments[:2])
    p0 = msgspec.structs.replace(d0, seat=FlightSeat.PREFILL, worker="p0", peers=("d0",))
    refused = msgspec.structs.replace(failed, handoff="")
    odd = msgspec.structs.replace(d0, moments=(Moment("asked", NOW), Moment("granted", float("nan"))))
    gauges = {"handoffs_total": 5.0, "delivered_total": 4.0, "bytes_total": 1e9, "pins": 3.0, "store_blocks": 1.0}
    return [
        r.encode(r.FlightReport(NOW, gauges, {"p0": "shm"}, (d0,), 0.5, 3)),
        r.encode(r.FlightReport(NOW, {"pins": float("nan")}, {}, (failed, p0))),
        r.encode(r.FlightReport(NOW, {}, {"p0": "tcp"}, (refused, msgspec.structs.replace(d0, end="")))),
        r.encode(r.FlightReport(-1.0, {"\x9b2J": 1.0}, {"\x1b]0;": "\n", "p1": "\u202e"}, (odd,))),
    ]


def asked(data: bytes) -> None:
    """A refusal with 400 that names the field, or what was asked for, within its bounds."""
    try:
        found = FlightsQuery.parse(data.decode("latin-1"))
    except ApiError as error:
        assert error.status == 400 and error.param is not None and len(error.message) < 400, error
    else:
        assert 1 <= found.last <= LAST_MAX and len(found.find) <= ID_CHARS_MAX


QUERIES = [
    b"last=20&failed=1&id=" + HANDOFF.encode(), b"", b"failed=", b"last=200&failed=0", b"id=%1b%ff+a%20b&last=0",
    b"last=%c2%b2", b"last=" + b"9" * 5000,
]  # fmt: skip
HEX = re.compile(r"[0-9a-f]+")


def traced(data: bytes) -> None:
    """None, or a valid parent that says the same when it is written and read again."""
    found = flight_records.parse_trace(data.decode("latin-1"))
    if found is None:
        return
    for text, size in ((found.trace_id, 32), (found.span_id, 16)):
        assert len(text) == size and HEX.fullmatch(text) and set(text) != {"0"}
    assert 0 <= found.flags <= flight_records.KNOWN_FLAGS
    assert len(str(found)) == flight_records.VERSION_00_CHARS and flight_records.parse_trace(str(found)) == found


PARENTS = [
    b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    b"cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-ff-more",
    b"00-00000000000000000000000000000000-00f067aa0ba902b7-00",
]


TARGETS = (
    Target("flight_report", told, told_seeds, Shape.MSGPACK, 500),
    Target("flights_query", asked, lambda: list(QUERIES), Shape.TEXT, 1500),
    Target("traceparent", traced, lambda: list(PARENTS), Shape.TEXT, 1500),
)
