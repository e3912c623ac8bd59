"""The shapes of `/v1/responses`: one whole response, or the numbered events that build it.

Law: the last event holds the response that a whole answer would have been, and no event comes after it; a stream that
fails ends with an `error` event instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api import sse
from kvbaton.api.answers import Token, chat_logprob, rounded
from kvbaton.api.api_errors import ApiError

_Object = dict[str, Any]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What a response repeats of its request."""

    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: Mapping[str, str] | None = None
    temperature: float = 1.0
    top_logprobs: int = 0
    user: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Asked:
        """Of a checked body; a null is what was left out."""
        return cls(**{name: fields[name] for name in cls.__struct_fields__ if fields.get(name) is not None})


class ResponseShape:
    """Builds the response to one request, whole or as events; one object serves one of the two, once."""

    def __init__(
        self,
        *,
        model: str,
        request_id: str,
        created_unix_s: int,
        asked: Asked,
        token_text: Callable[[int], str],
        top: int | None = None,
    ) -> None:
        self._head = {"id": f"resp_{request_id}", "object": "response", "created_at": created_unix_s, "model": model}
        self._item_id = f"msg_{request_id}"
        self._asked = asked
        self._token_text = token_text
        self._top = top  # None: no log probabilities are wanted
        self._number = 0
        self._text: list[str] = []
        self._logprobs: list[_Object] = []

    def whole(self, tokens: Sequence[Token], text: str, reason: str, usage: _Object) -> _Object:
        status = _status(reason)
        item = self._item(status, [_part(text, self._told(tokens))])
        return self._response(status, [item], usage)

    def opening(self) -> list[_Object]:
        """The events that come before any token."""
        begun = self._response("in_progress", [], None)
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event("response.output_item.added", output_index=0, item=self._item("in_progress", [])),
            self._event("response.content_part.added", **self._place(), part=_part("", [])),
        ]

    def token(self, spoken: Token) -> list[_Object]:
        """The event of one token; none where it has neither a text nor log probabilities to tell."""
        logprobs = self._told([spoken])
        if not (spoken.text or logprobs):
            return []
        self._text.append(spoken.text)
        self._logprobs += logprobs
        return [self._event("response.output_text.delta", **self._place(), delta=spoken.text, logprobs=logprobs)]

    def ending(self, rest: str, reason: str, usage: _Object) -> list[_Object]:
        """The events after the last token: text held back until now, and all of it once more."""
        events = self.token(Token(rest))
        status = _status(reason)
        text = "".join(self._text)
        part = _part(text, self._logprobs)
        item = self._item(status, [part])
        return [
            *events,
            self._event("response.output_text.done", **self._place(), text=text, logprobs=self._logprobs),
            self._event("response.content_part.done", **self._place(), part=part),
            self._event("response.output_item.done", output_index=0, item=item),
            self._event(f"response.{status}", response=self._response(status, [item], usage)),
        ]

    def failed(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed after its first byte."""
        return error_event(error, self._number)

    def _event(self, type: str, **values: Any) -> _Object:
        number, self._number = self._number, self._number + 1
        return {"type": type, "sequence_number": number, **values}

    def _place(self) -> _Object:
        return {"item_id": self._item_id, "output_index": 0, "content_index": 0}

    def _item(self, status: str, content: list[_Object]) -> _Object:
        return {"id": self._item_id, "type": "message", "role": "assistant", "status": status, "content": content}

    def _response(self, status: str, output: list[_Object], usage: _Object | None) -> _Object:
        asked = self._asked
        return {
            **self._head,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "output": output,
            "usage": usage,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "temperature": rounded(asked.temperature),
            "top_logprobs": asked.top_logprobs,
            "top_p": 1.0,
            "user": asked.user,
            "background": False,
            "store": False,
            "previous_response_id": None,
            "parallel_tool_calls": True,
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
        }

    def _told(self, tokens: Sequence[Token]) -> list[_Object]:
        if self._top is None:
            return []
        return [chat_logprob(each, self._top, self._token_text) for each in tokens if each.logprobs]


def error_event(error: ApiError, sequence_number: int = 0) -> bytes:
    """OpenAI documents the fault at top level and sends it under `error`, where its client looks: both are here."""
    fault = {"code": error.code, "message": error.message, "param": error.param}
    return sse.typed_event({"type": "error", "sequence_number": sequence_number, **fault, **error.body})


def usage(input_tokens: int, output_tokens: int, cached_tokens: int) -> _Object:
    return {
        "input_tokens": input_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": 0},
        "output_tokens": output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": input_tokens + output_tokens,
    }


def _status(reason: str) -> str:
    return "incomplete" if reason == "length" else "completed"


def _part(text: str, logprobs: list[_Object]) -> _Object:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
