"""The load of each worker, as sent by this router: estimated tokens in flight.

Law: whatever is taken is given back, once; a worker with nothing under way is not remembered.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvbaton.api.bodies import BodyKind
from kvbaton.protocol.ids import PeerId

ANSWER_TOKENS_GUESS = 256
"""Of a request that names no length."""
ANSWER_TOKENS_MAX = 32_768
"""No request counts for more: else one could steer all others away from a worker."""
SHAPING: Mapping[BodyKind, tuple[str, ...]] = {
    BodyKind.CHAT: ("tools", "messages"),
    BodyKind.RESPONSES: ("tools", "instructions", "input"),
    BodyKind.MESSAGES: ("tools", "system", "messages"),
}
"""The fields that a conversation's prompt is made of, in their order there."""
_HOLDING = (str, list, dict)
_LENGTHS = ("max_completion_tokens", "max_tokens", "max_output_tokens")


class Loads:
    """Tokens under way at each worker."""

    def __init__(self) -> None:
        self.tokens: dict[PeerId, int] = {}

    def look(self, now: float) -> None:
        """Learn what others have sent, where several share the workers; called before a choice."""

    def take(self, peer: PeerId, tokens: int) -> WorkerLoad:
        self._change(peer, tokens)
        return WorkerLoad(self, peer, tokens)

    def _change(self, peer: PeerId, tokens: int) -> None:
        left = self.tokens.get(peer, 0) + tokens
        if left > 0:
            self.tokens[peer] = left
        else:
            self.tokens.pop(peer, None)


class WorkerLoad:
    """One request's share; `give` ends it."""

    __slots__ = ("_loads", "_peer", "_tokens")

    def __init__(self, loads: Loads, peer: PeerId, tokens: int) -> None:
        self._loads = loads
        self._peer = peer
        self._tokens = tokens

    def give(self) -> None:
        tokens, self._tokens = self._tokens, 0
        if tokens:
            self._loads._change(self._peer, -tokens)


def prompt_tokens(kind: BodyKind, fields: Mapping[str, Any], chars_per_token: float) -> int:
    """An estimate: token ids are counted, texts are measured. At least 1."""
    if kind is BodyKind.COMPLETION:
        prompt = fields.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        return max(1, int(_chars(prompt) / chars_per_token))
    return max(1, int(sum(_chars(fields.get(name)) for name in SHAPING[kind]) / chars_per_token))


def answer_tokens(fields: Mapping[str, Any]) -> int:
    for name in _LENGTHS:
        value = fields.get(name)
        if isinstance(value, int):  # not every endpoint checks each of them
            return min(max(value, 1), ANSWER_TOKENS_MAX)
    return ANSWER_TOKENS_GUESS


def _chars(value: Any) -> int:
    """Characters of all texts within."""
    count, todo = 0, [value]
    while todo:
        each = todo.pop()
        if isinstance(each, str):
            count += len(each)
        else:
            inner = each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
            todo += [one for one in inner if type(one) in _HOLDING]  # not numbers: there may be a quarter of a million
    return count
