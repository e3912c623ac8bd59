"""What a node needs of the world: a control plane, data planes per rank, an engine's door, perhaps a store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kvbaton.protocol.events import Groups, StoreEnded
from kvbaton.protocol.ids import PutId, WorkerId


class ControlPort(Protocol):
    """Carries frames between authenticated workers. Never blocks; may lose, but never alters or misattributes."""

    def send(self, worker: WorkerId, frame: bytes) -> bool:
        """Queue a frame; False when no such worker is known (a full queue loses the frame and says True)."""

    def receive(self) -> Sequence[tuple[WorkerId, bytes]]:
        """What has come since the last call, each with its authenticated sender."""


class StorePort(Protocol):
    """Takes blocks for a shared store. Never blocks; each put ends exactly once, when it reads no more."""

    def put(self, put: PutId, blocks: Groups, keys: tuple[bytes, ...]) -> None: ...

    def cancel(self, put: PutId) -> None: ...

    def drain(self) -> Sequence[StoreEnded]: ...

    def set_waker(self, waker: Callable[[], None]) -> None: ...
