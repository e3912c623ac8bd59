"""One body that asks for several answers is several requests to an engine; this splits it and joins the answers.

Laws: each (prompt, choice) is its own request, with its own handoff; the client sees one answer with OpenAI's indexes
(prompt times n plus choice), one id and one usage, in which each prompt counts once. Of what a worker answered only as
much is taken apart as is joined: the rest passes as the bytes that came, whatever their shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api.bodies import Body, BodyKind

FRAME_BYTES_MAX = 256 << 10
"""Of an answer or a choice, besides what is never taken apart; of its usage."""
_SEED_BITS = 63


class AnswerPart(msgspec.Struct, frozen=True):
    """One request to an engine."""

    index: int
    prompt_index: int
    choice: int
    fields: Mapping[str, Any]


_NONE = msgspec.Raw(b"null")
_PROMPT_IDS = "prompt_token_ids"  # of a chat, beside the choices: in the first chunk of each, and in no other


class _Answer(msgspec.Struct):
    choices: msgspec.Raw = _NONE
    usage: msgspec.Raw = _NONE
    prompt_token_ids: msgspec.Raw = _NONE


class _Choice(msgspec.Struct):
    text: msgspec.Raw = _NONE
    message: msgspec.Raw = _NONE
    delta: msgspec.Raw = _NONE
    logprobs: msgspec.Raw = _NONE
    token_ids: msgspec.Raw = _NONE
    prompt_token_ids: msgspec.Raw = _NONE


_answer = msgspec.json.Decoder(_Answer)
_choice = msgspec.json.Decoder(_Choice)
_one = msgspec.json.Decoder(tuple[msgspec.Raw])  # a part asks for one choice, and a second one ends the reading
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])


def read(data: bytes) -> dict[str, Any]:
    """An answer or chunk of one part, as far as it is joined; `ValueError` for what is none."""
    data.decode()  # raw fields are not looked into, and what is no UTF-8 would make the whole answer unreadable
    answer = _answer.decode(data)
    fields: dict[str, Any] = dict(_framed(data, answer))
    choices, usage = bytes(answer.choices), bytes(answer.usage)
    fields["choices"] = None
    if choices != b"null":
        is_empty = choices[:1] == b"[" and not choices[1:-1].strip()
        fields["choices"] = (
            [] if is_empty else [_framed(bytes(one), _choice.decode(one)) for one in _one.decode(choices)]
        )
    if len(usage) > FRAME_BYTES_MAX:
        raise ValueError(f"usage: more than {FRAME_BYTES_MAX} bytes")
    fields["usage"] = msgspec.json.decode(usage)
    return fields


def _framed(data: bytes, inner: msgspec.Struct) -> dict[str, msgspec.Raw]:
    """The fields of an object, where all but those that `inner` names are short."""
    named = (getattr(inner, name) for name in inner.__struct_fields__)
    if len(data) - sum(len(bytes(each)) for each in named) > FRAME_BYTES_MAX:
        raise ValueError(f"fields: more than {FRAME_BYTES_MAX} bytes")
    return _fields.decode(data)


def split(body: Body) -> tuple[AnswerPart, ...]:
    """The requests that `body` stands for, in the order of their indexes; one alone keeps its fields as they came."""
    if body.parts == 1:
        return (AnswerPart(0, 0, 0, body.fields),)
    parts: list[AnswerPart] = []
    for prompt_index in range(max(len(body.prompts), 1)):
        for choice in range(body.n):
            fields = {name: value for name, value in body.fields.items() if name not in ("n", "best_of")}
            if body.kind is BodyKind.COMPLETION:
                fields["prompt"] = body.prompts[prompt_index]
            if choice and fields.get("seed") is not None:
                fields["seed"] = _next_seed(fields["seed"], choice)
            parts.append(AnswerPart(len(parts), prompt_index, choice, fields))
    return tuple(parts)


def _next_seed(seed: int, choice: int) -> int:
    """Choices of one seeded request must differ, and as vLLM's do: it adds the choice's number."""
    return (seed + choice) % (1 << _SEED_BITS) if seed >= 0 else seed + choice


def join(parts: Sequence[AnswerPart], answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One whole answer out of the parts', in order. One alone stays as it is."""
    if len(parts) == 1:
        return answers[0]
    joiner = Joiner()
    choices = [choice for part, answer in zip(parts, answers, strict=True) for choice in joiner.take(part, answer)]
    return {**joiner.head, **_prompt_ids(answers[0]), "choices": choices, "usage": joiner.usage}


def _prompt_ids(told: Mapping[str, Any]) -> dict[str, Any]:
    return {_PROMPT_IDS: told[_PROMPT_IDS]} if _PROMPT_IDS in told else {}


class Joiner:
    """Joins what arrives part by part: answers, or chunks of streams in any order."""

    def __init__(self) -> None:
        self.head: dict[str, Any] = {}  # id, object, created, model: those of whoever spoke first
        self._usages: dict[int, tuple[AnswerPart, dict[str, Any]]] = {}

    def take(self, part: AnswerPart, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The choices within an answer or chunk of `part`, under the index that the client knows."""
        if not self.head:
            self.head = {
                name: value
                for name, value in answer.items()
                if name not in ("choices", "usage", "kv_transfer_params", "error", _PROMPT_IDS)
            }
        if isinstance(answer.get("usage"), dict):
            self._usages[part.index] = (part, answer["usage"])
        return [{**choice, "index": part.index} for choice in answer.get("choices") or ()]

    def chunk(self, part: AnswerPart, chunk: Mapping[str, Any]) -> dict[str, Any] | None:
        """A stream's chunk as the client shall see it; None where it held only usage, which comes once, at the end."""
        choices = self.take(part, chunk)
        return {**self.head, **_prompt_ids(chunk), "choices": choices} if choices else None

    def usage_chunk(self) -> dict[str, Any]:
        return {**self.head, "choices": [], "usage": self.usage}

    @property
    def usage(self) -> dict[str, Any]:
        """Tokens of all parts; a prompt with several choices counts once."""
        prompt = completion = cached = 0
        told_cached = False
        for part, usage in self._usages.values():
            completion += usage.get("completion_tokens") or 0
            if part.choice == 0:
                prompt += usage.get("prompt_tokens") or 0
                details = usage.get("prompt_tokens_details")
                if details:
                    told_cached = True
                    cached += details.get("cached_tokens") or 0
        total: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        if told_cached:
            total["prompt_tokens_details"] = {"cached_tokens": cached}
        return total
