"""A client's body becomes a type at the door: known fields are checked once, unknown ones pass untouched.

Law: `fields` is what the client sent and is never changed; a field that is wrong is refused by its name. A JSON null
counts as absent, as it does at OpenAI.

The cost of parsing a JSON text, estimated from its bytes, so that no body can block an event loop.

Law: what passes here is parsed, walked and written again within tens of milliseconds, whatever its shape. Nothing here
makes an object of a value: a text is filtered down to its marks by the speed of `bytes.translate`.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from kvbaton.api.api_errors import ApiError, bad_field

CHOICES_MAX = 128
PARTS_MAX = 256
"""Prompts times choices of one body; more is refused, since each is a request of its own to the engines."""
STOPS_MAX = 1024
MESSAGES_MAX = 4096
"""Turns of a chat or of Anthropic's messages, or items of a response's input."""
SHOWN_CHARS = 200
"""Of what a decoder says about a body."""
SMALL_VALUES = 100
"""A list or object of more is told by its length."""
TEXT_PARTS = ("input_text", "output_text", "text")
"""Types of the parts of a response's messages that hold a text."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function")

Prompt = str | list[int]


class BodyKind(enum.Enum):
    """Which of the endpoints; the value is its path."""

    COMPLETION = "/v1/completions"
    CHAT = "/v1/chat/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


class Body(msgspec.Struct, frozen=True):
    """One client request, checked."""

    kind: BodyKind
    fields: Mapping[str, Any]
    prompts: tuple[Prompt, ...]  # of a completion; chats have their messages, a response its input in `fields`
    n: int
    stream: bool
    include_usage: bool  # whether a stream tells the usage; those of responses and messages always do

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


def _are(kind: type, values: Iterable[Any]) -> bool:
    """Whether all are of one type; JSON knows no subtypes. At C's speed: there may be a quarter of a million."""
    return set(map(type, values)) == {kind}


def _is_list_of_texts(value: Any) -> bool:
    return isinstance(value, list) and (not value or _are(str, value))


def _is_metadata(value: Any) -> bool:
    return isinstance(value, dict) and (not value or _are(str, value.values()))


