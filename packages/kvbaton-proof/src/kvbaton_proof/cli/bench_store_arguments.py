"""The options of `kvbaton bench store`."""

from __future__ import annotations

import argparse

from kvbaton.cli.arguments import whole
from kvbaton_proof.bench.kit.bench_peers import BACKENDS


def add(parser: argparse.ArgumentParser) -> None:
    add_one = parser.add_argument
    add_one("--backends", type=_backends, default=None, metavar="A,B", help=f"of {', '.join(BACKENDS)} (default: all)")
    add_one("--rounds", type=whole(1, 1000), default=5, metavar="N", help="rounds per row; the faster half counts")
    add_one("--prompt-tokens", type=whole(64, 4000), default=2000, metavar="N", help="prompt length for TTFT")
    add_one("--no-verdict", action="store_true", help="only measure: status 0 if everything was measured and right")
    add_one("--out", metavar="FILE", help="also write a Markdown page, as in docs/lab")
    add_one("--json", action="store_true", help="print one object with the figures")


def _backends(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in BACKENDS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(BACKENDS)}")
    return names
