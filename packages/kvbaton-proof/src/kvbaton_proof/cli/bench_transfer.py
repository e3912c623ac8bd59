"""`kvbaton bench transfer`: transports compared with the machine's limits and, with `--peers`, with other libraries.

Law: the exit status is the verdict: 0 when every byte was right and, with peers or a device, every claim holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys

from kvbaton.cli import progress
from kvbaton.cli.arguments import whole
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.kit.run_facts import ADVICE, DISTRIBUTIONS, PACKAGES
from kvbaton_proof.cli.bench_results import in_folder, names_of, show


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--repetitions", type=whole(1, 100_000), default=11, metavar="N", help="minimum repetitions of each size")
    option("--peers", type=names_of(tuple(PACKAGES)), default=(), metavar="LIST",
           help=f"compare with these: {','.join(PACKAGES)}")  # fmt: skip
    option("--device", choices=("cpu", "cuda"), default="cpu", help="memory to move; cuda: between two processes on "
           "one GPU")  # fmt: skip
    option("--out", metavar="FILE", help="write a Markdown page and a plot")
    option("--plot", metavar="FILE", help="where to write the plot (SVG)")
    option("--json", action="store_true", help="print one object with the figures")


def run(args: argparse.Namespace) -> int:
    from kvbaton_proof.bench.kit import run_facts
    from kvbaton_proof.bench.kit.piped_children import ChildFailed
    from kvbaton_proof.bench.transfer import transfer_rounds

    page, plot = in_folder("out", args.out), in_folder("plot", args.plot)
    if args.device == "cuda":
        return _device(args)
    for peer in args.peers:
        if not any(importlib.util.find_spec(name) for name in PACKAGES[peer]):
            raise CommandError(f"argument --peers: {peer} is not installed here; {ADVICE}")
    watch = run_facts.Stopwatch()
    try:
        with progress.shown("bench transfer", quiet=args.json) as say:
            report = transfer_rounds.measure_all(args.repetitions, args.peers, say)
    except ChildFailed as error:
        raise CommandError(str(error)) from None
    libraries = [name for peer in args.peers for name in DISTRIBUTIONS[peer]]
    facts = watch.facts(run_facts.shown(sys.argv[1:]), run_facts.own_versions(*libraries))
    if plot is None and page is not None:
        plot = page.with_suffix(".svg")
    beside = "" if plot is None or page is None else os.path.relpath(plot, page.parent)
    findings = transfer_rounds.findings(facts, report, beside)
    if plot is not None:
        plot.write_text(transfer_rounds.plot(report.segments))
    show(findings, run_facts.with_facts(report, facts), as_json=args.json, page=page)
    return 0 if findings.ok else 1


def _device(args: argparse.Namespace) -> int:
    from kvbaton.transports.cuda.cuda_driver import CudaError
    from kvbaton_proof.bench.device import device_ways
    from kvbaton_proof.bench.kit import run_facts
    from kvbaton_proof.bench.kit.piped_children import ChildFailed

    page, plot, watch = in_folder("out", args.out), in_folder("plot", args.plot), run_facts.Stopwatch()
    try:
        report = device_ways.measure(args.repetitions)
    except (ImportError, CudaError, ChildFailed) as error:
        raise CommandError(f"--device cuda: {error}") from None
    facts = watch.facts(run_facts.shown(sys.argv[1:]), run_facts.own_versions())
    findings = device_ways.findings(facts, report)
    if plot is not None:
        plot.write_text(device_ways.plot(report))
    result = {**run_facts.with_facts(report, facts), "verdicts": findings.checks}
    show(findings, result, as_json=args.json, page=page)
    return 0 if findings.ok else 1
