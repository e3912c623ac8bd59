"""`kvbaton bench`: what the data planes and the whole stack reach on this machine, beside what the machine can do."""

from __future__ import annotations

import argparse
import importlib

from kvbaton.cli import bench_arguments, bench_router_arguments, bench_store, bench_transfer
from kvbaton.cli.arguments import CommandError, HelpFormatter, Parser


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser, required=True)
    for name, text, add in (
        ("transfer", "segments of 4 to 256 KiB, then whole handoffs", bench_transfer.add),
        ("store", "values into shared stores and out again, and what a hit saves a request", bench_store.add),
        (
            "vllm",
            "one vLLM, pairs with kvbaton and a pair with NIXL, under vLLM's own load generator",
            bench_arguments.add,
        ),
        (
            "router",
            "what a request costs in the router, beside vllm-router and a toy proxy",
            bench_router_arguments.add,
        ),
    ):
        said = text[0].upper() + text[1:] + "."
        one = kinds.add_parser(
            name, help=text, description=said, allow_abbrev=False, formatter_class=HelpFormatter
        )  # fmt: skip
        one.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        add(one)


def run(args: argparse.Namespace) -> int:
    return {"transfer": bench_transfer.run, "store": bench_store.run, "vllm": _vllm, "router": _router}[args.what](args)


def _router(args: argparse.Namespace) -> int:
    bench_router_arguments.check(args)
    status: int = importlib.import_module("kvbaton.cli.bench_router").run(args)
    return status


def _vllm(args: argparse.Namespace) -> int:
    bench_arguments.check(args)
    try:
        suite = importlib.import_module("kvbaton.cli.bench_vllm")
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise CommandError("this command serves HTTP and needs aiohttp: pip install 'kvbaton[serve]'") from None
    status: int = suite.run(args)
    return status
