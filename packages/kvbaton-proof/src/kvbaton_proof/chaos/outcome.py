"""The observations of a chaos run, and whether the promises held. Pure: observations in, verdict out.

Laws: what cannot be measured is not reported as zero: it is None; an engine that could not be asked is a problem.
`ok` says that every promise held, of whatever connector ran; a peer is judged by the same line.

The report of a run: one JSON object, one page of Markdown, one page of HTML with a timeline.

Law: the pages say nothing that the JSON does not; the HTML needs nothing but itself.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from kvbaton_proof.chaos import rest_oracle
from kvbaton_proof.chaos.chaos_plan import Plan
from kvbaton_proof.chaos.fault_catalogue import PROMISES
from kvbaton_proof.chaos.judged_request import Board, Verdict
from kvbaton_proof.chaos.liars.lies import BY_NAME
from kvbaton_proof.chaos.members import STORE
from kvbaton_proof.chaos.rest_oracle import Usage
from kvbaton_proof.chaos.streams.stream_load import Counts
from kvbaton_proof.chaos.streams.stream_report import streams_line, streams_table


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One fault of the plan, from the moment it was done until the cluster was well again.

    Counts of answers are of requests that ended meanwhile. `late`: not ended by their deadline, hangs among them.
    """

    at_s: float
    title: str
    fault: str
    promises: tuple[int, ...]
    requests: int = 0
    right: int = 0
    errors: int = 0  # told so, with a status or by a closed connection
    wrong: int = 0
    late: int = 0
    dead: int = 0  # engines that died, though nobody killed them
    left_over: int | None = 0  # pins, used blocks and leases that stayed; None: could not be asked
    recover_s: float | None = None  # from the end of the fault until answers were right again; None: never
    note: str = ""
    seconds: float | None = None  # from the fault until the cluster was well again, or was no longer waited for

    @property
    def ok(self) -> bool:
        return not (self.wrong or self.late or self.dead or self.left_over) and self.recover_s is not None


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """A process at rest, before the first fault and after the last one. Zeros before: it was not there then."""

    name: str
    fds: tuple[int, int]
    threads: tuple[int, int]
    rss_mib: tuple[float, float]
    lives: int  # how often it was started
    pins: int
    used_blocks: int
    rss_mib_per_minute: float | None = None  # over the second half of its longest life; None: too short to tell


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The whole run; this is what --json prints, with `ok` beside it."""

    plan: str
    seed: int
    engine: str
    connector: str
    seconds: float
    requests: int
    right: int
    errors: int
    wrong: int
    late: int
    dead: int
    left_over: int
    rows: tuple[Row, ...]
    members: tuple[Member, ...] = ()
    problems: tuple[str, ...] = ()  # each breaks the verdict: what grew, what stayed, what could not be done
    errors_by_kind: dict[str, int] = {}
    handoffs: dict[str, int] = {}  # after all of it, by mode: of some prompts that nobody had, so many came over
    moments: dict[str, int] = {}  # named ones that were reached, and missed
    stolen: int = 0  # prompts that reached a process which no one should have sent them to
    lies: dict[str, dict[str, int]] = {}  # of a liar, by name: how often told, refused and believed
    streams: Counts | None = None  # long ones that were kept open
    network: str = ""  # namespaces or relay
    replay: str = ""  # the command that repeats it

    @property
    def ok(self) -> bool:
        broken = self.wrong or self.late or self.dead or self.left_over or self.stolen or self.problems
        broken = broken or (self.streams is not None and not self.streams.ok)
        return not broken and all(row.ok for row in self.rows)


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """What one life of a member had at one instant of the run."""

    at_s: float
    life: int
    fds: int
    threads: int
    rss_mib: float


class Second(msgspec.Struct, frozen=True, array_like=True):
    """Requests that ended in one second."""

    right: int
    errors: int
    bad: int  # wrong or late


class AtRest(msgspec.Struct, frozen=True):
    """A member before the first fault and after the last one."""

    lives: int
    before: Usage | None
    after: Usage | None
    held: rest_oracle.Held | None = None  # of engines


class Seen(msgspec.Struct, frozen=True):
    """The outcome, and what a report shows beside it."""

    outcome: Outcome
    samples: Mapping[str, Sequence[Sample]]
    seconds: Sequence[Second]
    wrongs: Sequence[str]
    lates: Sequence[str]
    deaths: Sequence[str]
    slowest_s: float


class Finds(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that was looked at."""

    seconds: float
    network: str
    rows: Sequence[Row]
    at_rest: Mapping[str, AtRest]
    samples: Mapping[str, Sequence[Sample]]
    deaths: Sequence[str]
    problems: Sequence[str]
    handoffs: Mapping[str, int] = {}
    moments: Mapping[str, int] = {}
    lies: Mapping[str, Mapping[str, int]] = {}
    stolen: int = 0
    streams: Counts | None = None


