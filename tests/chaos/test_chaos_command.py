"""`kvbaton chaos` as people call it: the list, bad usage, and one small run on real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kvbaton.cli.main import main
from kvbaton_proof.chaos import chaos_plan as plans
from kvbaton_proof.chaos import draw
from kvbaton_proof.chaos.chaos_plan import Plan, Step, to_json
from kvbaton_proof.chaos.fault_catalogue import BY_NAME, PROMISES, Moment

RUN_S = 240.0


def test_the_list_names_every_fault_with_its_promises(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--list"]) == 0
    said = capsys.readouterr().out
    for name, fault in BY_NAME.items():
        assert f"{name} " in said
        assert fault.what in said
    for number, promise in PROMISES.items():
        assert f"{number} {promise}" in said
    assert "mid-copy" in said


def test_the_list_as_one_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", "--list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {each["fault"] for each in told["faults"]} == {*BY_NAME, "roll"}
    for each in told["faults"]:
        assert each["promises"]
        assert each["targets"]
        assert each["moments"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--faults", "fire"], "argument --faults: got 'fire', expected some of kill"),
        (["--faults", ","], "argument --faults: names no fault"),
        (["--plan", "standard"], "argument --plan: the standard plan is for --engine vllm"),
        (["--engine", "vllm", "--plan", "random"], "argument --plan: vLLM has only the standard plan"),
        (["--connector", "nixl"], "argument --connector: embedded engines support only kvbaton's"),
        (
            ["--connector", "offloading"],
            "argument --connector: offloading hands nothing over",
        ),
        (["--connector", "x={}"], "argument --connector: x: has no kv_connector"),
        (["--minutes", "999999"], "argument --minutes: got 999999, at most 7200"),
        (["--replay", "/nowhere/plan.json"], "argument --replay: /nowhere/plan.json: No such file"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chaos", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_bad_plan_is_refused_by_its_field(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "plan.json").write_text('{"name":"x","seed":1,"engine":"embedded","decodes":0}')
    assert main(["chaos", "--replay", str(tmp_path / "plan.json")]) == 2
    assert "$.decodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fault", "target"), [("kill", "p9"), ("kill", ""), ("partition", "p0"), ("full-shm", "router"), ("flood", "p0")]
)
def test_a_plan_for_members_that_are_not_there_is_refused(
    fault: str, target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step = {"at_s": 1, "fault": fault, "target": target}
    (tmp_path / "plan.json").write_text(json.dumps({"name": "x", "seed": 1, "engine": "embedded", "steps": [step]}))
    assert main(["chaos", "--replay", str(tmp_path / "plan.json")]) == 2
    assert "steps[0].target" in capsys.readouterr().err


def test_the_longest_plan_can_be_replayed() -> None:
    plan = draw.draw(1, float(plans.SECONDS_MAX), draw.Size(2, 2))
    assert plans.from_json(plans.to_json(plan)) == plan


@pytest.mark.timeout(RUN_S + 30)
def test_a_d_is_killed_in_mid_copy_and_its_next_life_stopped_before_a_commit(tmp_path: Path) -> None:
    steps = (Step(0.5, "kill", "d0", Moment.MID_COPY), Step(1.0, "stop", "d0", Moment.BEFORE_COMMIT, 1.0))
    plan = Plan(name="random", seed=5, engine="embedded", prefills=1, decodes=1, seconds=3.0, steps=steps)
    (tmp_path / "plan.json").write_bytes(to_json(plan))
    words = ["chaos", "--replay", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvbaton.cli.main", *words], capture_output=True, timeout=RUN_S, check=False
    )
    said = done.stderr.decode()
    assert done.returncode == 0, said
    told = json.loads(done.stdout)
    assert told["ok"]
    assert told["right"] > 20
    assert (told["wrong"], told["late"], told["dead"], told["left_over"]) == (0, 0, 0, 0)
    kill, stop = told["rows"]
    assert kill["note"].endswith(("half of a read with p0", "half of a write with d0"))
    assert "was not reached" not in stop["note"]
    assert {each["name"]: each["lives"] for each in told["members"]}["d0"] == 2
    assert "half of a" in (tmp_path / "out" / "report.md").read_text()
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert "--replay" in told["replay"]
    assert f"--replay {tmp_path}" in said
    assert (tmp_path / "out" / "d0.log").read_text().count("--- life") == 2


@pytest.mark.slow
@pytest.mark.timeout(2 * RUN_S)
@pytest.mark.parametrize("continues", [True, False])
def test_a_d_that_is_killed_costs_no_stream_and_without_the_router_s_part_the_run_fails(
    continues: bool, tmp_path: Path
) -> None:
    plan = Plan(
        name="streams", seed=5, engine="embedded", prefills=1, decodes=2, seconds=4.0, streams=13,
        streams_continue=continues, steps=(Step(1.0, "kill", "d0", Moment.MID_STREAM),),
    )  # fmt: skip
    (tmp_path / "plan.json").write_bytes(to_json(plan))
    words = ["chaos", "--replay", str(tmp_path / "plan.json"), "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "kvbaton.cli.main", *words], capture_output=True, timeout=RUN_S, check=False
    )
    streams = json.loads(done.stdout)["streams"]
    assert streams["cut"] > 0, done.stderr.decode()
    assert done.returncode == (0 if continues else 1), done.stderr.decode()
    assert bool(streams["fates"]["lost"]) is not continues
    assert ("died" in streams["moves"]) is continues
    assert "Long streams" in (tmp_path / "out" / "report.md").read_text()


def _named(word: str) -> list[int]:
    """Processes that have `word` in their command."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            found += [int(entry.name)] if word.encode() in words else []
    return found


@pytest.mark.timeout(RUN_S + 30)
def test_ctrl_c_ends_every_process() -> None:
    with tempfile.TemporaryDirectory(prefix="cc-") as folder:  # short: it is the front of a socket's path
        words = ["chaos", "--prefill", "1", "--decode", "1", "--out", f"{folder}/out"]
        with subprocess.Popen(
            [sys.executable, "-m", "kvbaton.cli.main", *words], stderr=subprocess.PIPE, start_new_session=True,
            env={**os.environ, "TMPDIR": folder},
        ) as process:  # fmt: skip
            try:
                deadline = time.monotonic() + RUN_S
                while len(set(_named(folder)) - {process.pid}) < 4:  # router, store, p0, d0
                    assert process.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                process.send_signal(signal.SIGINT)
                _, said = process.communicate(timeout=RUN_S)
            finally:
                process.kill()
        assert process.returncode == 130, said.decode()
        deadline = time.monotonic() + RUN_S
        while _named(folder):  # killed, but not yet gone
            assert time.monotonic() < deadline
            time.sleep(0.05)
