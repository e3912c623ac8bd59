"""The result of `kvbaton bench serve`: the figures, how they were obtained, and the verdict.

Law: what is wrong is told in the same words to readers and to programs, and no place of one machine is told at all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.serve import serve_meter, serve_page, serve_report, serve_stats
from kvbaton_proof.bench.serve.serve_meter import Part
from kvbaton_proof.bench.serve.serve_report import Report
from kvbaton_proof.bench.serve.serve_work import Findings, Work

REACHED = 0.7  # of the rate: a part ends with its last answer, which costs a short part some of it
TOGETHER = 0.1
LATE_MS = 20.0  # requests that are sent so much after they were due are another load than was asked for


def report_of(
    args: argparse.Namespace,
    words: Sequence[str],
    work: Work,
    findings: Findings,
    load: tuple[float, float],
    seconds: float,
    more: Mapping[str, str],
) -> Report:
    parts, pools = findings.parts, findings.pools
    totals = [
        serve_meter.together([each for each in parts if each.target == name], meter, work.slo)
        for name, meter in pools.items()
    ]
    engine = "" if args.targets else args.engine
    wrong = [*findings.failures, *serve_report.complaints(parts, exact=engine == "embedded", stopped=findings.stopped)]
    return Report(
        ok=not wrong and not findings.stopped, wrong=wrong, notes=notes(totals, args.rate), stopped=findings.stopped,
        date=run_facts.today(), machine=run_facts.machine(),
        versions={**run_facts.own_versions("uvloop", "aiohttp"), **more},
        command=_shown(args, words), seconds=round(seconds, 1), load=load, engine=engine, options=_options(args, work),
        order=findings.order, targets=totals, parts=parts, ratios=serve_report.ratios(parts, list(pools)),
        quantiles={
            name: {time_: serve_stats.quantiles(meter.times[time_]) for time_ in serve_meter.TIMES}
            for name, meter in pools.items()
        },
        commands={name: run_facts.public(line) for name, line in findings.commands.items()},
    )  # fmt: skip


def _options(args: argparse.Namespace, work: Work) -> dict[str, Any]:
    """The load in words, for whoever reads the figures."""
    told: dict[str, Any] = {"rounds": args.rounds, "requests a part": work.planned or f"those of {args.seconds:g} s"}
    if args.trace is not None:
        told |= {"trace": Path(args.trace).name, "speed": args.trace_speed, "lengths times": args.length_scale}
    else:
        told |= {"prompt tokens": str(args.input_len), "answer tokens": str(args.output_len)}
    if args.prefix_len:
        told["shared beginnings"] = f"{args.prefixes} of {args.prefix_len} tokens"
    if args.rate is not None:
        told["requests/s"] = f"{args.rate:g} (Poisson)"
    if args.concurrency is not None:
        told["at most at once"] = args.concurrency
    if not args.targets:
        told |= {"prefill engines": args.prefill, "decode engines": args.decode, "transport": args.transport}
    if args.slo is not None:
        told["objectives"] = str(args.slo)
    return {**told, "warm-ups a part": work.warmups, "seed": args.seed}


def notes(totals: Sequence[Part], rate: float | None) -> list[str]:
    """What a reader should know before any figure is believed."""
    found = []
    slow = [each for each in totals if rate is not None and rate * REACHED > (each.requests_per_s or 0.0)]
    if slow and rate != float("inf"):
        told = ", ".join(f"{each.target} {each.requests_per_s or 0.0:.2f}" for each in slow)
        found.append(f"{rate:g} requests/s were asked for and not reached ({told}): this is overload, and times are "
                     "mostly queueing.")  # fmt: skip
    for each in totals:
        handed_over = each.used.handed_over
        if handed_over is not None and handed_over < each.right:
            found.append(f"{each.target}: {each.right - handed_over} of {each.right} requests were not handed over: "
                         "D had their KV already, or computed it itself.")  # fmt: skip
    together = {each.target: each.together for each in totals if each.together is not None}
    if max(together.values(), default=0.0) > TOGETHER:
        told = ", ".join(f"{name} {share:.0%}" for name, share in together.items())
        found.append(f"Tokens that came in one read with the one before: {told}. Their gaps are shorter than the "
                     "engine's steps, and TPOT and ITL with them; E2E does not suffer.")  # fmt: skip
    late = {each.target: each.held_back_p99_ms for each in totals if each.held_back_p99_ms is not None}
    if max(late.values(), default=0.0) > LATE_MS:
        told = ", ".join(f"{name} {each:.0f} ms" for name, each in late.items())
        found.append(f"Requests were sent after they were due, p99: {told}. The client was too busy, or had to wait "
                     "for others to end.")  # fmt: skip
    return found


def _shown(args: argparse.Namespace, words: Sequence[str]) -> str:
    """The command without the places of one machine."""
    places = {str(value) for value in (args.out, args.record, args.trace, args.vllm_python) if value is not None}
    return run_facts.shown([Path(word).name if word in places else word for word in words])


def texts(report: Report, files: Sequence[Path]) -> Iterable[str]:
    if files:
        yield serve_page.page(report, files[1].name)
        yield serve_page.plot(report.quantiles)
        yield msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n"
