"""`kvbaton bench goodput`: how many requests a second of a trace are answered right and within their objectives.

Laws: an invalid value is refused by its name, before anything is started. The exit status is the verdict on answers,
never on speed: 1 if an answer was wrong or an engine ended by itself. Ctrl-C prints what was measured until then.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.cli import progress
from kvbaton.cli.arguments import seconds, whole
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.operator_errors import CommandError, StoppedError
from kvbaton_proof.bench.kit.run_facts import AGGREGATED
from kvbaton_proof.bench.serve.contenders import LOCAL, TIMED
from kvbaton_proof.cli import bench_serve
from kvbaton_proof.cli.bench_results import show

if TYPE_CHECKING:
    from kvbaton_proof.bench.serve.goodput import GoodputReport, Level
    from kvbaton_proof.bench.serve.goodput_run import Sweep, Swept

SAMPLES = {"mooncake-sample": "mooncake_sample.jsonl", "azure-sample": "azure_sample.csv"}
"""Synthetic, of the two forms; by the names under which they come with this package."""
SAMPLES_AT = Path(__file__).parents[1] / "bench" / "load"
GAPS = {"p99": "itl_p99", "mean": "tpot", "max": "itl"}
"""What an objective `itl` is about, of each request."""
SLO, EMBEDDED_SLO = "ttft=2s,itl=25ms", "ttft=1s,itl=100ms"
EMBEDDED_SCALE = 1 / 32  # the samples' prompts are then of 200 tokens, which a model in NumPy reads in milliseconds
LEVELS_MAX = 10
MARGIN = 0.02
QUICK = {"rates": (4.0, 16.0, 64.0), "requests": 32, "rounds": 1, "compare": (AGGREGATED, "stream")}
ROLES = {"prefill": "p", "decode": "d", "any": ""}
ACTS = ("kill", "stop", "reset")
FAULT = "ACT:ROLE:EVERY, such as kill:decode:20s, stop:prefill:20s:5s or reset:any:5s"
EVERY_MIN_S = 0.5


def add(parser: argparse.ArgumentParser) -> None:
    bench_serve.add_where(parser.add_argument_group("targets: running servers, or a cluster started for this"))
    option = parser.add_argument_group("load").add_argument
    option("--trace", action="append", type=_trace, metavar="FILE[@R,R]", help=f"in Mooncake's or Azure's form, also "
           f".gz, or {' or '.join(SAMPLES)} (default: the first); several one after the other, each at its rates, of "
           "the same engines")  # fmt: skip
    option("--rates", type=_rates, metavar="R,R", help="requests/s to offer (default: found by doubling and halving)")
    option("--levels", type=whole(2, 100), default=LEVELS_MAX, metavar="N", help="at most N rates without --rates")
    option("--requests", type=whole(2, 100_000), metavar="N", help="the first N of the trace (default: all)")
    option("--seconds", type=seconds, metavar="S", help="at each rate, only as many of the trace as come in S seconds")
    option("--tokens-max", type=whole(2, 1 << 20), metavar="N", help="leave out requests with more tokens than N")
    option("--length-scale", type=bench_serve.factor, metavar="X",
           help="scale the trace's lengths (default: 1; embedded engines: 1/32)")  # fmt: skip
    option("--seed", type=whole(0, (1 << 32) - 1), default=0, metavar="N", help="seed of prompts and faults")
    option = parser.add_argument
    option("--slo", type=bench_serve.slo, metavar="A=T,B=T",
           help=f"objectives (default: {SLO}; embedded engines: {EMBEDDED_SLO})")  # fmt: skip
    option("--itl", choices=GAPS, default="p99", help="what an objective itl is about: of each request's own gaps "
           "between tokens the p99 (default), the mean or the longest")  # fmt: skip
    option("--faults", type=_faults, metavar="F,F", help="beside the load: kill:decode:20s (kill -9 and restart, so "
           "often), stop:prefill:20s:5s (for so long), reset:any:5s (vllm: the prefix cache)")  # fmt: skip
    option("--no-judge", action="store_true", help="do not compare answers, where engines do not repeat themselves")
    option("--margin", type=_margin, metavar="NATS", help="compare an answer up to the first token of which its "
           f"reference was less sure (default: {MARGIN} with --place, where a batch may change such a token, else 0: "
           "whole answers)")  # fmt: skip
    option("--rounds", type=whole(1, 100), metavar="N", help="repeat the rates (default: 1)")
    option("--quick", action="store_true", help="two targets, three rates, 32 requests each")
    option("--timeout-s", type=seconds, default=120.0, metavar="SECONDS", help="timeout of one request")
    option("--part-s", type=seconds, default=600.0, metavar="SECONDS", help="deadline of a target at one rate")
    option("--out", metavar="DIR", help="write a page, a plot and the figures there, as in docs/lab")
    option("--name", metavar="NAME", help="base name of these files (default: DATE-goodput)")
    option("--json", action="store_true", help="print one object with the figures")


def check(args: argparse.Namespace) -> None:
    """Fill in the defaults; refuse what does not go together."""
    if args.quick:
        for name, value in QUICK.items():
            if getattr(args, name) is None and not (name == "compare" and (args.url or args.target)):
                setattr(args, name, value)
    bench_serve.check_where(args)
    args.router_args = LOCAL  # as an operator starts it
    if args.faults and args.targets:
        raise CommandError("argument --faults: running servers are not hurt; remove --url and --target")
    if args.engine == "embedded" and any(act == "reset" for act, *_ in args.faults or ()):
        raise CommandError("argument --faults: embedded engines have no door for a reset; add: --engine vllm")
    is_tiny = not args.targets and args.engine == "embedded"
    args.rounds, args.rates = args.rounds or 1, args.rates or ()
    args.length_scale = args.length_scale or (EMBEDDED_SCALE if is_tiny else 1.0)
    args.slo = by_gaps(args.slo or bench_serve.slo(EMBEDDED_SLO if is_tiny else SLO), args.itl)
    # Servers without cache_salt get marked prompts, other ones in each part: those have no right answer to compare.
    args.judged = not (args.no_judge or args.no_salt or getattr(args, "shape", None) == TIMED)
    if args.margin is None:
        args.margin = MARGIN if not args.targets and args.device == "cuda" else 0.0
    args.margin = args.margin if args.judged else 0.0  # what is timed is not asked for its tokens' ids too
    args.trace = args.trace or [(next(iter(SAMPLES)), ())]
    if args.json and len(args.trace) > 1:
        raise CommandError("argument --json: prints one object, and each trace has its own; give --out DIR")


def _trace(text: str) -> tuple[str, tuple[float, ...]]:
    path, _, rates = text.partition("@")
    return path, _rates(rates) if rates else ()


def _margin(text: str) -> float:
    return 0.0 if text == "0" else bench_serve.number(text, lambda nats: 0 < nats < 10, "nats, such as 0.02, or 0")


def _rates(text: str) -> tuple[float, ...]:
    found = [
        bench_serve.number(word, lambda rate: 0 < rate <= 100_000, "requests/s above 0, such as 1,2,4")
        for word in text.split(",")
    ]
    return tuple(sorted(set(found)))


def _faults(text: str) -> list[tuple[str, str, float, float]]:
    return [_fault(word.strip()) for word in text.split(",")]


def _fault(word: str) -> tuple[str, str, float, float]:
    act, _, rest = word.partition(":")
    role, _, rest = rest.partition(":")
    times = rest.split(":")
    if act not in ACTS or role not in ROLES or len(times) != 1 + (act == "stop"):
        raise argparse.ArgumentTypeError(f"got {word!r}, expected {FAULT}")
    least = f"at least {EVERY_MIN_S:g} s in {word}"
    found = [
        bench_serve.number(each.removesuffix("s"), lambda value: EVERY_MIN_S <= value <= 86_400, least)
        for each in times
    ]
    return act, ROLES[role], found[0], found[1] if act == "stop" else 0.0


def by_gaps(slo: Any, how: str) -> Any:
    """An objective `itl` is about this of each request's gaps."""
    return slo if slo.itl is None else msgspec.structs.replace(slo, **{"itl": None, GAPS[how]: slo.itl})