def seen(plan: Plan, board: Board, finds: Finds, begun_at: float) -> Seen:
    """The verdict over a run."""
    counts = board.counts()
    problems = list(finds.problems)
    for name, rest in finds.at_rest.items():
        problems += rest_oracle.grown(name, rest.before, rest.after)
        if name != STORE:  # fills up to its own bound, on purpose
            problems += rest_oracle.keeps_growing(name, _longest(finds.samples.get(name, ())))
    if not counts.right:
        problems.append("no answer was right: nothing was tried")
    outcome = Outcome(
        plan=plan.name, seed=plan.seed, engine=plan.engine, connector=plan.connector, seconds=round(finds.seconds, 1),
        requests=counts.requests, right=counts.right, errors=counts.errors, wrong=counts.wrong, late=counts.late,
        dead=len(finds.deaths),
        left_over=sum(rest.held.count for rest in finds.at_rest.values() if rest.held is not None),
        rows=tuple(sorted(finds.rows, key=lambda row: row.at_s)),
        members=tuple(_member(name, rest, finds.samples.get(name, ())) for name, rest in finds.at_rest.items()),
        problems=tuple(dict.fromkeys(problems)), errors_by_kind=dict(sorted(board.kinds.items())),
        streams=finds.streams, network=finds.network, handoffs=dict(finds.handoffs), moments=dict(finds.moments),
        stolen=finds.stolen, lies={name: dict(count) for name, count in finds.lies.items()},
    )  # fmt: skip
    return Seen(
        outcome, finds.samples, _seconds(board, begun_at), board.wrongs, board.lates, finds.deaths, board.slowest_s
    )


def _member(name: str, rest: AtRest, samples: Sequence[Sample]) -> Member:
    nothing = Usage(0, 0, 0.0)
    was, now = rest.before or nothing, rest.after or nothing
    held = rest.held or rest_oracle.Held(0, 0, 0)
    return Member(
        name=name, fds=(was.fds, now.fds), threads=(was.threads, now.threads), rss_mib=(was.rss_mib, now.rss_mib),
        lives=rest.lives, pins=held.pins, used_blocks=held.used_blocks,
        rss_mib_per_minute=rest_oracle.growth_mib_per_minute(_longest(samples)),
    )  # fmt: skip


def _longest(samples: Sequence[Sample]) -> list[tuple[float, float]]:
    """The longest life: when, and MiB resident then."""
    by_life: dict[int, list[tuple[float, float]]] = {}
    for sample in samples:
        by_life.setdefault(sample.life, []).append((sample.at_s, sample.rss_mib))
    return max(by_life.values(), key=len, default=[])


def _seconds(board: Board, begun_at: float) -> list[Second]:
    found: dict[int, list[int]] = {}
    for line in board.lines:
        at = int(line.ended_at - begun_at)
        if line.ended_at >= begun_at:
            column = {Verdict.RIGHT: 0, Verdict.ERROR: 1}.get(line.verdict, 2)
            found.setdefault(at, [0, 0, 0])[column] += 1
    return [Second(*found.get(at, (0, 0, 0))) for at in range(max(found, default=-1) + 1)]


OUTCOME, SEEN, MARKDOWN, HTML = "outcome.json", "seen.json", "report.md", "report.html"
WIDTH = 60
PAGE_WIDTH, LEFT = 1000, 60
LOAD_HEIGHT, LANE_HEIGHT, MEMORY_HEIGHT = 160, 18, 160
SHORTEST_S = 0.5
_COLOURS = {"right": "#4a9c6d", "errors": "#d9a441", "bad": "#c0392b"}
_LINES = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#e377c2", "#7f7f7f")


def write(out: Path, seen: Seen) -> None:
    told = msgspec.json.encode({"ok": seen.outcome.ok, **msgspec.to_builtins(seen.outcome)})
    (out / OUTCOME).write_bytes(msgspec.json.format(told, indent=1) + b"\n")
    (out / SEEN).write_bytes(msgspec.json.encode(seen) + b"\n")
    (out / MARKDOWN).write_text(markdown(seen))
    (out / HTML).write_text(page(seen))


def bare(outcome: Outcome) -> Seen:
    """An outcome of which nothing else was kept."""
    return Seen(outcome, {}, (), (), (), (), 0.0)


