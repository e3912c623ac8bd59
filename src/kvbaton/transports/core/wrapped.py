"""A transport around another one: everything passes through, except what a subclass changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.transports.core.device_memory import mapped_bytes_of
from kvbaton.transports.core.refusals import refusals_of
from kvbaton.transports.core.transport import Copy, LendingTransport, Loan, PageTable, Transport, TransportEvent


class WrappedTransport:
    """See `base.Transport`."""

    def __init__(self, inner: Transport | None) -> None:
        """None: a subclass sets it later."""
        self._inner = inner

    @property
    def inner(self) -> Transport:
        assert self._inner is not None
        return self._inner

    @property
    def capabilities(self) -> Capabilities:
        return self.inner.capabilities

    @property
    def refusals(self) -> Mapping[str, int]:
        return refusals_of(self._inner)

    @property
    def mapped_bytes(self) -> int:
        return mapped_bytes_of(self._inner)

    def register(self, region: int, memory: Any) -> None:
        cast(Any, self.inner).register(region, memory)

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
        return self.inner.drain()

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.inner.set_waker(waker)

    def close(self) -> None:
        self.inner.close()
