"""The command line: which parts, on what, and where the results go. The exit status is the verdict.

The parts, what each shows, and which of them share servers.

Law: an act is a set of parts whose servers fit on one GPU together; they are started at once, because a start costs
more than what is asked of them. Parts of an act run one after the other, so that none disturbs what another measures.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.engines.vllm.launch import launching
from kvbaton.engines.vllm.models.tiny_hybrids import HYBRIDS
from kvbaton_proof.gpu_test import (
    exact,
    gpu_answers,
    gpu_faults,
    gpu_features,
    gpu_handoff,
    gpu_hybrids,
    gpu_load,
    gpu_machine,
    gpu_sglang,
    gpu_streams,
    gpu_turns,
    timing,
)
from kvbaton_proof.gpu_test.gpu_features import FEATURES
from kvbaton_proof.gpu_test.sizes import Sizes, sizes_of
from kvbaton_proof.rig import record
from kvbaton_proof.rig.connectors import has_nixl
from kvbaton_proof.rig.record import Book, Page
from kvbaton_proof.rig.servers import Group, Say, Site, Spec, standing

ABOUT: Mapping[str, str] = {
    "answers": "Greedy tokens of P and D beside one engine's, float32: modes, model runners, CUDA graphs, chunks, "
               "prefix-cache hits, preemption, and a control that damages blocks.",
    "bytes": "bfloat16, FLASH_ATTN: D goes on from P's KV with the very numbers with which P itself goes on.",
    "mla": "The same with a latent KV (MLA).",
    "hybrids": "Greedy tokens of models whose layers keep a state (Falcon-H1-, Qwen3-Next-, Nemotron-H-, Mamba2-like) "
               "beside one engine's: modes, with and without a prefix cache, and a control that damages states.",
    "features": "Drafts (EAGLE, MTP, n-grams), KV in 8 bits, vLLM's OffloadingConnector beside ours, LoRA, one side "
                "without a prefix cache: answers and accepted drafts beside one engine's, refusals, controls.",
    "turns": "Conversations of several turns, with a D that keeps them and one that does not: answers beside one "
             "engine's, turns that P took, time to first token of each turn.",
    "streams": "Streams that outlive their D: 64 of mixed kinds while it is killed, gaps at a kill with copies and "
               "without and at a drain, time to first token with P's first token, gaps without faults.",
    "timing": "The shape of an 8B model, CUDA graphs, one request at a time: D's leg beside its floor, time to first "
              "token when streaming beside one engine's, NixlConnector at its best settings beside both.",
    "load": "32 requests at once of 2,000 tokens: requests per second beside NixlConnector's, and what D's streams "
            "feel of loads that arrive.",
    "faults": "The same hand does the same things to a pair with kvbaton and to a pair with NixlConnector.",
    "sglang": "Real SGLang with kvbaton beside one engine and beside its own nixl: answers, a control, faults under "
              "load, time to first token. Only where it is named; needs SGLang beside this Python.",
    "handoff": "Without an engine: the contract of the device's data planes, and a handoff of 2.1 GB beside its copy.",
}  # fmt: skip
STANDARD: Sequence[Sequence[str]] = (
    ("answers", "bytes", "mla"), ("hybrids",), ("features",), ("turns",), ("streams",), ("timing", "load"), ("faults",),
    ("handoff",),
)  # fmt: skip
QUICK: Sequence[Sequence[str]] = (("answers", "timing"), ("handoff",))
SGLANG_ACT: Sequence[str] = ("sglang",)
"""Of another engine: never unless it is named."""
REHEARSED: Sequence[Sequence[str]] = (("answers",), ("timing", "load"), ("faults",))
"""On a CPU: what needs no device. `bytes`, `mla`, `hybrids`, `features` and `streams` can be named."""


def acts(device: str, quick: bool, named: Sequence[str] | None) -> list[list[str]]:
    """Which parts run, in which acts; ValueError names a part that there is not."""
    if named is None:
        return [list(act) for act in (REHEARSED if device == "cpu" else QUICK if quick else STANDARD)]
    unknown = [name for name in named if name not in ABOUT]
    if unknown:
        raise ValueError(f"--part: got {unknown[0]!r}, expected one of {', '.join(ABOUT)}")
    found = [[name for name in act if name in named] for act in (*STANDARD, SGLANG_ACT)]
    return [act for act in found if act]


PAGE = "gpu-test.md"
Groups = dict[str, Group]


@dataclass(slots=True)
class Stage:
    """What a part is given."""

    sizes: Sizes
    site: Site
    groups: Groups
    session: aiohttp.ClientSession
    say: Say
    sglang: Sequence[str]


Run = Callable[[Stage, Page], Awaitable[None]]


async def _faults(stage: Stage, page: Page) -> None:
    connections = aiohttp.TCPConnector(limit=0, force_close=True)  # none that a fault has broken is used again
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(connector=connections, timeout=timeout) as session:
        await gpu_faults.run(stage.sizes, stage.site, session, page, stage.say)


def _shared(run: Callable[..., Awaitable[None]], *first: object) -> Run:
    """A part that asks servers of its act."""
    return lambda stage, page: run(*first, stage.sizes, stage.groups, stage.session, page, stage.say)


def _timed(run: Callable[..., Awaitable[None]]) -> Run:
    """The same of one whose times say something on a GPU alone."""
    return lambda stage, page: run(
        stage.sizes, stage.groups, stage.session, page, stage.say, stage.site.device == "cuda"
    )


RUN: Mapping[str, Run] = {
    "answers": _shared(gpu_answers.run), "bytes": _shared(exact.run, exact.BYTES), "mla": _shared(exact.run, exact.MLA),
    "hybrids": _shared(gpu_hybrids.run),
    "features": lambda stage, page: gpu_features.run(stage.sizes, stage.site, stage.session, page, stage.say),
    "streams": lambda stage, page: gpu_streams.run(stage.sizes, stage.site, stage.session, page, stage.say),
    "turns": _timed(gpu_turns.run), "timing": _timed(timing.run), "load": _timed(gpu_load.run), "faults": _faults,
    "sglang": lambda stage, page: gpu_sglang.run(stage.site, stage.session, page, stage.say, stage.sglang),
    "handoff": lambda stage, page: gpu_handoff.run(stage.sizes, page, stage.say),
}  # fmt: skip


def specs(name: str, sizes: Sizes) -> list[Spec]:
    """The servers of a part; those of `faults`, `streams` and `features` are their own: two kill them, one has
    more than fit."""
    if name == "answers":
        return gpu_answers.specs(sizes)
    if name in ("bytes", "mla"):
        return exact.specs(exact.BYTES if name == "bytes" else exact.MLA, sizes)
    if name == "hybrids":
        return gpu_hybrids.specs(sizes)
    if name == "turns":
        return gpu_turns.specs(sizes)
    return timing.specs(sizes) if name in ("timing", "load") else []


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="python -m kvbaton_proof.gpu_test", description="Prove kvbaton under vLLM on this machine's GPU."
    )
    add = made.add_argument
    add("--part", metavar="NAME[,NAME]", default=None, help=f"only these: {', '.join(ABOUT)}")
    add("--quick", action="store_true", help="fewer of everything: at most 4 minutes on an H200")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a rehearsal at tiny sizes")
    add("--out", type=Path, default=Path("gpu-test"), metavar="DIR", help="for results and logs (default: gpu-test)")
    add("--vllm-python", default=None, metavar="PATH", help="the Python that has vLLM (default: looked for)")
    add("--nixl", choices=("auto", "on", "off"), default="auto", help="vLLM's own connector beside (auto: as planned)")
    add("--faults", metavar="TITLE[,TITLE]", default=None, help="of the part faults, only these steps")
    add("--models", metavar="NAME[,NAME]", default=None, help=f"of the part hybrids, only these: {', '.join(HYBRIDS)}")
    add(
        "--features",
        metavar="NAME[,NAME]",
        default=None,
        help=f"of the part features, only these: {', '.join(FEATURES)}",
    )
    add("--sglang", default=",".join(gpu_sglang.STEPS), metavar="STEP[,STEP]", help="of the part sglang, only these")
    add("--json", action="store_true", help="print the whole record on stdout at the end, all else on stderr")
    add(
        "--page", action="store_true", help="only draw the page again, of the record in --out: of a run that was killed"
    )
    add("--list", action="store_true", help="list the parts and do nothing")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser()
    args = options.parse_args(argv)
    if args.list:
        for name, what in ABOUT.items():
            print(f"{name:10} {what}")
        return 0
    if args.page:
        try:
            found = record.read(args.out / record.FILE)
        except (OSError, ValueError) as error:
            options.error(str(error))
        (args.out / PAGE).write_text(record.drawn(found, ABOUT))
        return 0 if found.ok else 1
    try:
        wanted = acts(args.device, args.quick, None if args.part is None else args.part.split(","))
        python = sys.executable if wanted == [["sglang"]] else launching.find_python(args.vllm_python)
    except (ValueError, launching.LaunchError) as error:
        options.error(str(error))
    if args.device == "cuda" and not gpu_machine.has_gpu():
        options.error("there is no GPU that the driver knows of; a rehearsal without one: --device cpu")
    sizes = _sized(args, options)
    begun = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - begun:6.1f} {text}", file=sys.stderr if args.json else sys.stdout, flush=True)

    out = args.out.resolve()
    plan = "quick" if args.quick else "standard"
    book = Book(out, plan, args.device, gpu_machine.described(args.device), gpu_machine.command_line())
    asyncio.run(_run(book, wanted, sizes, args.device, python, out, say, args.sglang.split(",")))
    (out / PAGE).write_text(record.drawn(book.record, ABOUT))
    _told(book, [name for act in wanted for name in act], out, say)
    if args.json:
        sys.stdout.write(msgspec.json.encode(book.record).decode() + "\n")
    return 0 if all(book.record.parts[name].ok for act in wanted for name in act) else 1


def _sized(args: argparse.Namespace, options: argparse.ArgumentParser) -> Sizes:
    sizes = sizes_of(args.device, args.quick)
    if args.nixl == "on" and not has_nixl():
        options.error("--nixl on: there is no nixl beside this Python; install one: pip install nixl-cu13")
    if args.nixl != "auto" or not has_nixl():
        sizes = msgspec.structs.replace(sizes, nixl=args.nixl == "on")
    if args.models is not None:
        named = tuple(args.models.split(","))
        unknown = [name for name in named if name not in HYBRIDS]
        if unknown:
            options.error(f"--models: got {unknown[0]!r}, expected one of {', '.join(HYBRIDS)}")
        sizes = msgspec.structs.replace(sizes, hybrids=named)
    try:
        if args.features is not None:
            sizes = msgspec.structs.replace(sizes, features=gpu_features.named(args.features.split(",")))
        if args.faults is not None:
            sizes = msgspec.structs.replace(sizes, faults=gpu_faults.named(args.faults.split(",")))
    except ValueError as error:
        options.error(str(error))
    return sizes


def _told(book: Book, names: Sequence[str], out: Path, say: Say) -> None:
    for name in names:
        part = book.record.parts[name]
        missed = [each for each in part.verdicts if each.judged and not each.ok]
        state = "ok" if part.ok else "NOT OK"
        say(f"{name}: {state}, {len(part.verdicts)} verdicts, {len(missed)} missed, {part.seconds:.0f} s")
        for each in missed:
            say(f"  missed: {each.name}: {each.reached} (bound: {each.bound})")
        for note in [] if part.ok else part.notes:
            say(f"  {note}")
    say(f"results: {book.path}, {out / PAGE}")


async def _run(
    book: Book, wanted: Sequence[Sequence[str]], sizes: Sizes, device: str, python: str, out: Path, say: Say,
    sglang: Sequence[str] = gpu_sglang.STEPS,
) -> None:  # fmt: skip
    """Every act; one that fails is told in its parts, and the next begins. SIGTERM ends all servers too."""
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    connections = aiohttp.TCPConnector(limit=0, force_close=False, keepalive_timeout=4)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    with tempfile.TemporaryDirectory(prefix="kvbaton-gpu-", ignore_cleanup_errors=True) as directory:
        async with aiohttp.ClientSession(connector=connections, timeout=timeout, read_bufsize=1 << 20) as session:
            for act in wanted:
                logs = out / "logs"
                logs.mkdir(parents=True, exist_ok=True)
                site = Site("cpu" if device == "cpu" else "cuda", python, Path(directory) / act[0], logs)
                await _act(book, act, sizes, site, session, say, sglang)


async def _act(
    book: Book, act: Sequence[str], sizes: Sizes, site: Site, session: aiohttp.ClientSession, say: Say,
    sglang: Sequence[str] = gpu_sglang.STEPS,
) -> None:  # fmt: skip
    pages = {name: book.begin(name) for name in act}
    wanted = {spec.name: spec for name in act for spec in specs(name, sizes)}
    say(f"{', '.join(act)}: starting {len(wanted)} groups of servers: {', '.join(wanted) or 'none'}")
    begun = time.monotonic()
    try:
        async with contextlib.AsyncExitStack() as stack:
            groups: Groups = {}
            if wanted:
                groups = await stack.enter_async_context(standing(site, list(wanted.values()), session, say))
            for name, found in pages.items():
                found.figure("servers up after", round(time.monotonic() - begun, 1))
                say(f"part {name}")
                await _part(name, Stage(sizes, site, groups, session, say, sglang), found)
    except (launching.LaunchError, OSError) as error:
        for found in pages.values():
            if not found.part.ended:
                found.verdict("servers started", str(error), "yes", False)


async def _part(name: str, stage: Stage, found: Page) -> None:
    try:
        await RUN[name](stage, found)
        found.end()
    except Exception as error:  # noqa: BLE001 - whatever a part stumbles over is told, and the others are run
        found.note("".join(traceback.format_exception(error))[-3000:])
        found.verdict("ran to its end", f"{type(error).__name__}: {error}", "yes", False)
