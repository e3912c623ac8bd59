"""Bounds: memories that forget, and quotas of how much of the shared messages, claims and bytes one peer may use.

Pure; time is an argument. What happens at a bound is the caller's decision, based on the return value.

Laws: a quota never depends on other peers, so no peer can use up another's. What exceeds a quota is refused or dropped
at little cost, and counted; the protocol repeats messages, so a dropped one costs only time. The defaults are beyond
what a healthy peer with a thousand requests in flight does.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

from kvbaton.protocol.geometry.layout import EngineLayout, Group, Share, cell_axes
from kvbaton.protocol.ids import LeaseId, Reader, WorkerId

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Remembered(Generic[K, V]):
    """The last `limit` things put in; the oldest is forgotten first."""

    __slots__ = ("_items", "limit")

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._items: OrderedDict[K, V] = OrderedDict()

    def put(self, key: K, value: V) -> tuple[K, V] | None:
        """Remember; returns what had to be forgotten for it."""
        self._items[key] = value
        self._items.move_to_end(key)
        return self._items.popitem(last=False) if len(self._items) > self.limit else None

    def get(self, key: K) -> V | None:
        return self._items.get(key)

    def __contains__(self, key: K) -> bool:
        return key in self._items

    def __len__(self) -> int:
        return len(self._items)


BUCKETS_MAX = 4096
"""Peers whose use is remembered; beyond it the one that was quiet longest begins anew."""


class Buckets(Generic[K]):
    """A token bucket for each peer: `per_s` in the long run, `burst` at once."""

    __slots__ = ("_left", "_refused", "burst", "per_s")

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._left: OrderedDict[K, tuple[float, float]] = OrderedDict()  # tokens, and when there were so many
        self._refused: OrderedDict[K, int] = OrderedDict()

    def take(self, peer: K, now: float, cost: float = 1.0) -> bool:
        """Whether one more, which counts as `cost`, is within the peer's quota; if so it is counted.

        One that costs more than a whole burst waits for a full bucket, and empties it.
        """
        if self.per_s == math.inf:
            return True
        left, since = self._left.get(peer, (self.burst, now))
        left = min(self.burst, left + max(0.0, now - since) * self.per_s)
        cost = min(cost, max(1.0, self.burst))
        within = left >= cost
        self._left[peer] = (left - cost if within else left), now
        self._left.move_to_end(peer)
        if len(self._left) > BUCKETS_MAX:
            self._refused.pop(self._left.popitem(last=False)[0], None)
        if not within:
            self._refused[peer] = self._refused.get(peer, 0) + 1
        return within

    def is_first_refusal(self, peer: K) -> bool:
        return self._refused.get(peer) == 1


class PerPeer(dict[Reader, V]):
    """Things by the reader that they are for, with a count for each worker. Put in and taken out one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self._counts: Counter[WorkerId] = Counter()

    def of(self, worker: WorkerId) -> int:
        return self._counts[worker]

    def __setitem__(self, reader: Reader, value: V) -> None:
        if reader not in self:
            self._counts[reader.peer.worker] += 1
        super().__setitem__(reader, value)

    def __delitem__(self, reader: Reader) -> None:
        super().__delitem__(reader)
        self._left(reader)

    def take(self, reader: Reader) -> V | None:
        """Remove and return it; None when there was nothing."""
        if reader not in self:
            return None
        self._left(reader)
        return super().pop(reader)

    def _left(self, reader: Reader) -> None:
        worker = reader.peer.worker
        self._counts[worker] -= 1
        if not self._counts[worker]:
            del self._counts[worker]


class Held:
    """Holdings of each worker at this node: seats at leases, and the bytes that they are about."""

    __slots__ = ("_bytes", "_seats", "_sizes")

    def __init__(self) -> None:
        self._sizes: dict[tuple[LeaseId, Reader], int] = {}
        self._seats: Counter[WorkerId] = Counter()
        self._bytes: Counter[WorkerId] = Counter()

    def seats(self, worker: WorkerId) -> int:
        return self._seats[worker]

    def bytes(self, worker: WorkerId) -> int:
        return self._bytes[worker]

    def take(self, lease: LeaseId, reader: Reader, size: int) -> None:
        """A reader takes a seat at a lease, once."""
        self._sizes[lease, reader] = size
        self._seats[reader.peer.worker] += 1
        self._bytes[reader.peer.worker] += size

    def give(self, lease: LeaseId, reader: Reader) -> None:
        """It has left its seat; repeating has no effect."""
        size = self._sizes.pop((lease, reader), None)
        if size is None:
            return
        worker = reader.peer.worker
        self._seats[worker] -= 1
        self._bytes[worker] -= size
        if not self._seats[worker]:
            del self._seats[worker], self._bytes[worker]


def block_bytes(layout: EngineLayout) -> tuple[int, ...]:
    """Bytes of one block of each group, over all ranks and layers."""
    return tuple(
        sum(
            len(rank.shares[index].places) * _page_bytes(group, rank.shares[index], layout.page_tokens(index))
            for rank in layout.ranks
        )
        for index, group in enumerate(layout.groups)
    )


def promised_bytes(layout: EngineLayout, per_block: Sequence[int], tokens: int) -> int:
    """Bytes that a reader of a prompt of `tokens` tokens will read."""
    spans = (group.needed(tokens) for group in layout.groups)
    return sum(size * (hi - lo) for size, (lo, hi) in zip(per_block, spans, strict=True))


def _page_bytes(group: Group, share: Share, tokens: int) -> int:
    return sum(math.prod(cell_axes(cell, share.head_count, tokens)) for cell in group.cells)
