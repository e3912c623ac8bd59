"""`kvbaton conformance`: finds vLLM's Python, goes on there with the same words, and says so when there is none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from kvbaton.cli import main as cli
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.cli import conformance
from kvbaton_proof.conformance.case_registry import (
    STALL_S,
    TRIES,
    CaseVerdict,
    StallMeter,
    each_value,
    unstalled,
)
from kvbaton_proof.conformance.conformance_run import VERDICT, Collector, ConformanceReport


class GoneError(Exception):
    """Stands for the process that has become another."""


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[str], dict[str, str]]]:
    calls: list[tuple[str, list[str], dict[str, str]]] = []

    def execve(python: str, words: list[str], environment: dict[str, str]) -> None:
        calls.append((python, words, environment))
        raise GoneError

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(conformance, "find_python", lambda given: given or "/opt/vllm/bin/python")
    monkeypatch.delenv(conformance.INSIDE_VARIABLE, raising=False)
    return calls


@pytest.mark.parametrize(
    ("words", "passed_on"),
    [
        ([], []),
        (["--json"], ["--json"]),
        (["--seeds", "7"], ["--seeds", "7..7"]),
        (["--seeds", "0..99", "--json"], ["--seeds", "0..99", "--json"]),
        (["--case", "a[b]"], ["--case", "a[b]"]),
        (["--list"], ["--list"]),
        (["--processes", "1"], ["--processes", "1"]),
    ],
)
def test_it_goes_on_in_vllm_s_python_with_the_same_words(
    words: list[str], passed_on: list[str], gone: list[tuple[str, list[str], dict[str, str]]]
) -> None:
    parser = cli.build_parser("conformance", conformance)
    with pytest.raises(GoneError):
        conformance.run(parser.parse_args(["conformance", "vllm", *words]))
    [(python, command, environment)] = gone
    assert python == "/opt/vllm/bin/python"
    assert command[1:] == ["-m", "kvbaton.cli.main", "conformance", "vllm", *passed_on]
    assert environment["PYTHONPATH"].split(os.pathsep)[0] == str(Path(conformance.__file__).parents[2])
    assert conformance.INSIDE_VARIABLE in environment


def test_inside_it_looks_no_further(monkeypatch: pytest.MonkeyPatch, gone: list[object]) -> None:
    monkeypatch.setenv(conformance.INSIDE_VARIABLE, "1")
    asked: list[dict[str, object]] = []

    class Suite:
        @staticmethod
        def main(*, tell: object, printing: object, **options: object) -> int:
            asked.append(options)
            return 1

    monkeypatch.setattr(conformance.importlib, "import_module", lambda name: Suite)
    args = cli.build_parser("conformance", conformance).parse_args(["conformance", "vllm", "--seeds", "3..4"])
    assert conformance.run(args) == 1
    assert asked == [
        {"cases": None, "seeds": range(3, 5), "as_json": False, "listed": False, "processes": 3, "spread": False}
    ]
    assert gone == []


def test_without_vllm_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def nothing(given: str | None) -> str:
        raise CommandError("no vLLM found; install it beside this program: make vllm")

    monkeypatch.setattr(conformance, "find_python", nothing)
    monkeypatch.delenv(conformance.INSIDE_VARIABLE, raising=False)
    assert cli.main(["conformance", "vllm"]) == 2
    assert "make vllm" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["sglang"], ["vllm", "--seeds", "9..3"], ["vllm", "--seeds", "1", "--case", "x"]])
def test_nonsense_is_one_line_and_status_2(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["conformance", *words])
    assert stopped.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_each_value_of_each_argument_is_met_and_other_names_bring_other_pairs_together() -> None:
    choices = (False, True), ("pull", "stream", "push"), ("one group", "two groups")
    each = {name: each_value(name, *choices) for name in ("a", "b", "c", "d", "e", "f")}
    for met in each.values():
        assert len(met) == 3
        assert tuple(map(set, zip(*met, strict=True))) == tuple(map(set, choices))
    assert len({(mode, shape) for met in each.values() for _, mode, shape in met}) == 6


def test_what_came_of_cases_and_seeds_is_added_up_and_a_failure_says_how_it_is_replayed() -> None:
    heard: list[str] = []
    collector = Collector(ConformanceReport(), 3, heard.append)
    for verdict in (
        CaseVerdict(name="all_is_well", steps=5, handoffs=2, delivered=2),
        CaseVerdict(name="one_is_wrong[pull]", what="WrongKvError: x", kind="wrong", steps=1, trace="..."),
        CaseVerdict(name="seed 7", what="AssertionError: y", kind="assertion", seconds=2.5, run_again=1),
    ):
        told = [(VERDICT, msgspec.json.encode(verdict).decode())]
        for when in ("setup", "call", "teardown"):
            collector.pytest_runtest_logreport(SimpleNamespace(user_properties=told, when=when))  # type: ignore[arg-type]
    report = collector.report
    assert (report.cases, report.failed, report.seeds, report.seeds_failed) == (2, 1, 1, 1)
    assert (report.steps, report.wrong, report.assertion_errors, report.run_again) == (6, 1, 1, 1)
    assert [each["replay"] for each in report.failures] == [
        "kvbaton conformance vllm --case 'one_is_wrong[pull]'",
        "kvbaton conformance vllm --seeds 7",
    ]
    assert heard[-1] == "3 of 3, 2 broken: seed 7" and collector.ended == 3


class Standing:
    """A machine that stands still, or does not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, stalls: list[bool]) -> None:
        monkeypatch.setattr(StallMeter, "stalled", property(lambda _: stalls.pop(0)))


