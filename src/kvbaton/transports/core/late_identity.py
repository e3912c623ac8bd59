"""A transport whose owner learns its identity later: a rank has its memory before its engine has an incarnation (rule
3).

Law: before `open` only `register` and `set_waker` have a lasting effect; after it this is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import PeerId
from kvbaton.transports.core.transport import Transport, TransportEvent
from kvbaton.transports.core.wrapped import WrappedTransport


class UnnamedTransport(WrappedTransport):
    """Makes the real transport when given its name."""

    def __init__(self, capabilities: Capabilities, make: Callable[[PeerId], Transport]) -> None:
        super().__init__(None)
        self._capabilities = capabilities
        self._make = make
        self._waker: Callable[[], None] | None = None

    def open(self, me: PeerId) -> None:
        """From now on it can be reached as `me`. A second name is refused: a new incarnation has new transports."""
        if self._inner is not None:
            raise RuntimeError(f"this transport has a name already; {me} needs its own")
        self._inner = self._make(me)
        if self.capabilities.lends_writes:
            self.lay_out(())  # nothing can be lent before the engine has said where blocks are
        if self._waker is not None:
            self._inner.set_waker(self._waker)

    @property
    def inner(self) -> Transport:
        if self._inner is None:
            raise RuntimeError("this transport has no owner yet")
        return self._inner

    @property
    def capabilities(self) -> Capabilities:
        return self._capabilities

    def register(self, region: int, memory: Any) -> None:
        raise NotImplementedError("memory is registered when the real transport is made")

    def drain(self) -> Sequence[TransportEvent]:
        return self._inner.drain() if self._inner is not None else ()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        if self._inner is not None:
            self._inner.set_waker(waker)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
