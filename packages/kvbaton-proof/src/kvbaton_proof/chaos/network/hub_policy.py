"""The fate of a packet between two hosts: delivered, delayed or lost. Pure; time is an argument.

Laws: from the moment of a cut nothing passes that way, not even what was already under way. What waits is bounded by
`WAITING_BYTES_MAX`; a packet over it is lost, as in a router with a full queue. Each way draws from a stream of its
own, so traffic elsewhere does not change which of its packets are lost.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import msgspec

WAITING_BYTES_MAX = 64 << 20  # of all ways together: 0.3 s at 200 MB/s
DELAY_S_MAX = 60.0

Way = tuple[str, str]  # source, target


class Wire(msgspec.Struct, frozen=True):
    """One way of a pair of hosts."""

    cut: bool = False
    delay_s: float = 0.0
    loss: float = 0.0


class Count(msgspec.Struct):
    """What one way has carried. `lost`: of cuts, of loss and of a full queue."""

    packets: int = 0
    payload_bytes: int = 0
    lost: int = 0


GOOD = Wire()


class Wires:
    """The state of every way between `names`. ValueError names what is wrong."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        self._names = frozenset(names)
        self._seed = seed
        self._bad: dict[Way, Wire] = {}
        self._chance: dict[Way, random.Random] = {}

    @property
    def all_good(self) -> bool:
        return not self._bad

    def get(self, way: Way) -> Wire:
        return self._bad.get(way, GOOD)

    def cut(self, way: Way) -> None:
        self._set(way, msgspec.structs.replace(self.get(way), cut=True))

    def slow(self, way: Way, delay_s: float, loss: float) -> None:
        if not 0 <= delay_s <= DELAY_S_MAX:
            raise ValueError(f"delay_s: got {delay_s:g}, expected 0 to {DELAY_S_MAX:g}")
        if not 0 <= loss <= 1:
            raise ValueError(f"loss: got {loss:g}, expected a share, 0 to 1")
        self._set(way, msgspec.structs.replace(self.get(way), delay_s=delay_s, loss=loss))

    def mend(self, way: Way) -> None:
        self._set(way, GOOD)

    def heal(self) -> None:
        self._bad.clear()

    def loses(self, way: Way, loss: float) -> bool:
        """Draw for one packet."""
        chance = self._chance.get(way)
        if chance is None:
            chance = self._chance[way] = random.Random(f"{self._seed}/{way[0]}/{way[1]}")
        return chance.random() < loss

    def _set(self, way: Way, wire: Wire) -> None:
        for name in way:
            if name not in self._names:
                raise ValueError(f"host: got {name!r}, expected one of {', '.join(sorted(self._names))}")
        if way[0] == way[1]:
            raise ValueError(f"way: {way[0]} to itself does not leave the host, so nothing can be done to it")
        if wire == GOOD:
            self._bad.pop(way, None)
        else:
            self._bad[way] = wire


class Switch:
    """Decides for each packet, and keeps those that are late."""

    def __init__(self, wires: Wires, waiting_bytes_max: int = WAITING_BYTES_MAX) -> None:
        self.wires = wires
        self.counts: dict[Way, Count] = {}
        self._waiting: list[tuple[float, int, Way, bytes]] = []  # a heap; the number keeps the order of equals
        self._waiting_bytes = 0
        self._waiting_bytes_max = waiting_bytes_max
        self._number = 0

    def arrived(self, way: Way, packet: bytes, now: float) -> bool:
        """Whether it goes on at once. Otherwise it was kept for later, or it is lost."""
        count = self.counts.get(way)
        if count is None:
            count = self.counts[way] = Count()
        wire = GOOD if self.wires.all_good else self.wires.get(way)
        if wire is GOOD:
            count.packets += 1
            count.payload_bytes += len(packet)
            return True
        if wire.cut or (wire.loss and self.wires.loses(way, wire.loss)):
            count.lost += 1
            return False
        if not wire.delay_s:
            count.packets += 1
            count.payload_bytes += len(packet)
            return True
        if self._waiting_bytes + len(packet) > self._waiting_bytes_max:
            count.lost += 1
            return False
        self._number += 1
        self._waiting_bytes += len(packet)
        heapq.heappush(self._waiting, (now + wire.delay_s, self._number, way, packet))
        return False

    def next_due(self) -> float | None:
        return self._waiting[0][0] if self._waiting else None

    def due(self, now: float) -> list[tuple[Way, bytes]]:
        """What has waited long enough, in order."""
        out: list[tuple[Way, bytes]] = []
        while self._waiting and self._waiting[0][0] <= now:
            _, _, way, packet = heapq.heappop(self._waiting)
            self._waiting_bytes -= len(packet)
            count = self.counts[way]
            if self.wires.get(way).cut:
                count.lost += 1
                continue
            count.packets += 1
            count.payload_bytes += len(packet)
            out.append((way, packet))
        return out
