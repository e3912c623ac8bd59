"""Other shapes of KV on real vLLM: MLA, sliding windows, tensor parallelism that differs between P and D.

Each case starts engines of its own, so this is `make test-full`, not `make test`. `docs/lab/` has its results.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvbaton.engines.vllm.models.tiny_hybrids import HYBRIDS
from tests.vllm.duo import MODES, Duo, ends, prompt_of, reference_of, running_duo, same
from tests.vllm.engines import Answer, free_port, start_engine

pytestmark = pytest.mark.timeout(900)

LENGTHS = (1, 2, 15, 16, 17, 100, 127, 128, 129, 255, 256, 257, 300, 383, 384, 385, 700, 1100)
TP2 = ("--tensor-parallel-size", "2")
UNCACHED = ("--no-enable-prefix-caching",)
"""vLLM 0.32.0 for CPUs fails on Falcon-H1 (one engine alone, without a connector, does too), on gated delta nets in
float32, and on states in a prefix cache: such models are handed over on GPUs (the GPU test's part `hybrids`)."""

SHAPES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "mla": ("mla", (), ()),
    "mla, tp 2 to 1": ("mla", TP2, ()),
    "mla, blocks of 16 to 32": ("mla", ("--block-size", "16"), ("--block-size", "32")),
    "gemma3": ("gemma3", (), ()),
    "mamba2, no prefix cache": ("mamba2", UNCACHED, UNCACHED),
    "tp 2 to 1": ("llama", TP2, ()),
    "tp 1 to 2": ("llama", (), TP2),
    "tp 2 to 2": ("llama", TP2, TP2),
}


def prompts_of(mode: str, shape: str) -> list[list[int]]:
    return [prompt_of(length, f"{shape} {mode}") for length in LENGTHS]


@pytest.mark.parametrize("shape", SHAPES)
def test_every_answer_is_that_of_one_engine(
    shape: str, vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    kind, p_args, d_args = SHAPES[shape]
    handed = len(prompts_of("pull", shape)) - (1 if kind in HYBRIDS else 0)  # a state after no token is not handed over
    model, answers = tiny(kind), {}
    alone = start_engine(vllm_python, model, free_port(), log=tmp_path / "alone.log")

    def learn() -> None:
        alone.wait_ready()
        for mode in MODES:
            answers[mode] = reference_of(alone, prompts_of(mode, shape))
        alone.stop()

    try:
        with running_duo(vllm_python, model, tmp_path, p_args=p_args, d_args=d_args, before_waiting=learn) as duo:
            for mode in MODES:
                check(duo, mode, prompts_of(mode, shape), answers[mode], handed)
    finally:
        alone.stop()


def check(duo: Duo, mode: str, prompts: list[list[int]], expected: list[Answer], handed: int) -> None:
    before = duo.delivered()
    found = duo.ask_all(prompts, mode, at_once=6)
    wrong = [
        len(prompt) for prompt, ours, theirs in zip(prompts, found, expected, strict=True) if not same(ours, theirs)
    ]
    duo.come_to_rest()
    assert (mode, wrong) == (mode, [])
    duo.handed_over(before, handed, "every one by a handoff")


def test_other_block_sizes_of_cpu_attention_are_refused_by_name(
    vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    """The inside of a page depends on the block size there, so it is part of the compatibility key."""
    model = tiny("llama")
    with running_duo(vllm_python, model, tmp_path, d_args=("--block-size", "64")) as duo:
        prompt = prompt_of(300, "blocks")
        answer = duo.decode(prompt, duo.prefill(prompt))
        assert same(answer, duo.d.ask(prompt, len(answer.tokens))), "computed by D itself"
        assert ends(duo.d) == {"incompatible": 1.0}
        duo.come_to_rest()
        assert "block of 128" in duo.d.tail(400) and "block of 64" in duo.d.tail(400), "the log names the difference"
