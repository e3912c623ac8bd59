"""The shapes of Anthropic's `/v1/messages`: one whole message, or the events that build it.

Law: what the events build is the message that a whole answer would have been; no event comes after `message_stop`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbaton.api import sse
from kvbaton.api.answers import Token
from kvbaton.api.api_errors import ApiError

_Object = dict[str, Any]


class MessageShape:
    """Builds the message that answers one request, whole or as events; one object serves one of the two, once."""

    def __init__(self, *, model: str, request_id: str, prompt_tokens: int) -> None:
        self._head = {"id": f"msg_{request_id}", "type": "message", "role": "assistant", "model": model}
        self._prompt_tokens = prompt_tokens
        self.met = ""  # the stop text that ended it

    def whole(self, tokens: Sequence[Token], text: str, reason: str, usage: _Object) -> _Object:
        return {**self._head, "content": [{"type": "text", "text": text}], **self._end(reason), "usage": usage}

    def opening(self) -> list[_Object]:
        """The events that come before any token."""
        end = {"stop_reason": None, "stop_sequence": None}
        begun = usage(self._prompt_tokens, 0, 0)
        message: _Object = {**self._head, "content": [], **end, "usage": begun}
        block = {"type": "text", "text": ""}
        return [
            {"type": "message_start", "message": message},
            {"type": "content_block_start", "index": 0, "content_block": block},
        ]

    def token(self, spoken: Token) -> list[_Object]:
        """The event of one token; none where it has no text to tell."""
        delta = {"type": "text_delta", "text": spoken.text}
        return [{"type": "content_block_delta", "index": 0, "delta": delta}] if spoken.text else []

    def ending(self, rest: str, reason: str, usage: _Object) -> list[_Object]:
        """The events after the last token, with text held back until now."""
        return [
            *self.token(Token(rest)),
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": self._end(reason), "usage": usage},
            {"type": "message_stop"},
        ]

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed after its first byte."""
        return sse.typed_error_event(error)

    def _end(self, reason: str) -> _Object:
        told = "max_tokens" if reason == "length" else "stop_sequence" if self.met else "end_turn"
        return {"stop_reason": told, "stop_sequence": self.met or None}


def usage(prompt_tokens: int, output_tokens: int, cached_tokens: int) -> _Object:
    """Anthropic counts tokens that were cached apart from the others of the prompt."""
    read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached_tokens}
    return {"input_tokens": prompt_tokens - cached_tokens, **read, "output_tokens": output_tokens}
