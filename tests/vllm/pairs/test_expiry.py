"""The test that vLLM's NixlConnector fails: leases that run out under D while its copy is under way (promise 1).

P gives a lease one second, whatever D says (`max_hold_s`), D starts every copy later than that (`fault_copy_delay_s`),
and P's cache is so small that what is let go is computed over at once. So commits come for blocks that are other
prompts' by then, and only the epochs tell. NIXL answered 50 of 102 such requests wrongly, with status 200.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.vllm.duo import TOKENS, Duo, ends, prompt_of, reference_of, running_duo, same
from tests.vllm.engines import EngineError, free_port, start_engine

pytestmark = pytest.mark.timeout(900)

REQUESTS = 208
AT_ONCE = 24
SMALL = ("--num-gpu-blocks-override", "20", "--no-enable-prefix-caching")  # a prompt takes 2 to 5
HASTY = {"lease_s": 1.0, "max_hold_s": 1.0, "transport": "tcp"}
SLOW = {"fault_copy_delay_s": 1.6, "transport": "tcp"}


def prompts() -> list[list[int]]:
    return [prompt_of(200 + number % 400, f"expiry {number}") for number in range(REQUESTS)]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_no_answer_is_wrong_when_leases_run_out(
    policy: str, vllm_python: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    model, expected = tiny("llama"), []
    alone = start_engine(vllm_python, model, free_port(), log=tmp_path / "alone.log")

    def learn() -> None:
        expected.extend(reference_of(alone.wait_ready(), prompts()))
        alone.stop()

    try:
        with running_duo(
            vllm_python, model, tmp_path, policy=policy, p_extra=HASTY, d_extra=SLOW, p_args=SMALL,
            d_args=("--no-enable-prefix-caching",), before_waiting=learn,
        ) as duo:  # fmt: skip
            with ThreadPoolExecutor(AT_ONCE) as pool:
                outcomes = list(pool.map(lambda pair: one(duo, *pair), zip(prompts(), expected, strict=True)))
            duo.come_to_rest(60)
            stale, told = duo.p.metrics().get("kvbaton_commits_stale_total", 0), ends(duo.d)
            print(f"{policy}: {len(outcomes)} requests, {outcomes.count('right')} right, {outcomes.count('error')} "
                  f"errors, {outcomes.count('wrong')} wrong; {stale:.0f} stale commits; ends {told}")  # fmt: skip
    finally:
        alone.stop()
    assert outcomes.count("wrong") == 0
    assert stale > 0, "else this proves nothing"
    assert told["stale"] == stale
    if policy == "recompute":
        assert outcomes.count("right") == REQUESTS
    else:
        assert outcomes.count("error") == sum(count for end, count in told.items() if end != "delivered")


def one(duo: Duo, prompt: list[int], expected: object) -> str:
    """Both legs without a router, which would ask again where D says that it failed."""
    params = duo.prefill(prompt)
    try:
        answer = duo.d.ask(prompt, TOKENS, kv_transfer_params=params)
    except EngineError as error:
        return "error" if "status 500" in str(error) else str(error)
    return "right" if same(answer, expected) else "wrong"  # type: ignore[arg-type]
