"""The work of one `kvbaton bench serve` run, from its arguments, and its results so far.

Law: nothing is started here; a trace that cannot be replayed ends the command in one line.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.serve import serve_plan, serve_stats, serve_trace
from kvbaton_proof.bench.serve.serve_load import UNDER_WAY_MAX, Pace
from kvbaton_proof.bench.serve.serve_meter import Meter, Part
from kvbaton_proof.bench.serve.serve_plan import REQUESTS, REQUESTS_MAX, Ask, Shape

WARMUPS = 4


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What every part is made of."""

    asks: Callable[[], Iterable[Ask]]  # the plan, from its beginning
    planned: int | None
    longest: int  # tokens of prompt and answer together
    pace: Pace
    warmups: int
    slo: serve_stats.Slo | None
    seed: int
    timeout_s: float
    in_prompt: bool


@dataclass(slots=True)
class Findings:
    """What has been measured so far."""

    parts: list[Part] = field(default_factory=list)
    order: list[tuple[int, str]] = field(default_factory=list)
    pools: dict[str, Meter] = field(default_factory=dict)  # all rounds of a target
    firsts: dict[int, Meter] = field(default_factory=dict)  # the first target of the round that is under way
    sent: list[tuple[Ask, float]] = field(default_factory=list)  # in the first part, for --record
    commands: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    stopped: bool = False


def work_of(args: argparse.Namespace) -> Work:
    if args.trace is not None:
        plan = _trace(args)
        longest, planned = max(ask.input_tokens + ask.output_tokens for ask in plan), len(plan)
        asks: Callable[[], Iterable[Ask]] = lambda: plan  # noqa: E731
    else:
        bound = args.requests or (REQUESTS if args.seconds is None else REQUESTS_MAX)
        shape = Shape(
            requests=bound, seed=args.seed, input=args.input_len, output=args.output_len, rate=args.rate,
            prefix_tokens=args.prefix_len, prefixes=args.prefixes,
        )  # fmt: skip
        longest, planned = args.prefix_len + args.input_len.high + args.output_len.high, bound
        asks = functools.partial(serve_plan.drawn, shape)
    pairs = 0 if args.targets else args.prefill * args.decode
    return Work(
        asks=asks, planned=None if args.seconds is not None else planned, longest=longest,
        pace=Pace(
            concurrency=args.concurrency or UNDER_WAY_MAX, seconds=args.seconds, deadline_s=args.part_s,
            timed=args.trace is not None or (args.rate is not None and args.rate != float("inf")),
        ),
        warmups=max(WARMUPS, 2 * pairs) if args.warmup is None else args.warmup,
        slo=args.slo, seed=args.seed, timeout_s=args.timeout_s, in_prompt=args.no_salt,
    )  # fmt: skip


def _trace(args: argparse.Namespace) -> list[Ask]:
    bound = args.requests or REQUESTS_MAX
    try:
        with open(args.trace, "rb") as lines:
            found = serve_trace.read(lines, speed=args.trace_speed, scale=args.length_scale, requests_max=bound)
    except serve_trace.TraceError as error:
        raise CommandError(f"argument --trace: {args.trace}: {error}; see docs/bench.md for the format") from None
    except OSError as error:
        raise CommandError(f"argument --trace: {args.trace}: {error.strerror}; name a file of JSON lines") from None
    return found
