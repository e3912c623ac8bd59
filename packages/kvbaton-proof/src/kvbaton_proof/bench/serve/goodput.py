"""Correct goodput: how many requests a second were good, by the rate at which they came.

    good      answered in full, right, and within the objectives
    late      right, but not within them
    wrong     another answer than the reference's; counts like none
    failed    an error by name, or cut off at the part's deadline

Laws: pure. Every request that was sent is one of the four, and only good ones count, so that an answer from KV which
was already reused costs as much as no answer. TTFT counts from when a request was *due*: a client that could not send
in time hides nothing. A capacity lies between two rates that were measured, or is said to lie outside of them.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec

from kvbaton_proof.bench.kit.lab_pages import Findings, Grid, Table, line_plot, number
from kvbaton_proof.bench.kit.run_facts import RunFacts, named
from kvbaton_proof.bench.load.open_loop import Answer, Record
from kvbaton_proof.bench.serve.serve_parts import Slo, figures, times_of

References = Mapping[int, bytes | tuple[int, ...]]
"""By a request's index its right answer: a digest of the text, or the tokens as far as they are sure."""
UNDER_WAY = "under way when the run was stopped"
SHARES = (0.9, 0.99)
"""Of requests that are good: the rates at which it is so are what buyers compare."""
FIRST_RATE, RATE_STEP = 1.0, 2.0
CLOSE_ENOUGH = 1.15
"""Two rates so near to each other need none between."""
HOPELESS = 0.5
"""With fewer good requests than this share, higher rates are not asked any more."""
LEGEND = (
    "rate: requests/s offered. good: answered in full, right and within the objectives, TTFT from when a request was "
    "due. late: right, not within them. wrong: not the reference's answer. failed: an error, or cut off. goodput/s: "
    "the good share of the rate. Times are those of right answers."
)
CAPACITY_LEGEND = (
    "The highest rate up to which so many requests are good, on a straight line between the rates that were measured; "
    "`<` and `>` where it lies below or above all of them. In brackets: the same of each round by itself."
)


class Level(msgspec.Struct, frozen=True, kw_only=True):
    """One target at one rate in one round."""

    round: int
    target: str
    rate: float
    sent: int
    good: int
    late: int
    wrong: int
    failed: int
    errors: Mapping[str, int]
    faults: Mapping[str, int]  # meanwhile
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    itl_p99_ms: float | None  # of all gaps of all requests

    @property
    def share(self) -> float:
        return self.good / self.sent if self.sent else 0.0


class Capacity(msgspec.Struct, frozen=True):
    """The rate up to which a share of requests is good."""

    share: float
    rate: float | None  # None: it lies outside of what was measured
    outside: str = ""  # `<` or `>` the rate that was the last one

    def __str__(self) -> str:
        return self.outside if self.rate is None else f"{self.rate:.2f}"


class GoodputReport(RunFacts, frozen=True, kw_only=True):
    """Everything that a run found."""

    ok: bool
    wrong: Sequence[str]
    notes: Sequence[str]
    stopped: bool
    slo: str
    objectives: Slo = Slo()
    options: Mapping[str, object]
    engines: Mapping[str, int]  # of a target that was started here
    levels: Sequence[Level]
    capacities: Mapping[str, Sequence[Capacity]]
    commands: Mapping[str, str] = {}


def from_due(record: Record, answer: Answer) -> Answer:
    """The answer with its times from when it was due."""
    held_s = max(0.0, record.sent_s - record.ask.due_s)
    return msgspec.structs.replace(answer, ttft_s=answer.ttft_s + held_s, e2e_s=answer.e2e_s + held_s)


def sure(answer: Answer, margin: float) -> tuple[int, ...]:
    """Its tokens before the first that was less than `margin` nats likelier than the next: another batch may change
    that one, and from there on the whole answer."""
    near = (at for at, each in enumerate(answer.leads) if each < margin)
    return answer.ids[: next(near, len(answer.ids))]


