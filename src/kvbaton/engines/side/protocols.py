"""What an engine and the sides have in common: its requests, its block tables and pool, what it is told to do.

Laws: an engine's own objects serve as they are where they have these names (vLLM's do). Only the engine's scheduler
thread calls any of this, and nothing here blocks. A request's figures are those of now: they are read when an event
comes, and never remembered. What an engine is told is small, picklable and made fresh for each step; nothing in it is
shared with its maker.

Block tables are as vLLM gives them, per vLLM group; `Grouping` turns them into the lists per group that the protocol
knows. vLLM's null block (id 0, out of a window) is `NO_BLOCK` past this module, and is never touched. Of a group of
states the list is one block: the state after the tokens in question. One that is not there is an error, never a gap.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvbaton.protocol.content import Content
from kvbaton.protocol.effects import End
from kvbaton.protocol.events import NO_BLOCK, Groups
from kvbaton.protocol.geometry.layout import EngineLayout, GroupKind, needed_blocks
from kvbaton.protocol.geometry.progress import GroupProgress, Progress


class ScheduledRequest(Protocol):
    """One request, as the engine's scheduler knows it."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int:
        """Prompt and answer so far."""

    @property
    def num_computed_tokens(self) -> int:
        """Those of which a step that was scheduled before has, or will have, the KV."""


class EndedTurn(NamedTuple):
    """A conversation's turn, where its next one may come."""

    ticket: object  # under which it is to be kept
    tokens: int  # of prompt and answer that have their KV, and that the next turn begins with


class SideRequests(Protocol):
    """How an engine's requests are read, and the one thing that is done to them."""

    def handed_tokens(self, request: Any) -> int:
        """How many of the first tokens of its prompt are handed over: the same on P and on D. 0: none can be."""

    def content(self, request: Any, position: int) -> Content:
        """All that shapes the KV of the first `position` tokens of its prompt."""

    def ended_turn(self, request: Any) -> EndedTurn | None:
        """What somebody may come back for, now that the request is over."""

    def turn_content(self, request: Any, upto: int) -> Content | None:
        """The same of prompt and answer; None where what its tokens are is not known."""

    def tokens(self, request: Any, first: int, last: int) -> Sequence[int]:
        """Of prompt and answer, as far as they are known."""

    def wants_whole_prompt(self, request: Any) -> bool:
        """Whether its answer is of the prompt itself, which then cannot be shortened."""

    def shorten(self, request: Any, tokens: int, *, drafts: bool = False) -> None:
        """Compute the first tokens alone, and end. `drafts`: a drafter must see which token comes after them."""

    def arrived_at(self, request: Any) -> float | None:
        """On the wall's clock, where that was before the engine's scheduler knew of it."""


class PinPool(Protocol):
    """The engine's one pool of KV blocks. Null blocks never come here."""

    @property
    def free_blocks(self) -> int: ...

    def touch(self, ids: Iterable[int]) -> Any:
        """Hold these blocks once more."""

    def unpin(self, ids: Sequence[int]) -> Any:
        """Undo one `touch`. From now on a reuse of a block raises its epoch before a kernel can overwrite it."""

    def overwritten(self, ids: Iterable[int]) -> None:
        """Their own request is about to write to these blocks again: what was granted of them is over."""


NULL_BLOCK_ID = 0
"""In an engine's table: no block, since no later token looks there."""

Tables = Sequence[Sequence[int]]
"""Per vLLM group the block ids of a request, in the order of its tokens."""


