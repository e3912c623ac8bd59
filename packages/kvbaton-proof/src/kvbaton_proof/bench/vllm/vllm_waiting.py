"""The cost of a step of vLLM's scheduler while requests wait for their P, without a model.

    python -m kvbaton_proof.bench.vllm.vllm_waiting 512 2000 1600      requests, tokens of each, of which D has cached
    so many

Laws: vLLM's own scheduler and block pool, and the connector as it runs in an engine; only P never begins. The same
engine waits in both ways in turns, asked about at every step and put aside, so that a drift of the machine hits both.
What is told is the time that the scheduler's thread was charged with: a nap costs nobody.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from kvbaton_proof.conformance import configs

STEPS = 15
WARM_STEPS = 3
BLOCK_TOKENS = 16
PATIENCE: dict[str, Any] = {
    "defer_timeout": 900.0,
    "claim_timeout": 900.0,
    "max_hold_s": 900.0,
    "transfer_timeout": 900.0,
    "lease_s": 60.0,
}
WAYS = ("asked about at every step", "put aside")


def measure(requests: int, tokens: int, cached: int) -> dict[str, float]:
    """Milliseconds of a step, the median of each way."""
    from kvbaton.engines.vllm.block_pool import status_aside
    from kvbaton_proof.conformance.lab import Lab, d_params, prompt_of, router_ticket

    shape = configs.EngineShape(
        blocks=2 * -(-tokens // BLOCK_TOKENS) + 64, block_tokens=BLOCK_TOKENS, windows=(0,), kv_heads=1,
        chunk_tokens=max(tokens, requests), seqs=requests, model_len=2 * tokens,
    )  # fmt: skip
    found: dict[str, list[float]] = {way: [] for way in WAYS}
    lab = Lab()
    try:
        d = lab.engine("d0", shape, **PATIENCE)
        common = prompt_of(cached, 1)
        first = d.add([*common, 3], max_tokens=1)
        while d.outcomes[first].reason is None:
            d.step()
        for way in (*WAYS, *WAYS[::-1]):
            d.connector.scheduler._live.waiting._aside = status_aside() if way == WAYS[1] else None
            names = [
                d.add([*common, *prompt_of(tokens - cached, 2 + at)], d_params("stream", router_ticket(ttl_s=900.0)))
                for at in range(requests)
            ]
            found[way] += _steps(d.step)
            for name in names:
                d.abort(name)
            while d.has_work:
                d.step()
    finally:
        lab.close()
    return {way: round(statistics.median(took), 2) for way, took in found.items()}


def _steps(step: Callable[[], bool]) -> list[float]:
    took = []
    for at in range(WARM_STEPS + STEPS):
        begun = time.thread_time()
        step()
        if at >= WARM_STEPS:
            took.append((time.thread_time() - begun) * 1e3)
    return took


def main(words: list[str]) -> int:
    import logging

    configs.prepare()
    logging.getLogger("vllm").setLevel(logging.CRITICAL)
    requests, tokens, cached = map(int, words)
    result = measure(requests, tokens, cached)
    print(json.dumps({"requests": requests, "tokens": tokens, "cached": cached, "step_ms": result}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
