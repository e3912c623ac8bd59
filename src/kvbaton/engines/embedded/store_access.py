"""A worker's access to the shared store that the operator named, for each of its ranks.

Laws: nothing is connected to while a worker starts, so it starts and serves without its store. Stopping leaves no pin:
the node's thread ends all store operations (`ClusterNode.end_store`), the engine's thread stops, and the thread that
stops the worker performs the remaining duties, with the node still running. It is bounded, whatever hangs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from kvbaton.control.addressing import ControlError
from kvbaton.control.keyring import Keyring
from kvbaton.engines.embedded.embedded_connector import EmbeddedConnector
from kvbaton.engines.embedded.worker_options import WorkerOptions
from kvbaton.node.cluster_node import EngineFacts
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.content import compat_digest
from kvbaton.ranks.engine_store import EngineStore, EngineStoreSettings
from kvbaton.ranks.rank_store import LocalRankStore, NotStorable, rank_values
from kvbaton.ranks.store_trust import opener, store_place
from kvbaton.store.interface import Backend

GET_PER_LOOKUP = 5.0
"""A get may take this many times as long as a look-up: it moves bytes."""
END_S = 5.0
POLL_S = 0.005


class StoreAccess:
    """One worker's parts of the store."""

    def __init__(self, shelf: EngineStore, doorway: Doorway, shared: Sequence[Backend]) -> None:
        self.shelf = shelf
        self._doorway = doorway
        self._shared = shared  # by ranks, who do not close it

    def settle(self, connector: EmbeddedConnector) -> None:
        """When the engine's thread has ended and the node's runs: drop what the engine holds for the store."""
        until = time.monotonic() + END_S
        while (self._doorway.put_blocks or connector.sides.stored.held_blocks) and time.monotonic() < until:
            connector.step_begin()
            time.sleep(POLL_S)

    def close(self) -> None:
        """After both threads have stopped."""
        self.shelf.close()
        for backend in self._shared:
            backend.close()


def open_store(
    options: WorkerOptions,
    keyring: Keyring,
    facts: EngineFacts,
    regions: Sequence[memoryview],
    doorway: Doorway,
) -> StoreAccess:
    """For a worker whose options name a store. KV that cannot be stored is refused, by the name of its group."""
    try:
        compat = compat_digest(facts.compat)
        values = [rank_values(facts.layout, rank, compat) for rank in range(len(regions))]
    except NotStorable as error:
        raise ControlError(f"store: {error}") from None
    make, owned = opener(store_place(options.store), keyring, ranks=len(regions), server=options.store_name)
    backends = [make() for _ in regions] if owned else [make()] * len(regions)
    ranks = [
        LocalRankStore(backend, each, [region], owned=owned)
        for backend, each, region in zip(backends, values, regions, strict=True)
    ]
    settings = EngineStoreSettings(
        lookup_timeout_s=options.store_timeout,
        get_timeout_s=GET_PER_LOOKUP * options.store_timeout,
        put_timeout_s=min(20.0, options.transfer_timeout),
        copies_percent=options.copies_percent,
    )
    shelf = EngineStore(ranks, settings)

    def wake() -> None:
        doorway.wake_engine()  # looked up when it is needed: the engine's thread sets it later

    shelf.wake_engine = wake
    return StoreAccess(shelf, doorway, () if owned else backends[:1])
