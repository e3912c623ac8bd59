"""Requests, their outputs, and the engine's state of a request in between.

Law: a request's state changes only by `Sequence.enter`, along `NEXT`; it holds blocks in `HOLDING` states only.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from kvbaton.engines.embedded.memory.block_cache import HashChain
from kvbaton.engines.embedded.memory.block_tables import Tables
from kvbaton.observe.codes.reasons import UNASKED
from kvbaton.protocol.ids import RequestId


class RequestStatus(enum.Enum):
    """How a request ended."""

    STOPPED = "stop"  # the model said EOS
    LENGTH = "length"
    ABORTED = "abort"
    ERROR = "error"
    REFUSED = "refused"  # the connector has no room for it: elsewhere, or later


class RequestState(enum.Enum):
    """Where a request is."""

    WAITING = "waiting"  # holds nothing
    LOADING = "loading"  # the connector writes into its blocks
    LOADED = "loaded"  # its KV has arrived, a running slot is awaited
    RUNNING = "running"
    LEAVING = "leaving"  # ended while loading: its blocks stay until the connector reports
    ENDED = "ended"


NEXT: Mapping[RequestState, frozenset[RequestState]] = {
    RequestState.WAITING: frozenset({RequestState.LOADING, RequestState.RUNNING, RequestState.ENDED}),
    RequestState.LOADING: frozenset(
        {RequestState.LOADED, RequestState.WAITING, RequestState.LEAVING, RequestState.ENDED}
    ),
    RequestState.LOADED: frozenset({RequestState.RUNNING, RequestState.WAITING, RequestState.ENDED}),
    RequestState.RUNNING: frozenset({RequestState.WAITING, RequestState.ENDED}),
    RequestState.LEAVING: frozenset({RequestState.ENDED}),
    RequestState.ENDED: frozenset(),
}

HOLDING = frozenset({RequestState.LOADING, RequestState.LOADED, RequestState.RUNNING, RequestState.LEAVING})


class Sampling(msgspec.Struct, frozen=True):
    """How tokens are chosen. The choice depends on the logits, `seed` and the position, and on nothing else."""

    max_tokens: int = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0  # 0: the likeliest token
    seed: int = 0
    logprobs: int | None = None  # 0: tell the chosen token's with each token; k: those of the k likeliest too


class EngineRequest(msgspec.Struct, frozen=True):
    """One prompt to answer."""

    request_id: RequestId
    prompt: tuple[int, ...]
    sampling: Sampling = Sampling()
    cache_salt: str = ""
    handoff: object = None  # the connector's; the engine never looks at it
    said: str = UNASKED  # why nothing is handed over, as the router said it; for the connector too
    arrived_at: float | None = None  # on the wall's clock, where that was before the engine knew of it; likewise
    history: tuple[int, ...] = ()  # the answer's first tokens, generated elsewhere: output like those that follow

    @property
    def given_tokens(self) -> int:
        """Prompt and history: what there is before the first token is sampled here."""
        return len(self.prompt) + len(self.history)


class Output(msgspec.Struct, frozen=True):
    """News of one request: a token, its end, or both."""

    request_id: RequestId
    token: int | None = None
    text: str = ""
    logprobs: tuple[tuple[int, float], ...] = ()  # the chosen token first, then the likeliest
    status: RequestStatus | None = None  # set once, on the last output
    reason: str = ""  # why, where the status is ERROR
    handoff: Mapping[str, object] | None = None  # what the connector answered at the end
    cached_tokens: int = 0  # prompt tokens that were not computed here


class RejectedError(Exception):
    """The engine cannot take this request: the caller must change it."""


class FullError(RejectedError):
    """The engine cannot take this request now: the caller must retry later."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request in progress: `tokens` are prompt and answer, the first `computed` of them have their KV in `tables`."""

    request: EngineRequest
    tokens: list[int]
    chain: HashChain
    tables: Tables
    state: RequestState = RequestState.WAITING
    computed: int = 0
    promised: int = 0  # while LOADING: how many tokens will have their KV when the load is reported
    cached_tokens: int = 0
    era: int = 0  # of the pool, when it got its first block

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def in_prefill(self) -> bool:
        return self.computed < self.request.given_tokens

    @property
    def answer_tokens(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def blocks(self) -> tuple[tuple[int, ...], ...]:
        """Its block table per KV group, copied: null (0) where a window has moved on."""
        return tuple(tuple(table) for table in self.tables)

    def enter(self, state: RequestState) -> None:
        assert state in NEXT[self.state], f"{self.request_id}: {self.state} -> {state} is illegal"
        self.state = state
        assert state in HOLDING or not any(any(table) for table in self.tables), f"{self.request_id} keeps blocks"
