"""`kvbaton conformance vllm`: checks the connector against vLLM's own scheduler, in every case and interleaving.

Law: this module imports nothing of vLLM. If this Python lacks it, the command continues in one that has it.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path

from kvbaton.cli import progress
from kvbaton.cli.arguments import whole
from kvbaton.local_cluster.vllm_engine import find_python
from kvbaton_proof.cli.sim import seeds

INSIDE_VARIABLE = "KVBATON_CONFORMANCE_INSIDE"
"""Set for the process that runs in vLLM's Python, so that it does not search further."""
SOURCES = Path(__file__).resolve().parents[2]
ENGINES = ("vllm",)
PROCESSES = 3
"""Half of a case's time is waiting for leases and timeouts: more processes than the two cores of a small machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", choices=ENGINES, help="the engine whose scheduler is used")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=seeds, metavar="A..B", help="interleavings of these seeds only (default: 0..99)")
    what.add_argument("--case", metavar="NAME", help="only this case, or all whose names contain this text")
    what.add_argument("--list", action="store_true", help="list the cases and run nothing")
    parser.add_argument(
        "--spread", action="store_true", help="each case with every value of its arguments, not every combination"
    )
    parser.add_argument("--vllm-python", metavar="PATH", help="Python interpreter with vLLM (default: searched for)")
    parser.add_argument("--processes", type=whole(1, 64), default=PROCESSES, metavar="N", help="processes at a time")
    parser.add_argument("--json", action="store_true", help="print one object with the figures")


def run(args: argparse.Namespace) -> int:
    python = sys.executable if INSIDE_VARIABLE in os.environ else find_python(args.vllm_python)
    if python != sys.executable:
        _go_on_in(python, words_of(args))
    suite = importlib.import_module("kvbaton_proof.conformance.conformance_run")
    with progress.shown("conformance", quiet=args.json or args.list) as tell:
        status: int = suite.main(
            cases=args.case,
            seeds=args.seeds,
            as_json=args.json,
            listed=args.list,
            processes=args.processes,
            spread=args.spread,
            tell=tell,
            printing=progress.aside,
        )
    return status


def words_of(args: argparse.Namespace) -> list[str]:
    """The equivalent command line for the other Python."""
    words = ["conformance", args.engine]
    if args.seeds is not None:
        words += ["--seeds", f"{args.seeds[0]}..{args.seeds[-1]}"]
    if args.case is not None:
        words += ["--case", args.case]
    if args.processes != PROCESSES:
        words += ["--processes", str(args.processes)]
    return words + ["--spread"] * args.spread + ["--list"] * args.list + ["--json"] * args.json


def _go_on_in(python: str, words: list[str]) -> None:
    """Replace this process by vLLM's Python, with this very code; does not return."""
    before = os.environ.get("PYTHONPATH", "")
    path = os.pathsep.join([str(SOURCES), before] if before else [str(SOURCES)])
    surroundings = {**os.environ, INSIDE_VARIABLE: "1", "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
    print(f"kvbaton conformance: continues in {python}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    os.execve(python, [python, "-m", "kvbaton.cli.main", *words], surroundings)
