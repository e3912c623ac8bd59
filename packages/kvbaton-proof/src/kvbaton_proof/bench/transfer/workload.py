"""The workload of `kvbaton bench transfer`: segments scattered over a region, and a check that they arrived.

Law: the same numbers give the same bytes and the same places in every process, so nothing but a seed is exchanged.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Callable, Sequence
from typing import cast

import numpy as np

from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction, HostTransport, LendingTransport, Spans

COPY_DEADLINE_S = 60.0
P = PeerId(WorkerId("bench-p"), Incarnation(1))

Make = Callable[[str, PeerId, Sequence[memoryview]], HostTransport]
"""Makes the transport of a way, for an identity, with its regions registered."""
Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class WrongBytes(RuntimeError):
    """A way said that it had delivered, and had not."""


def reader_id(way: str) -> PeerId:
    """D's identity, one for each way, so that what P lends to one is not lent to another."""
    return PeerId(WorkerId(way.replace(" ", "-")), Incarnation(1))


def pattern(size: int) -> Bytes:
    """The same bytes in both processes; no two 8-byte words of a region are equal."""
    words = np.arange(size // 8, dtype=np.uint64)
    words *= np.uint64(0x9E3779B97F4A7C15)
    return words.view(np.uint8)


def scattered(region_bytes: int, moved_bytes: int, segment_bytes: int, seed: int) -> Spans:
    """Segments at random places on both sides, in random order, none twice."""
    rng = np.random.default_rng(seed)
    places = region_bytes // segment_bytes
    count = moved_bytes // segment_bytes
    columns = (rng.permutation(places)[:count], rng.permutation(places)[:count], np.ones(count, np.int64))
    spans = array("q")
    spans.frombytes((np.stack(columns, axis=1).astype(np.int64) * segment_bytes).tobytes())
    return spans


def verify(name: str, target: memoryview, source: Bytes | memoryview, spans: Spans) -> None:
    """Every segment, byte for byte."""
    got, want = np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8)
    for local, remote, size in np.frombuffer(spans, np.int64).reshape(-1, 3).tolist():
        if not np.array_equal(got[local : local + size], want[remote : remote + size]):
            raise WrongBytes(f"{name} delivered wrong bytes at {local}")


class Driven:
    """One of kvbaton's transports, connected to `P`: a copy at a time, waited for without spinning."""

    def __init__(self, name: str, transport: HostTransport, memory: memoryview, endpoint: bytes) -> None:
        self._name = name
        self._transport = transport
        self._event = threading.Event()
        self._jobs = 0
        transport.register(0, memory)
        transport.connect(P, endpoint)
        transport.set_waker(self._event.set)

    def read(self, spans: Spans) -> None:
        deadline = time.monotonic() + COPY_DEADLINE_S
        self._event.clear()
        self._jobs += 1
        self._transport.submit(Copy(JobId(self._jobs), P, Direction.READ, 0, 0, spans))
        while not (news := self._transport.drain()):
            if not self._event.wait(max(0.0, deadline - time.monotonic())):
                raise RuntimeError(f"{self._name} delivered nothing within {COPY_DEADLINE_S:.0f} s")
            self._event.clear()
        if not isinstance(news[0], CopyEnded) or news[0].reason is not None:
            raise RuntimeError(f"{self._name} did not deliver: {news}")

    def close(self) -> None:
        self._transport.close()


class DrivenSource:
    """P, with a transport for each way, all of which D may read."""

    def __init__(self, memory: memoryview, ways: Sequence[str], make: Make) -> None:
        self._transports = {way: make(way, P, [memory]) for way in ways}
        for way, transport in self._transports.items():
            if transport.capabilities.lends_reads:
                lend_everything(cast(LendingTransport, transport), reader_id(way))

    def offer(self) -> dict[str, bytes]:
        return {way: transport.endpoint(reader_id(way)) for way, transport in self._transports.items()}

    def spin(self, way: str) -> None:
        """Its threads wait for events: nobody has to."""

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


class DrivenReader:
    """D, with a transport for each way."""

    spins = frozenset[str]()

    def __init__(self, memory: memoryview, offer: dict[str, bytes], ways: Sequence[str], make: Make) -> None:
        self.ways = tuple(ways)
        self._driven = {way: Driven(way, make(way, reader_id(way), []), memory, offer[way]) for way in ways}

    def prepare(self, segment_bytes: int, spans: Spans) -> None:
        self._spans = spans

    def moved(self, way: str) -> Spans:
        return self._spans

    def run(self, way: str) -> None:
        self._driven[way].read(self._spans)

    def close(self) -> None:
        for driven in self._driven.values():
            driven.close()
