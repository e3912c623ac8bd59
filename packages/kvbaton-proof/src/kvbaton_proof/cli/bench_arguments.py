"""The options of `kvbaton bench vllm`.

Law: an invalid level or target is refused by its name, before anything is started.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence

from kvbaton.cli.arguments import planes_choice, seconds, whole
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.vllm.vllm_rows import Level

TARGETS = ("aggregated", "kvbaton-pull", "kvbaton-push", "kvbaton-stream", "nixl")
"""In measuring order: the others' answers are compared with the first's."""
DEFAULT_TARGETS = ("aggregated", "kvbaton-pull", "kvbaton-push", "nixl")
DEFAULT_REQUESTS: Mapping[int, int] = {1: 30, 32: 192, 128: 384, 256: 512, 512: 1024}
CONCURRENCY_MAX, REQUESTS_MAX, REQUESTS_MIN = 2048, 1 << 20, 30


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option(
        "--targets", type=_targets, default=",".join(DEFAULT_TARGETS), metavar="A,B", help=f"of {', '.join(TARGETS)}"
    )
    option("--concurrency", type=_numbers(CONCURRENCY_MAX), default=",".join(map(str, DEFAULT_REQUESTS)),
           metavar="N,N", help="concurrency levels")  # fmt: skip
    wanted = ",".join(map(str, DEFAULT_REQUESTS.values()))
    option("--requests", type=_numbers(REQUESTS_MAX), metavar="N,N", help=f"per level or for all (default: {wanted})")
    option("--input-len", type=whole(8, 1 << 20), default=256, metavar="TOKENS", help="length of each random prompt")
    option("--output-len", type=whole(2, 1 << 20), default=16, metavar="TOKENS", help="length of each answer")
    option("--rounds", type=whole(1, 100), default=1, metavar="N", help="repeat the whole set, alternating the order")
    option(
        "--prefix-caching", action="store_true", help="enable prefix caching; off: each request moves its whole prompt"
    )
    option("--transport", type=planes_choice, default="auto", metavar="NAMES", help="transports of kvbaton's targets")
    option("--kv-gib", type=whole(1, 1024), default=1, metavar="N", help="KV cache of each engine")
    option("--level-s", type=seconds, metavar="SECONDS", help="deadline of a level (default: 120 + 0.5 per request)")
    option("--rest-s", type=seconds, default=60.0, metavar="SECONDS", help="time for engines to settle after a level")
    option("--vllm-python", metavar="PATH", help="the Python interpreter with vLLM (default: searched for)")
    option("--out", metavar="FILE", help="also write a Markdown page, as in docs/lab")
    option("--json", action="store_true", help="print one object with the figures")


def check(args: argparse.Namespace) -> None:
    """Replace two lists by `levels`."""
    args.levels = levels(args.concurrency, args.requests)


def levels(concurrency: Sequence[int], requests: Sequence[int] | None) -> tuple[Level, ...]:
    """The requests of each level: as given, or the defaults, or two per concurrent request."""
    if requests is None:
        wanted = [DEFAULT_REQUESTS.get(each, max(REQUESTS_MIN, 2 * each)) for each in concurrency]
    else:
        wanted = list(requests) * (len(concurrency) if len(requests) == 1 else 1)
    if len(wanted) != len(concurrency):
        raise CommandError(
            f"argument --requests: got {len(wanted)} numbers for {len(concurrency)} levels; give one each"
        )
    for at_once, count in zip(concurrency, wanted, strict=True):
        if count < at_once:
            raise CommandError(f"argument --requests: {count} requests cannot reach concurrency {at_once}; give more")
    return tuple(Level(at_once, count) for at_once, count in zip(concurrency, wanted, strict=True))


def _targets(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TARGETS:
            raise argparse.ArgumentTypeError(f"got {name!r}, expected some of {', '.join(TARGETS)}")
    return tuple(name for name in TARGETS if name in names)


def _numbers(high: int) -> Callable[[str], tuple[int, ...]]:
    one = whole(1, high)

    def parse(text: str) -> tuple[int, ...]:
        found = tuple(one(part) for part in text.split(","))
        if high == CONCURRENCY_MAX and len(set(found)) != len(found):
            raise argparse.ArgumentTypeError(f"got {text!r}, which has a level twice; --rounds repeats all")
        return found

    return parse