class Grouping:
    """How the protocol's groups relate to vLLM's."""

    def __init__(
        self, layout: EngineLayout, vllm_groups: tuple[int, ...], state_blocks: int = 0, lookahead: int = 0
    ) -> None:
        """`state_blocks`: of a group of states, how many computing a request takes. `lookahead`: of a drafter."""
        self.layout = layout
        self.vllm_groups = vllm_groups
        self.count = len(vllm_groups)
        self.block_tokens = tuple(group.block_tokens for group in layout.groups)
        self.states = tuple(group.kind is GroupKind.STATE for group in layout.groups)
        windowed = (group.kind in (GroupKind.SLIDING, GroupKind.CHUNKED) for group in layout.groups)
        self.at_end = tuple(map(any, zip(windowed, self.states, strict=True)))
        """Groups whose blocks vLLM drops, or overwrites, while a prompt goes on: pinned with its last chunk."""
        self.stateful = any(self.states)
        self.slides = any(late and not state for late, state in zip(self.at_end, self.states, strict=True))
        self.state_blocks = state_blocks
        self.lookahead = lookahead

    def needed(self, tokens: int) -> tuple[int, ...]:
        """How many blocks of each group hold that many tokens."""
        sizes = zip(self.states, self.block_tokens, strict=True)
        return tuple(1 if state else needed_blocks(tokens, size) for state, size in sizes)

    def whole(self, tokens: int) -> tuple[int, ...]:
        """How many blocks of each group that many tokens fill, where that is not the end."""
        sizes = zip(self.at_end, self.block_tokens, strict=True)
        return tuple(0 if late else tokens // size for late, size in sizes)

    def first(self, token: int) -> tuple[int, ...]:
        """The place of that token in each group's list."""
        return tuple(0 if state else token // size for state, size in zip(self.states, self.block_tokens, strict=True))

    def cut(self, tables: Tables, first: Sequence[int], last: Sequence[int], tokens: int = 0) -> Groups:
        """Blocks `first` to `last` of each group, of a request of which `tokens` tokens are computed or loaded.

        ValueError when a table is too short, or has no such state.
        """
        found = []
        for group, (number, lo, hi) in enumerate(zip(self.vllm_groups, first, last, strict=True)):
            ids, state = tables[number], self.states[group] and lo < hi
            if state:
                lo = needed_blocks(tokens, self.block_tokens[group]) - 1
                hi = lo + 1
            if len(ids) < hi:
                raise ValueError(f"group {group}: {len(ids)} blocks in the table, {hi} needed")
            part = tuple(map(int, ids[lo:hi]))
            if NULL_BLOCK_ID in part:
                if state:
                    raise ValueError(f"group {group}: no state after {tokens} tokens in the table")
                part = tuple(each if each != NULL_BLOCK_ID else NO_BLOCK for each in part)
            found.append(part)
        return tuple(found)

    def of_states(self, blocks: Groups) -> tuple[int, ...]:
        """The blocks among these lists that are states."""
        return tuple(each for state, ids in zip(self.states, blocks, strict=True) if state for each in ids)


def real(blocks: Groups) -> tuple[int, ...]:
    """All ids that are blocks."""
    whole = tuple(itertools.chain.from_iterable(blocks))
    return whole if NO_BLOCK not in whole else tuple(each for each in whole if each != NO_BLOCK)


Answer = tuple[int | None, bool]
"""To "how many tokens after the local ones can be loaded?": a number, and whether a load of them is to be begun."""

NOT_YET: Answer = (None, False)
"""Ask again."""
NOTHING: Answer = (0, False)


@dataclass(frozen=True, slots=True)
class LoadVerdict:
    """How one load ended. The engine gets it once."""

    request_id: str
    failed: bool = False
    bad_blocks: tuple[int, ...] = ()  # not failed as a whole: these are to be computed again, the ones before are good
    end: End = End()  # its reason, and how much is good, for engines that ask
    final: bool = False  # failed: the policy decides; else there is another source, or nothing was promised

    @property
    def is_good(self) -> bool:
        return not self.failed and not self.bad_blocks


@dataclass(frozen=True, slots=True)
class Leaving:
    """A prompt that is read behind this step, or written from it: what the step adds to each group's blocks."""

    lease: int
    had: tuple[int, ...]
    has: tuple[int, ...]

    def progress(self, done: Sequence[int], layers: Sequence[int]) -> Progress:
        """While it is computed: of each group's `layers`, the first `done` have what the step adds."""
        return tuple(
            GroupProgress(has) if count == total else GroupProgress(had, has, count) if count else GroupProgress(had)
            for count, total, had, has in zip(done, layers, self.had, self.has, strict=True)
        )
