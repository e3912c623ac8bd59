"""The options of `kvbaton bench transfer`."""

from __future__ import annotations

import argparse

from kvbaton.cli.arguments import whole
from kvbaton_proof.bench.kit.bench_peers import PACKAGES


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repetitions", type=whole(1, 100_000), default=11, metavar="N", help="minimum repetitions of each size"
    )
    known = ",".join(PACKAGES)
    parser.add_argument("--peers", type=_peers, default=[], metavar="LIST", help=f"compare with these: {known}")
    device = "memory to move; cuda: between two processes on one GPU"
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=device)
    parser.add_argument("--out", metavar="FILE", help="write a Markdown page and a plot")
    parser.add_argument("--plot", metavar="FILE", help="where to write the plot (SVG)")
    parser.add_argument("--json", action="store_true", help="print one object with the figures")


def _peers(text: str) -> list[str]:
    names = list(dict.fromkeys(text.split(",")))
    for name in names:
        if name not in PACKAGES:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected {' or '.join(PACKAGES)}, with commas")
    return names
