"""How a conversation is known: by names of the beginnings of its prompt, which the next turn's prompt begins with.

A completion's prompt is a text, named at every `STEP_BYTES` of it. The other APIs send messages, named one by one; what
clients write differently from turn to turn, though the prompt stays the same, is left out of the names:

    responses   the input as one text or as the message that stands for it; ids and states of earlier output
    messages    a text or its only block; marks for the cache, which wander to the newest message
    all three   what type a text part is called by

Laws: pure; names are keyed, so no client can aim at another's turn; a name costs as much as what it is of.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from kvbaton.api.bodies import TEXT_PARTS, BodyKind
from kvbaton.router.flow.attempt import RoutedCall

STEP_BYTES = 256
"""A text is looked up by its beginnings of so many bytes and multiples of it; a shorter one is not worth it."""
STEPS_MAX = 4096
_MARKS = frozenset({"cache_control"})
_OF_OUTPUT = frozenset({"role", "content", "type", "id", "status"})
_BILLING = "x-anthropic-billing-header"
"""Begins a part of some clients' system prompt that is new in each request; vLLM leaves it out of the prompt."""
_MESSAGES_IN = {BodyKind.CHAT: "messages", BodyKind.RESPONSES: "input", BodyKind.MESSAGES: "messages"}
_encode = msgspec.json.Encoder().encode


class TurnName(msgspec.Struct, frozen=True):
    """Of one beginning of a prompt."""

    key: bytes  # by which it is looked up
    whole: bytes  # of the whole prompt, where it is a text; else the same
    length: int = 0  # of that text


def text_of(call: RoutedCall) -> bytes:
    """The prompt of a completion as bytes of which a longer prompt's begin; b"" of anything else."""
    if call.kind is not BodyKind.COMPLETION:
        return b""
    prompt = call.fields.get("prompt")
    if isinstance(prompt, str):
        return prompt.encode(errors="surrogatepass")
    if isinstance(prompt, list) and prompt and all(type(each) is int for each in prompt):
        return _encode(prompt)[:-1] + b","
    return b""


def name_of(call: RoutedCall, secret: bytes) -> TurnName | None:
    """Of a whole prompt; None if it is too short, or none that is known by its beginnings."""
    text = text_of(call)
    if not text:
        last = deque(message_names(call, secret), maxlen=1)
        return TurnName(last[0], last[0]) if last else None
    stepped = deque(steps(call, text, secret), maxlen=1)
    if not stepped:
        return None
    [(state, at)] = stepped
    return TurnName(state.digest(), whole(state, text[at:]), len(text))


def message_names(call: RoutedCall, secret: bytes) -> Iterator[bytes]:
    """Names of the beginnings of what is not a text, message by message."""
    if call.kind is BodyKind.COMPLETION:
        return
    name = _hash(_shape(call), secret)
    for message in _messages(call):
        name = _hash(name + _encode(_said(message)), secret)
        yield name


def steps(call: RoutedCall, text: bytes, secret: bytes) -> Iterator[tuple[Any, int]]:
    """A text's beginnings, each a step longer: the hash of it so far, which goes on with the next, and its length."""
    state = blake2b(_shape(call), key=secret, digest_size=16)
    for at in range(STEP_BYTES, min(len(text), STEPS_MAX * STEP_BYTES) + 1, STEP_BYTES):
        state.update(text[at - STEP_BYTES : at])
        yield state, at


def whole(state: Any, rest: bytes) -> bytes:
    """The name of a text of which `state` has all but the rest."""
    state = state.copy()
    state.update(rest)
    return bytes(state.digest())


def _messages(call: RoutedCall) -> list[Any]:
    found = call.fields.get(_MESSAGES_IN[call.kind])
    if isinstance(found, str) and call.kind is BodyKind.RESPONSES:
        return [{"role": "user", "content": found}]
    return found if isinstance(found, list) else []


def _shape(call: RoutedCall) -> bytes:
    """What shapes the KV besides the messages or the text, and comes before them."""
    fields = call.fields
    shape = [call.kind.value, fields.get("model"), fields.get("cache_salt"), _unmarked(fields.get("tools"))]
    if call.kind is BodyKind.RESPONSES:
        shape.append(fields.get("instructions"))
    if call.kind is BodyKind.MESSAGES:
        shape.append([part for part in _parts(fields.get("system")) if not str(part[-1]).startswith(_BILLING)])
    return _encode(shape)


def _said(message: Any) -> Any:
    """A message as it is named: who says what, and all else that belongs to it."""
    if not isinstance(message, Mapping) or "role" not in message:  # an item of a response: a call of a tool, say
        return message
    more = {name: value for name, value in message.items() if name not in _OF_OUTPUT}
    return [message["role"], _parts(message.get("content")), more]


def _parts(content: Any) -> list[Any]:
    """What is said, part by part; a text is its only one."""
    if content is None:
        return []
    found = []
    for part in content if isinstance(content, list) else [content]:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") in TEXT_PARTS else part
        found.append(["text", text] if isinstance(text, str) else [_unmarked_part(part)])
    return found


def _unmarked(tools: Any) -> Any:
    return [_unmarked_part(each) for each in tools] if isinstance(tools, list) else tools


def _unmarked_part(part: Any) -> Any:
    if not isinstance(part, Mapping) or _MARKS.isdisjoint(part):
        return part
    return {name: value for name, value in part.items() if name not in _MARKS}


def _hash(data: bytes, secret: bytes) -> bytes:
    return blake2b(data, key=secret, digest_size=16).digest()
