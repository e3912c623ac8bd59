"""Virtual time and one source of chance. Nothing in the simulator reads a clock or another random generator.

Law: the same seed gives the same events in the same order; `trace_hash` says so in one line.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections import Counter, deque
from collections.abc import Callable

from kvbaton_proof.sim.world.touches import Touches

STORY_LINES_MAX = 400


class InjectedFault(RuntimeError):
    """Thrown by simulated ports on purpose; any other exception in a node is a bug."""


class World:
    """A heap of things to happen, a generator seeded once, and a running hash of what did happen."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.rng = random.Random(f"kvbaton-sim-{seed}")
        self.faults: Counter[str] = Counter()
        self.touches = Touches()
        self.story: deque[str] = deque(maxlen=STORY_LINES_MAX)
        self.events = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Let `act` happen `delay_s` from now."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, act))

    def run(self, until: float) -> None:
        """Let everything due by `until` happen, and be at that time."""
        heap = self._heap
        while heap and heap[0][0] <= until:
            self.now, _, act = heapq.heappop(heap)
            self.events += 1
            act()
        self.now = until

    @property
    def pending(self) -> int:
        return len(self._heap)

    def tell(self, line: str) -> None:
        """Add a line to the story (kept for the failure report, and hashed)."""
        text = f"{self.now:9.4f} {line}"
        self.story.append(text)
        self._hash.update(text.encode())

    def strike(self, kind: str, *whom: str, lasts_s: float = 0.0) -> None:
        """Count a fault, and note whom it strikes: handoffs, pairs or workers."""
        self.faults[kind] += 1
        self.touch(kind, *whom, lasts_s=lasts_s)

    def touch(self, kind: str, *whom: str, lasts_s: float = 0.0) -> None:
        """Note what need not be anybody's fault."""
        self.touches.add(kind, self.now, self.now + lasts_s, whom)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def trace_hash(self) -> str:
        return self._hash.hexdigest()
