"""One copy that has landed, while its bytes are compared: digests of either side in, a verdict out. Pure.

Law: it agrees only when both sides have told the digests of every portion and all of them were equal.
"""

from __future__ import annotations

from kvbaton.transports.checksum.checksum_portions import described, difference
from kvbaton.transports.core.jobs import CopyJob
from kvbaton.transports.core.transport import Spans


class Comparison:
    """Hears each portion twice, in any order: from here and from there. The caller holds the lock of the jobs."""

    def __init__(self, job: CopyJob, portions: list[Spans]) -> None:
        self.job = job
        self.portions = portions
        self._left = len(portions)
        self._halves: dict[int, bytes] = {}  # by portion, of whichever side was first

    @property
    def agrees(self) -> bool:
        return not self._left

    def hear(self, index: int, digests: bytes) -> str:
        """What differs, if that is known now; else nothing."""
        first = self._halves.pop(index, None)
        if first is None:
            self._halves[index] = digests
            return ""
        row = difference(first, digests)
        if row is not None:
            return described(self.job.copy, self.portions[index], row)
        self._left -= 1
        return ""
