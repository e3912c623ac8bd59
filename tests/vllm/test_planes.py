"""One P and one D on real vLLM whose KV goes over NIXL: the same answers, and nothing is left behind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.vllm.duo import MODES, TOKENS, prompt_of, running_duo, same

pytestmark = pytest.mark.timeout(600)

LENGTHS = (5, 127, 128, 129, 300, 512, 777, 1300)


def test_handoffs_over_nixl_give_one_engines_answers(
    vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    extra = {"transport": "nixl"}
    with running_duo(vllm_python, tiny("llama"), tmp_path, p_extra=extra, d_extra=extra) as duo:
        for mode in MODES:
            prompts = [prompt_of(length, f"nixl {mode}") for length in LENGTHS]
            before = duo.delivered()
            answers = duo.ask_all(prompts, mode)
            duo.come_to_rest()
            assert duo.delivered() - before == len(prompts), f"{mode}: every one by a handoff"
            alone = [duo.p.ask(prompt, TOKENS) for prompt in prompts]
            assert [len(x) for x, a, b in zip(prompts, answers, alone, strict=True) if not same(a, b)] == [], mode
        planes = [name for name in duo.d.metrics() if name.startswith("kvbaton_links_total{")]
        assert len(planes) == 1 and 'transport="nixl"' in planes[0]
