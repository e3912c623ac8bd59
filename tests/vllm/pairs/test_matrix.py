"""P and D of different vLLM versions: each supported minor with itself, and each with its neighbours.

`make vllm-matrix` sets `KVBATON_MATRIX` to the Pythons of the versions, "0.33=PATH 0.32=PATH 0.31=PATH 0.30=PATH".
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.duo import MODES, ends, prompt_of, running_duo, same

pytestmark = pytest.mark.timeout(900)

PYTHONS = dict(item.split("=", 1) for item in os.environ.get("KVBATON_MATRIX", "").split())
PAIRS = [(p, d) for p in PYTHONS for d in PYTHONS if abs(list(PYTHONS).index(p) - list(PYTHONS).index(d)) <= 1]
LENGTHS = (1, 128, 129, 300, 700)


def test_there_is_something_to_compare() -> None:
    assert len(PYTHONS) > 1, "KVBATON_MATRIX names no versions; see make vllm-matrix"


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_a_handoff_from_one_version_to_another(p: str, d: str, tiny: Callable[[str], Path], tmp_path: Path) -> None:
    """D's answer to a prompt that was handed over is its answer to the same prompt computed by itself."""
    off = ("--no-enable-prefix-caching",)
    with running_duo(PYTHONS[p], tiny("llama"), tmp_path, d_python=PYTHONS[d], p_args=off, d_args=off) as duo:
        for mode in MODES:
            for length in LENGTHS:
                prompt = prompt_of(length, f"{p} {d} {mode}")
                answer = duo.ask(prompt, mode)
                assert same(answer, duo.d.ask(prompt, len(answer.tokens))), (mode, length)
        duo.come_to_rest()
        assert ends(duo.d) == {"delivered": float(len(MODES) * len(LENGTHS))}
        print(f"MATRIX | P {p} | D {d} | {len(MODES) * len(LENGTHS)} handoffs, all right")
