"""One landed copy while its bytes are compared: digests of both sides in, a verdict out. Pure.

Law: it agrees only when both sides have given the digests of every portion and all of them were equal.
"""

from __future__ import annotations

from kvbaton.transports.checksum.checksum_portions import described, difference
from kvbaton.transports.core.jobs import CopyJob
from kvbaton.transports.core.transport import Spans


class Comparison:
    """Receives each portion twice, in any order: from each side. The caller holds the lock of the jobs."""

    def __init__(self, job: CopyJob, portions: list[Spans]) -> None:
        self.job = job
        self.portions = portions
        self._left = len(portions)
        self._halves: dict[int, bytes] = {}  # by portion, of the side that came first

    @property
    def agrees(self) -> bool:
        return not self._left

    def hear(self, index: int, digests: bytes) -> str:
        """The difference, if it is known now; otherwise nothing."""
        first = self._halves.pop(index, None)
        if first is None:
            self._halves[index] = digests
            return ""
        row = difference(first, digests)
        if row is not None:
            return described(self.job.copy, self.portions[index], row)
        self._left -= 1
        return ""
