"""The blocks of one simulated engine: their holders, and when a freed one is given to another request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

from kvbaton.node.doorway import Doorway, ForgetCached
from kvbaton_proof.sim.promises import LEAK, NEEDLESS, Broken
from kvbaton_proof.sim.world.sim_memory import Shape, word_at
from kvbaton_proof.sim.world.sim_request import SimRequest


class Pool:
    """Blocks with reference counts; reuse raises the epoch first."""

    def __init__(self, blocks: int, doorway: Doorway, groups: int = 1) -> None:
        self.refs = [0] * blocks
        self.free: deque[int] = deque(range(1, blocks))  # block 0 is nobody's
        self.held = [0] * blocks  # our own holds on destination blocks
        self.reuses = [0] * blocks
        self.total = 0
        self.reuses_soon = False  # what was let go last is given out first
        self.groups = groups
        self.turns = False  # of what is let go at once, the first group's blocks are given out first, not the last's
        self.tells = True  # of every reuse; else nobody ever hears of one
        self.untold: set[int] = set()  # let go, and somebody else watches them now: their reuse is not told
        self.steals: Callable[[], bool] = lambda: False  # whether somebody else takes the watcher of a block now
        self._doorway = doorway
        doorway.epochs.are_told = self.untold.isdisjoint

    def allocate(self, count: int) -> list[int]:
        taken = [self.free.popleft() for _ in range(count)]
        for block in taken:
            if self.tells and block not in self.untold:
                self._doorway.epochs.raise_epoch(block)
            self.reuses[block] += 1
            self.refs[block] = 1
        self.total += count
        return taken

    def prefer(self, blocks: Sequence[int]) -> None:
        """Give these out next, those of them that are free."""
        for block in blocks:
            if not self.refs[block]:
                self.free.remove(block)
                self.free.appendleft(block)

    def revive(self, blocks: list[int]) -> None:
        """Take blocks with their content: somebody wants the same prefix again."""
        for block in blocks:
            if self.refs[block] == 0:
                self.free.remove(block)
            self.refs[block] += 1
        self.total += len(blocks)

    def touch(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            if self.refs[block] == 0:
                raise Broken(LEAK, f"block {block} was pinned while it was free")
            self.refs[block] += 1
        self.total += len(blocks)

    def before_pin(self, blocks: Sequence[int]) -> None:
        """A block that was perhaps reused behind our back begins a new epoch, before its new pin notes one."""
        for block in self.untold.intersection(blocks):
            self._doorway.epochs.raise_epoch(block)
            self.untold.discard(block)

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Their own request is about to write to them again, pinned or not; of that every engine's connector knows."""
        for block in blocks:
            self._doorway.epochs.raise_epoch(block)

    def hold(self, blocks: tuple[int, ...]) -> None:
        """Bytes may land in these from now on."""
        self.touch(blocks)
        for block in blocks:
            self.held[block] += 1

    def let_go(self, blocks: tuple[int, ...]) -> None:
        for block in blocks:
            self.held[block] -= 1
        self.drop(blocks)

    def unpin(self, blocks: Sequence[int]) -> None:
        self.drop(blocks)
        self.untold.update(block for block in blocks if not self.refs[block] and self.steals())

    def drop(self, blocks: Sequence[int]) -> None:
        """As vLLM's pool does it: of what is let go at once, the end is reused first."""
        if self.turns:
            group = len(blocks) // self.groups
            blocks = [*blocks[group:], *blocks[:group]]
        put = self.free.appendleft if self.reuses_soon else self.free.append
        for block in blocks if self.reuses_soon else reversed(blocks):
            self.refs[block] -= 1
            if self.refs[block] < 0:
                raise Broken(LEAK, f"block {block} was freed more often than it was taken")
            if self.refs[block] == 0:
                put(block)
        self.total -= len(blocks)


class Prefixes:
    """Which blocks hold the beginnings of prompts, for as long as they do."""

    def __init__(self, shape: Shape, reuses: Sequence[int]) -> None:
        self._shape = shape
        self._reuses = reuses  # of each block: the engine's own truth, whatever the core believes
        self._found: dict[tuple[int, int, int], tuple[int, int]] = {}  # (word at its end, group, index): block, reuses

    def publish(self, request: SimRequest, computed: int | None = None) -> None:
        """Whole blocks are found by others as soon as they are issued: whoever finds them computes behind them."""
        for group, ids in enumerate(request.blocks) if not self._shape.states else ():
            for index in range((request.computed if computed is None else computed) // self._shape.block_tokens):
                self._found[self._name(request, index), group, index] = ids[index], self._reuses[ids[index]]

    def of(self, request: SimRequest) -> list[list[int]]:
        """Leading whole blocks of this prompt, per group; one token is always left to compute. Never of states."""
        if self._shape.states:
            return [[] for _ in self._shape.group_layers]
        groups, most = range(len(self._shape.group_layers)), (request.tokens - 1) // self._shape.block_tokens
        found: list[list[int]] = [[] for _ in groups]
        for index in range(most):
            name = self._name(request, index)
            listed = [self._found.get((name, group, index), (0, -1)) for group in groups]
            if any(self._reuses[block] != reuses for block, reuses in listed):
                break
            for ids, (block, _) in zip(found, listed, strict=True):
                ids.append(block)
        return found

    def forget(self) -> None:
        self._found.clear()

    def _name(self, request: SimRequest, index: int) -> int:
        """Of a block: what stands for its last token and all before it."""
        return word_at(request.content, (index + 1) * self._shape.block_tokens - 1)


def nothing_to_forget(duty: ForgetCached) -> None:
    """Of an engine among members that stay."""
    raise Broken(NEEDLESS, f"a cache is forgotten for {duty.origins}, and nobody was removed")
