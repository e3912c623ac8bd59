"""`kvbaton bench serve`: client-side latency and throughput of a cluster under load, target by target, in rounds.

Laws: an invalid value is refused by its name, before anything is started. The exit status is the verdict on answers,
never on speed: 0 if every request was answered in full, 1 with counts if not. Ctrl-C prints what was measured until
then.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from kvbaton.api.http.server_loop import run as run_loop
from kvbaton.cli import progress
from kvbaton.cli.arguments import planes_choice, seconds, url, whole
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.operator_errors import CommandError, StoppedError
from kvbaton_proof.bench.kit.run_facts import AGGREGATED, SINGLE
from kvbaton_proof.bench.load.request_plan import REQUESTS, Lengths
from kvbaton_proof.bench.serve.contenders import MODES, SHAPES, TIMED, contender
from kvbaton_proof.cli.bench_results import new_file, show
from kvbaton_proof.rig.connectors import given

INTERRUPTED = 130
SUFFIXES = (".md", ".svg", ".json")
ENGINES = ("embedded", "vllm")
DEFAULT_COMPARED = (AGGREGATED, *MODES)
CONCURRENCY, ROUNDS = 8, 6
INPUT_LEN, OUTPUT_LEN = "256", "32"
CONCURRENCY_MAX, ROUNDS_MAX, TARGETS_MAX, WARMUPS_MAX = 2048, 100, 16, 1024
_NAME = re.compile(r"[\w.-]{1,40}")
_OWN = (
    "engine", "compare", "contender", "prefill", "decode", "transport", "lease_s", "blocks", "vllm_python", "vllm_args",
    "kv_gib", "max_model_len", "place", "device", "shape",
)  # fmt: skip
_ONLY = {
    "embedded": ("blocks",),
    "vllm": ("contender", "vllm_python", "vllm_args", "kv_gib", "max_model_len", "place", "device", "shape"),
}
ROUTER_ARGS = ("--fallback", "strict", "--deadline-s", "900", "--first-byte-s", "900")
"""A mode is measured and nothing in its place; of a request its own time-out counts."""


class Given(msgspec.Struct, frozen=True):
    """A running server. `mode` is sent as a header, for a kvbaton router."""

    name: str
    url: str
    mode: str | None = None


def add(parser: argparse.ArgumentParser) -> None:
    add_where(parser.add_argument_group("targets: running servers, or a cluster started for this"))
    _load(parser.add_argument_group("load"))
    option = parser.add_argument
    option(
        "--rounds",
        type=whole(1, ROUNDS_MAX),
        default=ROUNDS,
        metavar="N",
        help="rounds; each measures every target once",
    )
    option("--warmup", type=whole(0, WARMUPS_MAX), metavar="N", help="uncounted requests before a part (default: 4, or "
           "two per pair)")  # fmt: skip
    option(
        "--slo", type=slo, metavar="A=S,B=S", help="objectives for goodput, in seconds: ttft, tpot, itl, itl_p99, e2e"
    )
    option("--timeout-s", type=seconds, default=120.0, metavar="SECONDS", help="timeout of one request")
    option("--part-s", type=seconds, default=600.0, metavar="SECONDS", help="deadline of a part")
    option("--record", metavar="FILE", help="write the requests as a trace, for --trace")
    option("--out", metavar="DIR", help="write a page, a plot and the figures there, as in docs/lab")
    option("--name", metavar="NAME", help="base name of these files (default: DATE-serve)")
    option("--json", action="store_true", help="print one object with the figures")


def add_where(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--url", type=url, action="append", default=[], metavar="URL", help="a server; several are compared")
    option("--target", type=_target, action="append", default=[], metavar="NAME=URL[#MODE]",
           help="the same, with a name and optionally a mode to request")  # fmt: skip
    option("--model", metavar="NAME", help="the model's name (default: the first that the servers list)")
    option("--no-salt", action="store_true", help="for servers without cache_salt: make prompts unique instead")
    option("--engine", choices=ENGINES, help="what to start, without --url and --target (default: embedded)")
    option("--compare", type=_names, metavar="A,B",
           help=f"of {', '.join((AGGREGATED, *MODES, SINGLE))} (default: the first four); with vllm also nixl, "
           "offloading and --contender's; pull+turns, stream+store; nixl@toy, pull@vllm-router")  # fmt: skip
    option("--contender", action="append", metavar="NAME=JSON", help="vllm: anybody's connector, by its "
           "--kv-transfer-config, or a file of it: docs/test-your-own-connector.md")  # fmt: skip
    option("--prefill", type=whole(1, 16), metavar="N", help="prefill engines (default: 1)")
    option("--decode", type=whole(1, 16), metavar="N", help="decode engines; aggregated: as many in total (default: 1)")
    option("--transport", type=planes_choice, metavar="NAMES", help="transports (default: auto)")
    option("--lease-s", type=seconds, metavar="SECONDS", help="how long P keeps a prompt for D (default: a connector's "
           "own)")  # fmt: skip
    option("--blocks", type=whole(2, 1 << 20), metavar="N", help="embedded: KV cache blocks per engine (default: 1024)")
    option("--vllm-python", metavar="PATH", help="vllm: the Python interpreter with vLLM (default: searched for)")
    option("--vllm-args", metavar="WORDS", help="vllm: more words of every server's command, in quotes, such as "
           "'--max-num-batched-tokens 512'")  # fmt: skip
    option("--kv-gib", type=whole(1, 1024), metavar="N", help="vllm: KV cache of each engine (default: 1)")
    option("--place", type=_names, metavar="A,B", help="vllm: GPUs for the engines of each cluster in turn, as "
           "CUDA_VISIBLE_DEVICES takes them (numbers, GPU-… or MIG-…); all clusters are started at once")  # fmt: skip
    option("--device", choices=("cuda", "cpu"), help="vllm: what engines run on (default: with --place cuda, else cpu)")
    option("--shape", choices=SHAPES, help="with --place: 8b, an 8B model's shape for timing (bfloat16, CUDA graphs; "
           "answers are not compared), or small, in float32 (default: 8b)")  # fmt: skip
    option("--max-model-len", type=whole(16, 1 << 20), metavar="N", help="vllm: tokens of a request (default: 2048)")


def _load(group: argparse._ArgumentGroup) -> None:
    option = group.add_argument
    option("--rate", type=_rate, metavar="R", help="requests/s, Poisson arrivals; inf: all at once")
    option("--concurrency", type=whole(1, CONCURRENCY_MAX), metavar="C", help=f"at most C requests in flight (without "
           f"--rate and --trace {CONCURRENCY})")  # fmt: skip
    option("--requests", type=whole(1, 100_000), metavar="N", help=f"per part (default: {REQUESTS}, all of a trace, or "
           "what --seconds allows)")  # fmt: skip
    option("--seconds", type=seconds, metavar="S", help="duration of each part")
    option("--input-len", type=_lengths, metavar="TOKENS", help=f"of a prompt: a number, or min:max (default: "
           f"{INPUT_LEN})")  # fmt: skip
    option("--output-len", type=_lengths, metavar="TOKENS", help=f"of an answer, likewise (default: {OUTPUT_LEN})")
    option("--prefix-len", type=whole(1, 1 << 20), metavar="TOKENS", help="additional shared prefix")
    option("--prefixes", type=whole(1, 4096), metavar="K", help="number of shared prefixes (default: 1)")
    option("--trace", metavar="FILE", help="a recorded load: JSON lines in Mooncake's trace format, or --record's")
    option("--trace-speed", type=factor, metavar="X", help="replay X times as fast (default: 1)")
    option("--length-scale", type=factor, metavar="X", help="scale a trace's lengths, for small engines (default: 1)")
    option("--seed", type=whole(0, (1 << 32) - 1), default=0, metavar="N", help="seed of all random draws")


def check(args: argparse.Namespace) -> None:
    """Fill in the defaults; refuse what does not go together."""
    check_where(args)
    args.router_args = ROUTER_ARGS
    _check_load(args)
    if args.concurrency is None and args.rate is None and args.trace is None:
        args.concurrency = CONCURRENCY


def check_where(args: argparse.Namespace) -> None:
    """Which targets are asked, or started."""
    args.targets = _targets(args)
    if not args.targets:
        _check_own(args)
        return
    for name in _OWN:
        if getattr(args, name) is not None:
            raise CommandError(f"argument --{_flag(name)}: running servers are not started; remove --url and "
                               "--target to start a cluster")  # fmt: skip


def _check_load(args: argparse.Namespace) -> None:
    if args.trace is not None and args.rate is not None:
        raise CommandError("argument --rate: a trace has its own times; give --trace-speed to change them")
    drawn, replayed = ("input_len", "output_len", "prefix_len", "prefixes"), ("trace_speed", "length_scale")
    for name in drawn if args.trace is not None else replayed:
        if getattr(args, name) is not None:
            why = (
                "a trace has its own prompts" if args.trace is not None else "it changes a trace; give --trace FILE too"
            )
            raise CommandError(f"argument --{_flag(name)}: {why}")
    if args.prefixes is not None and args.prefix_len is None:
        raise CommandError("argument --prefixes: --prefix-len is missing; give it too")
    args.input_len, args.output_len = args.input_len or _lengths(INPUT_LEN), args.output_len or _lengths(OUTPUT_LEN)
    args.prefix_len, args.prefixes = args.prefix_len or 0, args.prefixes or 1
    args.trace_speed, args.length_scale = args.trace_speed or 1.0, args.length_scale or 1.0


def _check_own(args: argparse.Namespace) -> None:
    args.engine = args.engine or ENGINES[0]
    if args.no_salt or args.model is not None:
        flag = "--no-salt" if args.no_salt else "--model"
        raise CommandError(f"argument {flag}: only for --url and --target; started engines need none")
    other = next(each for each in ENGINES if each != args.engine)
    for name in _ONLY[other]:
        if getattr(args, name) is not None:
            raise CommandError(f"argument --{_flag(name)}: not an option of the {args.engine} engine; "
                               f"add: --engine {other}")  # fmt: skip
    try:
        own = tuple(given(text).name for text in args.contender or ())
    except ValueError as error:
        raise CommandError(f"argument --contender: {error}") from None
    args.compare = tuple(dict.fromkeys((*(args.compare or (() if own else DEFAULT_COMPARED)), *own)))
    for name in args.compare:
        try:
            one = contender(name)
        except ValueError as error:
            raise CommandError(f"argument --compare: {error}") from None
        if args.engine == "embedded" and not one.is_embedded:
            raise CommandError(f"argument --compare: {name} is not played by embedded engines; add: --engine vllm")
    args.prefill, args.decode = args.prefill or 1, args.decode or 1
    args.transport = args.transport or "auto"
    args.device = args.device or ("cuda" if args.place else "cpu")
    if bool(args.shape) > bool(args.place) or (args.device == "cuda" and not args.place):
        flag = "shape" if args.shape else "device"
        raise CommandError(f"argument --{flag}: only with places for the engines; add: --place 0,1")
    args.shape = args.shape or (TIMED if args.place else None)


def _targets(args: argparse.Namespace) -> tuple[Given, ...]:
    urls = [Given("url" if len(args.url) == 1 else f"url{number}", each) for number, each in enumerate(args.url, 1)]
    found = (*args.target, *urls)
    names = [each.name for each in found]
    for name in names:
        if names.count(name) > 1:
            raise CommandError(f"argument --target: two are named {name}; give each its own name")
    if len(found) > TARGETS_MAX:
        raise CommandError(f"argument --target: got {len(found)}, at most {TARGETS_MAX}")
    return found


def _names(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name.strip() for name in text.split(",")))


def _target(text: str) -> Given:
    name, _, rest = text.partition("=")
    where, _, mode = rest.partition("#")
    if not _NAME.fullmatch(name) or not where:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected NAME=http://host:port")
    if mode and mode not in MODES:
        raise argparse.ArgumentTypeError(f"got the mode {mode!r}, expected one of {', '.join(MODES)}")
    return Given(name, url(where), mode or None)


def number(text: str, is_right: Callable[[float], bool], expected: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not is_right(value):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected {expected}")
    return value


def _rate(text: str) -> float:
    return number(text, lambda rate: 0 < rate <= 100_000 or rate == float("inf"), "requests/s above 0, or inf")


def factor(text: str) -> float:
    return number(text, lambda value: 1e-6 <= value <= 1e6, "a number above 0, such as 0.5")


def _lengths(text: str) -> Lengths:
    try:
        return Lengths.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def slo(text: str) -> Any:
    from kvbaton_proof.bench.serve.serve_parts import Slo  # brings numpy, which --help can do without

    try:
        return Slo.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _flag(name: str) -> str:
    return name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    from kvbaton_proof.bench.kit import run_facts
    from kvbaton_proof.bench.serve import serve_clusters, serve_report, serve_run
    from kvbaton_proof.bench.vllm.vllm_levels import versions

    check(args)
    files, record = page_files(args, "serve"), new_file("record", args.record)
    work = serve_run.work_of(args)
    server = None if args.targets else serve_clusters.server_of(args)
    raise_file_limit()
    watch, say = run_facts.Stopwatch(), functools.partial(progress.note, "bench")
    measured = run_loop(serve_run.measure(args, work, server, say, progress.shown))
    if record is not None:
        record.write_bytes(serve_run.recorded(measured))
    if not measured.turns:
        raise StoppedError
    own = run_facts.own_versions("uvloop", "aiohttp")
    facts = watch.facts(run_facts.shown(sys.argv[1:]), own if server is None else {**own, **versions(server.python)})
    report = serve_run.report_of(args, work, measured, facts)
    findings = serve_report.findings(report, files[1].name if files else "")
    show(findings, report, as_json=args.json, page=files[0] if files else None)
    if files:
        write_beside(files, serve_report.plot(report), report)
    if report.stopped:
        return INTERRUPTED
    return 0 if report.ok else 1


def write_beside(files: tuple[Path, ...], plot: str, report: msgspec.Struct) -> None:
    """What belongs to a page: its picture, and the figures."""
    files[1].write_text(plot)
    files[2].write_text(msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")


def page_files(args: argparse.Namespace, what: str, of: str = "") -> tuple[Path, ...]:
    """Page, plot and figures, `of` one of several; nothing is overwritten."""
    from kvbaton_proof.bench.kit import run_facts

    if args.name is not None and not _NAME.fullmatch(args.name):
        raise CommandError(f"argument --name: got {args.name!r}, expected letters, digits, '.', '_' and '-'")
    if args.name is not None and args.out is None:
        raise CommandError("argument --name: it names the files of --out DIR; give that too")
    if args.out is None:
        return ()
    name = "-".join(filter(None, (args.name or f"{run_facts.today()}-{what}", of)))
    if not Path(args.out).is_dir():
        raise CommandError(f"argument --out: {args.out} is not a directory; create it first")
    files = tuple(Path(args.out) / f"{name}{suffix}" for suffix in SUFFIXES)
    for path in files:
        if path.exists():
            raise CommandError(f"argument --out: {path} exists already; give another --name")
    return files
