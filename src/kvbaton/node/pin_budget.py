"""How much of a prefill engine's cache handoffs may pin, and who waits for room: decided before a prompt is computed.

Laws: blocks pinned by leases, and blocks promised to prompts that are computed for others, are together never more than
`blocks_max`; but one prompt that has the budget to itself may be as large as it is. Whoever waits is admitted in the
order of arrival, or refused at its deadline; at most `waiting_max` wait. A block that several leases pin counts once.
Who may be asked for a key by nobody here, a caller without a ticket of this cluster, has a share that leaves room for
those that have one; and of several decode workers that are known none has all. Who waits for its own share is passed.
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
STRANGERS_SHARE = 0.5
"""Of the room, and of the places to wait: for all callers together that show no ticket of this cluster."""
PEER_SHARE = 0.75
"""Of the room: for one decode worker, where there are others."""
PEERS_MAX = 4096
STRANGER = None
ANY_PEER = ""
"""A caller that has shown a ticket, which is for no decode worker in particular."""

Holder = str | None


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
        self._shares = HolderShares(blocks_max)

    # --- requests

    def ask(self, request: RequestId, blocks: int, now: float, holder: Holder = ANY_PEER) -> Room:
        """May this prompt, which takes so many blocks, be computed for somebody else? Once admitted, always."""
        if request in self._promised:
            return Room.ADMITTED
        self._expire(now)
        if request in self._refused:
            return Room.REFUSED
        if request not in self._waiting:
            places = self._shares.places(holder, self._waiting_max)
            is_full = self._waiting and (len(self._waiting) >= self._waiting_max or not places)
            if is_full or not self._shares.ever(holder, blocks):
                self._refuse(request)
                return Room.REFUSED
            self._waiting[request] = blocks, now + self.wait_s
            self._shares.came(request, holder)
        if not self._is_next(request):
            return Room.WAITING
        self._promised[request] = blocks = self._waiting.pop(request)[0]
        self._shares.admitted(request, blocks)
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
        self._shares.left(request, self._promised.pop(request, 0))
        self._waiting.pop(request, None)
        self._refused.discard(request)

    # --- leases, as the doorway records them

    def begun(self, lease: LeaseId, request: RequestId) -> None:
        self._of[lease] = request
        self._shares.begun(lease, request)

    def pin(self, lease: LeaseId, blocks: Iterable[int]) -> None:
        blocks = tuple(blocks)
        self._pins.update(blocks)
        request = self._of.get(lease)
        promised = 0
        if request is not None and request in self._promised:
            promised = min(self._promised[request], len(blocks))
            self._promised[request] -= promised
        self._shares.pinned(lease, len(blocks), promised)

    def unpin(self, lease: LeaseId, blocks: Iterable[int]) -> None:
        self._of.pop(lease, None)
        self._shares.unpinned(lease)
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
        """Whether it is the first of those that wait, and has room: a large prompt is not passed by small ones.

        But one that waits for its holder's own share is, by other holders'.
        """
        first = self._shares.first([(each, self._waiting[each][0]) for each in self._shares.heads()])
        return first == request and self._fits(self._waiting[request][0])

    def _fits(self, blocks: int) -> bool:
        used = self.pinned_blocks + self.promised_blocks
        return used + blocks <= self.blocks_max or not used

    def _expire(self, now: float) -> None:
        """Refuse whose deadline has passed, also those whom the engine does not ask about: they are in the way."""
        for request in [each for each, (_, until) in self._waiting.items() if now >= until]:
            if not self._is_next(request):
                self._waiting.pop(request)
                self._shares.left(request, 0)
                self._refuse(request)

    def _refuse(self, request: RequestId) -> None:
        self.refused_total += 1
        self._refused.add(request)


class HolderShares:
    """Who has how much of the room, and who waits, by decode worker; strangers are one holder."""

    def __init__(self, blocks_max: float) -> None:
        self._blocks_max = blocks_max
        self._peers: dict[str, None] = {}  # decode workers that tickets have named
        self._blocks: Counter[Holder] = Counter()  # promised and pinned
        self._queues: dict[Holder, dict[RequestId, int]] = {}  # those that wait, each with its number
        self._holder: dict[RequestId, Holder] = {}  # of those that wait or were promised
        self._leases: dict[LeaseId, tuple[Holder, int]] = {}
        self._arrivals = 0

    def places(self, holder: Holder, waiting_max: int) -> bool:
        """Whether one more of this holder's may wait."""
        return holder is not STRANGER or len(self._queues.get(STRANGER, ())) < waiting_max * STRANGERS_SHARE

    def ever(self, holder: Holder, blocks: int) -> bool:
        """Whether so many blocks could be this holder's: a stranger's prompt may not be larger than its share."""
        return holder is not STRANGER or blocks <= max(1.0, self._blocks_max * STRANGERS_SHARE)

    def came(self, request: RequestId, holder: Holder) -> None:
        if holder and len(self._peers) < PEERS_MAX:
            self._peers[holder] = None
        self._arrivals += 1
        self._holder[request] = holder
        self._queues.setdefault(holder, {})[request] = self._arrivals

    def heads(self) -> list[RequestId]:
        """The first of each holder, in order of arrival."""
        heads = (next(iter(queue.items())) for queue in self._queues.values())
        return [request for request, _ in sorted(heads, key=lambda each: each[1])]

    def first(self, waiting: Iterable[tuple[RequestId, int]]) -> RequestId | None:
        """The first, with its blocks, whose holder's share has room."""
        return next((request for request, blocks in waiting if self._has_room(self._holder[request], blocks)), None)

    def admitted(self, request: RequestId, blocks: int) -> None:
        self._unqueue(request)
        self._blocks[self._holder[request]] += blocks

    def left(self, request: RequestId, promised: int) -> None:
        self._unqueue(request)
        holder = self._holder.pop(request, ANY_PEER)
        self._give(holder, promised)

    def begun(self, lease: LeaseId, request: RequestId) -> None:
        self._leases[lease] = self._holder.get(request, ANY_PEER), 0

    def pinned(self, lease: LeaseId, blocks: int, promised: int) -> None:
        """`promised`: of those, what was counted before."""
        holder, before = self._leases.get(lease, (ANY_PEER, 0))
        self._leases[lease] = holder, before + blocks
        self._blocks[holder] += blocks - promised

    def unpinned(self, lease: LeaseId) -> None:
        holder, blocks = self._leases.pop(lease, (ANY_PEER, 0))
        self._give(holder, blocks)

    def _has_room(self, holder: Holder, blocks: int) -> bool:
        share = STRANGERS_SHARE if holder is STRANGER else PEER_SHARE if len(self._peers) > 1 else 1.0
        has = self._blocks[holder]
        return share == 1.0 or has + blocks <= self._blocks_max * share or not has

    def _unqueue(self, request: RequestId) -> None:
        holder = self._holder.get(request, ANY_PEER)
        queue = self._queues.get(holder)
        if queue is not None:
            queue.pop(request, None)
            if not queue:
                del self._queues[holder]

    def _give(self, holder: Holder, blocks: int) -> None:
        self._blocks[holder] -= blocks
        if self._blocks[holder] <= 0:
            del self._blocks[holder]


def budget_of(blocks: int, share: float, wait_s: float = PIN_WAIT_S) -> PinBudget:
    """For a cache of so many blocks; a share of 1 is no limit."""
    return PinBudget(max(1, int(blocks * share)) if share < 1 else math.inf, wait_s)


FULL_SHARE = 0.05
ROOM_SHARE = 0.1
"""Of its blocks, that no request and no handoff holds: below the first it is full, above the second it is not."""


class Fullness:
    """Whether an engine has room for one more prompt, as it tells routers: they prefer others meanwhile.

    Law: it says "full" early, while what is under way can still grow, and takes it back late, so that the word does not
    change with every request. It is advice: where everybody is full, everybody is asked as before.
    """

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
