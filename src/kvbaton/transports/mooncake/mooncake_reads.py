"""The reads in flight on one Mooncake engine, from their start to their end.

Laws: used only by the thread of its link. A part is over when the engine says so of all its slices. `close` closes the
engine first, so that what it returns is at rest: the library cannot cancel a read, and closing is the only way.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kvbaton.transports.core.jobs import CopyJob
from kvbaton.transports.core.span_tables import size_of
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.mooncake.mooncake_endpoint import MooncakeEndpoint
from kvbaton.transports.mooncake.mooncake_engine import SLICES_MAX, MooncakeEngine, SliceState

PART_SLICES_MAX = 256
WINDOW_BYTES = 32 << 20
"""Asked for and not there: enough to keep the engine's four connections busy, and a cancelled copy rests soon after."""

LOOK_AHEAD = 16
"""Parts end about in the order in which they began, so only the oldest are looked at."""


class ReadFailed(Exception):
    """The engine could not start a read, or one has failed: the connection is unusable."""


@dataclass(slots=True, eq=False)
class MooncakePart:
    """Some slices of a copy, in flight together."""

    job: CopyJob
    spans: Spans
    size_bytes: int
    slices: deque[int] = field(default_factory=deque)  # not yet seen to be over


class Reads:
    """Parts under way with one peer, oldest first."""

    def __init__(self, engine: MooncakeEngine, there: MooncakeEndpoint, address: Callable[[int], int]) -> None:
        """`address` says where a local region begins."""
        self._engine = engine
        self._there = there
        self._address = address
        self._slices = self._bytes = 0
        self.parts: deque[MooncakePart] = deque()
        self.moved_at = 0.0

    @property
    def has_room(self) -> bool:
        return self._slices <= SLICES_MAX - PART_SLICES_MAX and self._bytes < WINDOW_BYTES

    def start(self, job: CopyJob, spans: Spans) -> None:
        if not self.parts:
            self.moved_at = time.monotonic()
        part = MooncakePart(job, spans, size_of(spans))
        self.parts.append(part)
        self._bytes += part.size_bytes
        local = self._address(job.copy.local_region)
        remote = self._there.regions[job.copy.remote_region].address
        numbers = iter(spans)
        for here, there, size in zip(numbers, numbers, numbers, strict=True):
            if size:
                number = self._engine.start_read(self._there.session, local + here, remote + there, size)
                if not number:
                    raise ReadFailed
                part.slices.append(number)
                self._slices += 1

    def over(self) -> list[MooncakePart]:
        """Those of the oldest that are over, taken out."""
        found = [part for part in itertools.islice(self.parts, LOOK_AHEAD) if self._is_over(part)]
        for part in found:
            self.parts.remove(part)
            self._bytes -= part.size_bytes
        return found

    def close(self) -> deque[MooncakePart]:
        """Reads that were in flight, now at rest."""
        self._engine.close()
        parts, self.parts = self.parts, deque()
        return parts

    def _is_over(self, part: MooncakePart) -> bool:
        while part.slices:
            state = self._engine.state(part.slices[0])
            if state is SliceState.MOVING:
                return False
            part.slices.popleft()
            self._slices -= 1
            self.moved_at = time.monotonic()
            if state is SliceState.FAILED:
                raise ReadFailed
        return True
