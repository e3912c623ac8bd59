"""What is read of engines and processes."""

from __future__ import annotations

import asyncio

from kvbaton.observe.metrics.exposition import figures
from kvbaton_proof.chaos.vllm.vllm_judge import BLOCKS
from kvbaton_proof.rig import meters

RESTING = """\
# HELP vllm:kv_cache_usage_perc KV-cache usage.
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.0
kvbaton_pinned_blocks{engine="0",model_name="tiny"} 0.0
kvbaton_ends_total{end="delivered",engine="0",model_name="tiny"} 7.0
kvbaton_ends_total{end="lease expired, \\"late\\"",engine="0",model_name="tiny"} 1.0
"""
NIXL = """\
vllm:kv_cache_usage_perc{engine="0"} 0.0
vllm:nixl_xfer_time_seconds_count{engine="0"} 12.0
vllm:nixl_num_failed_transfers_total{engine="0"} 2.0
"""


def test_ends_are_counted_by_how_in_kvbatons_words_and_in_nixls() -> None:
    assert meters.ends(figures(RESTING)) == {"delivered": 7, 'lease expired, \\"late\\"': 1}
    found = meters.ends(figures(NIXL))
    assert found["delivered"] == 12 and found["num_failed_transfers"] == 2


def test_only_what_was_added_is_told() -> None:
    assert meters.gained({"delivered": 4}, {"delivered": 7, "stale": 1, "late": 0}) == {"delivered": 3, "stale": 1}


def test_an_engine_is_at_rest_without_used_and_without_pinned_blocks() -> None:
    assert meters.is_at_rest(figures(RESTING)) and meters.is_at_rest(figures(NIXL))
    assert not meters.is_at_rest(figures(RESTING.replace('"tiny"} 0.0', '"tiny"} 0.25', 1)))
    assert not meters.is_at_rest(figures(NIXL + "kvbaton_pinned_blocks 2.0\n"))


def test_an_engine_that_does_not_tell_is_not_at_rest() -> None:
    assert not meters.is_at_rest(figures("some_other_metric 0.0\n"))


def test_rest_is_waited_for_and_what_holds_is_named() -> None:
    answers = {"http://p/metrics": [NIXL.replace("} 0.0", "} 0.5"), NIXL], "http://d/metrics": [NIXL]}

    async def fetch(url: str) -> str:
        left = answers.get(url)
        if left is None:
            raise OSError("refused")
        return left.pop(0) if len(left) > 1 else left[0]

    rest = asyncio.run(meters.come_to_rest({"p": "http://p", "d": "http://d"}, fetch, 5.0))
    assert rest.at_rest and rest.seconds > 0 and not rest.holding
    gone = asyncio.run(meters.come_to_rest({"p": "http://p", "x": "http://x"}, fetch, 0.1))
    assert not gone.at_rest and gone.holding == ("x does not tell: refused",)


def test_handoffs_are_counted_for_either_connector() -> None:
    found = {'kvbaton_ends_total{end="delivered",engine="0"}': 4.0, 'kvbaton_ends_total{end="stale"}': 2.0}
    assert meters.handed(found, "kvbaton") == 4 and meters.handed(found, "nixl") == 0
    assert meters.handed({"vllm:nixl_xfer_time_seconds_count": 3.0}, "nixl") == 3


def test_what_is_held_is_the_most_that_anybody_counts() -> None:
    assert meters.held({}, BLOCKS) == 0
    assert meters.held({"vllm:kv_cache_usage_perc": 5 / (BLOCKS - 1)}, BLOCKS) == 5
    assert meters.held({"vllm:kv_cache_usage_perc": 5 / (BLOCKS - 1), "kvbaton_pinned_blocks": 6.0}, BLOCKS) == 6
    assert meters.held({"kvbaton_leases_held": 2.0}, BLOCKS) == 2
    assert meters.held({"vllm:kv_cache_usage_perc": 1e-6}) == 1, "however many blocks it has"


def test_what_is_not_told_is_not_at_rest() -> None:
    assert not meters.is_at_rest(None)
    assert not meters.is_at_rest({"vllm:kv_cache_usage_perc": 0.0, "kvbaton_leases_held": 1.0})
