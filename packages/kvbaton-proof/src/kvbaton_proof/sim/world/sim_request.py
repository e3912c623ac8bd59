"""One request inside one simulated engine; the production sides read it as it is (`ScheduledRequest`)."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvbaton.protocol.content import Content, digest
from kvbaton.protocol.effects import End
from kvbaton.protocol.events import Groups
from kvbaton.protocol.ids import HandoffId, RequestId
from kvbaton_proof.sim.world.sim_memory import Words, word_at
from kvbaton_proof.sim.world.touches import handoff_of

if TYPE_CHECKING:
    from kvbaton_proof.sim.world.sim_generation import Generation


class Phase(enum.Enum):
    WAITING = "waiting"
    FETCHING = "fetching"  # from a store
    PREFILLING = "prefilling"
    LOADING = "loading"
    DECODING = "decoding"


@dataclass(slots=True)
class SimRequest:
    """What an engine knows of a request. `computed` is what has been issued; the device may not be done with it."""

    id: RequestId
    content: Words
    tokens: int
    role: str  # "prefill", "decode", "both"
    on_end: Callable[[str, str], None]
    mode: str = "pull"
    ticket: str = ""
    max_readers: int = 1
    phase: Phase = Phase.WAITING
    blocks: tuple[list[int], ...] = ()
    turn: int = 0  # rises when its blocks go: outputs of steps that were issued before say nothing of it
    computed: int = 0
    decoded: int = 0  # steps behind the prompt that have been issued
    reported: set[int] = field(default_factory=set)
    failed: End | None = None
    first_token: int = 0  # of what is loaded
    loads_upto: int = 0
    aborted: bool = False
    decode_left: int = 0  # outputs that are still to come
    decode_issued: int = 0
    fetched: bool = False  # asked a store once, likewise
    trusted: bool = True  # its ticket is genuine
    keep: str = ""  # the ticket under which D may keep it for the next turn
    offer: tuple[str, int] | None = None  # what a D keeps of it: the ticket, and the turn's tokens
    prefers: tuple[int, ...] = ()  # blocks that it gets, where they are free
    put_off_at: float | None = None  # when it was first told to wait for room to be pinned
    rests: frozenset[str] = frozenset()  # on whose KV its own was computed, where members are removed
    era: int = 0  # how often its engine's cache had been forgotten when it got its blocks

    generation: Generation | None = None  # where its answer is made of tokens

    @property
    def request_id(self) -> str:
        return self.id

    @property
    def num_prompt_tokens(self) -> int:
        return self.tokens

    @property
    def num_tokens(self) -> int:
        """What is said of the answer is the same token over and over."""
        return self.tokens

    @property
    def most_tokens(self) -> int:
        """Of prompt and answer: it gets blocks for all of them at once."""
        return self.tokens + 1 if self.generation is None else self.generation.most_tokens

    @property
    def num_computed_tokens(self) -> int:
        return self.computed + self.decoded

    @property
    def handoffs(self) -> tuple[HandoffId, ...]:
        """That it is for, or waits for."""
        tickets = (self.ticket, self.offer[0] if self.offer is not None else "")
        return tuple(map(handoff_of, filter(None, tickets)))


def one_value(request: SimRequest, blocks: Groups) -> tuple[Groups, tuple[bytes, ...]]:
    """Of a store that keeps prompts, not blocks."""
    return blocks, (digest_of(request),)


def digest_of(request: SimRequest) -> bytes:
    return digest_for(request.content, request.tokens)


def digest_for(content: Words, tokens: int) -> bytes:
    return digest(Content((word_at(content, tokens - 1), tokens), tokens))
