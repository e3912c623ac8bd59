"""The lab page that `kvbaton bench vllm --out` writes: what was measured, on what, how, and what follows from it.

Laws: pure. Everything that a reader needs to judge or repeat the figures is on the page; what speaks against kvbaton is
told in the same words as what speaks for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import kvbaton_proof.bench.vllm.vllm_table as table
from kvbaton_proof.bench.kit.lab_pages import SAYS, bullets, indented, lab_page, markdown, section, what_ran
from kvbaton_proof.bench.kit.run_facts import RunFacts, named, unquiet
from kvbaton_proof.bench.vllm.vllm_rows import OURS, Ratio, Row, complaints, median, of, ratios

NOISE = 0.1
"""Figures this close are called alike, or as close as two rounds of one target, if those differ more."""
LIMITS = (
    "The model is a four-layer Llama of random weights in fp32 on a CPU, engines and client share one machine, and "
    "bytes go over its own memory or loopback. Nothing here speaks about GPUs, RDMA, real models or several machines: "
    "there the transfer's share of a request is another.",
    "Two engines use two cores, the aggregated one uses one. That disaggregated targets have more requests/s than the "
    "aggregated one at high load, where they do, is mostly that; CPU s/req tells what the second engine costs.",
    "The client and the router compete with the engines for the same cores, in all targets alike.",
    "All disaggregated targets stand behind kvbaton's own router (NIXL by URL, P then D, P's kv_transfer_params passed "
    "on verbatim); the aggregated engine is asked directly, which spares it a hop.",
    "NIXL runs as well as we could make it run here: UCX over tcp on loopback (its shared-memory transport was not "
    "tried), num_threads 0, and a shim that lets its progress thread sleep 1 ms between two looks, without which it "
    "spins on a core per engine. That shim can cost a transfer up to about 1 ms. vLLM's own spinning is calmed in all "
    "targets.",
    "kvbaton's bytes go over shared memory here (its own choice on one host); NIXL's go over TCP. That is what each "
    "does as configured, not a comparison of two data planes over one wire.",
)


class VllmFacts(RunFacts, frozen=True, kw_only=True):
    """And how it was measured."""

    options: Mapping[str, object]
    commands: Mapping[str, str]  # of what was started, by target and name
    idle_cores: Mapping[str, float] = {}  # of a target's engines together, before any load
    failures: Sequence[str] = ()  # targets that could not be measured


def page(facts: VllmFacts, rows: Sequence[Row]) -> str:
    """The whole page."""
    rounds = len({row.round for row in rows})
    return lab_page(
        f"{facts.date}: vLLM with kvbaton, with NIXL, and alone",
        f"{facts.machine}. {facts.version_line}. {rounds} round{'s' if rounds != 1 else ''}, each target started anew "
        f"in each, {facts.seconds / 60:.0f} minutes in all. {named(facts.options)}.",
        indented(facts.command),
        [markdown(table.HEAD, table.grid(rows)), "", table.LEGEND],
        section(
            "Beside the others",
            "kvbaton's figure divided by the other's at the same level. More is better for req/s, less for the rest.",
            "",
            markdown(table.RATIO_HEAD, table.ratio_grid(ratios(rows))),
        ),
        bullets(SAYS, [*noise(rows), *idle(facts.idle_cores), *findings(rows), *facts.failures, *LIMITS]),
        what_ran(facts.commands),
    )


def findings(rows: Sequence[Row]) -> list[str]:
    """What the figures say, good and bad."""
    alike = max(NOISE, _spread(rows))
    said = [_compared(each, alike) for each in ratios(rows) if each.base == "nixl"]
    wrong = complaints(rows)
    if wrong:
        return [*said, *(f"**{line}**" for line in wrong)]
    asked = sum(row.requests for row in rows if row.target.startswith(OURS))
    return [*said, f"All {asked} requests to kvbaton's targets succeeded, and every engine came to rest each time."]


def _compared(each: Ratio, alike: float) -> str:
    words = []
    for name, value in each.by_metric.items():
        if value is None:
            continue
        if 1 - alike <= value <= 1 + alike:
            words.append(f"{name} alike ({value:.2f})")
        else:
            better = (value > 1) == (name == "req/s")
            words.append(f"{name} {'better' if better else 'WORSE'} ({value:.2f})")
    return f"{each.target} beside NIXL, {each.concurrency} at once: {', '.join(words) or 'nothing to compare'}."


def idle(cores: Mapping[str, float]) -> list[str]:
    """Whether anything spins: then figures on few cores are about that, and not about transfers."""
    if not cores:
        return []
    told = ", ".join(f"{target} {used:.2f}" for target, used in cores.items())
    return [f"Cores used by a target's engines while they had nothing to do: {told}."]


def noise(rows: Sequence[Row]) -> list[str]:
    """How much the figures are worth."""
    said = []
    if len({row.round for row in rows}) < 2:
        said.append("Single runs: differences of a tenth mean nothing, and there is no spread to judge the rest by.")
    else:
        said.append(f"The rate of one target at one level differed between rounds by up to {_spread(rows):.0%}.")
    so = "Wall-clock figures of those are not worth keeping; CPU s/req suffers less."
    return [*said, *unquiet([row.others_cores for row in rows], "measurements", so)]


def _spread(rows: Sequence[Row]) -> float:
    worst = 0.0
    for target, concurrency in {(row.target, row.concurrency) for row in rows}:
        each = of(rows, target, concurrency)
        rates, middle = [row.req_per_s for row in each if row.req_per_s], median(each, lambda row: row.req_per_s)
        if rates and middle:
            worst = max(worst, (max(rates) - min(rates)) / middle)
    return worst
