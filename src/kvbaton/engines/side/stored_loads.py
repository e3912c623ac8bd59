"""Loads from the shared store that the engine waits for.

Laws: every load is reported to the engine exactly once: when the store has ended it, or at its deadline, whichever is
first. Its destination blocks are held by a `touch` of our own until the store has ended it, so that nothing lands in a
block that has become somebody else's. What the store brought is the beginning of what was asked for, and no more is
said.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbaton.engines.side.protocols import LoadVerdict, PinPool
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason
from kvbaton.ranks.engine_store import AskId, EngineStore, StoreTold

FAILED = End(Reason.STORE_FAILED)
GRACE_S = 1.0
"""Beyond the store's own time-out, for the way there and back."""


@dataclass(slots=True)
class _StoredLoad:
    request_id: str
    first: int  # of the prompt's blocks, the first of these
    blocks: tuple[int, ...]
    until: float
    is_second_source: bool
    is_reported: bool = False
    is_void: bool = False  # what it brings is not wanted any more, whatever it is


@dataclass(slots=True)
class StoredLoads:
    """All loads from the store."""

    shelf: EngineStore
    pool: PinPool
    counts: Counter[str]
    block_tokens: int
    _loads: dict[AskId, _StoredLoad] = field(default_factory=dict)
    _verdicts: list[LoadVerdict] = field(default_factory=list)

    def begin(
        self,
        request_id: str,
        first: int,
        hashes: Sequence[bytes],
        ids: tuple[int, ...],
        now: float,
        *,
        is_second_source: bool = False,
    ) -> bool:
        """The engine has blocks for a load. False: the store takes no more, and nothing is held or reported."""
        self.pool.touch(ids)
        ask = None
        try:
            ask = self.shelf.get(hashes, ids)
        finally:
            if ask is None:
                self.pool.unpin(ids)
        if ask is None:
            return False
        until = now + self.shelf.settings.get_timeout_s + GRACE_S
        self._loads[ask] = _StoredLoad(request_id, first, ids, until, is_second_source)
        self.counts["loads"] += 1
        return True

    def refuse(self, request_id: str) -> None:
        """A load that the engine waits for and that was not begun."""
        self._verdicts.append(LoadVerdict(request_id, failed=True, end=FAILED))

    def __contains__(self, ask: AskId) -> bool:
        return ask in self._loads

    def told(self, told: StoreTold) -> tuple[str, int] | None:
        """The store has ended a load. If it did not bring all of it: whose, and how many blocks of it there are."""
        load = self._loads[told.ask]
        count = 0 if load.is_void else min(told.count, len(load.blocks))
        if not load.is_reported:
            self._report(load, count)
        self.let_go(told.ask)
        return (load.request_id, load.first + count) if count < len(load.blocks) else None

    def let_go(self, ask: AskId) -> None:
        """Nothing of a load moves any more. One that was not reported has failed: the engine would wait for ever."""
        load = self._loads.pop(ask, None)
        if load is not None:
            self.pool.unpin(load.blocks)
            if not load.is_reported:
                self._verdicts.append(LoadVerdict(load.request_id, failed=True, end=FAILED))

    def on_time(self, now: float) -> None:
        """The engine waits no longer for a load that is overdue; its blocks stay held."""
        for ask, load in self._loads.items():
            if now >= load.until and not load.is_reported:
                self.shelf.forget(ask)
                self.counts["loads.late"] += 1
                self._report(load, 0)

    def give_up(self, request_id: str) -> None:
        """The request is over in the engine; its load is still reported."""
        for ask in self._of(request_id):
            self.shelf.forget(ask)

    def void(self) -> None:
        """The cache was replaced: nothing that is on its way is delivered."""
        for ask, load in self._loads.items():
            load.is_void = True
            self.shelf.forget(ask)

    def waits(self, request_id: str) -> bool:
        """Whether a load of this request is still to be reported."""
        return any(not self._loads[ask].is_reported for ask in self._of(request_id))

    def take_verdicts(self) -> tuple[LoadVerdict, ...]:
        verdicts, self._verdicts = self._verdicts, []
        return tuple(verdicts)

    @property
    def holders(self) -> list[tuple[int, ...]]:
        return [load.blocks for load in list(self._loads.values())]

    @property
    def held_blocks(self) -> int:
        return sum(map(len, self.holders))

    @property
    def busy(self) -> bool:
        return bool(self._loads or self._verdicts)

    def _of(self, request_id: str) -> list[AskId]:
        return [ask for ask, load in self._loads.items() if load.request_id == request_id]

    def _report(self, load: _StoredLoad, count: int) -> None:
        self.counts["loaded_blocks"] += count
        self.counts["second_source"] += bool(count) and load.is_second_source
        bad = load.blocks[count:] if count else ()
        good = End(Reason.STORE_FAILED, good_tokens=(load.first + count) * self.block_tokens)
        end = End() if count == len(load.blocks) else good
        self._verdicts.append(LoadVerdict(load.request_id, failed=not count, bad_blocks=bad, end=end))
        load.is_reported = True
