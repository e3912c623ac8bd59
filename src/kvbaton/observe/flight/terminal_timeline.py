"""A journey for the terminal: lanes for router, P and D on one time axis, then figures, then the outcome.

Law: pure text of bounded size; every bar fits the width; a colour carries no information that the words lack.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from kvbaton.observe.flight.flight_records import DELIVERED, QUIET, FlightSeat
from kvbaton.observe.flight.journey import REFUSED, STAGES, WITHDRAWN, Journey, JourneyLane, Missing, Stage

WIDTH_MIN = 60
WIDTH_MAX = 160
DETAIL_CHARS_MAX = 400
_NAMES = {FlightSeat.ROUTER: "router", FlightSeat.PREFILL: "P", FlightSeat.DECODE: "D"}
_BARS = {
    FlightSeat.ROUTER: ("choose", "prefill", "handover", "first_token", "answer"),
    FlightSeat.PREFILL: ("prefill_queue", "compute", "hold"),
    FlightSeat.DECODE: ("connect", "claim", "queue", "copy", "commit", "deliver"),
}
"""Each on a line of its own, in the order of a journey; `first_byte` lies within `copy` and is a figure only."""
_INNER = ("handover", "hold")
"""Not worth a line unless they were finished: what follows them was never begun."""
_SAID = {
    "choose": "choose a pair",
    "prefill": "wait for P",
    "handover": "hand over",
    "first_token": "wait for D",
    "answer": "stream the answer",
    "prefill_queue": "wait for its turn",
    "compute": "compute the prompt",
    "hold": "hold for D",
    "connect": "connect",
    "claim": "claim",
    "queue": "wait for blocks",
    "first_byte": "first byte",
    "copy": "copy",
    "commit": "commit",
    "deliver": "deliver",
}

StyleName = Literal["good", "bad", "warn", "dim", "bold"]
Style = Callable[[str, StyleName], str]
"""The text as it is shown in that style."""


def plain(text: str, _: StyleName) -> str:
    return text


class Ink:
    """The drawing characters."""

    def __init__(self, style: Style = plain, *, fancy: bool = True) -> None:
        self.style = style
        self.bar = "█" if fancy else "#"
        self.open = "░" if fancy else "~"  # of a stage that never came to its end
        self.tick = "▏" if fancy else "|"
        self.rule = "─" if fancy else "-"
        self._fancy = fancy

    def spelled(self, line: str) -> str:
        """The line in characters that the terminal has."""
        return line if self._fancy else line.replace("→", "->").replace("µ", "u")


def draw(journey: Journey, width: int = 100, ink: Ink | None = None) -> list[str]:
    """The lines of one journey."""
    ink = ink or Ink()
    width = max(WIDTH_MIN, min(width, WIDTH_MAX))
    lines = [*_head(journey, width, ink), *_lanes(journey, width, ink), *_foot(journey, ink)]
    return [ink.spelled(line.rstrip()) for line in lines]


def brief(journey: Journey) -> list[str]:
    """One row for a list: time, request, workers, duration, outcome."""
    router = journey.lane(FlightSeat.ROUTER)
    workers = [_worker(journey, seat) or "-" for seat in (FlightSeat.PREFILL, FlightSeat.DECODE)]
    took = journey.ttft_s if journey.ttft_s is not None else journey.seconds
    share = "" if journey.transfer_share is None else f"{journey.transfer_share:.0%}"
    return [
        journey.request[:40] if router is not None else "?",
        journey.handoff[:12] or "-",
        journey.mode or "-",
        " → ".join(workers),
        duration(took),
        share or "-",
        _verdict(journey),
    ]


def _verdict(journey: Journey) -> str:
    if journey.failed and (not journey.end or journey.end in QUIET):
        return f"{journey.end or 'under way'}, but {journey_reason(journey)}"
    if journey.mistake:
        return f"refused: {journey.end}"
    return f"{journey.end or 'under way'}{_later(journey, '; try {} answered')}"


def _later(journey: Journey, said: str) -> str:
    return "" if journey.answered_by is None else said.format(journey.answered_by + 1)


BRIEF_HEADER = ["request", "handoff", "mode", "P → D", "first byte", "transfer", "end"]


def duration(seconds: float) -> str:
    """Three figures or so, in the unit that fits."""
    if seconds < 0.0000005:
        return "0"
    if seconds < 0.001:
        return f"{seconds * 1e6:.0f} µs"
    if seconds < 1.0:
        return f"{seconds * 1e3:.{1 if seconds >= 0.01 else 2}f} ms"
    return f"{seconds:.2f} s" if seconds < 100 else f"{seconds:.0f} s"


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def amount(count: float, unit: str = "B") -> str:
    for prefix in ("", "Ki", "Mi", "Gi"):
        if count < 1024:
            return f"{count:.0f} {prefix}{unit}" if not prefix else f"{count:.1f} {prefix}{unit}"
        count /= 1024
    return f"{count:.1f} Ti{unit}"


# --- parts


def _head(journey: Journey, width: int, ink: Ink) -> list[str]:
    name = journey.request or "?"
    which = f", try {journey.number + 1} of {journey.tries}" if journey.tries > 1 else ""
    lines = [ink.style(f"request {name}{which}", "bold")]
    pair = " → ".join(_worker(journey, seat) or "?" for seat in (FlightSeat.PREFILL, FlightSeat.DECODE))
    what = [f"mode {journey.mode}" if journey.mode else "", "" if journey.mode == "alone" else f"from {pair}"]
    what += [
        counted(journey.tokens, "token") if journey.tokens else "",
        journey.transport and f"over {journey.transport}",
    ]
    if journey.bytes:
        rate = f" at {amount(journey.bytes_per_s, 'B/s')}" if journey.bytes_per_s else ""
        what.append(f"{amount(journey.bytes)} in {counted(journey.blocks, 'block')}{rate}")
    lines += _wrapped(", ".join(each for each in what if each), width)
    if journey.handoff:
        lines.append(ink.style(f"handoff {journey.handoff}", "dim"))
    return lines


def _lanes(journey: Journey, width: int, ink: Ink) -> list[str]:
    label = 30
    room = max(width - label - 12, 10)
    span = max(journey.seconds, 1e-6)
    lines = ["", _axis(label, room, span, ink)]
    for lane in journey.lanes:
        lines.append(ink.style(_lane_name(lane), "bold"))
        for name in _BARS[lane.seat]:
            stage, opened = _stage(journey, lane, name), _opened(lane, name)
            if stage is not None:
                lines.append(_bar(stage, label, room, span, ink))
            elif opened is not None:
                lines.append(_bar(opened, label, room, span, ink, is_open=True))
    lines += [ink.style(_absent(missing), "warn") for missing in journey.missing]
    return lines


def _axis(label: int, room: int, span: float, ink: Ink) -> str:
    middle = f" {duration(span / 2)} "
    left = (room - len(middle)) // 2
    rule = ink.rule * left + middle + ink.rule * (room - left - len(middle))
    return ink.style(" " * (label - 2) + "0 " + rule + f" {duration(span)}", "dim")


def _bar(stage: Stage, label: int, room: int, span: float, ink: Ink, *, is_open: bool = False) -> str:
    first = min(int(stage.begin_s / span * room), room - 1)
    last = min(max(int(-(-stage.end_s / span * room // 1)), first + 1), room)
    is_short = (stage.end_s - stage.begin_s) / span * room < 0.5
    body = ink.tick if is_short else (ink.open if is_open else ink.bar) * (last - first)
    drawn = " " * first + body + " " * (room - first - len(body))
    said = f"{_SAID[stage.name]}, unfinished" if is_open else _SAID[stage.name]
    return f"  {said:<{label - 2}}{drawn} {duration(stage.seconds):>9}"


def _opened(lane: JourneyLane, name: str) -> Stage | None:
    """A stage that started and never finished, up to the last moment of its lane; none for a successful one."""
    if lane.end in (DELIVERED, *QUIET) or not lane.moments:
        return None
    first, last = STAGES[lane.seat][name]
    begun = next((moment.at for moment in lane.moments if moment.step == first), None)
    if begun is None or any(moment.step == last for moment in lane.moments) or name in _INNER:
        return None
    if name == "deliver" and lane.failed:  # there was nothing to deliver
        return None
    return Stage(name, lane.seat, lane.worker, begun, max(lane.moments[-1].at, begun))


def _foot(journey: Journey, ink: Ink) -> list[str]:
    lines = [""]
    if journey.ttft_s is not None:
        share = ""
        if journey.transfer_s is not None and journey.transfer_share is not None:
            share = f", of which the transfer took {duration(journey.transfer_s)} ({journey.transfer_share:.0%})"
        lines.append(f"first byte after {duration(journey.ttft_s)}{share}")
    if journey.itl_s is not None:
        lines.append(f"{journey.chunks} tokens, one every {duration(journey.itl_s)}")
    for lane in journey.lanes:
        lines.append(_ending(lane, ink))
    why, _, left = _moved(journey).partition(" ")
    if left:
        begun = f"an answer that {left[:80]} had begun ({why[:20]})"
        lines.append(f"it went on with {begun}: --last {journey.number + 1} shows both")
    skewed = [lane for lane in journey.lanes if abs(lane.clock_offset_s) >= 0.001]
    for lane in skewed:
        late = "behind" if lane.clock_offset_s > 0 else "ahead of"
        lines.append(f"the clock of {lane.worker} is {duration(abs(lane.clock_offset_s))} {late} the first lane's")
    if journey.clocks_doubtful:
        lines.append("the clocks contradict each other; lanes may be shifted")
    if journey.failed:
        if journey.end == "ok":
            lines.append("the client got its answer anyway: D computed the prompt itself")
        if journey.answered_by is not None:
            lines.append(_later(journey, "the client got its answer anyway: try {} answered"))
    if journey.mistake:
        lines.append("the client's mistake: the worker refused the request, and no handoff failed")
    if journey.failed or journey.mistake:
        lines.append(ink.style(f"next: kvbaton explain {journey_reason(journey)}", "warn"))
    return lines


def _moved(journey: Journey) -> str:
    """Why a stream left its D, and which; "" of a try that began an answer."""
    router = journey.lane(FlightSeat.ROUTER)
    return next((each.detail for each in router.moments if each.step == "moved"), "") if router is not None else ""


def journey_reason(journey: Journey) -> str:
    """The code to explain: D's or P's failure, else the router's."""
    for seat in (FlightSeat.DECODE, FlightSeat.PREFILL, FlightSeat.ROUTER):
        for lane in journey.lanes:
            if lane.seat is seat and lane.failed:
                return lane.end
    return journey.end


