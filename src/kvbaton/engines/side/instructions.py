"""What the sides tell an engine to do, and what its workers may say of a step.

Law: everything here is small, picklable and made fresh for each step; nothing in it is shared with its maker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvbaton.protocol.effects import End
from kvbaton.protocol.geometry.progress import GroupProgress, Progress

Answer = tuple[int | None, bool]
"""To "how many tokens after the local ones can be loaded?": a number, and whether a load of them is to be begun."""

NOT_YET: Answer = (None, False)
"""Ask again."""
NOTHING: Answer = (0, False)


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """How one load ended. The engine gets it once."""

    request_id: str
    failed: bool = False
    bad_blocks: tuple[int, ...] = ()  # not failed as a whole: these are to be computed again, the ones before are good
    end: End = End()  # its reason, and how much is good, for engines that ask
    final: bool = False  # failed: the policy decides; else there is another source, or nothing was promised

    @property
    def is_good(self) -> bool:
        return not self.failed and not self.bad_blocks


@dataclass(frozen=True, slots=True)
class Leaving:
    """A prompt that is read behind this step, or written from it: what the step adds to each group's blocks."""

    lease: int
    had: tuple[int, ...]
    has: tuple[int, ...]

    def progress(self, done: Sequence[int], layers: Sequence[int]) -> Progress:
        """While it is computed: of each group's `layers`, the first `done` have what the step adds."""
        return tuple(
            GroupProgress(has) if count == total else GroupProgress(had, has, count) if count else GroupProgress(had)
            for count, total, had, has in zip(done, layers, self.had, self.has, strict=True)
        )
