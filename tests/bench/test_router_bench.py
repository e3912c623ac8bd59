"""`kvbaton bench router`: what it may be told, what its exit status means, and a short run with real processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvbaton.cli import main as cli
from kvbaton.processes.child_process import Say
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.kit import run_facts
from kvbaton_proof.bench.router import router_run, several_routers
from kvbaton_proof.bench.router.router_rows import (
    DIRECT,
    KVBATON,
    KVBATON_2,
    MORIIO,
    NIXL,
    THEIRS,
    TOY,
    Level,
    Measured,
    Row,
    Streams,
)
from kvbaton_proof.bench.router.router_toy import to_prefill
from kvbaton_proof.cli import bench_router
from kvbaton_proof.rig import fronts

SITE = router_run.Site(router_run.Backends(1111, 2222), "/somewhere/vllm-router")
PORTS = router_run.Ports(3333, 4444, 5555)


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench_router.add(parser)
    args = parser.parse_args(words)
    bench_router.check(args)
    return args


def test_by_default_everything_is_measured_twice_at_three_levels() -> None:
    args = parsed()
    assert args.targets == (DIRECT, KVBATON, KVBATON_2, NIXL, MORIIO, TOY)
    assert (args.concurrency, args.streams, args.rounds, args.window_s) == ((1, 64, 512), 512, 2, 2.0)


def test_quick_is_one_short_round_unless_told_otherwise() -> None:
    assert (parsed("--quick").rounds, parsed("--quick").window_s < 1) == (1, True)
    assert (parsed("--quick", "--rounds", "3").rounds, parsed("--quick", "--window-s", "4").window_s) == (3, 4.0)


def test_targets_keep_their_order_and_direct_is_always_among_them() -> None:
    assert parsed("--targets", "toy,kvbaton").targets == (DIRECT, KVBATON, TOY)
    assert parsed("--without-vllm-router").targets == (DIRECT, KVBATON, KVBATON_2, TOY)


def test_contradictions_are_refused_by_name() -> None:
    with pytest.raises(CommandError, match="--vllm-router: not allowed with"):
        parsed("--without-vllm-router", "--vllm-router", "x")
    with pytest.raises(CommandError, match="--targets: nothing is left"):
        parsed("--without-vllm-router", "--targets", NIXL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--targets", "nginx"], "got 'nginx', expected some of kvbaton"),
        (["--concurrency", "0"], "got 0, expected 1 to"),
        (["--window-s", "-1"], "expected seconds above 0"),
        (["--vllm-router", "/nowhere/vllm-router"], "/nowhere/vllm-router is not a program; make .venv-router/.ready"),
        (["--out", "/nowhere/page.md"], "/nowhere/page.md exists already, or its directory does not"),
    ],
)
def test_what_cannot_be_meant_ends_in_one_line_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = cli.main(["bench", "router", *words])
    except SystemExit as stopped:
        status = int(stopped.code or 0)
    error = capsys.readouterr().err
    assert status == 2 and said in error and error.count("\n") == 1


def test_vllm_router_is_looked_for_in_the_environment_made_for_it_then_on_the_path(tmp_path: Path) -> None:
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert fronts.find_vllm_router(None, below, str(below)) is None
    (below / "vllm-router").touch(0o755)
    assert fronts.find_vllm_router(None, below, str(below)) == str(below / "vllm-router")
    made = tmp_path / ".venv-router" / "bin" / "vllm-router"
    made.parent.mkdir(parents=True)
    made.touch(0o755)
    assert fronts.find_vllm_router(None, below, str(below)) == str(made)
    assert fronts.find_vllm_router(str(below / "vllm-router"), tmp_path, "") == str(below / "vllm-router")
    assert fronts.find_vllm_router(str(below / "other"), tmp_path, "") is None


def test_every_target_but_direct_has_a_command_with_its_port_and_both_backends() -> None:
    for name in (KVBATON, NIXL, TOY):
        words = router_run.command(name, SITE, PORTS)
        assert "3333" in words and "http://127.0.0.1:1111" in words and "http://127.0.0.1:2222" in words
    assert "127.0.0.1:5555" in router_run.command(MORIIO, SITE, PORTS)
    with pytest.raises(router_run.TargetError, match="no such target: nginx"):
        router_run.command("nginx", SITE, PORTS)
    with pytest.raises(router_run.TargetError, match=r"make \.venv-router/\.ready"):
        router_run.command(NIXL, router_run.Site(SITE.backends, None), PORTS)


def test_the_toy_asks_p_for_one_token_and_leaves_the_clients_body_alone() -> None:
    body = {"prompt": "x", "max_tokens": 16, "stream": True, "stream_options": {}}
    asked = to_prefill(body)
    assert (asked["max_tokens"], asked["stream"], "stream_options" in asked) == (1, False, False)
    assert asked["kv_transfer_params"]["do_remote_decode"] is True
    assert body["max_tokens"] == 16 and "kv_transfer_params" not in body


def found(names: tuple[str, ...] = (DIRECT, KVBATON, NIXL, MORIIO, TOY), **more: Any) -> Measured:
    """As a run would, with figures that meet every bound unless `more` says otherwise."""
    known: dict[str, Any] = {"answered": 1000, "asked": 1000, "seconds": 1.0, "p50_ms": 0.5, "router_cpu_s": 0.5}
    return Measured(
        targets=(),
        rounds=1,
        window_s=1.0,
        rows=[Row(round=1, target=name, level=Level(False, 1), **{**known, **more}) for name in names],
        streams=[Streams(round=1, target=name, asked=512, open_at_once=512, complete=512) for name in names],
    )


def told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], findings: Measured, *words: str
) -> tuple[int, dict[str, Any]]:
    async def measure(_: router_run.RouterBenchPlan, measured: Measured, __: Say) -> None:
        measured.rows += findings.rows
        measured.streams += findings.streams
        measured.failures += findings.failures

    monkeypatch.setattr(router_run, "measure", measure)
    monkeypatch.setattr(several_routers, "several_routers", list)  # a model that is tested elsewhere
    status = cli.main(["bench", "router", "--json", *words])
    return status, json.loads(capsys.readouterr().out)


def with_vllm_router(monkeypatch: pytest.MonkeyPatch, program: str | None) -> None:
    monkeypatch.setattr(fronts, "find_vllm_router", lambda *_: program)


def test_status_is_0_when_all_was_measured_without_errors_within_bounds(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_vllm_router(monkeypatch, "/nowhere/bin/vllm-router")
    status, said = told(monkeypatch, capsys, found())
    assert status == 0 and said["verdict"] == "ok" and said["wrong"] == []
    assert said["versions"]["vllm-router"] == "unknown"
    assert {bound["ok"] for bound in said["checks"]} == {True}


@pytest.mark.parametrize("more", [{"router_cpu_s": 0.9}, {"errors": {"status 500": 1}}, {"handed_over": 0}], ids=str)
def test_status_is_1_for_a_bound_an_error_or_a_router_that_skips_p_unless_only_figures_are_wanted(
    more: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_vllm_router(monkeypatch, "/nowhere/bin/vllm-router")
    status, said = told(monkeypatch, capsys, found(**more))
    assert status == 1 and said["verdict"] == "NOT ok" and said["wrong"]
    status, said = told(monkeypatch, capsys, found(**more), "--no-verdict")
    assert status == 0 and said["verdict"] == "none" and said["wrong"]


def test_a_missing_vllm_router_is_a_failure_unless_it_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_vllm_router(monkeypatch, None)
    rest = found((DIRECT, KVBATON, TOY))
    status, said = told(monkeypatch, capsys, rest)
    assert status == 1
    for name in THEIRS:
        assert said["targets"][name]["missing"] is True and "make .venv-router/.ready" in said["targets"][name]["how"]
    status, said = told(monkeypatch, capsys, rest, "--without-vllm-router")
    assert status == 0 and set(said["targets"]) == {DIRECT, KVBATON, KVBATON_2, TOY}


def test_a_run_in_which_kvbaton_could_not_be_measured_is_no_success_even_without_verdict(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_vllm_router(monkeypatch, "/nowhere/bin/vllm-router")
    away = found((DIRECT, TOY))
    away.failures.append("kvbaton, round 1, could not be measured: it ended")
    assert told(monkeypatch, capsys, away, "--no-verdict")[0] == 1
    status, said = told(monkeypatch, capsys, away)
    assert status == 1 and said["targets"][KVBATON]["failed"] is True and said["targets"][TOY]["failed"] is False


def test_bounds_are_kvbatons_and_say_nothing_where_only_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = told(monkeypatch, capsys, found((DIRECT, TOY), router_cpu_s=3.0), "--targets", TOY)
    assert (status, said["checks"], said["verdict"]) == (0, [], "ok")


def test_a_page_does_not_tell_where_things_lie_on_this_machine() -> None:
    words = ["bench", "router", "--out", "/home/me/page.md", "--vllm-router=/opt/x/vllm-router", "--quick"]
    assert run_facts.shown(words) == ("kvbaton bench router --out page.md --vllm-router=vllm-router --quick")


def test_a_page_is_written_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_vllm_router(monkeypatch, "/nowhere/bin/vllm-router")
    page = tmp_path / "page.md"
    assert told(monkeypatch, capsys, found(), "--page", str(page))[0] == 0
    assert "what a router costs" in page.read_text()
    assert cli.main(["bench", "router", "--out", str(page)]) == 2, "a page that is there stays as it is"


def test_a_short_run_measures_the_router_and_the_toy_with_real_processes() -> None:
    words = ["--quick", "--without-vllm-router", "--no-verdict", "--concurrency", "1,4", "--streams", "8"]
    done = subprocess.run(
        [sys.executable, "-m", "kvbaton.cli.main", "bench", "router", "--json", "--window-s", "0.05", *words],
        capture_output=True, text=True, timeout=110, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert set(said["targets"]) == {DIRECT, KVBATON, KVBATON_2, TOY}, done.stderr
    for name, target in said["targets"].items():
        assert target["errors"] == 0 and set(target["levels"]) == {"1", "4", "8 streams"}
        assert [(each["open_at_once"], each["complete"]) for each in target["streams"]] == [(8, 8)]
        for level in target["levels"].values():
            assert level["req_per_s"] > 0 and level["p50_ms"] <= level["p99_ms"]
            assert (level["cpu_us"] is None) == (level["added_p50_ms"] is None) == (name == DIRECT)
    for row in said["rows"]:
        assert row["handed_over"] is None if row["target"] == DIRECT else row["handed_over"] >= row["asked"]
    assert set(said["ratios"]) == {TOY, f"{KVBATON_2} / {TOY}", f"{KVBATON_2} / {KVBATON}"}
    assert next(each for each in said["checks"] if each["name"].startswith("streams"))["ok"]
    assert "cores" in said["machine"] and said["versions"]["kvbaton"]
    assert "round 1 of 1: kvbaton is up" in done.stderr
