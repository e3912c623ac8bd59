"""The production door of a simulated engine, watched, and as other engines use it."""

from __future__ import annotations

from collections.abc import Callable

from kvbaton.node.doorway import NOBODYS, Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.protocol.effects import Effect, Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Groups
from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import LeaseId, RequestId
from kvbaton_proof.sim.promises import LEAK, Broken


class WatchedDoorway(Doorway):
    """The production door, and a memory of which leases have been released: each is, once.

    What engines may do and the sides do not, it does for them: it grants to several readers, says that a lease is all
    listed before it is computed, and has each rank say for itself what is ready.
    """

    def __init__(self, config: DoorwayConfig, epochs: EpochTable) -> None:
        super().__init__(config, epochs)
        self.on_released: Callable[[LeaseId], None] = lambda lease: None
        self._released: set[LeaseId] = set()
        self.sourceless: set[LeaseId] = set()  # P's request has ended early
        self.readers_of: Callable[[RequestId], int] = lambda request: 1
        self.announce: Callable[[LeaseId, Progress, int], None] = self.progressed  # by the rank whose device it is
        self.by_rank = False
        self._by_rank: set[LeaseId] = set()
        self._listed: set[LeaseId] = set()

    def source_ended(self, lease: LeaseId, reason: Reason) -> None:
        self.sourceless.add(lease)
        super().source_ended(lease, reason)

    def hand_in(self, effect: Effect) -> None:
        if isinstance(effect, Unpin):
            if effect.lease in self._released:
                raise Broken(LEAK, f"{self.config.me.worker}: lease {effect.lease} was released twice")
            self._released.add(effect.lease)
            self.on_released(effect.lease)
        super().hand_in(effect)

    def grant(
        self,
        digest: bytes,
        tokens: int,
        blocks: Groups,
        *,
        max_readers: int = 1,
        request: RequestId = NOBODYS,
        trace: str = "",
    ) -> tuple[str, tuple[int, ...]]:
        readers = self.readers_of(request)
        return super().grant(digest, tokens, blocks, max_readers=readers, request=request, trace=trace)

    def streams(self, lease: LeaseId) -> None:
        """It is read while it is computed."""
        if self.by_rank:
            self._by_rank.add(lease)

    def progressed(self, lease: LeaseId, progress: Progress, rank: int | None = None) -> None:
        if rank is not None or lease not in self._by_rank:
            super().progressed(lease, progress, rank)
            return
        for each in range(self.config.ranks):
            self.announce(lease, progress, each)

    def list_early(self, lease: LeaseId) -> None:
        self.completed(lease)
        self._listed.add(lease)

    def completed(self, lease: LeaseId) -> None:
        if lease not in self._listed:
            super().completed(lease)