def is_right(index: int, answer: Answer, references: References) -> bool:
    """As far as its reference goes; without any references nothing is called wrong."""
    known = references.get(index)
    if isinstance(known, tuple):
        return answer.ids[: len(known)] == known
    return not references or known == answer.digest


def verdict(record: Record, references: References, slo: Slo) -> str:
    """What one request counts as."""
    if record.answer is None:
        return "failed"
    if not is_right(record.ask.index, record.answer, references):
        return "wrong"
    return "good" if slo.met_by(from_due(record, record.answer)) else "late"


def request_row(record: Record, references: References, slo: Slo) -> dict[str, object]:
    """One request for whoever wants to judge by other objectives; milliseconds, the first token's from when due."""
    row: dict[str, object] = {
        "index": record.ask.index, "prompt": record.ask.input_tokens, "answer": record.ask.output_tokens,
        "due_s": round(record.ask.due_s, 3), "verdict": verdict(record, references, slo),
    }  # fmt: skip
    if record.answer is None:
        return {**row, "error": record.error or UNDER_WAY}
    answer = from_due(record, record.answer)
    itl = figures(answer.gaps_s)
    gaps = {} if itl is None else {"itl_mean": itl.mean_ms, "itl_p99": itl.p99_ms, "itl_max": itl.max_ms}
    return {**row, "ttft": round(answer.ttft_s * 1e3, 3), "e2e": round(answer.e2e_s * 1e3, 3), **gaps}


def level_of(
    records: Sequence[Record],
    references: References,
    slo: Slo,
    *,
    number: int,
    target: str,
    rate: float,
    faults: Mapping[str, int] = {},
) -> Level:
    called = Counter(verdict(record, references, slo) for record in records)
    errors = Counter(record.error or UNDER_WAY for record in records if record.answer is None)
    right = [
        from_due(record, record.answer)
        for record in records
        if record.answer is not None and is_right(record.ask.index, record.answer, references)
    ]
    ttft, itl = figures(times_of(right, "ttft")), figures(times_of(right, "itl"))
    return Level(
        round=number, target=target, rate=round(rate, 3), sent=len(records), good=called["good"], late=called["late"],
        wrong=called["wrong"], failed=called["failed"], errors=dict(errors), faults=faults,
        ttft_p50_ms=None if ttft is None else ttft.p50_ms, ttft_p99_ms=None if ttft is None else ttft.p99_ms,
        itl_p99_ms=None if itl is None else itl.p99_ms,
    )  # fmt: skip


