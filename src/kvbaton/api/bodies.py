"""A client's body becomes a type at the door: known fields are checked once, unknown ones pass untouched.

Law: `fields` is what the client sent and is never changed; a field that is wrong is refused by its name. A JSON null
counts as absent, as it does at OpenAI.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api.errors import ApiError, bad_field

CHOICES_MAX = 128
PARTS_MAX = 256
"""Prompts times choices of one body; more is refused, since each is a request of its own to the engines."""
STOPS_MAX = 16
MESSAGES_MAX = 4096
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Prompt = str | list[int]


class Kind(enum.Enum):
    """Which of the two endpoints; the value is its path."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"


class Body(msgspec.Struct, frozen=True):
    """One client request, checked."""

    kind: Kind
    fields: Mapping[str, Any]
    prompts: tuple[Prompt, ...]  # of a completion; a chat has its messages in `fields`
    n: int
    stream: bool
    include_usage: bool

    @property
    def parts(self) -> int:
        """How many requests to an engine this body stands for."""
        return max(len(self.prompts), 1) * self.n


def _whole(low: int, high: int | None = None) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= low and (high is None or value <= high)


def _number(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _of(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_stop(value: Any) -> bool:
    texts = value if isinstance(value, list) else [value]
    return len(texts) <= STOPS_MAX and all(isinstance(text, str) and text for text in texts)


_Check = tuple[Callable[[Any], bool], str]
_COMMON: Mapping[str, _Check] = {
    "model": (_of(str), "a string"),
    "max_tokens": (_whole(1), "a whole number of at least 1"),
    "min_tokens": (_whole(0), "a whole number of at least 0"),
    "n": (_whole(1, CHOICES_MAX), f"a whole number from 1 to {CHOICES_MAX}"),
    "temperature": (_number(0, 100), "a number of at least 0"),
    "top_p": (_number(0, 1), "a number from 0 to 1"),
    "seed": (_whole(-(1 << 63), (1 << 63) - 1), "a whole number of 64 bits"),
    "stream": (_of(bool), "true or false"),
    "stream_options": (_of(dict), "an object"),
    "stop": (_is_stop, f"a text, or a list of at most {STOPS_MAX}, none empty"),
    "ignore_eos": (_of(bool), "true or false"),
    "cache_salt": (_of(str), "a string"),
    "user": (_of(str), "a string"),
}
_OWN: Mapping[Kind, Mapping[str, _Check]] = {
    Kind.COMPLETION: {
        "logprobs": (_whole(0, 20), "a whole number from 0 to 20"),
        "echo": (_of(bool), "true or false"),
        "best_of": (_whole(1, CHOICES_MAX), f"a whole number from 1 to {CHOICES_MAX}"),
    },
    Kind.CHAT: {
        "max_completion_tokens": (_whole(1), "a whole number of at least 1"),
        "logprobs": (_of(bool), "true or false"),
        "top_logprobs": (_whole(0, 20), "a whole number from 0 to 20"),
    },
}


def parse(kind: Kind, data: bytes) -> Body:
    """The body as a type; `ApiError` (400) that names the first field that is wrong."""
    fields = _object(data)
    for name, (holds, expected) in (*_COMMON.items(), *_OWN[kind].items()):
        value = fields.get(name)
        if value is not None and not holds(value):
            raise bad_field(name, f"got {_brief(value)}, expected {expected}")
    if kind is Kind.CHAT:
        _check_messages(fields.get("messages"))
        prompts: tuple[Prompt, ...] = ()
    else:
        prompts = _prompts(fields.get("prompt"))
    options = fields.get("stream_options") or {}
    body = Body(
        kind, fields, prompts, fields.get("n") or 1, bool(fields.get("stream")), bool(options.get("include_usage"))
    )
    if body.parts > PARTS_MAX:
        raise bad_field("n", f"{len(prompts)} prompts times {body.n} choices, at most {PARTS_MAX} together")
    return body


def _object(data: bytes) -> dict[str, Any]:
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"body: not JSON ({error})", param="body", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise ApiError(400, f"body: got {_brief(fields)}, expected an object", param="body", code="invalid_json")
    return fields


def _prompts(value: Any) -> tuple[Prompt, ...]:
    """OpenAI's four shapes: a text, texts, token ids, lists of token ids."""
    match value:
        case None:
            raise bad_field("prompt", "missing; expected a text, token ids, or a list of either")
        case str():
            return (value,)
        case [] | [[], *_]:
            raise bad_field("prompt", "empty; expected at least one text or token id")
        case [*items] if all(isinstance(item, str) for item in items):
            return tuple(items)
        case [*items] if all(_is_token(item) for item in items):
            return (items,)
        case [*items] if all(isinstance(item, list) and item and all(map(_is_token, item)) for item in items):
            return tuple(items)
    raise bad_field("prompt", f"got {_brief(value)}, expected a text, token ids (0 or above), or a list of either")


def _is_token(value: Any) -> bool:
    return type(value) is int and value >= 0


def _check_messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise bad_field("messages", f"got {_brief(value)}, expected a list with at least one message")
    if len(value) > MESSAGES_MAX:
        raise bad_field("messages", f"{len(value)} messages, at most {MESSAGES_MAX}")
    for index, message in enumerate(value):
        where = f"messages[{index}]"
        if not isinstance(message, dict):
            raise bad_field(where, f"got {_brief(message)}, expected an object")
        role = message.get("role")
        if role not in ROLES:
            raise bad_field(f"{where}.role", f"got {_brief(role)}, expected one of {', '.join(ROLES)}")
        if not isinstance(message.get("content"), str | list | None):
            got = _brief(message["content"])
            raise bad_field(f"{where}.content", f"got {got}, expected a text or a list of parts")


def _brief(value: Any) -> str:
    text = "nothing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
