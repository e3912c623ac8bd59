"""Which answers another D may go on with, and what the router asks of workers for it (decision 0025).

Laws: a seed of the router's is given once, and to every D of that answer the same. A history goes to a worker only with
the router's word that it is for this worker.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api.params import HistoryWay, Mode
from kvbaton.router.flow.delivered import Delivered
from kvbaton.router.flow.dialect_table import TicketMinter
from kvbaton.router.flow.first_token import FirstToken, FirstTokenRule
from kvbaton.router.flow.said_text import HistoryRoom
from kvbaton.router.workers.directory import ListedEngine

NOT_CONTINUED: Mapping[str, str] = {
    "api": "a stream of `/v1/responses` or `/v1/messages`: its events name no tokens",
    "one_engine": "an answer that one engine computes by itself: echo, prompt_logprobs, prompt_embeds, beam search",
    "hidden_reasoning": "`include_reasoning: false`: vLLM leaves out the tokens with the text",
    "worker": "its D does not tell how it continues: another system's worker, an older one, custom logits processors",
    "no_ids": "D told text without the ids of its tokens",
    "choices": "D told several choices in one stream",
    "unreadable": "D sent an event that the router cannot read",
    "history_max": "more tokens than `history_max`",
    "histories_max": "more tokens of all streams than `histories_max`",
    "moves_max": "it has moved `moves_max` times",
    "moves_per_s": "too many streams want to move at once: `moves_per_s`",
    "nobody": "no other D is there that can go on with it",
    "differs": "the next D told another text or other tokens than those that the client has",
}
"""Streams that end with D, by name; `kvbaton_router_moves_failed_total` counts those that would have moved."""
_LOOKS_BACK: Mapping[str, tuple[Any, ...]] = {
    "presence_penalty": (0,), "frequency_penalty": (0,), "repetition_penalty": (1,), "bad_words": ([],),
    "response_format": ({"type": "text"},), "structured_outputs": (), "logits_processors": ([],),
    "thinking_token_budget": (), "repetition_detection": (), "tool_choice": ("auto", "none"),
}  # fmt: skip
"""What a D that takes the history for the prompt cannot go on with, with the values that ask for nothing."""
_SEED_BITS = 63
_TOKEN_MAX = (1 << 31) - 1
_encode = msgspec.json.Encoder().encode


class StreamLife:
    """One streamed answer, by whichever D."""

    __slots__ = (
        "_fields", "_ids_wanted", "_room", "_seed", "attempts", "delivered", "first", "history", "is_asked",
        "is_behind", "moves", "on_first",
    )  # fmt: skip

    def __init__(self, fields: Mapping[str, Any], room: HistoryRoom, first: FirstTokenRule | None = None) -> None:
        """`first`: P's first token may be told by this rule."""
        options = fields.get("stream_options")
        usage_due = isinstance(options, dict) and bool(options.get("include_usage"))
        self._ids_wanted = fields.get("return_token_ids") is True
        self.delivered = Delivered(room, ids_wanted=self._ids_wanted, usage_due=usage_due)
        self._fields = fields
        self._seed = None if fields.get("temperature") == 0 or "seed" in fields else secrets.randbits(_SEED_BITS)
        self._room = room
        self.first = first
        self.on_first: Callable[[Any], None] = lambda told: None  # called with what is told of it, once
        self.history: tuple[int, ...] = ()  # what the next D goes on behind
        self.is_behind = False  # whether the D that was asked last was told of it
        self.is_asked = False  # whether the D that answers names its tokens
        self.moves = 0
        self.attempts = 0  # at all workers

    def takes(self, worker: ListedEngine) -> bool:
        """Whether it can be asked as D to go on with this answer."""
        way = worker.continues if worker.is_own else HistoryWay.NONE
        return way is HistoryWay.OUTPUT or (way is HistoryWay.PROMPT and self._is_plain)

    def wants_first(self, prefill: ListedEngine, decode: ListedEngine, mode: Mode) -> bool:
        """Whether P's token is what the answer begins with, and D goes on behind it or says the same."""
        if self.first is None or self.history or self.moves or decode.full:
            return False
        able = prefill.is_own and prefill.continues is decode.continues and self.takes(decode)
        is_repeated = mode is Mode.PULL or self._fields.get("temperature") == 0 or self.seed is not None
        return able and is_repeated and min(prefill.context_tokens, decode.context_tokens) > 0

    @property
    def seed(self) -> int | None:
        """What the answer is sampled by, where D is told; None: chance decides, or there is none."""
        return self._seed if self._seed is not None else self._fields.get("seed")

    def sampled(self) -> bytes:
        """Fields of P's body, so that its token is the one that D would sample."""
        return b"" if self.seed is None else b',"seed":%b' % _encode(self.seed)

    def may_say(self, first: FirstToken) -> bool:
        """Whether it can be remembered as a history."""
        room = self._room
        return room.of_one > 0 and room.held < room.of_all and 0 <= first.token <= _TOKEN_MAX

    def say_first(self, first: FirstToken) -> bytes:
        """The client gets it; whoever is asked from now on begins behind it."""
        shown = self.delivered.told(first.events)
        self.delivered.prompt_tokens = first.prompt_tokens
        self.history = (first.token,)
        self.delivered.moved()
        return shown

    @property
    def _is_plain(self) -> bool:
        """Greedy, by nothing but the tokens before."""
        fields = self._fields
        return fields.get("temperature") == 0 and not any(
            fields.get(name) is not None and fields[name] not in off for name, off in _LOOKS_BACK.items()
        )

    def asked(self, body: bytes, worker: ListedEngine) -> bytes:
        """D's body, with what makes its answer one that another D can go on with."""
        self.is_asked, self.is_behind = worker.is_own and worker.continues is not HistoryWay.NONE, bool(self.history)
        if not self.is_asked:
            return body
        ids = b"" if self._ids_wanted else b',"return_token_ids":true'
        seed = b""
        if self._seed is not None and worker.continues is HistoryWay.OUTPUT:
            seed = b',"seed":%d' % self._seed
        return b"".join((memoryview(body)[: body.rindex(b"}")], ids, seed, b"}"))

    def told(self, params: bytes | None, worker: ListedEngine, minter: TicketMinter | None) -> bytes | None:
        """Parameters of a leg, with the history where there is one."""
        if not self.history or minter is None:
            return params
        proof = minter.for_history(self.history, worker)
        history = _encode({"tokens": self.history, "proof": proof})
        params = params or b"{}"
        end = params.rindex(b"}")
        comma = b"" if params[:end].strip() == b"{" else b","
        return b'%b%b"history":%b}' % (params[:end], comma, history)


def takes_prompt(worker: ListedEngine) -> bool:
    """Whether it can be asked as P for a prompt with the beginning of an answer."""
    return worker.is_own and worker.continues is not HistoryWay.NONE
