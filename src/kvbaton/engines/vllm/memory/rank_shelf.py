"""A rank's part of each block as a value of the shared store.

Laws: a cache that cannot be stored and a text that is no store are refused at start, by name. A store that is not there
is not: it costs misses. Caches of a device go through pinned memory (`device_shelf`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvbaton.engines.shared.connector_settings import FIELD, ConnectorSettings
from kvbaton.engines.shared.store_setup import alone, keyring_of
from kvbaton.engines.vllm.memory.vllm_layout import RankFacts, engine_layout
from kvbaton.protocol.legality import Role
from kvbaton.ranks.device_store import DeviceRankStore, StagingShape
from kvbaton.ranks.engine_store import RankStoreInterface
from kvbaton.ranks.rank_store import LocalRankStore, NotStorable, rank_values
from kvbaton.ranks.rank_store_link import MakeRankStore
from kvbaton.ranks.store_trust import Served, opener, store_place
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.cuda.cuda_driver import CudaGpu, Gpu

_NOBODY = "0" * 32


def rank_shelf(
    settings: ConnectorSettings,
    facts: RankFacts,
    rank: int,
    ranks: int,
    memories: Sequence[memoryview] | Sequence[DeviceMemory],
    gpu: Callable[[int], Gpu] = CudaGpu,
    role: Role = Role.BOTH,
) -> MakeRankStore | None:
    """What makes this rank's shelf, once its engine is known; None without a store. Raises what is told at start.

    `gpu`: of the device that the memory is on. `role`: of the engine.
    """
    if not settings.store:
        return None
    place = store_place(settings.store)
    layout = engine_layout([facts])
    views = [each for each in memories if isinstance(each, memoryview)]
    on_device = [each for each in memories if isinstance(each, DeviceMemory)]
    try:
        values = rank_values(layout, 0, _NOBODY)
        if on_device:
            StagingShape(values, on_device)
    except NotStorable as error:
        raise ValueError(f"{FIELD}.store: {error}") from None
    if isinstance(place, Served):
        keyring = keyring_of(settings, rank, role)
    else:  # which asks for no key of ours
        keyring = alone(settings) if settings.joins else keyring_of(settings)
    make, _ = opener(place, keyring, ranks=ranks, server=settings.store_name)

    def made(compat: str) -> RankStoreInterface:
        values = rank_values(layout, 0, compat)
        if on_device:
            return DeviceRankStore(make(), values, on_device, gpu(on_device[0].device))
        return LocalRankStore(make(), values, views, owned=True)

    return made
