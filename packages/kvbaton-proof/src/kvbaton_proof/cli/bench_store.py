"""`kvbaton bench store`: throughput of stores as an engine sees it, compared; and what a hit saves a request.

Law: the exit status is the verdict: 0 when every requested backend could be measured, every byte and answer was right,
everything that was put was found, and a hit beat computing the prompt.
"""

from __future__ import annotations

import argparse
import functools

from kvbaton.cli import progress
from kvbaton.cli.arguments import whole
from kvbaton.cli.progress import note
from kvbaton_proof.bench.kit.run_facts import BACKENDS
from kvbaton_proof.cli.bench_results import in_folder, names_of, show


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--backends", type=names_of(BACKENDS), metavar="A,B", help=f"of {', '.join(BACKENDS)} (default: all)")
    option("--rounds", type=whole(1, 1000), default=5, metavar="N", help="rounds per row; the faster half counts")
    option("--prompt-tokens", type=whole(64, 4000), default=2000, metavar="N", help="prompt length for TTFT")
    option("--no-verdict", action="store_true", help="only measure: status 0 if everything was measured and right")
    option("--out", metavar="FILE", help="also write a Markdown page, as in docs/lab")
    option("--json", action="store_true", help="print one object with the figures")


def run(args: argparse.Namespace) -> int:
    from kvbaton_proof.bench.kit import run_facts
    from kvbaton_proof.bench.store import store_moves, store_page

    page, watch = in_folder("out", args.out), run_facts.Stopwatch()
    names = args.backends or tuple(name for name in BACKENDS if store_moves.is_installed(name))
    with progress.shown("bench store", quiet=args.json):
        report = store_page.measure(names, args.rounds, args.prompt_tokens, functools.partial(note, "bench"))
    backends = f" --backends {','.join(args.backends)}" if args.backends else ""
    command = f"kvbaton bench store{backends} --rounds {args.rounds} --prompt-tokens {args.prompt_tokens}"
    facts = watch.facts(command, run_facts.own_versions())
    findings = store_page.findings(facts, report, strict=not args.no_verdict)
    result = {**run_facts.with_facts(report, facts), "complaints": findings.wrong, "ok": findings.ok}
    show(findings, result, as_json=args.json, page=page)
    for line in findings.wrong if args.json else ():
        note("bench", line)
    return 0 if findings.ok else 1
