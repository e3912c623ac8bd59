"""What a vLLM worker needs to reach the shared store: an identity, and its rank's part of each block as a value.

Laws: a cache that cannot be stored, a key that is missing and a text that is no store are refused at start, by name. A
store that is not there is not: it costs misses. Each rank has an identity of its own towards a kvbaton store, since an
answer goes to whoever spoke last under that name. Caches of a device go through pinned memory (`device_shelf`).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence

import zmq

from kvbaton.control.keyring import TICKET_KEY_BYTES, Keyring, load
from kvbaton.engines.vllm.connector_settings import FIELD, ConnectorSettings
from kvbaton.engines.vllm.vllm_layout import RankFacts, engine_layout
from kvbaton.protocol.ids import WorkerId
from kvbaton.ranks.device_store import DeviceRankStore, StagingShape
from kvbaton.ranks.rank_store import LocalShelf
from kvbaton.ranks.rank_store_host import MakeShelf
from kvbaton.ranks.rank_values import NotStorable, rank_values
from kvbaton.ranks.store_address import Served, opener, store_place
from kvbaton.ranks.store_interface import RankStoreInterface
from kvbaton.transports.core.device_memory import DeviceMemory
from kvbaton.transports.cuda.cuda_driver import CudaGpu, Gpu

_NOBODY = "0" * 32


def keyring_of(settings: ConnectorSettings, rank: int = 0) -> Keyring:
    """Who the engine, or one of its ranks, is. An engine that is alone gets keys that nobody else knows."""
    if not settings.is_alone:
        return load(settings.keys, rank_identity(settings.name, rank))
    public, secret = (key.decode() for key in zmq.curve_keypair())
    name = WorkerId(settings.name)
    return Keyring(name, public, secret, {name: public}, (secrets.token_bytes(TICKET_KEY_BYTES),))


def rank_identity(name: str, rank: int) -> str:
    """In the key directory: the engine's own name for its first rank, and one each for the others."""
    return f"{name}.{rank}" if rank else name


def rank_shelf(
    settings: ConnectorSettings,
    facts: RankFacts,
    rank: int,
    ranks: int,
    memories: Sequence[memoryview] | Sequence[DeviceMemory],
    gpu: Callable[[int], Gpu] = CudaGpu,
) -> MakeShelf | None:
    """What makes this rank's shelf, once its engine is known; None without a store. Raises what is told at start.

    `gpu`: of the device that the memory is on.
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
    keyring = keyring_of(settings, rank if isinstance(place, Served) else 0)
    make, _ = opener(place, keyring, ranks=ranks, server=settings.store_name)

    def made(compat: str) -> RankStoreInterface:
        values = rank_values(layout, 0, compat)
        if on_device:
            return DeviceRankStore(make(), values, on_device, gpu(on_device[0].device))
        return LocalShelf(make(), values, views, owned=True)

    return made
