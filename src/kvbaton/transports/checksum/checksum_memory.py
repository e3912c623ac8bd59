"""Memory that can be digested: the interface that checksums need, and its implementation for host memory.

Laws: `digest` returns at once and never touches memory on the caller's thread; `tell` is called once, from another,
with a digest for each row or with an error, unless this was closed. The caller has range-checked every row. Both sides
of a pair have the same `kind`: digests of two kinds cannot be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol, TypeAlias

import msgspec

from kvbaton.transports.checksum.checksum_hash import digests
from kvbaton.transports.checksum.checksum_pool import Digesters
from kvbaton.transports.checksum.checksum_portions import PART_BYTES, PIECE_BYTES
from kvbaton.transports.core.shared_memory import RegisteredMemory
from kvbaton.transports.core.transport import Spans

Tell: TypeAlias = Callable[[bytes, str], None]
"""Little-endian digests, one for each row; or why there are none."""


class Portioning(msgspec.Struct, frozen=True):
    """How the compared bytes are divided."""

    piece_bytes: int = PIECE_BYTES
    part_bytes: int = PART_BYTES
    row_bytes_max: int = PART_BYTES + PIECE_BYTES  # in a peer's query

    @property
    def question_bytes_max(self) -> int:
        """More than an honest peer ever asks about at once: others wait in the same queue."""
        return self.part_bytes + self.piece_bytes


class Sums(Protocol):
    """The registered memory of one transport, as seen by digests."""

    kind: str
    portioning: Portioning

    def add(self, region: int, memory: Any) -> None: ...
    def size_of(self, region: int) -> int | None: ...
    def digest(self, region: int, spans: Spans, width: int, halt: bytearray, tell: Tell) -> None:
        """Rows of `width` numbers, offset first and bytes last. May end early, with undefined results, once
        `halt[0]`."""

    def close(self, join_s: float) -> bool:
        """Start nothing more; whether nothing touches memory any more within `join_s`."""


class HostSums:
    """Host memory, by xxh3 on its own threads."""

    kind = "host"
    portioning = Portioning()

    def __init__(self, name: str, threads: int) -> None:
        self.digesters = Digesters(name, threads)
        self.digests = digests
        self._memory = RegisteredMemory()

    def add(self, region: int, memory: memoryview) -> None:
        self._memory.add(region, memory)

    def size_of(self, region: int) -> int | None:
        memory = self._memory.get(region)
        return None if memory is None else memory.nbytes

    def digest(self, region: int, spans: Spans, width: int, halt: bytearray, tell: Tell) -> None:
        self.digesters.add(partial(self._run, self._memory.get(region), spans, width, halt, tell))

    def close(self, join_s: float) -> bool:
        stopped = self.digesters.close(join_s)
        if stopped:
            self._memory.clear()
        return stopped

    def _run(self, memory: memoryview | None, spans: Spans, width: int, halt: bytearray, tell: Tell) -> None:
        """On a digester."""
        try:
            found = self.digests(memory or memoryview(b""), spans, width, halt)
        except Exception as error:
            tell(b"", repr(error))
            raise
        tell(found, "")
