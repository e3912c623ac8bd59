"""`kvbaton bench`: what the data planes and the whole stack reach on this machine, beside what the machine can do."""

from __future__ import annotations

import argparse
import importlib
import json
import sys

import msgspec

from kvbaton.bench import handoff, transfer
from kvbaton.cli import bench_arguments, bench_router_arguments
from kvbaton.cli.arguments import CommandError, HelpFormatter, Parser

SHM_TARGET, TCP_TARGET = 0.9, 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", parser_class=Parser, required=True)
    for name, text, add in (
        ("transfer", "segments of 4 to 256 KiB, then whole handoffs", _add_transfer),
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


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repetitions", type=int, default=11, metavar="N", help="of each size")
    parser.add_argument("--json", action="store_true", help="print one object with the figures")


def run(args: argparse.Namespace) -> int:
    return {"transfer": _transfer, "vllm": _vllm, "router": _router}[args.what](args)


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


def _transfer(args: argparse.Namespace) -> int:
    if args.repetitions < 1:
        raise CommandError(f"--repetitions: got {args.repetitions}, expected a number above 0")
    report = transfer.measure(repetitions=args.repetitions)
    stack = []
    for name in ("shm", "tcp"):
        print(f"handoffs over {name} …", file=sys.stderr, flush=True)
        stack.append(handoff.measure(name))
    report["handoffs"] = msgspec.to_builtins(stack)
    correct = all(each.delivered == each.handoffs for each in stack)
    if args.json:
        print(json.dumps(report))
    else:
        print(transfer.table(report))
        print(_table(stack))
    return 0 if correct else 1


def _table(stack: list[handoff.HandoffResult]) -> str:
    lines = ["one-block handoffs through the whole stack: p50, p99 alone; rate with 64 at once; delivered"]
    lines += [
        f"{each.transport:>6}  {each.p50_ms:7.3f} ms {each.p99_ms:7.3f} ms {each.handoffs_per_s:9.0f}/s   "
        f"{each.delivered} of {each.handoffs}"
        for each in stack
    ]
    return "\n".join(lines)
