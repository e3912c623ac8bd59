"""`kvbaton bench turns`: time to first token of the turns of a conversation, with and without turns kept by D.

Law: the exit status is the verdict on answers, never on speed: 0 if all clusters gave the same.
"""

from __future__ import annotations

import argparse
import functools

from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.cli import main
from kvbaton.cli.arguments import whole
from kvbaton.cli.progress import note
from kvbaton_proof.cli.bench_results import show


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--engine", choices=["embedded", "vllm"], default="embedded", help="what serves; vllm: a tiny model on CPU")
    option("--vllm-python", metavar="FILE", default=None, help="python that has vLLM (default: found)")
    option("--turns", type=whole(2, 50), default=5, metavar="N", help="turns of a conversation")
    option("--conversations", type=whole(1, 1000), default=5, metavar="N", help="medians over these")
    option("--first", type=whole(256, 3000), default=1200, metavar="N", help="tokens of the first prompt")
    option("--answer", type=whole(2, 1000), default=128, metavar="N", help="tokens of an answer")
    option("--more", type=whole(1, 1000), default=64, metavar="N", help="tokens that a client adds at each turn")
    option("--json", action="store_true", help="print one object with the figures")


def run(args: argparse.Namespace) -> int:
    if args.engine != "vllm":
        main.need("numpy")
    from kvbaton_proof.bench import turn_talks

    shape = turn_talks.TalkShape(args.turns, args.first, args.answer, args.more, args.conversations)
    server = turn_talks.server_of(args.vllm_python, shape) if args.engine == "vllm" else None
    report = run_loop(turn_talks.measured(args.engine, server, shape, functools.partial(note, "bench")))
    show(turn_talks.findings(report), report, as_json=args.json, page=None)
    return 0 if report.is_right else 1
