"""Runs the suite: cases, then seeds; one object or a few lines on stdout, the verdict as status.

Law: a failure names one command that replays it. Needs vLLM's Python; `kvbaton conformance vllm` finds it.
"""

from __future__ import annotations

import functools
import gc
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import msgspec

from kvbaton.engines.vllm.config import vllm_versions
from kvbaton_proof.conformance import configs
from kvbaton_proof.conformance.stalls import StallMeter

SEEDS = range(100)
SEED = "seed "
SHOWN_MAX = 20
BAD_USAGE = 2
COLLECT_EVERY = 20
TRIES = 4
"""How often a case is run that was not in time on a machine that stood still."""
NOT_IN_TIME = "broken"  # of a verdict's kinds
_runs = itertools.count(1)
FORKED_FROM = "kvbaton_proof.conformance.forked_from"
PARALLEL_MIN = 40  # below it, the start of other processes costs more than they save


class ConformanceReport(msgspec.Struct, kw_only=True):
    """The whole run in numbers. `wrong`: oracle violations; `assertion_errors`: vLLM's own, an engine's death each."""

    holds: bool = True
    vllm: str = ""
    cases: int = 0
    failed: int = 0
    seeds: int = 0
    seeds_failed: int = 0
    steps: int = 0
    handoffs: int = 0
    delivered: int = 0
    loads_failed: int = 0
    stale: int = 0
    wrong: int = 0
    blocks_left: int = 0
    assertion_errors: int = 0
    hook_errors: int = 0
    guarded_faults: int = 0
    run_again: int = 0  # not in time while the machine stood still
    wall_s: float = 0.0
    slowest_seed_s: float = 0.0
    failures: list[dict[str, str]] = msgspec.field(default_factory=list)


def main(
    *,
    cases: str | None,
    seeds: range | None,
    as_json: bool,
    listed: bool = False,
    processes: int = 1,
    pairwise: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    printing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run what is asked for: all cases and the default seeds, some cases, or some seeds.

    `tell` hears of progress; results are printed in a context of `printing`.
    """
    configs.prepare()
    configs.hush()
    from kvbaton_proof.conformance.case_registry import all_cases

    known = all_cases(pairwise=pairwise)
    chosen = _chosen(known, cases) if cases is not None else known if seeds is None else []
    if listed or (cases is not None and not chosen):
        if not listed:
            said = f"kvbaton conformance: no case is called {cases}; see: kvbaton conformance vllm --list"
            with printing():
                print(said, file=sys.stderr, flush=True)
            return BAD_USAGE
        print("\n".join(each.name for each in known))
        return 0
    report, begun = ConformanceReport(vllm=vllm_versions.vllm_version()), time.monotonic()
    wanted = seeds if seeds is not None else range(0) if cases is not None else SEEDS
    tasks = [*(each.name for each in chosen), *wanted]
    for at, verdict in enumerate(_verdicts(tasks, processes), 1):
        _take(report, verdict)
        tell(f"{at} of {len(tasks)}, {report.failed + report.seeds_failed} broken: {verdict.name.replace('_', ' ')}")
    report.wall_s = round(time.monotonic() - begun, 1)
    report.holds = not (report.failed or report.seeds_failed)
    with printing():
        print(msgspec.json.encode(report).decode() if as_json else _text(report), flush=True)
    return 0 if report.holds else 1


def _chosen(known: Sequence[Any], text: str) -> list[Any]:
    """The case of that name, with its arguments or without; else all whose names hold the text."""
    exact = [each for each in known if text in (each.name, each.name.split("[")[0])]
    return exact or [each for each in known if text in each.name]


def _take(report: ConformanceReport, verdict: Any) -> None:
    is_seed = verdict.name.startswith(SEED)
    if is_seed:
        report.seeds += 1
        report.seeds_failed += not verdict.holds
        report.slowest_seed_s = max(report.slowest_seed_s, verdict.seconds)
    else:
        report.cases += 1
        report.failed += not verdict.holds
    chosen = f"--seeds {verdict.name.removeprefix(SEED)}" if is_seed else f"--case '{verdict.name}'"
    _add(report, verdict, f"kvbaton conformance vllm {chosen}")


def _verdicts(tasks: Sequence[str | int], processes: int) -> Iterator[Any]:
    """Each task's verdict as it comes; in processes of their own, since all that a case uses is one process wide."""
    if processes == 1 or len(tasks) < PARALLEL_MIN:
        configs.warm()
        yield from map(_run, tasks)
        return
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload([FORKED_FROM])
    with forks.Pool(processes) as pool:
        yield from pool.imap_unordered(_run, tasks)


def _run(task: str | int) -> Any:
    """A case by its name, or a seed."""
    from kvbaton_proof.conformance.case_registry import run_case
    from kvbaton_proof.conformance.interleave import run_seed

    _tidy()
    return _unstalled(lambda: run_seed(task) if isinstance(task, int) else run_case(_by_name()[task]))


def _unstalled(run: Callable[[], Any]) -> Any:
    """What it comes to on a machine that runs it: while this process stands still, leases and time-outs run out."""
    for again in range(TRIES):
        with StallMeter() as meter:
            verdict = run()
        verdict = msgspec.structs.replace(verdict, run_again=again)
        if verdict.kind != NOT_IN_TIME or not meter.stalled:
            break
    return verdict


@functools.cache
def _by_name() -> dict[str, Any]:
    from kvbaton_proof.conformance.case_registry import all_cases

    return {each.name: each for each in all_cases()}


def _tidy() -> None:
    """Engines of earlier cases are cyclic garbage, with caches; a full collection takes as long as a case."""
    if next(_runs) % COLLECT_EVERY == 0:
        gc.collect()


def _add(report: ConformanceReport, verdict: Any, replay: str) -> None:
    report.steps += verdict.steps
    report.handoffs += verdict.handoffs
    report.delivered += verdict.delivered
    report.loads_failed += verdict.failed
    report.stale += verdict.stale
    report.blocks_left += verdict.blocks_left
    report.hook_errors += verdict.hook_errors
    report.guarded_faults += verdict.faults
    report.run_again += verdict.run_again
    report.wrong += verdict.kind == "wrong"
    report.assertion_errors += verdict.kind == "assertion"
    if not verdict.holds and len(report.failures) < SHOWN_MAX:
        failure = {"name": verdict.name, "what": verdict.what, "replay": replay, "trace": verdict.trace}
        report.failures.append(failure)


def _text(report: ConformanceReport) -> str:
    lines = [
        f"{report.cases - report.failed} of {report.cases} cases and {report.seeds - report.seeds_failed} of "
        f"{report.seeds} seeds hold on vLLM {report.vllm}; {report.steps} steps in {report.wall_s:.0f} s",
        f"loads: {report.handoffs}, delivered {report.delivered}, failed {report.loads_failed} "
        f"(stale {report.stale}), wrong {report.wrong}; vLLM assertions {report.assertion_errors}, "
        f"hooks that raised {report.hook_errors}, blocks left {report.blocks_left}",
    ]
    if report.run_again:
        lines.append(f"run again: {report.run_again} times, not in time on a machine that stood still")
    for failure in report.failures:
        lines.append(f"BROKEN {failure['name']}: {failure['what']}\n{failure['trace']}  replay: {failure['replay']}")
    return "\n".join(lines)
