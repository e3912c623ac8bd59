"""The figures of `kvbaton bench router` as a table, and as the lab page that `--out` writes.

Laws: pure. Everything that a reader needs to judge or repeat the figures is on the page; what speaks against kvbaton is
told in the same words as what speaks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import kvbaton_proof.bench.router.router_rows as found
from kvbaton_proof.bench.kit.lab_pages import SAYS, bullets, indented, lab_page, section, what_ran
from kvbaton_proof.bench.kit.run_facts import RunFacts, load_line, unquiet
from kvbaton_proof.bench.kit.text_tables import Grid, markdown, number, plain
from kvbaton_proof.bench.router.router_backends import EVENTS, WRITES
from kvbaton_proof.bench.router.router_rows import KVBATON, KVBATON_2, TARGETS, TOY, Bound, Row, Streams

HEAD = (
    "at once", "target", "req/s", "p50 ms", "p99 ms", "added p50 ms", "added p99 ms", "CPU µs/req", "backends µs",
    "client µs", "errors", "others' cores",
)  # fmt: skip
RATIO_HEAD = ("at once", "target / base", "CPU", "added p50", "req/s")
LEGEND = (
    "CPU µs/req: user and system time of the router with all its threads and children, per request answered in the "
    "window; backends and client likewise (two backend requests for each, one for direct). added: beyond the same load "
    "straight to D. From 64 at once on, p50 is queueing, that is at once / req/s, and says nothing that req/s does "
    "not. Medians over the rounds; of latencies and rates over the quieter half of them."
)
COARSE_S = 2.0
LIMITS = (
    "Backends answer at once with fixed bytes, and client, backends and router share one machine's cores over "
    "loopback: req/s is a lower bound for a router that has a core for itself. CPU µs/req is the figure to compare.",
    f"{TOY} stands in for the toy proxies of vLLM's examples: their shape (P, then D, a new client session for each), "
    "our code on aiohttp. It is not theirs.",
    "vllm-router runs with round_robin and log level error: once with URLs (nixl), once with discovery (moriio READ), "
    "the fastest of its disaggregated modes that we know. kvbaton's router runs as its defaults are, with URLs; "
    f"{KVBATON_2} is the same with --processes 2. vllm-router has as many threads as the machine has cores.",
)


class RouterFacts(RunFacts, frozen=True, kw_only=True):
    """And how it was measured."""

    cores: int
    load_before: tuple[float, float, float]
    load_after: tuple[float, float, float]
    window_s: float
    rounds: int
    targets: Sequence[str]  # that were to be measured, and could be found
    commands: Mapping[str, str]
    missing: Mapping[str, str] = {}  # how to get what could not be measured, by target
    failures: Sequence[str] = ()


def grid(rows: Sequence[Row]) -> Grid:
    """A line per level and target."""
    lines = []
    for level in found.levels(rows):
        for target in TARGETS:
            each = found.summary(rows, target, level)
            if each is not None:
                cells = [
                    number(each.req_per_s, 0), number(each.p50_ms, 3), number(each.p99_ms, 2),
                    number(each.added_p50_ms, 3), number(each.added_p99_ms, 2), number(each.cpu_us, 0),
                    number(each.backends_cpu_us, 0), number(each.client_cpu_us, 0),
                    f"{each.errors} of {each.requests}", number(each.others_cores, 2),
                ]  # fmt: skip
                lines.append([str(level), target, *cells])
    return lines


def ratio_grid(rows: Sequence[Row]) -> Grid:
    """Figures of ours divided by another's, a line per level and pair."""
    return [
        [level, pair if " / " in pair else f"{KVBATON} / {pair}", *(number(each[name][level], 2) for name in each)]
        for pair, each in found.ratios(rows).items()
        for level in each["cpu_us"]
    ]


def tables(rows: Sequence[Row]) -> str:
    """Both, for a terminal."""
    ratios = ratio_grid(rows)
    return plain(HEAD, grid(rows)) + (f"\n\n{plain(RATIO_HEAD, ratios)}" if ratios else "")


def bounds(facts: RouterFacts, rows: Sequence[Row], streams: Sequence[Streams]) -> dict[str, Bound]:
    """None where kvbaton's router was not to be measured."""
    return found.bounds(rows, streams) if KVBATON in facts.targets else {}


def bound_lines(known: Mapping[str, Bound]) -> list[str]:
    lines = []
    for bound in known.values():
        value = "not measured" if bound.value is None else f"{bound.value:g}"
        aim = "" if bound.aim is None else f", aim {bound.aim:g}"
        limit = f"of {bound.limit:g}" if bound.aim is None else f"at most {bound.limit:g}"
        limit = f"at least {bound.limit:g}" if bound.is_least else limit
        lines.append(f"{'met' if bound.met else 'NOT met'}: {bound.what}: {value} ({limit}{aim})")
    return lines


def stream_lines(streams: Sequence[Streams]) -> list[str]:
    """Per target: all rounds together."""
    lines = []
    for target in TARGETS:
        mine = [each for each in streams if each.target == target]
        if mine:
            asked, complete = sum(each.asked for each in mine), sum(each.complete for each in mine)
            at_once = min(each.open_at_once for each in mine)
            lines.append(
                f"{target}: {at_once} of {mine[0].asked} streams open at the same moment, "
                f"{complete} of {asked} ended in full"
            )
    return lines


def doubts(facts: RouterFacts, rows: Sequence[Row]) -> list[str]:
    """How much the figures are worth."""
    said = []
    if facts.window_s < COARSE_S:
        said.append(f"Windows of {facts.window_s:g} s: CPU time comes in ticks of 10 ms, so these figures are coarse.")
    if facts.rounds < 2:
        said.append("A single round: there is no spread to judge differences by.")
    so = "Latencies and rates suffer from that, CPU less."
    return [*said, *unquiet([row.others_cores for row in rows], "windows", so)]


def page(facts: RouterFacts, rows: Sequence[Row], streams: Sequence[Streams]) -> str:
    """The whole page."""
    missing = [f"{name} was not measured: it is not installed ({how})." for name, how in facts.missing.items()]
    wrong = [f"**{line}**" for line in (*facts.failures, *found.complaints(rows, streams))]
    return lab_page(
        f"{facts.date}: what a router costs: kvbaton's beside vllm-router and a toy proxy",
        f"{facts.machine}; {load_line(facts.load_before[0], facts.load_after[0])}. {facts.version_line}. "
        f"{facts.rounds} round{'s' if facts.rounds != 1 else ''}, each target started anew in each, windows of "
        f"{facts.window_s:g} s, {facts.seconds:.0f} s in all. Completions of 2.1 kB; streams have "
        f"{EVENTS} events in {WRITES} writes.",
        indented(facts.command),
        [markdown(HEAD, grid(rows)), "", LEGEND],
        section(
            "Beside the others",
            "The first figure divided by the second at the same level. Less is better for CPU and added p50, more for "
            "req/s.",
            "",
            markdown(RATIO_HEAD, ratio_grid(rows)),
        ),
        bullets("Streams that are all open at once", stream_lines(streams)),
        bullets("What kvbaton's router has to meet", bound_lines(bounds(facts, rows, streams))),
        bullets(SAYS, [*doubts(facts, rows), *missing, *wrong, *LIMITS]),
        what_ran(facts.commands),
    )
