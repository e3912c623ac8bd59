"""`kvbaton bench`: throughput and latency of transports and of the whole stack, compared with the machine's limits."""

from __future__ import annotations

import argparse
import importlib

from kvbaton.cli.arguments import HelpFormatter, Parser, add_common
from kvbaton_proof.cli import (
    bench_arguments,
    bench_router_arguments,
    bench_serve_arguments,
    bench_store_arguments,
    bench_transfer_arguments,
    bench_turns_arguments,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser, required=True)
    for name, text, add in (
        ("transfer", "segments of 4 to 256 KiB, then whole handoffs", bench_transfer_arguments.add),
        ("store", "puts and gets of shared stores, and what a hit saves a request", bench_store_arguments.add),
        (
            "serve",
            "client-side latency under load: modes and aggregated engines in turn, or running servers",
            bench_serve_arguments.add,
        ),
        (
            "vllm",
            "aggregated vLLM, pairs with kvbaton and a pair with NIXL, under vLLM's own load generator",
            bench_arguments.add,
        ),
        (
            "router",
            "the router's cost per request, compared with vllm-router and a toy proxy",
            bench_router_arguments.add,
        ),
        (
            "turns",
            "time to first token of a conversation's turns, kept by D or not, and aggregated",
            bench_turns_arguments.add,
        ),
    ):
        said = text[0].upper() + text[1:] + "."
        one = kinds.add_parser(
            name, help=text, description=said, allow_abbrev=False, formatter_class=HelpFormatter
        )  # fmt: skip
        add_common(one)
        add(one)


def run(args: argparse.Namespace) -> int:
    kinds = {
        "transfer": _transfer,
        "store": _store,
        "vllm": _vllm,
        "router": _router,
        "serve": _serve,
        "turns": _turns,
    }
    return kinds[args.what](args)


def _transfer(args: argparse.Namespace) -> int:
    status: int = importlib.import_module("kvbaton_proof.cli.bench_transfer").run(args)
    return status


def _store(args: argparse.Namespace) -> int:
    status: int = importlib.import_module("kvbaton_proof.cli.bench_store").run(args)
    return status


def _serve(args: argparse.Namespace) -> int:
    bench_serve_arguments.check(args)
    status: int = importlib.import_module("kvbaton_proof.cli.bench_serve").run(args)
    return status


def _router(args: argparse.Namespace) -> int:
    bench_router_arguments.check(args)
    status: int = importlib.import_module("kvbaton_proof.cli.bench_router").run(args)
    return status


def _turns(args: argparse.Namespace) -> int:
    status: int = importlib.import_module("kvbaton_proof.cli.bench_turns").run(args)
    return status


def _vllm(args: argparse.Namespace) -> int:
    bench_arguments.check(args)
    status: int = importlib.import_module("kvbaton_proof.cli.bench_vllm").run(args)
    return status
