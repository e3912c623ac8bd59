"""Which data-parallel rank an engine is, as vLLM tells it: by several fields, none of which is always there.

Of a dense model vLLM makes each rank an engine of its own and tells it that it is the only one: `data_parallel_index`
keeps the rank, and the engine id ends in it (`_dp0`). Of a mixture of experts all fields say what they mean, and the
ranks compute in lock-step: one that has nothing to do runs dummy batches, for which it asks no connector.

Laws: a rank is a member of the cluster (`control.rank_names`). Its HTTP server knows it by a number that may be another
than its rank: where each host's server sees its own ranks alone (`--data-parallel-external-lb`, `-hybrid-lb`) they are
counted from 0 again. A size that vLLM does not tell is taken to be the least that it can be.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

_RANK_OF_ENGINE = re.compile(r"_dp([0-9]{1,5})\Z")
LOCAL_BALANCERS = ("data_parallel_external_lb", "data_parallel_hybrid_lb")


class DataParallelPlace(msgspec.Struct, frozen=True):
    """One rank's place among all."""

    rank: int
    size: int  # of all; at least
    http_rank: int  # by which its HTTP server knows it
    http_size: int  # how many that server has; above 1 a request names the one that it is for; at least

    @property
    def speaks(self) -> bool:
        """Whether it announces its HTTP server, where that is done once for all ranks."""
        return self.http_rank == 0


def place_of(vllm_config: Any, outer: Any = None) -> DataParallelPlace | None:
    """None for an engine without data parallelism. `outer`: vLLM's own configuration, around a MultiConnector's."""
    parallel = vllm_config.parallel_config
    transfers = [vllm_config.kv_transfer_config, getattr(outer, "kv_transfer_config", None)]
    ids = [str(getattr(each, "engine_id", "")) for each in transfers]
    by_id = next((int(found[1]) for each in ids if (found := _RANK_OF_ENGINE.search(each)) is not None), None)
    rank = max(getattr(parallel, field, 0) or 0 for field in ("data_parallel_index", "data_parallel_rank"))
    told = getattr(parallel, "data_parallel_size", 1)
    if told == 1 and not rank and by_id is None:
        return None
    # vLLM 0.32 forgets how many ranks a dense model has, but for this copy
    size = max(told, getattr(parallel, "elastic_ep_max_dp_size", None) or 1, rank + 1, 2)
    if getattr(parallel, LOCAL_BALANCERS[0], False):
        return DataParallelPlace(rank, size, 0, 1)
    if getattr(parallel, LOCAL_BALANCERS[1], False):
        local = getattr(parallel, "data_parallel_rank_local", None) or 0
        return DataParallelPlace(rank, size, local, max(2, local + 1))
    return DataParallelPlace(rank, size, rank, size)
