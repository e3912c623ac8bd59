"""A second load is begun only where its blocks are free twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvbaton.engines.side.store import SecondLoads


def request(name: str, tokens: int) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=tokens)


def test_a_second_load_needs_its_blocks_beyond_all_that_failed_loads_reserve() -> None:
    pool: Any = SimpleNamespace(free_blocks=12)
    loads = SecondLoads(pool, 4)
    first, other = request("a", 16), request("b", 8)
    assert loads.admits(first), "one that was never loaded is vLLM's own business"
    loads.allocated(first, 12)
    assert loads.admits(first), "5 reserved and 5 more of 12"
    loads.allocated(other, 4)
    assert not loads.admits(first), "8 reserved and 5 more of 12"
    loads.allocated(other, 0)
    assert loads.admits(first), "the other one runs"
    loads.allocated(other, 4)
    loads.left("b")
    assert loads.admits(first)
    pool.free_blocks = 9
    assert not loads.admits(first)