_Check = tuple[Callable[[Any], bool], str]
_COMMON: Mapping[str, _Check] = {
    "model": (_of(str), "a string"),
    "min_tokens": (_whole(0), "a whole number of at least 0"),
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
_TEXT_OR_CHAT: Mapping[str, _Check] = {
    "max_tokens": (_whole(1), "a whole number of at least 1"),
    "return_token_ids": (_of(bool), "true or false"),
    "n": (_whole(1, CHOICES_MAX), f"a whole number from 1 to {CHOICES_MAX}"),
}
_CHECKS: Mapping[BodyKind, Mapping[str, _Check]] = {
    BodyKind.COMPLETION: {
        **_COMMON,
        **_TEXT_OR_CHAT,
        "logprobs": (_whole(-1), "a whole number, -1 for all"),
        "max_tokens": (_whole(0), "a whole number of at least 1, or 0 with echo"),
        "echo": (_of(bool), "true or false"),
        "best_of": (_whole(1, CHOICES_MAX), f"a whole number from 1 to {CHOICES_MAX}"),
    },
    BodyKind.CHAT: {
        **_COMMON,
        **_TEXT_OR_CHAT,
        "max_completion_tokens": (_whole(1), "a whole number of at least 1"),
        "logprobs": (_of(bool), "true or false"),
        "top_logprobs": (_whole(-1), "a whole number, -1 for all"),
    },
    BodyKind.RESPONSES: {
        **_COMMON,
        "instructions": (_of(str), "a text"),
        "max_output_tokens": (_whole(1), "a whole number of at least 1"),
        "top_logprobs": (_whole(-1), "a whole number, -1 for all"),
        "include": (_is_list_of_texts, "a list of texts"),
        "store": (_of(bool), "true or false"),
        "background": (_of(bool), "true or false"),
        "previous_response_id": (_of(str), "a string"),
        "tools": (_of(list), "a list"),
        "parallel_tool_calls": (_of(bool), "true or false"),
        "text": (_of(dict), "an object"),
        "reasoning": (_of(dict), "an object"),
        "truncation": (_of(str), "a string"),
        "metadata": (_is_metadata, "an object of texts"),
    },
    BodyKind.MESSAGES: {
        **_COMMON,
        "max_tokens": (_whole(1), "a whole number of at least 1"),
        "system": (lambda value: isinstance(value, str | list), "a text or a list of parts"),
        "stop_sequences": (_is_list_of_texts, "a list of texts"),
        "top_k": (_whole(-1), "a whole number"),
        "tools": (_of(list), "a list"),
        "tool_choice": (_of(dict), "an object"),
        "thinking": (_of(dict), "an object"),
        "metadata": (_of(dict), "an object"),
    },
}


def parse(kind: BodyKind, data: bytes) -> Body:
    """The body as a type; `ApiError` (400) that names the first field that is wrong."""
    fields = json_object(data)
    checks = _CHECKS[kind]
    for name, value in fields.items():
        check = checks.get(name)
        if check is not None and value is not None and not check[0](value):
            raise bad_field(name, f"got {_brief(value)}, expected {check[1]}")
    stream = bool(fields.get("stream"))
    if kind is BodyKind.RESPONSES:
        _check_response(fields)
        return Body(kind, fields, (), 1, stream, True)
    if kind is BodyKind.MESSAGES:
        _check_anthropic(fields)
        return Body(kind, fields, (), 1, stream, True)
    if kind is BodyKind.CHAT:
        _check_messages(fields.get("messages"))
        prompts: tuple[Prompt, ...] = ()
    elif fields.get("max_tokens") == 0 and not fields.get("echo"):
        raise bad_field("max_tokens", "got 0, expected a whole number of at least 1; 0 only with echo")
    elif fields.get("prompt") is None and fields.get("prompt_embeds") is not None:
        prompts = ()  # vLLM's: the engine knows how many there are
    else:
        prompts = _prompts(fields.get("prompt"))
    options = fields.get("stream_options") or {}
    body = Body(kind, fields, prompts, fields.get("n") or 1, stream, bool(options.get("include_usage")))
    if (body.n > 1 or len(prompts) > 1) and body.parts > PARTS_MAX:
        raise bad_field("n", f"{len(prompts)} prompts times {body.n} choices, at most {PARTS_MAX} together")
    return body


def json_object(data: bytes) -> dict[str, Any]:
    """A body's fields, unchecked; `ApiError` (400) for what is no JSON object or costs too much."""
    check(data)
    try:
        fields = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        said = str(error)[:SHOWN_CHARS]  # it names the place, which may be a thousand lists deep
        raise ApiError(400, f"body: not JSON ({said})", param="body", code="invalid_json") from None
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
        case [*items] if _are(str, items):
            return tuple(items)
        case [*items] if _are_tokens(items):
            return (items,)
        case [*items] if _are(list, items) and all(item and _are_tokens(item) for item in items):
            return tuple(items)
    raise bad_field("prompt", f"got {_brief(value)}, expected a text, token ids (0 or above), or a list of either")


def _are_tokens(values: list[Any]) -> bool:
    return _are(int, values) and min(values) >= 0


def _check_anthropic(fields: Mapping[str, Any]) -> None:
    _check_messages(fields.get("messages"))
    if fields.get("max_tokens") is None:
        raise bad_field("max_tokens", "missing; expected a whole number of at least 1")
    if len(fields.get("stop_sequences") or ()) > STOPS_MAX:
        raise bad_field("stop_sequences", f"{len(fields['stop_sequences'])} texts, at most {STOPS_MAX}")


def _check_messages(value: Any) -> None:
    if not isinstance(value, list) or not value:
        raise bad_field("messages", f"got {_brief(value)}, expected a list with at least one message")
    if len(value) > MESSAGES_MAX:
        raise bad_field("messages", f"{len(value)} messages, at most {MESSAGES_MAX}")
    for index, message in enumerate(value):
        _check_message(f"messages[{index}]", message)


def _check_message(where: str, message: Any) -> None:
    if not isinstance(message, dict):
        raise bad_field(where, f"got {_brief(message)}, expected an object")
    role = message.get("role")
    if role not in ROLES:
        raise bad_field(f"{where}.role", f"got {_brief(role)}, expected one of {', '.join(ROLES)}")
    if not isinstance(message.get("content"), str | list | None):
        got = _brief(message["content"])
        raise bad_field(f"{where}.content", f"got {got}, expected a text or a list of parts")


def _check_response(fields: Mapping[str, Any]) -> None:
    if fields.get("background"):
        raise bad_field("background", "a background response would outlive its handoff; remove it")
    items = fields.get("input")
    if isinstance(items, str):
        return
    if not isinstance(items, list) or not items:
        raise bad_field("input", f"got {_brief(items)}, expected a text or a list with at least one item")
    if len(items) > MESSAGES_MAX:
        raise bad_field("input", f"{len(items)} items, at most {MESSAGES_MAX}")
    for index, item in enumerate(items):
        _check_item(f"input[{index}]", item)


def is_message(item: Mapping[str, Any]) -> bool:
    """Whether an item of a response's input is a turn of the conversation; its type may be left out."""
    kind = item.get("type")
    return kind == "message" or (kind is None and "role" in item)


def _check_item(where: str, item: Any) -> None:
    """A message and its texts are checked; items and parts of other types are the worker's to judge."""
    if isinstance(item, dict) and not is_message(item):
        if not isinstance(item.get("type"), str | None):
            raise bad_field(f"{where}.type", f"got {_brief(item['type'])}, expected a string")
        return
    _check_message(where, item)
    content = item.get("content")
    for index, part in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(part, dict):
            raise bad_field(f"{where}.content[{index}]", f"got {_brief(part)}, expected an object")
        if part.get("type") in TEXT_PARTS and not isinstance(part.get("text"), str):
            raise bad_field(f"{where}.content[{index}].text", f"got {_brief(part.get('text'))}, expected a text")


def _brief(value: Any) -> str:
    if isinstance(value, list | dict) and not _is_small(value):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    text = "nothing" if value is None else repr(value[:60] if isinstance(value, str) else value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_small(value: Any) -> bool:
    """Whether it holds so few values that all of them may be written out to show the first."""
    todo, count = [value], 0
    while todo and count <= SMALL_VALUES:
        each = todo.pop()
        inner = list(itertools.islice(each.values() if isinstance(each, dict) else each, SMALL_VALUES + 1))
        count += len(inner)
        todo += [one for one in inner if isinstance(one, list | dict)]
    return count <= SMALL_VALUES


NESTING_MAX = 128
"""Of lists and objects within each other."""
VALUES_MAX = 1 << 18
"""Of all kinds: a prompt of so many token ids costs 50 ms."""
CONTAINERS_MAX = 1 << 15
"""Lists and objects: each costs ten numbers."""
TEXTS_MAX = 1 << 16
"""Names of fields are among them: each that is new costs 1 us."""
HARD_NUMBERS_MAX = 1024
"""Of 20 digits or more, or with an exponent: `1.5e300` takes the parser 30 us, 1,000 times what `1.5` takes."""
EASY_BYTES = 16 << 10
"""A text of no more than this is cheap whatever it holds, but for its depth."""

_LONG = b"0" * 20
_KEPT = b'"[]{},:'
_DIGITS = b"0123456789"
_STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}
_TABLE = bytes.maketrans(_DIGITS + b"E", b"0" * 10 + b"e")
_REST = bytes(each for each in range(256) if each not in _KEPT + _DIGITS + b"eE")


def too_costly(data: bytes, nesting_max: int = NESTING_MAX) -> str:
    """What there is too much of, "" if it may be parsed. Of a text that is no JSON whatever is true of its marks."""
    if len(data) <= EASY_BYTES and data.count(b"[") + data.count(b"{") <= nesting_max:
        return ""
    if b"\\" in data:  # no quote ends a text but those that are left
        data = data.replace(b"\\\\", b"__").replace(b'\\"', b"__")
    marks = data.translate(_TABLE, _REST)
    if marks.count(b'"') > 2 * TEXTS_MAX:
        return f"more than {TEXTS_MAX} texts"
    outside = b"".join(marks.split(b'"')[::2])
    containers = outside.count(b"[") + outside.count(b"{")
    if containers > CONTAINERS_MAX:
        return f"more than {CONTAINERS_MAX} lists and objects"
    if outside.count(b",") + containers >= VALUES_MAX:
        return f"more than {VALUES_MAX} values"
    if outside.count(_LONG) + outside.count(b"0e") > HARD_NUMBERS_MAX:
        return f"more than {HARD_NUMBERS_MAX} numbers with an exponent, or of {len(_LONG)} digits"
    return f"nested deeper than {nesting_max}" if _is_deep(outside, nesting_max) else ""


def check(data: bytes, nesting_max: int = NESTING_MAX) -> None:
    """Refuse a client's body that is not worth its time."""
    found = too_costly(data, nesting_max)
    if found:
        raise ApiError(400, f"body: {found}; send less in one request", param="body", code="invalid_json")


def _is_deep(marks: bytes, nesting_max: int) -> bool:
    brackets = marks.translate(None, b",:0e")
    return max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0) > nesting_max