def counted(faults: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {act}" for act, count in sorted(faults.items()))


def shares(levels: Sequence[Level]) -> list[tuple[float, float]]:
    """The share of good requests at each rate, all rounds together."""
    rates = sorted({each.rate for each in levels})
    return [(rate, statistics.mean(each.share for each in levels if each.rate == rate)) for rate in rates]


def capacity(levels: Sequence[Level], share: float) -> Capacity:
    """From the lowest rate upwards, until fewer are good for the first time."""
    before: tuple[float, float] | None = None
    for rate, found in shares(levels):
        if found < share:
            if before is None:
                return Capacity(share, None, f"< {rate:g}")
            slow, high = before
            return Capacity(share, round(slow + (rate - slow) * (high - share) / (high - found), 3))
        before = rate, found
    return Capacity(share, None, "-" if before is None else f"> {before[0]:g}")


def next_rate(levels: Sequence[Level], rates: Sequence[float], levels_max: int) -> float | None:
    """What to offer a target next: of the rates given, or by doubling, then between the ones around a capacity."""
    known = shares(levels)
    if rates:
        if known and known[-1][1] < HOPELESS:
            return None
        return next((rate for rate in rates if rate not in {each for each, _ in known}), None)
    if not known:
        return FIRST_RATE
    if len(known) >= levels_max:
        return None
    for wanted in SHARES:
        over = next((rate for rate, share in known if share < wanted), None)
        if over is None:
            return known[-1][0] * RATE_STEP
        under = max((rate for rate, _ in known if rate < over), default=None)
        if under is None:
            return over / RATE_STEP
        if over / under > CLOSE_ENOUGH:
            return round(math.sqrt(under * over), 3)
    return None


def complaints(levels: Sequence[Level]) -> list[str]:
    """Wrong answers are never a matter of load."""
    return [
        f"{each.target} at {each.rate:g}/s, round {each.round}: {each.wrong} of {each.sent} answers are not the "
        "reference's"
        for each in levels
        if each.wrong
    ]


def findings(report: GoodputReport, picture: str = "") -> Findings:
    head = ("target", "rate", "sent", "good", "late", "wrong", "failed", "faults", "goodput/s", "TTFT p50 ms",
            "TTFT p99 ms", "ITL p99 ms")  # fmt: skip
    tables = [
        Table(head, _rows(report.levels), "Goodput at each rate", LEGEND),
        Table(
            ("target", *(f"{share:.0%} good" for share in SHARES), "engines", f"{SHARES[0]:.0%} good, an engine"),
            _capacities(report), "Requests/s within the objectives", CAPACITY_LEGEND,
        ),
    ]  # fmt: skip
    errors = [
        f"{each.target} at {each.rate:g}/s, round {each.round}: {count} × {kind}"
        for each in report.levels
        for kind, count in each.errors.items()
    ]
    return Findings(
        title="Correct goodput",
        about=f"{report.date}, {report.machine}; {report.load_line}. {report.version_line}. {report.seconds:.0f} s in "
        f"all. Objectives: {report.slo}. {named(report.options)}.",
        command=report.command, tables=tables, lines=errors,
        wrong=[*report.wrong, *(["stopped by the operator"] if report.stopped else [])], doubts=report.notes,
        commands=report.commands, picture=picture,
    )  # fmt: skip


def plot(report: GoodputReport) -> str:
    lines = {
        target: [(0.0, 0.0), *((rate, rate * share) for rate, share in shares(_of(report.levels, target)))]
        for target in dict.fromkeys(each.target for each in report.levels)
    }
    return line_plot(lines, f"Goodput ({report.slo})", "requests/s offered", "good requests/s")


def _of(levels: Sequence[Level], target: str) -> list[Level]:
    return [each for each in levels if each.target == target]


def _rows(levels: Sequence[Level]) -> Grid:
    return [
        [
            each.target, f"{each.rate:g}", str(each.sent), f"{each.share:.0%}", str(each.late), str(each.wrong),
            str(each.failed), counted(each.faults) or "-", f"{each.rate * each.share:.2f}", number(each.ttft_p50_ms, 0),
            number(each.ttft_p99_ms, 0), number(each.itl_p99_ms, 1),
        ]
        for each in sorted(levels, key=lambda each: (each.target, each.rate, each.round))
    ]  # fmt: skip


def _capacities(report: GoodputReport) -> Grid:
    rows = []
    for target, found in report.capacities.items():
        engines, rate = report.engines.get(target), found[0].rate
        per_engine = None if engines is None or rate is None else rate / engines
        cells = [f"{each}{spread(_of(report.levels, target), each.share)}" for each in found]
        rows.append([target, *cells, str(engines or "-"), number(per_engine, 2)])
    return rows


def spread(levels: Sequence[Level], share: float) -> str:
    """The same of each round, from the least to the most; nothing of one round."""
    rounds = sorted({each.round for each in levels})
    found = [capacity([each for each in levels if each.round == number], share) for number in rounds]
    known = sorted(each.rate for each in found if each.rate is not None)
    if len(rounds) < 2 or not known:
        return ""
    outside = "".join(f", {each}" for each in found if each.rate is None)
    return f" ({known[0]:.2f} to {known[-1]:.2f}{outside})"
