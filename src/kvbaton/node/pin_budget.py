"""How much of a prefill engine's cache handoffs may pin, and who waits for room: decided before a prompt is computed.

Laws: blocks pinned by leases, and blocks promised to prompts that are computed for others, are together never more than
`blocks_max`; but one prompt that has the budget to itself may be as large as it is. Whoever waits is admitted in the
order of arrival, or refused at its deadline; at most `waiting_max` wait. A block that several leases pin counts once.
Only the engine's thread calls this; time is an argument.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping

from kvbaton.protocol.ids import LeaseId, RequestId

PIN_SHARE = 0.75
"""Of the cache. The rest is for what is computed: without it P would preempt what it has begun."""
PIN_WAIT_S = 5.0
WAITING_MAX = 256
"""Requests that wait for room at one engine; more are refused at once."""


class Room(enum.Enum):
    """Whether a prompt may be computed for somebody else now."""

    ADMITTED = "admitted"
    WAITING = "waiting"  # ask again
    REFUSED = "refused"  # for good: nobody may lease it


class PinBudget:
    """Of one engine. Without `blocks_max` everybody is admitted."""

    def __init__(
        self, blocks_max: float = math.inf, wait_s: float = PIN_WAIT_S, waiting_max: int = WAITING_MAX
    ) -> None:
        self.blocks_max = blocks_max
        self.refused_total = 0
        self.wait_s = wait_s
        self._waiting_max = waiting_max
        self._pins: Counter[int] = Counter()  # leases by the block that they pin
        self._of: dict[LeaseId, RequestId] = {}
        self._promised: dict[RequestId, int] = {}  # blocks that it may still pin
        self._waiting: dict[RequestId, tuple[int, float]] = {}  # blocks and deadline, in order of arrival
        self._refused: set[RequestId] = set()  # that the engine has not ended yet

    # --- requests

    def ask(self, request: RequestId, blocks: int, now: float) -> Room:
        """May this prompt, which takes so many blocks, be computed for somebody else? Once admitted, always."""
        if request in self._promised:
            return Room.ADMITTED
        self._expire(now)
        if request in self._refused:
            return Room.REFUSED
        if request not in self._waiting:
            if self._waiting and len(self._waiting) >= self._waiting_max:
                self._refuse(request)
                return Room.REFUSED
            self._waiting[request] = blocks, now + self.wait_s
        if not self._is_next(request):
            return Room.WAITING
        self._promised[request] = self._waiting.pop(request)[0]
        return Room.ADMITTED

    def waits(self, request: RequestId, now: float) -> bool:
        """Whether `ask` would say so again. Without side effects."""
        found = self._waiting.get(request)
        return found is not None and now < found[1] and not self._is_next(request)

    def holds(self, request: RequestId) -> bool:
        """Whether it was admitted and is not over: only then may it be leased."""
        return request in self._promised or self.blocks_max == math.inf

    def left(self, request: RequestId) -> None:
        """The request is over in the engine: what it has not pinned by now it never will."""
        self._promised.pop(request, None)
        self._waiting.pop(request, None)
        self._refused.discard(request)

    # --- leases, as the doorway records them

    def begun(self, lease: LeaseId, request: RequestId) -> None:
        self._of[lease] = request

    def pin(self, lease: LeaseId, blocks: Iterable[int]) -> None:
        blocks = tuple(blocks)
        self._pins.update(blocks)
        request = self._of.get(lease)
        if request is not None and request in self._promised:
            self._promised[request] = max(0, self._promised[request] - len(blocks))

    def unpin(self, lease: LeaseId, blocks: Iterable[int]) -> None:
        self._of.pop(lease, None)
        for block in blocks:
            self._pins[block] -= 1
            if not self._pins[block]:
                del self._pins[block]

    # --- figures

    @property
    def pinned_blocks(self) -> int:
        return len(self._pins)

    @property
    def promised_blocks(self) -> int:
        return sum(list(self._promised.values()))

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def figures(self, blocks: int) -> Mapping[str, int]:
        """From any thread. `blocks`: of the whole cache."""
        return {
            "pin_max_blocks": int(min(self.blocks_max, blocks)),
            "pin_waiting": len(self._waiting),
            "pin_refused_total": self.refused_total,
        }

    # --- helpers

    def _is_next(self, request: RequestId) -> bool:
        """Whether it is the first of those that wait, and has room: a large prompt is not passed by small ones."""
        return next(iter(self._waiting)) == request and self._fits(self._waiting[request][0])

    def _fits(self, blocks: int) -> bool:
        used = self.pinned_blocks + self.promised_blocks
        return used + blocks <= self.blocks_max or not used

    def _expire(self, now: float) -> None:
        """Refuse whose deadline has passed, also those whom the engine does not ask about: they are in the way."""
        for request in [each for each, (_, until) in self._waiting.items() if now >= until]:
            if not self._is_next(request):
                self._waiting.pop(request)
                self._refuse(request)

    def _refuse(self, request: RequestId) -> None:
        self.refused_total += 1
        self._refused.add(request)


def budget_of(blocks: int, share: float, wait_s: float = PIN_WAIT_S) -> PinBudget:
    """For a cache of so many blocks; a share of 1 is no limit."""
    return PinBudget(max(1, int(blocks * share)) if share < 1 else math.inf, wait_s)
