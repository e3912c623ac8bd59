"""Prompts that go to the shared store once they have been computed, and copies of answers while they are generated.

Laws: a prompt's whole blocks are put when every rank has computed the last of them, and only while they are the
request's own; a preempted one is put when it has been computed again. Each put has one pin, dropped when the store has
read the blocks or failed. At most `PINNED_SHARE` of the cache is pinned for puts.

Copies are for engines that go on where this one died: a block of an answer is put when every rank has computed its last
token, and only behind all blocks before it, since what a store finds of a chain ends at its first gap. At most a share
of the blocks is on its way at once; the longest requests come first, since they would cost most to compute again. What
there is no room for is put with a later step. A copy that fails costs computing.
"""

from __future__ import annotations

import enum
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvbaton.engines.side.protocols import Grouping, PinPool, SideRequests, Tables
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.events import NO_BLOCK
from kvbaton.store.content_keys import extend

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
            prompt.phase is not Phase.ASKING
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
