"""What the connector has in the scheduler's process once the engine has its cache: P's and D's halves, and what waits.

Law: only the scheduler's thread is here.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

from kvbaton.engines.side.asks import Ask
from kvbaton.engines.side.decode import DecodeSide
from kvbaton.engines.side.instructions import LoadVerdict
from kvbaton.engines.side.no_store import NoStore
from kvbaton.engines.side.pin_admission import PinAdmission
from kvbaton.engines.side.prefill import PrefillSide
from kvbaton.engines.side.turns import TurnSide
from kvbaton.engines.vllm.block_pool import PinnedPool
from kvbaton.engines.vllm.cache_resets import CacheResets
from kvbaton.engines.vllm.early_claims import EarlyClaims
from kvbaton.engines.vllm.waiting import Waiting, status_aside
from kvbaton.node.doorway import Doorway


class ConnectorParts:
    """Of one engine."""

    __slots__ = (
        "arrived", "decode", "door", "early", "failures", "held", "pins", "pool", "prefill", "resets", "stored",
        "turns", "waiting",
    )  # fmt: skip

    def __init__(
        self,
        door: Doorway,
        pool: PinnedPool,
        prefill: PrefillSide,
        decode: DecodeSide,
        early: EarlyClaims,
        stored: NoStore,
        turns: TurnSide,
    ) -> None:
        self.door = door
        self.pool = pool
        self.prefill = prefill
        self.decode = decode
        self.early = early
        self.stored = stored
        self.turns = turns
        self.held: dict[str, Ask | None] = {}  # requests that came, by what they ask, until their content is known
        self.pins = pins = PinAdmission(prefill, door.budget, on_refused=turns.refused)
        self.waiting = Waiting(lambda each: decode.blocked(each) or pins.blocked(each), status_aside())
        self.resets = CacheResets(pool, lambda: chain(door.holders, stored.holders))
        self.arrived: list[str] = []  # loads of which vLLM is to be told
        self.failures: list[LoadVerdict] = []  # and those of which the workers are

    @property
    def is_awaited(self) -> bool:
        """Whether vLLM waits for something that only we can tell it."""
        return bool(self.arrived or self.waiting or self.decode.busy or self.stored.busy)

    def voided(self) -> None:
        """Weights were replaced: nothing that was loaded, and that vLLM has not been told of, is delivered."""
        self.sort()
        self.decode.voided()
        self.failures += [LoadVerdict(request_id) for request_id in self.arrived]
        self.failures[:] = [LoadVerdict(verdict.request_id, failed=True) for verdict in self.failures]
        self.arrived.clear()

    def before_reset(self, manager: Any, do_duties: Callable[[], None], nap: Callable[[float], None]) -> None:
        """vLLM is about to empty its prefix cache, which it refuses while a block is held."""
        do_duties()
        self.turns.keeper.let_all_go()
        door, stored = self.door, self.stored
        left = lambda: door.turn_blocks  # noqa: E731
        if self.resets.is_ours(manager):
            self._preempt(manager)
            stored.let_loads_go()
            door.cache_replaced()
            left = lambda: door.pinned_blocks + stored.held_blocks  # noqa: E731
        self.resets.wait(do_duties, nap, left)

    def _preempt(self, manager: Any) -> None:
        """Whoever waits for a load waits for nothing from here on, and is computed."""
        self.sort()
        for request_id in self.resets.preempt(manager):
            self.waiting.comes_again(request_id)
        ended = [verdict for verdict in self.failures if self.resets.preempts(verdict.request_id)]
        self.arrived += [verdict.request_id for verdict in ended]
        self.failures[:] = [verdict for verdict in self.failures if verdict not in ended]

    def sort(self) -> None:
        """Verdicts that have come since: what has arrived, and what has failed."""
        for verdict in self.decode.take_verdicts() + self.stored.take_verdicts():
            if verdict.is_good or self.resets.preempts(verdict.request_id):
                self.arrived.append(verdict.request_id)
            else:
                self.failures.append(verdict)
