"""The lab page that `kvbaton bench serve --out` writes: results, setup, method, conclusions.

Laws: pure. Everything that a reader needs to judge or repeat the figures is on the page. What speaks against
handing KV over is told in the same words as what speaks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvbaton_proof.bench.kit import svg_plots
from kvbaton_proof.bench.kit.lab_pages import SAYS, bullets, console, lab_page, section, what_ran
from kvbaton_proof.bench.kit.run_facts import load_line, named, unquiet
from kvbaton_proof.bench.serve.serve_report import LEGEND, RATIO_LEGEND, Ratio, Report, tables

TITLES = {
    "ttft": "time to first token",
    "tpot": "time per further token",
    "itl": "gap between tokens",
    "e2e": "whole answer",
}
ROUNDS_MIN = 6  # five that agree are chance once in sixteen
RATES = ("req/s", "out tok/s", "goodput/s")
LOCAL = (
    "Router, engines and the client that measures share one machine's cores, and bytes go over its memory or loopback; "
    "disaggregation is meant for engines that have cores or GPUs of their own. Nothing here speaks about GPUs, RDMA or "
    "real models. Why a target is faster or slower was not measured: engine CPU s/req is the only hint.",
    "The aggregated target has as many engines as the disaggregated ones together, behind the same router, which gives "
    "each request to the engine with the fewest tokens under way; every engine computes prompt and answer itself.",
)
EMBEDDED = (
    "The engine is kvbaton's own, a tiny model in numpy for demonstrations and tests: its figures say nothing about a "
    "model worth serving."
)
VLLM = "The model is a four-layer Llama of random weights in fp32 on a CPU; each engine has one thread for its model."


def page(report: Report, picture: str) -> str:
    """The whole page; `picture` is the file beside it."""
    engine = report.engine or "clusters that were running"
    drawn = tables(report, as_markdown=True)
    return lab_page(
        f"{report.date}: what clients see ({engine})",
        f"{report.machine}; {load_line(*report.load)}. {report.version_line}. {report.seconds:.0f} s in all. "
        f"{named(report.options)}.",
        console(report.command),
        [f"Order of the parts: {' '.join(target for _, target in report.order)}."],
        [drawn[0], "", drawn[1], "", LEGEND, "", f"![Times of requests by target]({picture})"],
        section("Beside each other", drawn[2], "", RATIO_LEGEND) if report.ratios else [],
        bullets(SAYS, said(report)),
        what_ran(report.commands),
    )


def plot(quantiles: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """`quantiles`: by target and time, the values of 0, 1 … 100 %."""
    about = "Times of requests by target: share of requests against milliseconds"
    return svg_plots.curves(quantiles, TITLES, about)


def said(report: Report) -> list[str]:
    """What the figures say, good and bad, and what limits them."""
    found = [f"**{line}**" for line in report.wrong]
    if report.ok:
        found.append(f"All {sum(each.sent for each in report.parts)} requests were answered in full.")
    if report.stopped:
        found.append("**The run was stopped before it was done.**")
    found += [compared(each) for each in report.ratios]
    found += _noise(report)
    found += report.notes
    if report.engine:
        found += [*LOCAL, VLLM if report.engine == "vllm" else EMBEDDED]
    return found


def compared(each: Ratio) -> str:
    """One target beside the base: only what the rounds decide is called better or worse."""
    better: list[str] = []
    worse: list[str] = []
    open_: list[str] = []
    for name, spread in each.by_metric.items():
        if spread is None:
            continue
        if not spread.is_decided:
            open_.append(name)
        else:
            is_better = (spread.median > 1) == (name in RATES)
            (better if is_better else worse).append(f"{name} ({spread.median:.2f})")
    told = [f"{what} in {', '.join(names)}" for what, names in (("better", better), ("WORSE", worse)) if names]
    if open_:
        told.append(f"undecided in {', '.join(open_)}")
    return f"{each.target} beside {each.base}: {'; '.join(told) or 'nothing to compare'}."


def _noise(report: Report) -> Sequence[str]:
    rounds = max((each.round for each in report.parts), default=0)
    found = []
    if rounds < ROUNDS_MIN and report.ratios:
        found.append(f"Rounds: {rounds}. Fewer than {ROUNDS_MIN} decide nothing, so nothing is called better or worse.")
    so = "Targets took turns, so that this hits all alike; take the ratios rather than the times."
    return [*found, *unquiet([each.used.others_cores for each in report.parts], "parts", so)]
