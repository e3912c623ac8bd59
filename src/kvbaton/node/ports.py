"""The ports of a node: a control plane, transports per rank, an engine's doorway, optionally a store."""

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
        """Frames received since the last call, each with its authenticated sender."""


class StorePort(Protocol):
    """Accepts blocks for a shared store. Never blocks; each put ends exactly once, when it no longer reads."""

    def put(self, put: PutId, blocks: Groups, keys: tuple[bytes, ...], origins: tuple[str, ...] = ()) -> None:
        """`origins`: members on whose KV these blocks may be computed."""

    def cancel(self, put: PutId) -> None: ...

    def drain(self) -> Sequence[StoreEnded]: ...

    def set_waker(self, waker: Callable[[], None]) -> None: ...
