"""Whether an engine has room for one more prompt, as it tells routers: they prefer others meanwhile.

Law: it says "full" early, while what is under way can still grow, and takes it back late, so that the word does not
change with every request. It is advice: where everybody is full, everybody is asked as before.
"""

from __future__ import annotations

FULL_SHARE = 0.05
ROOM_SHARE = 0.1
"""Of its blocks, that no request and no handoff holds: below the first it is full, above the second it is not."""


class Fullness:
    """Of one engine."""

    def __init__(self) -> None:
        self._is_full = False

    def look(self, free_blocks: int, blocks: int, waiting: int = 0) -> bool:
        """`waiting`: requests for whose KV there is no room to pin."""
        share = free_blocks / blocks if blocks else 1.0
        if waiting or share < FULL_SHARE:
            self._is_full = True
        elif share > ROOM_SHARE:
            self._is_full = False
        return self._is_full
