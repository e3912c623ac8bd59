"""The plugin that calms vLLM's rings touches what it knows, and nothing else."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
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
