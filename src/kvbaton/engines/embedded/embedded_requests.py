"""The embedded engine's requests, as the machines of `engines.side` read them.

Law: a request's figures are those of now, as far as the connector's hooks have told them: what is computed, and once it
ends also its answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvbaton.api.params import TransferParams
from kvbaton.engines.embedded import tokenizer
from kvbaton.engines.embedded.engine_request import EngineRequest
from kvbaton.engines.embedded.memory.kv_layout import content_of
from kvbaton.engines.side.protocols import EndedTurn
from kvbaton.protocol.content import Content
from kvbaton.protocol.ids import RequestId


@dataclass(slots=True)
class AskedRequest:
    """A request that has not ended."""

    request: EngineRequest
    tokens: Sequence[int] = field(init=False)  # prompt and history, and the whole answer once that is told
    num_computed_tokens: int = 0
    known_tokens: int = 0  # that need not be computed
    era: int | None = None  # of the pool, when it got its first block
    takes_turn: bool = False

    def __post_init__(self) -> None:
        self.tokens = (*self.request.prompt, *self.request.history)

    @property
    def request_id(self) -> RequestId:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        """With the history: all that is known before a token is sampled here."""
        return self.request.given_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def params(self) -> TransferParams | None:
        handoff = self.request.handoff
        return handoff if isinstance(handoff, TransferParams) else None


class EmbeddedRequests:
    """Implements `SideRequests`."""

    def handed_tokens(self, asked: AskedRequest) -> int:
        """Of a history's last token nobody has the KV: it was sampled, and never computed."""
        return asked.num_prompt_tokens - (1 if asked.request.history else 0)

    def content(self, asked: AskedRequest, position: int) -> Content:
        return content_of(asked.request, position, asked.tokens)

    def ended_turn(self, asked: AskedRequest) -> EndedTurn | None:
        """Of what clients were told, all but the last token: they are not told of the end's own token."""
        params = asked.params
        if params is None or params.keep is None:
            return None
        told = asked.num_tokens - (1 if asked.tokens[-1] == tokenizer.EOS else 0)
        return EndedTurn(params.keep, told - 1)

    def turn_content(self, asked: AskedRequest, upto: int) -> Content:
        return content_of(asked.request, upto, asked.tokens)

    def tokens(self, asked: AskedRequest, first: int, last: int) -> Sequence[int]:
        return asked.tokens[first:last]

    def wants_whole_prompt(self, asked: AskedRequest) -> bool:
        """What there is no room for is refused, and not shortened."""
        return True

    def shorten(self, asked: AskedRequest, tokens: int, *, drafts: bool = False) -> None:
        raise NotImplementedError("this engine keeps no states, and refuses what it has no room for")

    def arrived_at(self, asked: AskedRequest) -> float | None:
        return asked.request.arrived_at
