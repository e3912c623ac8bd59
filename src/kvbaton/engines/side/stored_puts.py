"""Prompts that go to the shared store once they have been computed, and copies of answers while they are generated.

Laws: a prompt's whole blocks are put when every rank has computed the last of them, and only while they are the
request's own; a preempted one is put when it has been computed again. Each put has one pin, dropped when the store has
read the blocks or failed. At most `PINNED_SHARE` of the cache is pinned for puts.

Copies are for engines that go on where this one died: a block of an answer is put when every rank has computed its last
token, and only behind all blocks before it, since what a store finds of a chain ends at its first gap. At most a share
of the blocks is on its way at once; the longest requests come first, since they would cost most to compute again. What
there is no room for is put with a later step. A copy that fails costs computing.

Loads from the shared store that the engine waits for.

Laws: every load is reported to the engine exactly once: when the store has ended it, or at its deadline, whichever is
first. Its destination blocks are held by a `touch` of our own until the store has ended it, so that nothing lands in a
block that has become somebody else's. What the store brought is the beginning of what was asked for, and no more is
said.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvbaton.engines.side.protocols import Grouping, LoadVerdict, PinPool, SideRequests, Tables
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK
from kvbaton.ranks.engine_store import AskId, EngineStore, StoreTold
from kvbaton.store.interface import extend

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


PINNED_SHARE = 0.5
"""Of the engine's blocks; a prompt beyond it is not put, which costs a miss later."""


class Phase(enum.Enum):
    ASKING = "asking"  # a look-up is under way, or waits for its turn
    FOUND = "found"  # some of it can be loaded, when the engine has blocks
    LOADING = "loading"
    OVER = "over"  # the rest is computed here


@dataclass(slots=True)
class StoredPrompt:
    """A prompt as the store knows it."""

    request: Any
    hashes: tuple[bytes, ...]  # of its whole blocks
    usable: int  # of these, how many may be loaded: one token is always left to compute
    phase: Phase = Phase.OVER
    known: int = 0  # the store has so many, from the first on
    until: float = 0.0
    is_asked: bool = False
    is_put: bool = False
    is_kept: bool = True  # what it computes may be shared
    ran_first: bool = False  # it runs while the store is asked what need not be put again
    last_hash: bytes = b""  # of the chain, as far as it was put: of the prompt's last block, then of the answer's
    copied: int = 0  # blocks of the answer that were put

    @property
    def is_there(self) -> bool:
        """Whether the store has, or is being given, all whole blocks of the prompt."""
        return self.is_kept and (self.is_put or self.known >= len(self.hashes))


@dataclass(slots=True)
class _Due:
    """Computed with this step: to be put."""

    step: int
    request_id: str
    blocks: tuple[int, ...]


@dataclass(slots=True)
class _DueCopy:
    """Whole with this step."""

    step: int
    prompt: StoredPrompt
    blocks: tuple[int, ...]  # from the first that is not copied on


