"""The workload of `kvbaton bench transfer`: segments scattered over a region, and a check that they arrived.

Law: the same numbers give the same bytes and the same places in every process, so nothing but a seed is exchanged.
"""

from __future__ import annotations

import threading
import time
from array import array

import numpy as np

from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction, HostTransport, Spans

COPY_DEADLINE_S = 60.0
P = PeerId(WorkerId("bench-p"), Incarnation(1))

Bytes = np.ndarray[tuple[int], np.dtype[np.uint8]]


class WrongBytes(RuntimeError):
    """A way said that it had delivered, and had not."""


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


def contiguous(moved_bytes: int) -> Spans:
    return array("q", (0, 0, moved_bytes))


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
