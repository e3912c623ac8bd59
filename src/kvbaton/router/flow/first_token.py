"""The first token of an answer, told to the client as soon as P has sampled it (decision 0025).

P's answer is whole, and the client reads a stream: what is told is what D's own events would have begun with, under the
head that goes on. D begins behind that token where it is asked after P; where both are asked at once it says the same.

Laws: no token is told that D would tell otherwise, or not yet: text that a stop string may cut, half a character, what
a parser reads. None is told of a request that D would refuse although P took it, or for which D has no room. Where P's
token ends the answer (its end, or `max_tokens: 1`), all of the answer is told, and D is let go. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api import sse
from kvbaton.api.bodies import BodyKind
from kvbaton.router.workers.directory import ListedEngine

_ENDS = ("length", "stop")
_LIMITS = ("max_completion_tokens", "max_tokens")
_HALF = "\ufffd"


class _PMessage(msgspec.Struct):
    role: str = "assistant"
    content: str | None = None


class _PChoice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str
    text: str | None = None
    message: _PMessage | None = None
    logprobs: msgspec.Raw = msgspec.Raw(b"null")
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


class _PUsage(msgspec.Struct):
    prompt_tokens: int


class _PAnswer(msgspec.Struct):
    id: msgspec.Raw
    created: msgspec.Raw
    model: msgspec.Raw
    choices: list[_PChoice]
    usage: msgspec.Raw
    prompt_token_ids: msgspec.Raw = msgspec.Raw(b"null")


_answer = msgspec.json.Decoder(_PAnswer).decode
_usage = msgspec.json.Decoder(_PUsage).decode


class FirstToken(msgspec.Struct, frozen=True):
    """What P's answer says of it."""

    token: int
    events: bytes
    prompt_tokens: int
    is_last: bool  # the answer ends here


class FirstTokenRule:
    """For one streamed answer: whether P's token may be told, and what is told then."""

    __slots__ = ("_chat", "_ids_wanted", "_limit", "_stop_ids", "_stops", "_usage_due", "is_off")

    def __init__(self, kind: BodyKind, fields: Mapping[str, Any]) -> None:
        self._chat = kind is BodyKind.CHAT
        self._ids_wanted = fields.get("return_token_ids") is True
        self._limit = next((fields[name] for name in _LIMITS if fields.get(name) is not None), None)
        stops, self._stop_ids = fields.get("stop") or (), fields.get("stop_token_ids") or ()
        self._stops: Sequence[Any] = (stops,) if isinstance(stops, str) else stops
        options = fields.get("stream_options") or {}
        self._usage_due = isinstance(options, Mapping) and options.get("include_usage") is True
        parsed = (fields.get("tools") or fields.get("functions")) and fields.get("tool_choice") != "none"
        unread = not self._chat and fields.get(_LIMITS[0]) is not None  # by vLLM's completions
        own = fields.get("echo") or fields.get("return_prompt_text")  # D's first event alone has that text
        self.is_off = bool(own or parsed or unread or not self._is_plain(options, fields))

    def _is_plain(self, options: Any, fields: Mapping[str, Any]) -> bool:
        """Whether these fields are such as D takes: P has never seen them, or others in their place."""
        limit, least = self._limit, fields.get("min_tokens")
        return (
            (limit is None or (type(limit) is int and limit > 0))
            and (not least or (type(least) is int and limit is not None and 0 < least <= limit))
            and isinstance(options, Mapping)
            and all(value is None or type(value) is bool for value in options.values())
            and not options.get("continuous_usage_stats")
            and isinstance(self._stops, list | tuple)
            and all(isinstance(each, str) and each for each in self._stops)
            and isinstance(self._stop_ids, list | tuple)
        )

    def told(self, answer: bytes, prefill: ListedEngine, decode: ListedEngine) -> FirstToken | None:
        """Of P's whole answer; None where D is to tell it."""
        try:
            found = _answer(answer)
            prompt_tokens = _usage(found.usage).prompt_tokens
            (choice,), context_tokens = found.choices, min(prefill.context_tokens, decode.context_tokens)
            parts = (found.id, found.created, found.model, found.usage, found.prompt_token_ids)
            if any(b"\n" in bytes(part) for part in (*parts, choice.logprobs, choice.prompt_token_ids)):
                return None  # it would end an event's line
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
            return None
        if prompt_tokens + (self._limit or 2) > context_tokens:
            return None  # D may refuse it, or have room for no second token
        text = choice.text if choice.message is None else choice.message.content
        is_last = choice.finish_reason == "stop" or self._limit == 1
        if choice.finish_reason not in _ENDS or not self._is_sure(text or "", choice.token_ids, is_last=is_last):
            return None
        token = choice.token_ids[0] if choice.token_ids else 0
        events = self._events(found, choice, text or "", is_last=is_last)
        return FirstToken(token, events, prompt_tokens, is_last)

    def _is_sure(self, text: str, ids: Sequence[int], *, is_last: bool) -> bool:
        """Whether this is how the answer begins, whatever follows."""
        if _HALF in text or any(_may_cut(stop, text) for stop in self._stops):
            return False
        if any(each in self._stop_ids for each in ids):
            return False
        # A parser of tool calls may read what looks like markup, or leave blanks out, although no tools were given.
        shown = text[:1].isalnum() and text == text.strip() if self._chat else bool(text)
        return len(ids) <= 1 and (is_last or (shown and len(ids) == 1))

    def _events(self, found: _PAnswer, choice: _PChoice, text: str, *, is_last: bool) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        head = {"id": found.id, "object": kind, "created": found.created, "model": found.model}
        end = choice.finish_reason if is_last else None
        told: dict[str, Any] = {"index": 0, "logprobs": choice.logprobs, "finish_reason": end}
        told["token_ids"] = choice.token_ids
        if self._chat:
            role = choice.message.role if choice.message is not None else "assistant"
            opening = {"index": 0, "delta": {"role": role, "content": ""}, "finish_reason": None}
            prompt = {"prompt_token_ids": found.prompt_token_ids} if self._ids_wanted else {}
            events = sse.event({**head, "choices": [opening], **prompt})
            events += sse.event({**head, "choices": [{**told, "delta": {"content": text} if text else {}}]})
        else:
            prompt = {"prompt_token_ids": choice.prompt_token_ids} if self._ids_wanted else {}
            events = sse.event({**head, "choices": [{**told, "text": text, **prompt}]})
        if not is_last:
            return events
        if self._usage_due:
            events += sse.event({**head, "choices": [], "usage": found.usage})
        return events + sse.DONE


def _may_cut(stop: str, text: str) -> bool:
    """Whether a stop string is in a text, or begins at its end."""
    return stop in text or any(text.endswith(stop[:length]) for length in range(1, min(len(stop), len(text) + 1)))