def headline(outcome: Outcome) -> str:
    return (
        f"{outcome.requests} requests in {outcome.seconds:.0f} s under {len(outcome.rows)} faults: "
        f"{outcome.right} right, {outcome.errors} errors, {outcome.wrong} wrong, {outcome.stolen} stolen, "
        f"{outcome.late} late, {outcome.dead} dead, {outcome.left_over} left over"
    ) + ("" if outcome.streams is None else f"\n{streams_line(outcome.streams)}")


def markdown(seen: Seen) -> str:
    outcome = seen.outcome
    lines = [
        f"# kvbaton chaos: {'every promise held' if outcome.ok else 'a promise broke'}",
        "",
        f"{headline(outcome)}.{f' The slowest request took {seen.slowest_s:.1f} s.' if seen.slowest_s else ''}",
        f"Plan {outcome.plan}, seed {outcome.seed}, engine {outcome.engine}, connector {outcome.connector}, network "
        f"{outcome.network or 'none'}. Again: `{outcome.replay}`",
        "",
        *_section("Problems", [f"- {_safe(each)}" for each in outcome.problems]),
        *_section("Wrong answers", [f"- {_safe(each)}" for each in seen.wrongs]),
        *_section("Late requests", [f"- {_safe(each)}" for each in seen.lates]),
        *_section("Deaths", [f"- {_safe(each)}" for each in seen.deaths]),
        *_section("Faults", _rows(outcome.rows)),
        *_section("Timeline", _timeline(seen)),
        *_section("Long streams", streams_table(outcome.streams)),
        *_section("Lies", _lies(outcome.lies)),
        *_section("Processes at rest, before and after", _members(outcome.members)),
        *_section("Errors by kind", [f"- {_safe(kind)}: {count}" for kind, count in outcome.errors_by_kind.items()]),
        *_section("The promises", [f"{number}. {text}" for number, text in PROMISES.items()]),
    ]
    return "\n".join(lines).rstrip() + "\n"


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return [f"## {title}", *lines, ""] if lines else []


