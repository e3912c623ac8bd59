"""The plugin that calms vLLM's rings and forks its processes touches what it knows, and nothing else."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvbaton.engines.vllm import no_spin_plugin

RING = """
from contextlib import contextmanager
SPINLOOP_EXT_ENABLED = True
def sched_yield():
    spun.append(1)
class SpinCondition:
    def wait(self, timeout_ms=None):
        sched_yield()
class MessageQueue:
    @contextmanager
    def acquire_write(self, timeout=None):
        sched_yield()
        yield
"""


def ring_of(text: str) -> Any:
    ring: Any = types.ModuleType(no_spin_plugin._RING)
    ring.spun = []
    exec(text, vars(ring))
    return ring


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Any]:
    """A ring after vLLM has called the plugin with a value of the switch."""

    def install(text: str, switch: str) -> Any:
        ring = ring_of(text)
        monkeypatch.setitem(sys.modules, no_spin_plugin._RING, ring)
        monkeypatch.setenv(no_spin_plugin.SWITCH, switch)
        no_spin_plugin.install()
        no_spin_plugin.install()  # vLLM may call it more than once
        ring.SpinCondition().wait()
        with ring.MessageQueue().acquire_write():
            pass
        return ring

    return install


def test_with_the_switch_readers_and_writers_sleep(installed: Callable[[str, str], Any]) -> None:
    ring = installed(RING, "1")
    assert ring.spun == []
    assert ring.SPINLOOP_EXT_ENABLED is False


@pytest.mark.parametrize("switch", ["", "0", "yes"])
def test_without_the_switch_nothing_is_touched(installed: Callable[[str, str], Any], switch: str) -> None:
    ring = installed(RING, switch)
    assert ring.spun == [1, 1]
    assert ring.SPINLOOP_EXT_ENABLED is True


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            RING.replace("def wait(self, timeout_ms=None):\n        sched_yield()", "def wait(self): pass"),
            "does not call",
        ),
        (RING.replace("class SpinCondition:", "class Other:") + "\nSpinCondition = lambda: Other()", "has no"),
    ],
)
def test_a_ring_that_looks_different_costs_one_line_and_stays(
    installed: Callable[[str, str], Any], text: str, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    ring = installed(text, "1")
    assert ring.spun != []
    assert ring.SPINLOOP_EXT_ENABLED is True
    assert said in caplog.text


def test_a_vllm_without_a_ring_costs_one_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, no_spin_plugin._RING, None)
    monkeypatch.setenv(no_spin_plugin.SWITCH, "1")
    no_spin_plugin.install()
    assert "has no effect with this vLLM" in caplog.text


METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


class Platform:
    """vLLM's, as far as it is looked at: the check of an engine's configuration chooses how its processes start."""

    def __init__(self, is_cpu: bool = True) -> None:
        self._is_cpu = is_cpu

    def is_cpu(self) -> bool:
        return self._is_cpu

    def check_and_update_config(self, config: list[str]) -> None:
        config.append("checked")
        os.environ[METHOD] = "spawn"


def platforms_of(platform: object) -> Any:
    platforms: Any = types.ModuleType(no_spin_plugin._PLATFORMS)
    platforms.current_platform = platform
    return platforms


@pytest.mark.parametrize(
    ("is_cpu", "given", "method"), [(True, {}, "fork"), (False, {}, "spawn"), (True, {METHOD: "spawn"}, "spawn")]
)
def test_processes_are_forked_on_cpus_unless_the_operator_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, is_cpu: bool, given: dict[str, str], method: str
) -> None:
    platform, config = Platform(is_cpu), list[str]()
    monkeypatch.setenv(METHOD, "spawn")  # as vLLM's command does before it loads plugins
    monkeypatch.setattr(no_spin_plugin, "_given", lambda: given)
    assert no_spin_plugin.fork(platforms_of(platform)) is None
    platform.check_and_update_config(config)
    assert (config, os.environ[METHOD]) == (["checked"], method)


def test_what_the_operator_set_is_what_the_process_began_with(tmp_path: Path) -> None:
    (tmp_path / "environ").write_bytes(b"A=1\0B=x=y\0\xff=?\0")
    given = no_spin_plugin._given(tmp_path / "environ")
    assert (given["A"], given["B"]) == ("1", "x=y")
    assert METHOD not in given


def test_a_platform_that_looks_different_is_told() -> None:
    assert "check_and_update_config" in str(
        no_spin_plugin.fork(platforms_of(types.SimpleNamespace(is_cpu=lambda: True)))
    )
