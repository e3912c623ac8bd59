"""`kvbaton bench transfer`: transports compared with the machine's limits and, with `--peers`, with other libraries.

Law: the exit status is the verdict: 0 when every byte was right and, with peers, every claim holds.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from kvbaton import __version__
from kvbaton.cli import progress
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.kit.bench_peers import ADVICE, DISTRIBUTIONS, PACKAGES
from kvbaton_proof.bench.kit.piped_children import ChildFailed
from kvbaton_proof.bench.transfer import idle, transfer_checks, transfer_page, transfer_rounds, whole_handoff
from kvbaton_proof.cli import bench_device

OWN_PLANES = ("shm", "tcp")


def run(args: argparse.Namespace) -> int:
    if args.device == "cuda":
        return bench_device.run(args)
    _check(args)
    load, begun = os.getloadavg()[0], time.monotonic()
    try:
        with progress.shown("bench transfer", quiet=args.json) as tell:
            report = _measure(args, tell)
    except ChildFailed as error:
        raise CommandError(str(error)) from None
    facts = transfer_page.TransferFacts(
        load_before=load,
        load_after=os.getloadavg()[0],
        versions=_versions(args.peers),
        command=run_facts.shown(sys.argv[1:]),
        seconds=time.monotonic() - begun,
        date=run_facts.today(),
        machine=run_facts.machine(),
        cores=os.cpu_count() or 1,
    )
    typed = msgspec.convert(report, transfer_page.Report)
    _write(args, facts, typed)
    if args.json:
        print(json.dumps({**report, "facts": msgspec.to_builtins(facts)}))
    else:
        print(transfer_rounds.table(report))
        print(_handoffs(typed))
        print("\n".join(transfer_page.check_lines(typed.checks)))
    correct = all(each.delivered == each.handoffs for each in typed.handoffs)
    return 0 if correct and all(each.ok for each in typed.checks) else 1


def _check(args: argparse.Namespace) -> None:
    """Errors that can be detected before minutes are spent."""
    for peer in args.peers:
        if not any(importlib.util.find_spec(name) for name in PACKAGES[peer]):
            raise CommandError(f"argument --peers: {peer} is not installed here; {ADVICE}")
    for flag in ("out", "plot"):
        path = getattr(args, flag)
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise CommandError(f"argument --{flag}: {path}: no such folder; create it first")


def _measure(args: argparse.Namespace, say: Callable[[str], None]) -> dict[str, object]:
    segments = transfer_rounds.PEER_SEGMENT_BYTES if args.peers else transfer_rounds.SEGMENT_BYTES
    report = transfer_rounds.measure(repetitions=args.repetitions, segments=segments, peers=args.peers, say=say)
    if args.peers:
        planes = (*OWN_PLANES, *args.peers)
        say(f"idle for {idle.IDLE_S:.0f} s: {', '.join(planes)}")
        percent = idle.measure(planes)
        found = msgspec.convert(report["checks"], list[transfer_checks.Check])
        report["idle_percent"] = percent
        report["checks"] = msgspec.to_builtins([*found, *transfer_checks.judge_idle(percent)])
    stack = []
    for name in OWN_PLANES:
        say(f"handoffs over {name}")
        stack.append(whole_handoff.measure(name))
    report["handoffs"] = msgspec.to_builtins(stack)
    return report


def _versions(names: list[str]) -> dict[str, str]:
    found = {"kvbaton": __version__, "python": platform.python_version()}
    for name in names:
        present = run_facts.installed(DISTRIBUTIONS[name])
        found |= dict(list(present.items())[:1])
    return found


def _write(args: argparse.Namespace, facts: transfer_page.TransferFacts, report: transfer_page.Report) -> None:
    plot = Path(args.plot) if args.plot else Path(args.out).with_suffix(".svg") if args.out else None
    if plot is not None:
        plot.write_text(transfer_page.plot(report.segments))
    if args.out and plot is not None:
        beside = os.path.relpath(plot, Path(args.out).parent)
        Path(args.out).write_text(transfer_page.page(msgspec.structs.replace(facts, plot=beside), report))


def _handoffs(report: transfer_page.Report) -> str:
    lines = ["one-block handoffs through the whole stack: p50, p99 one at a time; rate at concurrency 64; delivered"]
    lines += [
        f"{each.transport:>6}  {each.p50_ms:7.3f} ms {each.p99_ms:7.3f} ms {each.handoffs_per_s:9.0f}/s   "
        f"{each.delivered} of {each.handoffs}"
        for each in report.handoffs
    ]
    return "\n".join(lines)
