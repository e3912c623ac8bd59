"""One stream of any API as its client reads it: what was told of each choice, and in which order. Sans-IO.

Law: nothing that is told is forgotten or mended: what comes twice is kept twice, what contradicts is a problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from kvbaton.api.bodies import BodyKind

Object = Mapping[str, Any]
PROBLEMS_MAX = 8
NOT_FOR_CLIENTS = ("kv_transfer_params",)


@dataclass(slots=True)
class Choice:
    """What there is of one choice of an answer."""

    text: str = ""
    finish: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)  # one entry a token, as the API tells it
    tokens: int = 0  # events that had a text

    def take_logprobs(self, told: Any) -> None:
        if not told:
            return
        if isinstance(told, dict) and "tokens" in told:  # of a completion: columns
            top = told.get("top_logprobs") or [None] * len(told["tokens"])
            columns = told["tokens"], told["token_logprobs"], top, told["text_offset"]
            self.logprobs += [list(row) for row in zip(*columns, strict=True)]
        else:
            self.logprobs += told.get("content") or [] if isinstance(told, dict) else told


class StreamReader:
    """Feed it the payloads of a stream in order; then look at what it has."""

    def __init__(self, kind: BodyKind, *, ids_asked: bool = False) -> None:
        self.kind = kind
        self.choices: dict[int, Choice] = {}
        self.usage: Object | None = None
        self.error = ""  # the code of the event that ended it
        self.is_done = False
        self.problems: list[str] = []
        self.built: Object | None = None  # of responses: the whole answer that the last event repeats
        self._ids_asked = ids_asked
        self._head: tuple[Any, ...] | None = None
        self._roles: set[int] = set()
        self._number = 0
        self._read = {BodyKind.RESPONSES: self._response, BodyKind.MESSAGES: self._message}.get(kind, self._chunk)

    @property
    def told_text(self) -> bool:
        return any(choice.text for choice in self.choices.values())

    def feed(self, payload: bytes) -> bool:
        """Whether it told some of the text."""
        if self.is_done or self.error:
            self._wrong(f"after its end: {payload[:80]!r}")
            return False
        if payload == b"[DONE]":
            self.is_done = True
            return False
        try:
            told = msgspec.json.decode(payload)
            fault = told.get("error")
            if fault is not None and told.get("type", "error") == "error":
                self.error = str(fault.get("code") or fault.get("type")) if isinstance(fault, dict) else str(fault)
                return False
            for name in NOT_FOR_CLIENTS:
                if name in told:
                    self._wrong(f"{name} was told to a client")
            return self._read(told)
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            self._wrong(f"{type(error).__name__} {error} in {payload[:120]!r}")
            return False

    def _wrong(self, what: str) -> None:
        if len(self.problems) < PROBLEMS_MAX:
            self.problems.append(what)

    def _choice(self, index: int) -> Choice:
        return self.choices.setdefault(index, Choice())

    def _same_head(self, *head: Any) -> None:
        if self._head is None:
            self._head = head
        elif self._head != head:
            self._wrong(f"the head was {self._head}, then {head}")

    def _finished(self, choice: Choice, reason: str | None) -> None:
        if reason and choice.finish:
            self._wrong(f"finished by {choice.finish}, and again by {reason}")
        choice.finish = reason or choice.finish

    # --- completions and chats

    def _chunk(self, told: Object) -> bool:
        self._same_head(told["id"], told["object"], told["created"], told["model"])
        if told.get("usage") is not None and not told["choices"]:
            if self.usage is not None:
                self._wrong("usage was told twice")
            self.usage = told["usage"]
        news = False
        for each in told["choices"]:
            choice = self._choice(each["index"])
            if choice.finish:
                self._wrong(f"choice {each['index']} went on after its end: {msgspec.json.encode(each)[:80]!r}")
            text = each.get("text") or "" if self.kind is BodyKind.COMPLETION else self._delta(each)
            choice.text += text
            choice.tokens += bool(text)
            news |= bool(text)
            choice.take_logprobs(each.get("logprobs"))
            if each.get("token_ids"):
                if not self._ids_asked:
                    self._wrong("token ids were told to a client that did not ask for them")
                choice.ids += each["token_ids"]
            self._finished(choice, each.get("finish_reason"))
        return news

    def _delta(self, each: Object) -> str:
        delta, index = each["delta"], each["index"]
        if delta.get("role"):
            if index in self._roles:
                self._wrong(f"choice {index} was opened twice")
            self._roles.add(index)
        elif index not in self._roles:
            self._wrong(f"choice {index} was not opened")
        calls = (call.get("function", {}).get("arguments") for call in delta.get("tool_calls") or ())
        return (delta.get("content") or "") + "".join(filter(None, calls))

    # --- the typed events of responses and messages

    def _response(self, told: Object) -> bool:
        if told["sequence_number"] != self._number:
            self._wrong(f"event {told['sequence_number']} where {self._number} was due")
            self._number = told["sequence_number"]
        self._number += 1
        choice, kind = self._choice(0), told["type"]
        if (whole := told.get("response")) is not None:
            self._same_head(whole["id"], whole["created_at"], whole["model"])
            if whole["status"] in ("completed", "incomplete"):
                self.is_done, self.built, self.usage = True, whole, whole["usage"]
                self._finished(choice, whole["status"])
        if kind == "response.output_text.delta":
            choice.text += told["delta"]
            choice.tokens += 1
            choice.take_logprobs(told.get("logprobs"))
            return bool(told["delta"])
        return False

    def _message(self, told: Object) -> bool:
        choice, kind = self._choice(0), told["type"]
        if kind == "message_start":
            if self._head is not None:
                self._wrong("the message began twice")
            self._head = (told["message"]["id"], told["message"]["model"])
        elif kind == "content_block_delta":
            choice.text += told["delta"]["text"]
            choice.tokens += 1
            return bool(told["delta"]["text"])
        elif kind == "message_delta":
            self._finished(choice, f"{told['delta']['stop_reason']} {told['delta']['stop_sequence']}")
            self.usage = told["usage"]
        elif kind == "message_stop":
            self.is_done = True
        return False


def whole(kind: BodyKind, answer: Object) -> tuple[list[Choice], Object]:
    """The choices of an answer that was not streamed, and its usage."""
    if kind is BodyKind.RESPONSES:
        part = answer["output"][0]["content"][0]
        return [_of(part["text"], answer["status"], part.get("logprobs"))], answer["usage"]
    if kind is BodyKind.MESSAGES:
        finish = f"{answer['stop_reason']} {answer['stop_sequence']}"
        return [_of("".join(part["text"] for part in answer["content"]), finish)], answer["usage"]
    found = []
    for each in sorted(answer["choices"], key=lambda choice: int(choice["index"])):
        text = each["text"] if kind is BodyKind.COMPLETION else each["message"]["content"]
        found.append(_of(text, each["finish_reason"], each.get("logprobs"), each.get("token_ids") or ()))
    return found, answer["usage"]


def _of(text: str, finish: str, logprobs: Any = None, ids: Sequence[int] = ()) -> Choice:
    choice = Choice(text, finish, list(ids))
    choice.take_logprobs(logprobs)
    return choice