@dataclass(slots=True)
class AnswerCopies:
    """All copies of one engine."""

    door: Doorway
    pool: PinPool
    grouping: Grouping
    requests: SideRequests
    blocks_most: int  # on their way at once; 0: none are made
    hashes_most: int  # of one request
    counts: Counter[str]
    is_of_use: bool = True
    _due: deque[_DueCopy] = field(default_factory=deque)

    def scheduled(
        self,
        step: int,
        chunks: Mapping[str, int],
        prompts: Mapping[str, StoredPrompt],
        tables_of: Callable[[str], Tables],
    ) -> bool:
        """These tokens are about to be computed. True: a block of an answer is whole with them."""
        if not (self.blocks_most and self.is_of_use):
            return False
        size, waiting = self.grouping.block_tokens[0], {each.prompt.request.request_id for each in self._due}
        for request_id in chunks.keys() & prompts.keys() - waiting:
            prompt = prompts[request_id]
            whole = min((prompt.request.num_computed_tokens + chunks[request_id]) // size, self.hashes_most)
            first = len(prompt.hashes) + prompt.copied
            if whole > first and prompt.is_there:
                [blocks] = self.grouping.cut(tables_of(request_id), (first,), (whole,))
                self._due.append(_DueCopy(step, prompt, blocks))
        return bool(self._due) and self._due[-1].step == step

    def computed(self, step: int) -> None:
        """Every rank is done with this step, and so with those before it; what it sampled is known."""
        done = []
        while self._due and self._due[0].step <= step:
            done.append(self._due.popleft())
        for due in sorted(done, key=lambda each: -each.prompt.request.num_tokens):
            self._put(due.prompt, due.blocks)

    def drop(self, request_id: str) -> None:
        """Its blocks are gone, or about to go."""
        self._due = deque(due for due in self._due if due.prompt.request.request_id != request_id)

    def drop_all(self) -> None:
        self._due.clear()

    def _put(self, prompt: StoredPrompt, blocks: tuple[int, ...]) -> None:
        if self.door.put_blocks + len(blocks) > self.blocks_most:
            self.counts["copies.skipped"] += 1
            return
        size = self.grouping.block_tokens[0]
        first = len(prompt.hashes) + prompt.copied
        tokens = self.requests.tokens(prompt.request, first * size, (first + len(blocks)) * size)
        if len(tokens) < len(blocks) * size:
            return  # what a step in flight will sample is not known yet
        hashes = tuple(extend(prompt.last_hash, tokens, size))
        put_blocks(self.door, self.pool, blocks, hashes)
        prompt.copied, prompt.last_hash = prompt.copied + len(blocks), hashes[-1]
        self.counts["copied_blocks"] += len(blocks)


@dataclass(slots=True)
class StoredPuts:
    """All puts of one engine."""

    door: Doorway
    pool: PinPool
    grouping: Grouping
    blocks_total: int
    counts: Counter[str]
    copies: AnswerCopies
    _due: deque[_Due] = field(default_factory=deque)

    def scheduled(
        self,
        step: int,
        chunks: Mapping[str, int],
        prompts: Mapping[str, StoredPrompt],
        tables_of: Callable[[str], Tables],
    ) -> bool:
        """Chunks of so many tokens are about to be computed. True: a prompt, or what is copied, ends with some."""
        count, is_copied = len(self._due), self.copies.scheduled(step, chunks, prompts, tables_of)
        for request_id, tokens in chunks.items():
            prompt = prompts.get(request_id)
            if prompt is None or prompt.is_put or any(due.request_id == request_id for due in self._due):
                continue
            if self._is_whole(prompt, prompt.request.num_computed_tokens + tokens):
                self._due.append(_Due(step, request_id, self._blocks(prompt, tables_of(request_id))))
        return len(self._due) > count or is_copied

    def computed(self, step: int, prompts: Mapping[str, StoredPrompt]) -> None:
        """Every rank is done with this step, and so with those before it."""
        while self._due and self._due[0].step <= step:
            due = self._due.popleft()
            prompt = prompts.get(due.request_id)
            if prompt is not None:
                self._put(prompt, due.blocks)
        self.copies.computed(step)

    def finished(self, prompt: StoredPrompt, tables: Tables) -> None:
        """Its request has ended well: the last chance."""
        if not prompt.is_put and self._is_whole(prompt, prompt.request.num_computed_tokens):
            self._put(prompt, self._blocks(prompt, tables))

    def drop(self, request_id: str) -> None:
        """Its blocks are gone, or about to go."""
        self._due = deque(due for due in self._due if due.request_id != request_id)
        self.copies.drop(request_id)

    def drop_all(self) -> None:
        self._due.clear()
        self.copies.drop_all()

    def _is_whole(self, prompt: StoredPrompt, computed_tokens: int) -> bool:
        whole = len(prompt.hashes)
        return (
            not (prompt.ran_first and prompt.phase is Phase.ASKING)
            and prompt.known < whole
            and computed_tokens >= whole * self.grouping.block_tokens[0]
        )

    def _blocks(self, prompt: StoredPrompt, tables: Tables) -> tuple[int, ...]:
        [blocks] = self.grouping.cut(tables, (0,), (len(prompt.hashes),))
        return blocks

    def _put(self, prompt: StoredPrompt, blocks: tuple[int, ...]) -> None:
        """Keep what the store lacks of a prompt that is in these blocks now."""
        prompt.is_put = True
        ids, hashes = blocks[prompt.known :], prompt.hashes[prompt.known :]
        if not ids or NO_BLOCK in ids:
            return
        if self.door.put_blocks + len(ids) > self.blocks_total * PINNED_SHARE:
            self.counts["puts.skipped"] += 1
            prompt.is_kept = False
            return
        put_blocks(self.door, self.pool, ids, hashes)


def put_blocks(door: Doorway, pool: PinPool, ids: tuple[int, ...], hashes: tuple[bytes, ...]) -> None:
    """Blocks that hold what the hashes say, now; pinned until the store has read them."""
    pool.touch(ids)  # before anybody knows of them
    try:
        door.put((ids,), hashes)
    except Exception:
        pool.unpin(ids)
        raise
