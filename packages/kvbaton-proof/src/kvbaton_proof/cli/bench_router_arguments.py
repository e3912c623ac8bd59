"""The options of `kvbaton bench router`.

Law: an invalid value is refused by its name, before anything is started.
"""

from __future__ import annotations

import argparse

from kvbaton.cli.arguments import seconds, whole
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.router.router_rows import DIRECT, KVBATON, TARGETS, THEIRS, TOY

CONCURRENCY = (1, 64, 512)
CONCURRENCY_MAX = 4096
ROUNDS, WINDOW_S, WARMUP_S, LAPS_MIN = 2, 2.0, 0.4, 2
QUICK_ROUNDS, QUICK_WINDOW_S, QUICK_WARMUP_S, QUICK_LAPS_MIN = 1, 0.6, 0.1, 1


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--targets", type=_targets, metavar="A,B", help=f"of {', '.join(TARGETS[1:])} (default: all) and direct")
    option("--concurrency", type=_levels, default=",".join(map(str, CONCURRENCY)), metavar="N,N",
           help="concurrency levels")  # fmt: skip
    option("--streams", type=whole(1, CONCURRENCY_MAX), default=512, metavar="N", help="concurrent streams")
    option("--rounds", type=whole(1, 100), metavar="N",
           help=f"repeat the whole set, alternating the order (default: {ROUNDS})")  # fmt: skip
    option("--window-s", type=seconds, metavar="SECONDS", help=f"measured per level (default: {WINDOW_S:g})")
    option("--quick", action="store_true", help=f"one round of short windows ({QUICK_WINDOW_S:g} s): coarse figures")
    option("--vllm-router", metavar="PATH", help="the program (default: .venv-router/bin/vllm-router, or on the PATH)")
    option("--without-vllm-router", action="store_true", help="do not measure it; otherwise its absence is a failure")
    option("--no-verdict", action="store_true", help="only measure: status 0 if kvbaton's router could be measured")
    option("--out", "--page", dest="out", metavar="FILE",
           help="also write a Markdown page, as in docs/lab")  # fmt: skip
    option("--json", action="store_true", help="print one object with the figures")


def check(args: argparse.Namespace) -> None:
    """Fill in the defaults."""
    args.rounds = args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
    args.window_s = args.window_s or (QUICK_WINDOW_S if args.quick else WINDOW_S)
    args.warmup_s = min(args.window_s, QUICK_WARMUP_S if args.quick else WARMUP_S)
    args.laps_min = QUICK_LAPS_MIN if args.quick else LAPS_MIN
    named = args.targets or TARGETS[1:]
    if args.without_vllm_router:
        if args.vllm_router is not None:
            raise CommandError("argument --vllm-router: not allowed with --without-vllm-router; give one of them")
        named = tuple(name for name in named if name not in THEIRS)
    if not named:
        raise CommandError(f"argument --targets: nothing is left to measure; name {KVBATON} or {TOY}")
    args.targets = (DIRECT, *named)


def _targets(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TARGETS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(TARGETS[1:])}")
    return tuple(name for name in TARGETS[1:] if name in names)


def _levels(text: str) -> tuple[int, ...]:
    one = whole(1, CONCURRENCY_MAX)
    return tuple(sorted({one(part) for part in text.split(",")}))