def _ending(lane: JourneyLane, ink: Ink) -> str:
    name = _named(lane.seat, lane.worker)
    if not lane.end:
        said = "gone; this is its last report" if lane.gone else "under way"
        return f"{name}: {ink.style(said, 'warn' if lane.gone else 'dim')}"
    good = lane.end in (DELIVERED, *QUIET)
    detail = f": {lane.detail[:DETAIL_CHARS_MAX]}" if lane.detail else ""
    repeated = lane.retries if lane.seat is not FlightSeat.ROUTER else 0
    more = f" ({counted(repeated, 'message')} repeated)" if repeated else ""
    return f"{name}: {ink.style(lane.end, 'good' if good else 'bad')}{detail}{more}{' (gone)' if lane.gone else ''}"


def _lane_name(lane: JourneyLane) -> str:
    life = f"@{lane.incarnation[:8]}" if lane.incarnation else ""
    own = f"  {lane.request}" if lane.seat is not FlightSeat.ROUTER and lane.request else ""
    return f"{_named(lane.seat, lane.worker)}{life}{own}"


def _named(seat: FlightSeat, worker: str) -> str:
    """P p0; of a router that has no other name, its seat."""
    return _NAMES[seat] if worker in ("", _NAMES[seat]) else f"{_NAMES[seat]} {worker}"


def _absent(missing: Missing) -> str:
    said = missing.why if missing.why in (REFUSED, WITHDRAWN) else f"no record: {missing.why}"
    return f"{_named(missing.seat, missing.worker)}: {said}"


def _worker(journey: Journey, seat: FlightSeat) -> str:
    lane = journey.lane(seat)
    if lane is not None:
        return lane.worker
    return next((missing.worker for missing in journey.missing if missing.seat is seat), "")


def _stage(journey: Journey, lane: JourneyLane, name: str) -> Stage | None:
    found: Sequence[Stage] = [
        stage for stage in journey.stages if (stage.seat, stage.worker, stage.name) == (lane.seat, lane.worker, name)
    ]
    return found[0] if found else None


def _wrapped(text: str, width: int) -> list[str]:
    lines: list[str] = []
    for word in text.split(", "):
        if lines and len(lines[-1]) + len(word) + 2 <= width:
            lines[-1] += f", {word}"
        else:
            lines.append(word)
    return lines
