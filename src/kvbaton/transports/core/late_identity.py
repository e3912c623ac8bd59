"""A data plane whose owner learns later who it is: a rank has its memory before its engine has an incarnation (rule 3).

Law: before `open` nothing but `register` and `set_waker` has an effect that lasts; after it this is the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import cast

from kvbaton.protocol.capabilities import Capabilities
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.device_memory import mapped_bytes_of
from kvbaton.transports.core.refusals import refusals_of
from kvbaton.transports.core.transport import Copy, LendingTransport, Loan, PageTable, Transport, TransportEvent


class UnnamedTransport:
    """Makes the real transport when told its name."""

    def __init__(self, capabilities: Capabilities, make: Callable[[PeerId], Transport]) -> None:
        self.capabilities = capabilities
        self._make = make
        self._inner: Transport | None = None
        self._waker: Callable[[], None] | None = None

    def open(self, me: PeerId) -> None:
        """From now on it can be reached as `me`. A second name is refused: a new life has new data planes."""
        if self._inner is not None:
            raise RuntimeError(f"this transport has a name already; {me} needs one of its own")
        self._inner = self._make(me)
        if self.capabilities.enforces:
            self.lay_out(())  # nothing can be lent before the engine has said where blocks are
        if self._waker is not None:
            self._inner.set_waker(self._waker)

    @property
    def inner(self) -> Transport:
        if self._inner is None:
            raise RuntimeError("this transport was not told yet whose it is")
        return self._inner

    @property
    def refusals(self) -> Mapping[str, int]:
        return refusals_of(self._inner)

    @property
    def mapped_bytes(self) -> int:
        return mapped_bytes_of(self._inner)

    def register(self, region: int, memory: memoryview) -> None:
        raise NotImplementedError("memory is registered by whoever makes the real transport")

    def endpoint(self, peer: PeerId) -> bytes:
        return self.inner.endpoint(peer)

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        self.inner.connect(peer, endpoint)

    def disconnect(self, peer: PeerId) -> None:
        self.inner.disconnect(peer)

    def lay_out(self, tables: Sequence[PageTable]) -> None:
        cast(LendingTransport, self.inner).lay_out(tables)

    def lend(self, loan: Loan) -> None:
        cast(LendingTransport, self.inner).lend(loan)

    def submit(self, copy: Copy) -> bool:
        return self.inner.submit(copy)

    def cancel(self, job: JobId) -> None:
        self.inner.cancel(job)

    def fence(self, peer: PeerId) -> None:
        self.inner.fence(peer)

    def drain(self) -> Sequence[TransportEvent]:
        return self._inner.drain() if self._inner is not None else ()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        if self._inner is not None:
            self._inner.set_waker(waker)

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