def _rows(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| at | fault | tries | right | errors | wrong | late | dead | well after | |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        well = "never" if row.recover_s is None else f"{row.recover_s:.1f} s"
        tries = ", ".join(map(str, row.promises))
        lines.append(
            f"| {row.at_s:.1f} s | {row.title} | {tries} | {row.right} | {row.errors} | {row.wrong} | {row.late} | "
            f"{row.dead} | {well} | {_safe(row.note)} |"
        )
    return lines


def _members(members: Sequence[Member]) -> list[str]:
    if not members:
        return []
    lines = [
        "| process | lives | descriptors | threads | MiB resident | MiB a minute | pins | used blocks |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in members:
        slope = "" if each.rss_mib_per_minute is None else f"{each.rss_mib_per_minute:+.2f}"
        lines.append(
            f"| {each.name} | {each.lives} | {each.fds[0]} → {each.fds[1]} | {each.threads[0]} → {each.threads[1]} | "
            f"{each.rss_mib[0]:.0f} → {each.rss_mib[1]:.0f} | {slope} | {each.pins} | {each.used_blocks} |"
        )
    return lines


def _lies(found: Mapping[str, Mapping[str, int]]) -> list[str]:
    if not found:
        return []
    lines = ["| lie | about | told | refused | believed |", "|---|---|---|---|---|"]
    for name, count in found.items():
        what = BY_NAME[name].what if name in BY_NAME else ""
        lines.append(f"| {name} | {what} | {count['told']} | {count['refused']} | {count['believed']} |")
    return lines


def _timeline(seen: Seen) -> list[str]:
    """One line for every few seconds: right answers as a bar, the rest as numbers, and what began."""
    step = max(1, len(seen.seconds) // 40)
    most = max((sum(each.right for each in seen.seconds[at : at + step]) for at in range(0, len(seen.seconds), step)),
               default=0)  # fmt: skip
    if not seen.seconds:
        return []
    lines = ["```", f"{'s':>5}  {'right':<{WIDTH // 2}} right errors bad"]
    for at in range(0, len(seen.seconds), step):
        piece = seen.seconds[at : at + step]
        right, errors, bad = (sum(getattr(each, name) for each in piece) for name in ("right", "errors", "bad"))
        begun = "; ".join(row.title for row in seen.outcome.rows if at <= row.at_s < at + step)
        bar = "#" * (right * (WIDTH // 2) // most if most else 0)
        lines.append(f"{at:>5}  {bar:<{WIDTH // 2}} {right:>5} {errors:>6} {bad:>3}  {begun}".rstrip())
    return [*lines, "```"]


def _safe(text: str) -> str:
    """One line, which no table takes for its own."""
    return " ".join(text.split()).replace("|", "/")[:600]


# --- the page of HTML: requests by second, every fault as a bar, memory of every process; every text is escaped


def page(seen: Seen) -> str:
    outcome = seen.outcome
    total_s = max(float(len(seen.seconds)), outcome.seconds, 1.0)
    scale = (PAGE_WIDTH - LEFT) / total_s
    verdict = "every promise held" if outcome.ok else "a promise broke"
    figures = (
        f"{outcome.requests} requests, {outcome.right} right, {outcome.errors} errors, {outcome.wrong} wrong, "
        f"{outcome.late} late, {outcome.dead} dead, {outcome.left_over} left over; seed {outcome.seed}"
    )
    parts = [
        "<!doctype html><meta charset=utf-8><title>kvbaton chaos</title>",
        "<style>body{font:14px sans-serif;margin:24px;max-width:1060px}svg text{font:11px sans-serif}</style>",
        f"<h1>kvbaton chaos: {verdict}</h1><p>{html.escape(figures)}</p>",
        *(f"<p><b>{html.escape(problem)}</b></p>" for problem in outcome.problems),
        "<h2>Requests that ended, by second</h2>",
        _svg(LOAD_HEIGHT + 20, [*_load(seen, scale), *_axis(total_s, scale, LOAD_HEIGHT)]),
        "<h2>Faults, until well again</h2>",
        _svg(LANE_HEIGHT * (len(outcome.rows) + 1) + 4, _lanes(outcome.rows, total_s, scale)),
        "<h2>MiB resident</h2>",
        _svg(MEMORY_HEIGHT + 40, [*_memory(seen, scale), *_axis(total_s, scale, MEMORY_HEIGHT)]),
        f"<p>Again: <code>{html.escape(outcome.replay)}</code></p>",
    ]
    return "\n".join(parts) + "\n"


def _svg(height: int, parts: Sequence[str]) -> str:
    return f'<svg width="{PAGE_WIDTH}" height="{height}" role="img">{"".join(parts)}</svg>'


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    told = f"<title>{html.escape(title)}</title>" if title else ""
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.1f}" height="{height:.1f}" fill="{fill}">{told}</rect>'
    )


def _text(x: float, y: float, text: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {more}>{html.escape(text)}</text>'


def _load(seen: Seen, scale: float) -> list[str]:
    most = max((each.right + each.errors + each.bad for each in seen.seconds), default=1) or 1
    parts = [_text(0, 12, f"{most}/s")]
    for at, each in enumerate(seen.seconds):
        top = float(LOAD_HEIGHT)
        for name, colour in _COLOURS.items():
            height = getattr(each, name) * LOAD_HEIGHT / most
            top -= height
            if height:
                parts.append(_rect(LEFT + at * scale, top, scale * 0.9, height, colour, f"{at} s: {name} {each}"))
    return parts


def _lanes(rows: Sequence[Row], total_s: float, scale: float) -> list[str]:
    parts = []
    for number, row in enumerate(rows):
        y = number * LANE_HEIGHT
        lasted_s = max(SHORTEST_S, row.seconds or 0.0)
        colour = "#5b7db1" if row.ok else _COLOURS["bad"]
        x = LEFT + row.at_s * scale
        parts.append(_rect(x, y + 3, lasted_s * scale, LANE_HEIGHT - 6, colour, f"{row.title}: {row.note}"))
        if row.at_s < total_s / 2:
            parts.append(_text(x + lasted_s * scale + 4, y + 13, row.title))
        else:
            parts.append(_text(x - 4, y + 13, row.title, 'text-anchor="end"'))
    return [*parts, *_axis(total_s, scale, LANE_HEIGHT * len(rows))]


def _memory(seen: Seen, scale: float) -> list[str]:
    most = max((sample.rss_mib for samples in seen.samples.values() for sample in samples), default=1.0) or 1.0
    parts = [_text(0, 12, f"{most:.0f} MiB")]
    for number, (name, samples) in enumerate(seen.samples.items()):
        colour = _LINES[number % len(_LINES)]
        for life in sorted({sample.life for sample in samples}):
            points = " ".join(
                f"{LEFT + sample.at_s * scale:.1f},{MEMORY_HEIGHT * (1 - sample.rss_mib / most):.1f}"
                for sample in samples
                if sample.life == life
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(_text(LEFT + number * 70, MEMORY_HEIGHT + 34, name, f'fill="{colour}"'))
    return parts


def _axis(total_s: float, scale: float, y: float) -> list[str]:
    every = next(step for step in (5, 10, 30, 60, 300, 600, 3600, 36000) if total_s / step <= 20)
    marks = [_text(LEFT + at * scale, y + 14, f"{at} s") for at in range(0, int(total_s) + 1, every)]
    return [_rect(LEFT, y, PAGE_WIDTH - LEFT, 0.5, "#888"), *marks]