def verdicts(*kinds: str) -> Callable[[], CaseVerdict]:
    waiting = list(kinds)
    return lambda: CaseVerdict(name="one", kind=(kind := waiting.pop(0)), what=kind)


def test_what_was_not_in_time_while_the_machine_stood_still_is_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    Standing(monkeypatch, [True, True])
    held = unstalled(verdicts("broken", "broken", ""))
    assert held.holds
    assert held.run_again == 2


@pytest.mark.parametrize("kind", ["wrong", "assertion", "error"])
def test_a_wrong_answer_is_never_excused_by_the_machine(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    Standing(monkeypatch, [True])
    broken = unstalled(verdicts(kind, ""))
    assert (broken.kind, broken.run_again) == (kind, 0)


def test_nothing_is_run_again_on_a_machine_that_did_not_stand_still(monkeypatch: pytest.MonkeyPatch) -> None:
    Standing(monkeypatch, [False])
    assert unstalled(verdicts("broken", "")).kind == "broken"


def test_what_is_never_in_time_is_broken_however_often_the_machine_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Standing(monkeypatch, [True] * TRIES)
    broken = unstalled(verdicts(*["broken"] * TRIES))
    assert (broken.kind, broken.run_again) == ("broken", TRIES - 1)


def test_a_process_that_was_stopped_is_seen_to_have_stood_still() -> None:
    """Stopped by a signal, as by a hypervisor: nothing in it runs, its clock does."""
    stopped = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from kvbaton_proof.conformance.case_registry import StallMeter\n"
            "with StallMeter() as meter: print('begun', flush=True); sys.stdin.readline()\n"
            "print(meter.stalled, flush=True)",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert stopped.stdin is not None
    assert stopped.stdout is not None
    assert stopped.stdout.readline() == "begun\n"
    stopped.send_signal(signal.SIGSTOP)
    time.sleep(3 * STALL_S)  # what is measured, not waited for
    stopped.send_signal(signal.SIGCONT)
    assert stopped.communicate("\n", timeout=30)[0] == "True\n"


def test_a_thread_that_waits_for_a_processor_is_seen_though_the_meter_is_run() -> None:
    """Two busy processes on one core each get half of it; whoever sleeps in between is woken in time."""
    said = (
        "import os, time; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
        "from kvbaton_proof.conformance.case_registry import STALL_S, TRIES, StallMeter, unstalled\n"
        "rival = os.fork()\n"
        "if not rival:\n"
        "    while os.getppid() > 1 and time.process_time() < 60: pass\n"
        "    os._exit(0)\n"
        "begun = time.monotonic()\n"
        "with StallMeter() as meter:\n"
        "    while meter.queued_s < STALL_S and time.monotonic() - begun < 30: pass\n"
        "os.kill(rival, 9); print(meter.stalled)\n"
    )
    done = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, timeout=90, check=True)
    assert done.stdout == "True\n"
