"""Copies of answers in the shared store, so that another engine goes on where this one died.

Laws: a block of an answer is put when every rank has computed its last token, and only behind all blocks before it:
what a store finds of a chain ends at its first gap. At most a share of the engine's blocks is on its way at once; the
longest requests come first, since they would cost most to compute again. What is not put now is put with a later step.
Nothing is retried and nothing waits: a copy that fails costs computing.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from kvbaton.engines.side.protocols import Grouping, PinPool, SideRequests, Tables
from kvbaton.engines.side.stored_puts import StoredPrompt, put_blocks
from kvbaton.node.doorway import Doorway
from kvbaton.store.content_keys import extend


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
    _due: deque[_DueCopy] = field(default_factory=deque)

    def scheduled(
        self,
        step: int,
        chunks: Mapping[str, int],
        prompts: Mapping[str, StoredPrompt],
        tables_of: Callable[[str], Tables],
    ) -> bool:
        """These tokens are about to be computed. True: a block of an answer is whole with them."""
        if not self.blocks_most:
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