def trace_path(name: str) -> Path:
    return SAMPLES_AT / SAMPLES[name] if name in SAMPLES else Path(name)


def run(args: argparse.Namespace) -> int:
    from kvbaton_proof.bench.kit import run_facts
    from kvbaton_proof.bench.serve import goodput, goodput_run, serve_clusters
    from kvbaton_proof.bench.vllm.vllm_levels import versions

    check(args)
    sweeps = [sweep_of(args, path, rates) for path, rates in args.trace]
    several = [sweep.trace.partition(".")[0] for sweep in sweeps] if len(sweeps) > 1 else [""]
    pages = [bench_serve.page_files(args, "goodput", each) for each in several]
    server = None if args.targets else serve_clusters.server_of(args)
    raise_file_limit()
    watch, say = run_facts.Stopwatch(), functools.partial(progress.note, "bench")
    own = run_facts.own_versions("uvloop", "aiohttp")
    all_versions = own if server is None else {**own, **versions(server.python)}

    def report_of(sweep: Sweep, swept: Swept) -> GoodputReport:
        facts = watch.facts(run_facts.shown(sys.argv[1:]), all_versions)
        notes = [] if args.judged else ["Answers were not compared: wrong ones count as good."]
        return goodput_run.report_of(sweep, swept, facts, options_of(args, sweep), notes)

    traces: list[tuple[Sweep, Swept]] = []
    for sweep, files in zip(sweeps, pages, strict=True):
        swept = goodput_run.Swept(stopped=True)  # until it has come to its end
        if files:
            swept.keep = functools.partial(_keep, files, functools.partial(report_of, sweep, swept))
        traces.append((sweep, swept))
    reports = []
    try:
        run_loop(goodput_run.measure(args, traces, server, say, progress.shown))
    finally:  # also of a run that failed at a later trace
        for (sweep, swept), files in zip(traces, pages, strict=True):
            if swept.levels:
                reports.append(report_of(sweep, swept))
                findings = goodput.findings(reports[-1], files[1].name if files else "")
                show(findings, reports[-1], as_json=args.json, page=files[0] if files else None)
                if files:
                    bench_serve.write_beside(files, goodput.plot(reports[-1]), reports[-1])
    if not reports:
        raise StoppedError
    if any(report.stopped for report in reports):
        return bench_serve.INTERRUPTED
    return 0 if all(report.ok for report in reports) else 1


