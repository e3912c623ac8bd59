"""A case of the transport contract, and helpers that all of them use."""

from __future__ import annotations

import functools
import random
import unittest
from array import array
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.testing.transport_harness import Side, TransportHarness
from kvbaton.transports.core.transport import Copy, Direction, Spans

SMALL_BYTES = 64 << 10
LARGE_BYTES = 8 << 20
STRANGER = PeerId(WorkerId("stranger"), Incarnation(99))
READ, WRITE = Direction.READ, Direction.WRITE

Check: TypeAlias = Callable[[TransportHarness], None]
Places: TypeAlias = list[tuple[int, int, int]]


class Case(msgspec.Struct, frozen=True):
    """One law, as a sentence and a function."""

    name: str
    run: Check
    needs: frozenset[str]

    def __str__(self) -> str:
        return self.name

    def __call__(self, harness: TransportHarness) -> None:
        missing = self.needs - offered(harness)
        if missing:
            raise unittest.SkipTest(f"needs {', '.join(sorted(missing))}")
        try:
            self.run(harness)
        finally:
            harness.reset()


class Cases(list[Case]):
    """The cases of one module, in order."""

    def add(self, *needs: str) -> Callable[[Check], Check]:
        """Decorates a check that can be run only where `needs` are offered."""

        def note(run: Check) -> Check:
            self.append(Case(run.__name__, run, frozenset(needs)))
            return run

        return note


def offered(harness: TransportHarness) -> frozenset[str]:
    """What the transport and the harness together make possible."""
    able = harness.capabilities
    fences = able.can_fence and able.can_write
    extra = {"write": able.can_write, "fence": fences, "cancel": able.cancels, "lends": able.enforces}
    extra["knows_writes"] = able.knows_writes
    return harness.offers | {name for name, is_so in extra.items() if is_so}


def directions(harness: TransportHarness) -> tuple[Direction, ...]:
    return (READ, WRITE) if harness.capabilities.can_write else (READ,)


def fill(memory: memoryview, seed: int) -> bytes:
    """Random bytes, so that nothing is right by chance; a copy of them."""
    data = noise(len(memory), seed)
    memory[:] = data
    return data


@functools.cache  # a mark must be quick, or what it should catch is over before it is made
def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


def copy(job: int, to: Side, direction: Direction, spans: Places, region: int = 0) -> Copy:
    return Copy(JobId(job), to.peer, direction, 0, region, flat(spans))


def flat(spans: Places) -> Spans:
    return array("q", [number for span in spans for number in span])


def scatter(rng: random.Random, near_bytes: int, far_bytes: int, count: int, size_max: int) -> Places:
    """Spans whose local and whose remote places do not overlap."""
    slots = min(near_bytes, far_bytes) // size_max
    local, remote = rng.sample(range(slots), count), rng.sample(range(slots), count)
    spans = []
    for here, there in zip(local, remote, strict=True):
        size = rng.randint(1, size_max)
        spans.append((here * size_max + rng.randint(0, size_max - size), there * size_max, size))
    return spans


def moved(target: bytes, source: bytes, spans: Places, direction: Direction) -> bytes:
    """What the target holds after the copy, and nothing else."""
    result = bytearray(target)
    for local, remote, size in spans:
        to, at = (local, remote) if direction is READ else (remote, local)
        result[to : to + size] = source[at : at + size]
    return bytes(result)
