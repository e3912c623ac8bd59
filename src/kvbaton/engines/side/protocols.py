"""What the sides need of an engine: its requests, what their KV is of, and its block pool.

Laws: an engine's own objects serve as they are where they have these names (vLLM's do). Only the engine's scheduler
thread calls any of this, and nothing here blocks. A request's figures are those of now: they are read when an event
comes, and never remembered.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvbaton.protocol.content import Content


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
