"""`kvbaton bench`: throughput and latency of transports and of the whole stack, compared with the machine's limits.

Laws: a benchmark is imported when it is run, so that `--help` and typing mistakes are answered at once. All show what
they found in one way: tables, one object with `--json`, a page with `--out`. The exit status is the verdict.
"""

from __future__ import annotations

import argparse

from kvbaton.cli.arguments import HelpFormatter, Parser, add_common
from kvbaton_proof.cli import (
    bench_goodput,
    bench_router,
    bench_serve,
    bench_store,
    bench_transfer,
    bench_turns,
    bench_vllm,
)

KINDS = {
    "transfer": (bench_transfer, "segments of 4 to 256 KiB, then whole handoffs"),
    "store": (bench_store, "puts and gets of shared stores, and what a hit saves a request"),
    "serve": (bench_serve, "client-side latency under load: modes and aggregated engines in turn, or running servers"),
    "goodput": (
        bench_goodput,
        "right answers within objectives, by rate: a trace on several targets, with faults beside",
    ),
    "vllm": (bench_vllm, "aggregated vLLM, pairs with kvbaton and a pair with NIXL, under vLLM's own load generator"),
    "router": (bench_router, "the router's cost per request, compared with vllm-router and a toy proxy"),
    "turns": (bench_turns, "time to first token of a conversation's turns, kept by D or not, and aggregated"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser, required=True)
    for name, (module, text) in KINDS.items():
        described = text[0].upper() + text[1:] + "."
        one = kinds.add_parser(
            name, help=text, description=described, allow_abbrev=False, formatter_class=HelpFormatter
        )  # fmt: skip
        add_common(one)
        module.add(one)


def run(args: argparse.Namespace) -> int:
    module, _ = KINDS[args.what]
    status: int = module.run(args)
    return status
