"""`kvbaton plan`: how many prefill and decode engines a trace needs, by a simulator of queues and measured speeds.

Law: beside a measured run (`--beside`) the prediction comes first; if it is off by more than 15 % both are printed, the
exit status is 1, and nothing else is predicted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.cli.arguments import url, whole
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.cli import bench_goodput, bench_serve
from kvbaton_proof.cli.bench_results import show

if TYPE_CHECKING:
    from kvbaton_proof.bench.load.request_plan import Ask
    from kvbaton_proof.bench.serve.capacity_plan import Speeds
    from kvbaton_proof.bench.serve.goodput import Level

REPEATS, AT_ONCE, STREAMS = 3, 16, (1, 4, 16)
STREAM_TOKENS, SHORT_TOKENS = 48, 16
TIMEOUT_S = 60.0
SHARE = 0.9  # of requests, that have to be good
BESIDE = ("rate", "good: predicted", "measured", "predicted TTFT p50 ms", "p99 ms", "measured TTFT p50 ms", "p99 ms",
          "predicted ITL p99 ms", "measured")  # fmt: skip
NEEDED = ("needed", "good", "TTFT p50 ms", "TTFT p99 ms", "ITL p99 ms")
LEGEND, ESTIMATE = "Beside the run that was measured.", "By a simulator of queues: an estimate."
DOES_NOT_HOLD, NOTHING_ELSE = "the prediction does not hold within", "nothing else is predicted"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("trace", metavar="TRACE", help=f"a trace's file, or {' or '.join(bench_goodput.SAMPLES)}")
    option("--speeds", metavar="FILE", required=True, help="speeds of one P and one D, as JSON; --measure writes it")
    option("--measure", type=url, metavar="URL", help="measure the speeds first, of an idle pair that runs there")
    option("--beside", metavar="FILE", help="the JSON of a bench goodput run of this trace: is the prediction right?")
    option("--target", metavar="NAME", help="of that run (default: its last)")
    option("--rate", type=bench_serve.factor, metavar="R", help="requests/s (default: the trace's own)")
    option("--slo", type=bench_serve.slo, metavar="A=T,B=T", help=f"objectives (default: {bench_goodput.SLO})")
    option("--requests", type=whole(2, 100_000), metavar="N", help="the first N of the trace (default: all)")
    option("--tokens-max", type=whole(2, 1 << 20), metavar="N", help="leave out requests with more tokens than N")
    option("--length-scale", type=bench_serve.factor, metavar="X", help="scale the trace's lengths (default: 1)")
    option("--json", action="store_true", help="print one object with the figures")


def run(args: argparse.Namespace) -> int:
    from kvbaton_proof.bench.kit.lab_pages import Findings, Table, number
    from kvbaton_proof.bench.serve import capacity_plan, goodput_run

    report = _report(args.beside) if args.beside else None
    own = report.options if report is not None else {}
    asks, _ = goodput_run.trace_of(
        bench_goodput.trace_path(args.trace), scale=args.length_scale or own.get("lengths times") or 1.0,
        requests=args.requests or own.get("requests"), tokens_max=args.tokens_max,
    )  # fmt: skip
    speeds = _speeds(args, asks)
    given = bench_goodput.by_gaps(args.slo or bench_serve.slo(bench_goodput.SLO), "p99")
    slo = report.objectives if report is not None and args.slo is None else given
    tables, lines, beside, found = [], [], None, None
    if report is not None:
        target = args.target or report.levels[-1].target
        measured = [each for each in report.levels if each.target == target]
        if not measured or "prefill engines" not in own:
            raise CommandError(f"argument --beside: it has no P and D by the name of {target}")
        shape = (own["prefill engines"], own["decode engines"])
        predicted = [capacity_plan.level(asks, each.rate, speeds, *shape, slo) for each in measured]
        beside = capacity_plan.compared(predicted, measured, SHARE)
        tables.append(Table(BESIDE, [_row(*each) for each in zip(predicted, measured, strict=True)], target, LEGEND))
        off = "" if beside.off is None else f": {beside.off:+.0%}"
        rates = f"predicted {number(beside.predicted, 2)}, measured {number(beside.measured, 2)}{off}"
        lines.append(f"requests/s of which {beside.share:.0%} are good: {rates}")
    wrong = [] if beside is None or beside.holds else [f"{DOES_NOT_HOLD} {capacity_plan.TOLERATED:.0%}: {NOTHING_ELSE}"]
    rate = args.rate or (len(asks) - 1) / (asks[-1].due_s - asks[0].due_s)
    if not wrong:
        found = capacity_plan.needed(asks, rate, speeds, slo, SHARE)
        cells = [f"more than {capacity_plan.ENGINES_MAX} engines", *["-"] * 4]
        if found is not None:
            times = (number(found.ttft_p50_ms, 0), number(found.ttft_p99_ms, 0), number(found.itl_p99_ms, 1))
            cells = [found.target, f"{found.share:.1%}", *times]
        tables.append(Table(NEEDED, [cells], f"{rate:.2f} requests/s, {SHARE:.0%} within {slo}", ESTIMATE))
    findings = Findings(title="", about="", command="", tables=tables, lines=lines, wrong=wrong)
    result = {"ok": not wrong, "speeds": speeds, "beside": beside, "needed": found, "rate": rate}
    show(findings, result, as_json=args.json, page=None)
    return 1 if wrong else 0


def _row(predicted: Level, measured: Level) -> list[str]:
    from kvbaton_proof.bench.kit.lab_pages import number

    times = [number(each, 0) for one in (predicted, measured) for each in (one.ttft_p50_ms, one.ttft_p99_ms)]
    gaps = [number(each.itl_p99_ms, 1) for each in (predicted, measured)]
    return [f"{measured.rate:g}", f"{predicted.share:.0%}", f"{measured.share:.0%}", *times, *gaps]


def _report(name: str) -> Any:
    from kvbaton_proof.bench.serve.goodput import GoodputReport

    try:
        return msgspec.json.decode(Path(name).read_bytes(), type=GoodputReport)
    except (OSError, msgspec.DecodeError) as error:
        raise CommandError(f"argument --beside: {name}: {error}; give what bench goodput --json printed") from None


def _speeds(args: argparse.Namespace, asks: list[Ask]) -> Speeds:
    from kvbaton_proof.bench.serve.capacity_plan import Speeds

    path = Path(args.speeds)
    if args.measure is not None:
        found = asyncio.run(_measured(args.measure, asks))
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        return found
    try:
        return msgspec.json.decode(path.read_bytes(), type=Speeds)
    except (OSError, msgspec.DecodeError) as error:
        raise CommandError(f"argument --speeds: {path}: {error}; write it with --measure URL") from None


async def _measured(where: str, asks: list[Ask]) -> Speeds:
    """What a client sees of a pair that has nothing else to do."""
    from kvbaton_proof.bench.load.open_loop import Aim, ask_for_models, body_of, session, streamed, warm_up
    from kvbaton_proof.bench.load.request_plan import Ask, Piece
    from kvbaton_proof.bench.serve.capacity_plan import fitted

    aim = Aim(
        url=where, model=(await ask_for_models("measure", where)).model, timeout_s=TIMEOUT_S, salt=str(time.time_ns())
    )
    lengths = sorted(each.input_tokens for each in asks)
    sizes = sorted({lengths[len(lengths) * part // 10] for part in (1, 5, 9)})
    if len(sizes) < 2:
        sizes = [max(1, sizes[0] // 2), sizes[0]]
    usual, count = max(2, round(statistics.median(each.output_tokens for each in asks))), 0
    await warm_up(aim, AT_ONCE)

    async with session(aim) as client:

        async def one(tokens: int, answer: int) -> Any:
            nonlocal count
            count += 1
            stream = await streamed(client, where, body_of(Ask(count, 0.0, (Piece(f"m{count}", tokens),), answer), aim))
            told = stream if isinstance(stream, str) else stream.answer(answer)
            if isinstance(told, str):
                raise CommandError(f"argument --measure: a request of {tokens} tokens failed: {told}")
            return told

        ttft_s, each_s, gap_s = {}, {}, {}
        for size in sizes:
            ttft_s[size] = statistics.median([(await one(size, 2)).ttft_s for _ in range(REPEATS)])
            took = []
            for _ in range(REPEATS):  # with answers as the trace has them, so that D works meanwhile
                firsts = sorted(
                    [each.ttft_s for each in await asyncio.gather(*(one(size, usual) for _ in range(AT_ONCE)))]
                )
                took.append((firsts[-1] - firsts[0]) / (AT_ONCE - 1))
            each_s[size] = statistics.median(took)
        for streams in STREAMS:
            told = await asyncio.gather(*(one(SHORT_TOKENS, STREAM_TOKENS) for _ in range(streams)))
            gap_s[streams] = statistics.median(each.tpot_s for each in told)  # single gaps are 0 where tokens coalesce
    return fitted(ttft_s, each_s, gap_s)
