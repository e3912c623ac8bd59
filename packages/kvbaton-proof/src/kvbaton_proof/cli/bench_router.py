"""`kvbaton bench router`: the router's overhead, compared with vLLM's router and a toy proxy in one run.

Law: the exit status is 0 only if everything planned was measured (a missing vllm-router must be excluded by name), no
request failed anywhere, and kvbaton's router met its bounds; with --no-verdict, if kvbaton's router was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import sys
from pathlib import Path

from kvbaton.cli import progress
from kvbaton.cli.arguments import seconds, whole
from kvbaton.cli.progress import note
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.router.router_rows import DIRECT, KVBATON, OWNED, PLAIN, TARGETS, THEIRS, TOY, Level
from kvbaton_proof.cli.bench_results import names_of, new_file, show
from kvbaton_proof.rig import fronts

CONCURRENCY = (1, 64, 512)
CONCURRENCY_MAX = 4096
ROUNDS, WINDOW_S, WARMUP_S, LAPS_MIN = 2, 2.0, 0.4, 2
QUICK_ROUNDS, QUICK_WINDOW_S, QUICK_WARMUP_S, QUICK_LAPS_MIN = 1, 0.6, 0.1, 1


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--targets", type=names_of((*TARGETS[1:], OWNED, PLAIN), in_order=True), metavar="A,B",
           help=f"of {', '.join(TARGETS[1:])} (default: all these), {OWNED}, {PLAIN} and direct")  # fmt: skip
    option("--concurrency", type=_levels, default=",".join(map(str, CONCURRENCY)), metavar="N,N",
           help="concurrency levels")  # fmt: skip
    option("--streams", type=whole(1, CONCURRENCY_MAX), default=512, metavar="N", help="concurrent streams")
    option("--rounds", type=whole(1, 100), metavar="N",
           help=f"repeat the whole set, alternating the order (default: {ROUNDS})")  # fmt: skip
    option("--window-s", type=seconds, metavar="SECONDS", help=f"measured per level (default: {WINDOW_S:g})")
    option("--quick", action="store_true", help=f"one round of short windows ({QUICK_WINDOW_S:g} s): coarse figures")
    option("--vllm-router", metavar="PATH", help="the program (default: .venv-router/bin/vllm-router, or on the PATH)")
    option("--without-vllm-router", action="store_true", help="do not measure it; otherwise its absence is a failure")
    option("--no-verdict", action="store_true", help="only measure: status 0 if kvbaton's router could be measured")
    option("--out", "--page", dest="out", metavar="FILE",
           help="also write a Markdown page, as in docs/lab")  # fmt: skip
    option("--json", action="store_true", help="print one object with the figures")


def check(args: argparse.Namespace) -> None:
    """Fill in the defaults."""
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    args.window_s = args.window_s or (QUICK_WINDOW_S if args.quick else WINDOW_S)
    args.warmup_s = min(args.window_s, QUICK_WARMUP_S if args.quick else WARMUP_S)
    args.laps_min = QUICK_LAPS_MIN if args.quick else LAPS_MIN
    named = args.targets or TARGETS[1:]
    if args.without_vllm_router:
        if args.vllm_router is not None:
            raise CommandError("argument --vllm-router: not allowed with --without-vllm-router; give one of them")
        named = tuple(name for name in named if name not in THEIRS)
    if not named:
        raise CommandError(f"argument --targets: nothing is left to measure; name {KVBATON} or {TOY}")
    args.targets = (DIRECT, *named)


def _levels(text: str) -> tuple[int, ...]:
    one = whole(1, CONCURRENCY_MAX)
    return tuple(sorted({one(part) for part in text.split(",")}))


def run(args: argparse.Namespace) -> int:
    from kvbaton_proof.bench.kit import run_facts
    from kvbaton_proof.bench.kit.piped_children import ChildFailed
    from kvbaton_proof.bench.router import router_rows, router_run, several_routers

    check(args)
    page, say = new_file("out", args.out), functools.partial(note, "bench")
    raise_file_limit()
    wanted, how = [name for name in args.targets if name in THEIRS], router_run.HOW_TO_GET_VLLM_ROUTER
    program = None
    if wanted:
        program = fronts.find_vllm_router(args.vllm_router, Path.cwd(), os.environ.get("PATH"))
        if program is None and args.vllm_router is not None:
            raise CommandError(f"argument --vllm-router: {args.vllm_router} is not a program; {how}")
    missing = dict.fromkeys(wanted, how) if program is None else {}
    if missing:
        say(f"vllm-router is not installed and will not be measured: {how}")
    plan = router_run.RouterBenchPlan(
        targets=tuple(name for name in args.targets if name not in missing),
        levels=(*(Level(False, count) for count in args.concurrency), Level(True, args.streams)),
        streams=args.streams, rounds=args.rounds, window_s=args.window_s, warmup_s=args.warmup_s, vllm_router=program,
        laps_min=args.laps_min,
    )  # fmt: skip
    measured = router_rows.Measured(targets=plan.targets, missing=missing, rounds=plan.rounds, window_s=plan.window_s)
    watch = run_facts.Stopwatch()
    try:
        with progress.shown("bench router", quiet=args.json):
            asyncio.run(router_run.measure(plan, measured, say))
    except ChildFailed as error:
        raise CommandError(f"{error}; is this machine very busy?") from None
    facts = watch.facts(run_facts.shown(sys.argv[1:]), router_run.versions(program))
    findings, several = router_rows.findings(facts, measured), several_routers.several_routers()
    verdict = "none" if args.no_verdict else "ok" if findings.ok else "NOT ok"
    result = {**router_rows.as_object(facts, measured, findings, verdict), "several_routers": several}
    show(findings, result, as_json=args.json, page=page, verdict="none" if args.no_verdict else None)
    if not args.json:
        print("\n".join(several_routers.as_lines(several)))
    if args.no_verdict:
        return 0 if any(row.target == KVBATON and row.answered for row in measured.rows) else 1
    return 0 if findings.ok else 1
