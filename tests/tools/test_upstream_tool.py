"""`tools/upstream_tests.py`: what it makes of two runs of vLLM's tests, and how ours gets into a configuration."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
sys.path.insert(0, str(TOOLS))

import upstream_plugin as plugin  # noqa: E402
import upstream_tests as tool  # noqa: E402

KNOWN = {"t::known": tool.Expectation("delayed free", "the other one frees late", ("t::known",))}


def result(test: str, outcome: str, said: str = "", built: tuple[str, ...] = ("NixlConnector",)) -> Any:
    return tool.Result(test, outcome, said, built)


def verdict(test: str, named: str, ours: str) -> tuple[str, str]:
    (line,) = tool.compare([result(test, named, "named said")], [result(test, ours, "ours said")], KNOWN)
    return line.verdict, line.reason


def test_a_difference_is_known_by_its_reason_or_by_what_it_said() -> None:
    assert verdict("t::any", "passed", "passed") == (tool.SAME, "")
    assert verdict("t::known", "passed", "failed") == (tool.EXPECTED, "delayed free")
    assert verdict("t::any", "passed", "failed") == (tool.UNKNOWN, "ours said")
    assert verdict("t::any", "passed", "skipped") == (tool.UNKNOWN, "ours said")


def test_an_expectation_that_passes_is_told() -> None:
    assert verdict("t::known", "passed", "passed") == (tool.HEALED, "delayed free")


def test_a_test_that_does_not_pass_as_it_is_says_nothing_about_ours() -> None:
    assert verdict("t::any", "failed", "failed") == (tool.NOT_HERE, "named said")
    assert verdict("t::known", "skipped", "skipped") == (tool.NOT_HERE, "named said")
    assert verdict("t::any", "failed", "passed") == (tool.BETTER, "named said")


def test_a_test_that_the_second_run_does_not_tell_of_has_failed() -> None:
    (line,) = tool.compare([result("t::any", "passed")], [], KNOWN)
    assert (line.verdict, line.reason, line.said) == (tool.UNKNOWN, "it did not end", "it did not end")


def test_only_tests_whose_connector_ours_can_stand_for_are_run_again() -> None:
    results = [
        result("t::nixl", "passed"),
        result("t::child", "passed", built=("MultiConnector", "ExampleConnector")),
        result("t::mock", "passed", built=("MockKVConnector",)),
        result("t::none", "passed", built=()),
    ]
    assert [each.test for each in tool.concerned(results)] == ["t::nixl", "t::child"]


def test_an_expectation_without_a_test_is_told() -> None:
    assert tool.unseen(tool.compare([result("t::any", "passed")], [], KNOWN), KNOWN) == ["t::known"]


def test_the_table_has_each_test_and_the_reasons_that_were_used() -> None:
    plan = tool.Plan((), {}, (KNOWN["t::known"], tool.Expectation("other", "unused words", ())))
    lines = tool.compare(
        [result("tests/v1/kv_connector/unit/a.py::x", "passed"), result("t::known", "passed")],
        [result("tests/v1/kv_connector/unit/a.py::x", "passed"), result("t::known", "failed")],
        KNOWN,
    )
    shown = tool.table(lines, plan)
    assert "a.py::x" in shown and "tests/v1" not in shown
    assert "delayed free: the other one frees late" in shown and "unused words" not in shown
    assert "2 tests name" in tool.summary(lines) and "1 differ as expected" in tool.summary(lines)


def test_the_expectations_of_this_tree_can_be_read_and_give_each_test_one_reason() -> None:
    plan = tool.read_plan()
    assert plan.paths and plan.reasons()
    assert all(each.why.endswith(".") and each.tests for each in plan.expectation)
    names = [each.name for each in plan.expectation]
    assert len(set(names)) == len(names)


def test_a_test_under_two_reasons_is_refused_by_its_name() -> None:
    plan = tool.Plan((), {}, (tool.Expectation("a", "why.", ("t::x",)), tool.Expectation("b", "why.", ("t::x",))))
    with pytest.raises(ValueError, match="t::x is under a and b"):
        plan.reasons()


def test_what_is_no_checkout_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([str(tmp_path)]) == 2
    assert "give a checkout of vLLM's repository" in capsys.readouterr().err


def test_a_hub_has_each_model_where_it_is_looked_for(tmp_path: Path) -> None:
    tool.hub(tmp_path, {"facebook/opt-125m": {"model_type": "opt"}})
    home = tmp_path / "models--facebook--opt-125m"
    revision = (home / "refs" / "main").read_text()
    assert json.loads((home / "snapshots" / revision / "config.json").read_text()) == {"model_type": "opt"}


def transfer_config(monkeypatch: pytest.MonkeyPatch) -> Any:
    class Transfer:
        """As much of vLLM's KVTransferConfig as is used."""

        kv_connector_module_path: str | None = None

        def __init__(self, connector: str, role: str = "kv_consumer", **extra: Any) -> None:
            self.kv_connector, self.kv_role, self.kv_connector_extra_config = connector, role, extra
            self.__post_init__()

        def __post_init__(self) -> None:
            if not self.kv_role:
                raise ValueError("kv_role")

    monkeypatch.delenv(plugin.ROLE_ENV, raising=False)
    plugin.swap(Transfer, "/keys")
    return Transfer