def sweep_of(args: argparse.Namespace, name: str, rates: tuple[float, ...]) -> Sweep:
    """What is measured with one trace."""
    from kvbaton_proof.bench.load.open_loop import UNDER_WAY_MAX, Pace
    from kvbaton_proof.bench.serve import goodput_run

    path, rates = trace_path(name), rates or args.rates
    most = None if args.seconds is None or not rates else max(2, round(max(rates) * args.seconds))
    asks, left_out = goodput_run.trace_of(
        path, scale=args.length_scale, requests=args.requests or most, tokens_max=args.tokens_max
    )
    return goodput_run.Sweep(
        asks=asks, trace=path.name, left_out=left_out, seconds=args.seconds, margin=args.margin, slo=args.slo,
        rates=rates, levels_max=args.levels, timeout_s=args.timeout_s, seed=args.seed, in_prompt=args.no_salt,
        pace=Pace(concurrency=UNDER_WAY_MAX, deadline_s=args.part_s, timed=True),
        faults=[goodput_run.Fault(*each) for each in args.faults or ()],
    )  # fmt: skip


def options_of(args: argparse.Namespace, sweep: Sweep) -> dict[str, object]:
    """The load in words, for whoever reads the figures."""
    return {
        "trace": sweep.trace, "requests": len(sweep.asks),
        **({"seconds at each rate": sweep.seconds} if sweep.seconds else {}),
        "left out as too long": sweep.left_out, "lengths times": args.length_scale,
        "seed": args.seed, "engine": "-" if args.targets else args.engine,
        **({} if args.targets else {"prefill engines": args.prefill, "decode engines": args.decode}),
        **({"places": len(args.place), "shape": args.shape} if not args.targets and args.place else {}),
        "faults": ", ".join(map(str, sweep.faults)) or "none",
        **({"lease": f"{args.lease_s:g} s"} if args.lease_s else {}),
    }  # fmt: skip


def _keep(
    files: tuple[Path, ...], report_of: Callable[[], GoodputReport], level: Level, rows: Sequence[Mapping[str, object]]
) -> None:
    """What was measured so far is there, whatever ends the run; its requests one by one too."""
    from kvbaton_proof.bench.serve import goodput

    report = report_of()
    files[0].write_text(goodput.findings(report, files[1].name).as_page())
    bench_serve.write_beside(files, goodput.plot(report), report)
    head = {"round": level.round, "target": level.target, "rate": level.rate}
    with files[0].with_suffix(".requests.jsonl").open("ab") as out:
        out.writelines(msgspec.json.encode(head | dict(row)) + b"\n" for row in rows)
