"""`kvbaton bench vllm`: aggregated vLLM, with kvbaton, and with its own NIXL connector, under the same load here.

Laws: an invalid level or target is refused by its name, before anything is started. The exit status is 0 only if every
request to kvbaton's targets was answered in full (as the aggregated engine answered it, where that was measured) and
all their engines became idle.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence

from kvbaton.cli import progress
from kvbaton.cli.arguments import planes_choice, seconds, whole
from kvbaton.cli.progress import note
from kvbaton.cli.screen import stdout
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.vllm.vllm_rows import Level
from kvbaton_proof.cli.bench_results import names_of, new_file, show

TARGETS = ("aggregated", "kvbaton-pull", "kvbaton-push", "kvbaton-stream", "nixl")
"""In measuring order: the others' answers are compared with the first's."""
DEFAULT_TARGETS = ("aggregated", "kvbaton-pull", "kvbaton-push", "nixl")
DEFAULT_REQUESTS: Mapping[int, int] = {1: 30, 32: 192, 128: 384, 256: 512, 512: 1024}
CONCURRENCY_MAX, REQUESTS_MAX, REQUESTS_MIN = 2048, 1 << 20, 30


def add(parser: argparse.ArgumentParser) -> None:
    option = parser.add_argument
    option("--targets", type=names_of(TARGETS, in_order=True), default=",".join(DEFAULT_TARGETS), metavar="A,B",
           help=f"of {', '.join(TARGETS)}")  # fmt: skip
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


def _numbers(high: int) -> Callable[[str], tuple[int, ...]]:
    one = whole(1, high)

    def parse(text: str) -> tuple[int, ...]:
        numbers = tuple(one(part) for part in text.split(","))
        if high == CONCURRENCY_MAX and len(set(numbers)) != len(numbers):
            raise argparse.ArgumentTypeError(f"got {text!r}, which has a level twice; --rounds repeats all")
        return numbers

    return parse


def run(args: argparse.Namespace) -> int:
    from kvbaton.local_cluster import vllm_engine
    from kvbaton_proof.bench.kit import run_facts
    from kvbaton_proof.bench.vllm import vllm_levels, vllm_rows
    from kvbaton_proof.rig.servers import SERVED

    planned = levels(args.concurrency, args.requests)
    out, say = new_file("out", args.out), functools.partial(note, "bench")
    raise_file_limit()
    python = vllm_engine.find_python(args.vllm_python)
    versions = vllm_levels.versions(python)
    if vllm_levels.NIXL in args.targets and "nixl" not in versions:
        raise CommandError(f"{python} has no nixl; make vllm-nixl installs it, or remove nixl from --targets")
    model = vllm_engine.tiny_model(python, vllm_engine.TINY_KINDS[0], vllm_engine.TINY_SEED)
    server = vllm_engine.ServerOptions(python=python, model=str(model), served_name=SERVED, kv_gib=args.kv_gib)
    if args.input_len + args.output_len > server.max_model_len:
        raise CommandError(f"--input-len and --output-len: more than {server.max_model_len} tokens together")
    plan = vllm_levels.VllmBenchPlan(
        setup=vllm_levels.Setup(server=server, prefix_caching=args.prefix_caching, transport=args.transport),
        targets=args.targets, levels=planned, rounds=args.rounds, input_tokens=args.input_len,
        output_tokens=args.output_len, rest_s=args.rest_s, level_s=args.level_s,
    )  # fmt: skip
    watch = run_facts.Stopwatch()
    with progress.shown("bench vllm", quiet=args.json):
        findings = asyncio.run(vllm_levels.measure(plan, say))
    own = {"kvbaton": run_facts.own_versions()["kvbaton"], **versions}
    told = watch.facts(shlex.join(["kvbaton", *sys.argv[1:]]), own, with_memory=True)
    facts, ok = vllm_levels.facts_of(plan, told, findings), vllm_levels.is_ok(plan, findings)
    shown = vllm_rows.findings(facts, findings.rows)
    verdict = f"{stdout().verdict(ok)} ({facts.seconds:.0f} s)"
    show(shown, vllm_levels.as_object(facts, findings, ok), as_json=args.json, page=out, verdict=verdict)
    return 0 if ok else 1
