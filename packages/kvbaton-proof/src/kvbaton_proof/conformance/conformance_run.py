"""Runs the suite by pytest and tells what came of it: one object or a few lines on stdout, the verdict as status.

Laws: a failure names one command that replays it. The suite's tests are in `suite`; this is a plugin of pytest too,
with the options that choose among them. Needs vLLM's Python, and pytest in it; `kvbaton conformance vllm` finds it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from kvbaton.engines.vllm.config import vllm_versions
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.conformance import configs
from kvbaton_proof.conformance.case_registry import Case, CaseVerdict, all_cases

if TYPE_CHECKING:  # the command says what to do where there is none
    import pytest

SEEDS = range(100)
SEED = "seed "
SHOWN_MAX = 20
BAD_USAGE = 2
INTERRUPTED = 2  # what pytest makes of Ctrl-C
VERDICT = "verdict"
"""The property of a test's report that holds what came of it."""
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
    spread: bool = False,
    tell: Callable[[str], None] = lambda _: None,
    printing: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> int:
    """Run what is asked for: all cases and the default seeds, some cases, or some seeds.

    `tell` hears of progress; results are printed in a context of `printing`.
    """
    if importlib.util.find_spec("pytest") is None:
        raise CommandError(f"the suite runs by pytest, which this Python lacks: {sys.executable} -m pip install pytest")
    configs.prepare()
    configs.hush()
    known = all_cases(spread=spread)
    chosen = _chosen(known, cases) if cases is not None else known if seeds is None else []
    if listed or (cases is not None and not chosen):
        if not listed:
            with printing():
                print(f"kvbaton conformance: no case is called {cases}; see: kvbaton conformance vllm --list",
                      file=sys.stderr, flush=True)  # fmt: skip
            return BAD_USAGE
        print("\n".join(each.name for each in known))
        return 0
    wanted = seeds if seeds is not None else range(0) if cases is not None else SEEDS
    words = ["--conformance-case", cases] if cases is not None else []
    words += ["--conformance-spread"] * spread + ["--conformance-seeds", f"{wanted.start}..{wanted.stop}"]
    tests = ["test_case"] * bool(chosen) + ["test_seed"] * bool(wanted)
    count, begun = len(chosen) + len(wanted), time.monotonic()
    collector = Collector(ConformanceReport(vllm=vllm_versions.vllm_version()), count, tell)
    problem = _pytest([*words, *_parallel(processes, count)], tests, collector)
    report = collector.report
    report.wall_s = round(time.monotonic() - begun, 1)
    report.holds = not (report.failed or report.seeds_failed or problem)
    with printing():
        print(msgspec.json.encode(report).decode() if as_json else _text(report), flush=True)
        if problem:
            print(problem, file=sys.stderr, flush=True)
    return 0 if report.holds else 1


def _parallel(processes: int, count: int) -> list[str]:
    """In processes of their own, since all that a case uses is one process wide; one where pytest has no xdist."""
    is_able = processes > 1 and count >= PARALLEL_MIN and importlib.util.find_spec("xdist") is not None
    return ["-n", str(processes), "--dist", "worksteal"] if is_able else []


def _pytest(words: Sequence[str], tests: Sequence[str], collector: Collector) -> str:
    """Run these tests, without the configuration of whatever project is here; says what kept pytest from it."""
    import pytest

    suite, output = Path(__file__).with_name("suite.py"), io.StringIO()
    alone = [
        "-c",
        os.devnull,
        "--rootdir",
        str(suite.parent),
        "--noconftest",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
        "-q",
    ]
    ours = ["-p", __name__, "--tb", "no", *words, *(f"{suite}::{name}" for name in tests)]
    with contextlib.redirect_stdout(output):
        status = pytest.main([*alone, *ours], plugins=[collector])
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    missing = collector.count - collector.ended
    return output.getvalue() if missing or status not in (0, 1) else ""


class Collector:
    """A plugin of pytest that adds up what its reports say."""

    def __init__(self, report: ConformanceReport, count: int, tell: Callable[[str], None]) -> None:
        self.report = report
        self.count = count
        self.ended = 0
        self._tell = tell

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        verdicts = [value for name, value in report.user_properties if name == VERDICT and report.when == "call"]
        for value in verdicts:
            verdict = msgspec.json.decode(str(value), type=CaseVerdict)
            _take(self.report, verdict)
            self.ended += 1
            broken = self.report.failed + self.report.seeds_failed
            self._tell(f"{self.ended} of {self.count}, {broken} broken: {verdict.name.replace('_', ' ')}")


def pytest_addoption(parser: pytest.Parser) -> None:
    option = parser.getgroup("conformance").addoption
    option("--conformance-case", metavar="NAME", help="only this case, or all whose names contain this text")
    option(
        "--conformance-seeds", metavar="A..B", default="0..0", help="interleavings of these seeds, the last excluded"
    )
    option("--conformance-spread", action="store_true", help="every value of arguments, not every combination")


def pytest_configure(config: pytest.Config) -> None:
    """In each process that runs tests, before its first."""
    hands_out = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")  # xdist's, for others
    if not hands_out:
        configs.prepare()
        configs.hush()
        configs.warm()


def wanted_cases(config: pytest.Config) -> list[Case]:
    known = all_cases(spread=config.getoption("conformance_spread"))
    name = config.getoption("conformance_case")
    return known if name is None else _chosen(known, name)


def wanted_seeds(config: pytest.Config) -> range:
    first, _, last = config.getoption("conformance_seeds").partition("..")
    return range(int(first), int(last))


def _chosen(known: Sequence[Case], text: str) -> list[Case]:
    """The case of that name, with its arguments or without; else all whose names hold the text."""
    exact = [each for each in known if text in (each.name, each.name.split("[")[0])]
    return exact or [each for each in known if text in each.name]


def _take(report: ConformanceReport, verdict: CaseVerdict) -> None:
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


def _add(report: ConformanceReport, verdict: CaseVerdict, replay: str) -> None:
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
