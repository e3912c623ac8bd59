"""How vLLM's process shares its interpreter with ours."""

from __future__ import annotations

import sys

import pytest

from kvbaton.engines.vllm import interpreter


def test_threads_give_way_soon_and_never_later_than_the_operator_said() -> None:
    before = sys.getswitchinterval()
    try:
        for had, has in ((0.005, interpreter.SWITCH_S), (0.0001, 0.0001)):
            sys.setswitchinterval(had)
            interpreter.share()
            assert sys.getswitchinterval() == pytest.approx(has, abs=2e-6)
    finally:
        sys.setswitchinterval(before)
