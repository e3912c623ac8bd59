"""What one plain vLLM engine answers: a program of its own, so that its memory is free before the cluster starts.

python -m tests.ray.reference_answers MODEL < prompts.json > answers.json
"""

from __future__ import annotations

import contextlib
import json
import sys
from typing import Any

TOKENS = 12


def main() -> None:
    prompts = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):
        answers = answer(sys.argv[1], prompts)
    json.dump(answers, sys.stdout)


def answer(model: str, prompts: list[list[int]]) -> list[str]:
    from vllm import LLM, SamplingParams

    engine: Any = LLM(model, dtype="float32", enforce_eager=True, max_model_len=2048, max_num_seqs=32)
    wanted = SamplingParams(temperature=0.0, max_tokens=TOKENS)
    found = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], wanted, use_tqdm=False)
    return [each.outputs[0].text for each in found]


if __name__ == "__main__":
    main()