def test_ours_takes_the_place_of_a_connector_with_settings_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transfer_config(monkeypatch)
    for name in (*plugin.HANDS_OVER, plugin.EXAMPLE):
        found = config(name, shared_storage_path="x")
        assert (found.kv_connector, found.kv_connector_module_path) == ("BatonConnector", "kvbaton.integrations.vllm")
        assert set(found.kv_connector_extra_config) == {"name", "keys", "model_id"}
        assert found.kv_role == "kv_consumer", "what a test says of the role stays"
    names = [config("NixlConnector").kv_connector_extra_config["name"] for _ in range(3)]
    assert len(set(names)) == 3 and set(names) <= set(plugin.NAMES), "two of one test are two members"


def test_what_ours_cannot_stand_for_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transfer_config(monkeypatch)
    for name in ("MultiConnector", "OffloadingConnector", "MockKVConnector"):
        found = config(name, own=1)
        assert (found.kv_connector, found.kv_connector_module_path) == (name, None)
        assert found.kv_connector_extra_config == {"own": 1}
    with pytest.raises(ValueError, match="kv_role"):
        config("NixlConnector", role="")


def test_a_role_can_be_given_in_place_of_the_tests_own(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transfer_config(monkeypatch)
    monkeypatch.setenv(plugin.ROLE_ENV, "kv_both")
    assert config("NixlConnector").kv_role == "kv_both"
    assert config("MockKVConnector").kv_role == "kv_consumer"


def test_connectors_are_noted_by_the_name_in_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    class Factory:
        @classmethod
        def get_connector_class(cls, transfer: Any) -> Any:
            return transfer.kv_connector

    class Config:
        def __post_init__(self) -> None:
            Factory.get_connector_class(SimpleNamespace(kv_connector="looked up for the configuration alone"))

    monkeypatch.setattr(plugin, "_seen", plugin.Seen())
    plugin.watch(Factory, Config)
    Config().__post_init__()
    for name in ("MultiConnector", "NixlConnector", "NixlConnector"):
        assert Factory.get_connector_class(SimpleNamespace(kv_connector=name)) == name
    assert plugin._seen.built == ["MultiConnector", "NixlConnector"]


def test_a_test_s_mock_answers_newer_hooks_as_the_connector_in_whose_place_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Scheduler:
        def __init__(self) -> None:
            self.connector: Any = None
            self.kv_holding_waiting = ["r"]
            self.connector = SimpleNamespace(**{hook: lambda request, hook=hook: hook for hook in plugin.NEWER})

    monkeypatch.setattr(plugin, "_seen", plugin.Seen())
    plugin.bridge(Scheduler)
    scheduler: Any = Scheduler()
    assert scheduler.skipped_waiting == ["r"]
    assert plugin._seen.notes == []
    scheduler.connector = Mock()
    assert [getattr(scheduler.connector, hook)("r") for hook in plugin.NEWER] == list(plugin.NEWER)
    assert plugin._seen.notes == [plugin.MOCKED]


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([("setup", "passed"), ("call", "passed"), ("teardown", "passed")], "passed"),
        ([("setup", "passed"), ("call", "failed"), ("teardown", "passed")], "failed"),
        ([("setup", "passed"), ("call", "passed"), ("teardown", "failed")], "failed"),
        ([("setup", "failed"), ("teardown", "passed")], "failed"),
        ([("setup", "skipped"), ("teardown", "passed")], "skipped"),
        ([("setup", "passed"), ("call", "skipped"), ("teardown", "passed")], "skipped"),
    ],
)
def test_a_test_is_what_its_worst_part_was(
    parts: list[tuple[str, str]], expected: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(plugin.REPORT_ENV, str(tmp_path / "report"))
    plugin.pytest_runtest_logstart("t::x")
    for when, outcome in parts:
        told = SimpleNamespace(when=when, outcome=outcome, failed=outcome == "failed", skipped=outcome == "skipped")
        told.longrepr = SimpleNamespace(reprcrash=SimpleNamespace(message="assert 1 == 2\n  more"))
        plugin.pytest_runtest_logreport(told)
    plugin.pytest_runtest_logfinish("t::x")
    line = json.loads((tmp_path / "report").read_text())
    assert (line["test"], line["outcome"]) == ("t::x", expected)
    assert line["said"] == ("assert 1 == 2 more" if expected == "failed" else "")
