"""The shapes of OpenAI's answers and chunks, for one prompt and one choice; `merge` makes many of them one.

Law: floats are rounded so that none is written with an exponent: a proxy that re-serialises bodies changes those, and
one in the field keeps the old length, so that its client waits for a byte that never comes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from kvbaton.api.bodies import BodyKind

_DECIMALS = 4  # 0.0001 is the smallest that Python writes without an exponent


class Token(msgspec.Struct, frozen=True):
    """One token of an answer; `logprobs` holds the chosen token first, then the likeliest.

    Several at once (`ids`) where an answer begins with what another engine generated, and no log probabilities are due.
    """

    text: str
    logprobs: tuple[tuple[int, float], ...] = ()
    ids: tuple[int, ...] = ()


class AnswerShape:
    """Builds the answers and chunks of one choice."""

    def __init__(
        self,
        kind: BodyKind,
        *,
        model: str,
        request_id: str,
        created_unix_s: int,
        token_text: Callable[[int], str],
        top: int | None = None,
        prompt_ids: Sequence[int] | None = None,
    ) -> None:
        """`prompt_ids`: where token ids are wanted, those of the prompt."""
        self._kind = kind
        prefix = "cmpl" if kind is BodyKind.COMPLETION else "chatcmpl"
        self._head = {"id": f"{prefix}-{request_id}", "created": created_unix_s, "model": model}
        self._token_text = token_text
        self._top = top  # None: no log probabilities are wanted
        self._prompt_ids = prompt_ids
        self._is_begun = False
        self._offset = 0

    def opening(self) -> dict[str, Any] | None:
        """The chunk that comes before any token, where the format has one."""
        if self._kind is BodyKind.COMPLETION:
            return None
        opening = self._chunk({"delta": {"role": "assistant", "content": ""}, "finish_reason": None})
        return opening if self._prompt_ids is None else {**opening, "prompt_token_ids": list(self._prompt_ids)}

    def token(self, spoken: Token) -> dict[str, Any]:
        logprobs = self._logprobs([spoken])
        if self._kind is BodyKind.COMPLETION:
            choice: dict[str, Any] = {"text": spoken.text, "logprobs": logprobs, "finish_reason": None}
        else:
            choice = {"delta": {"content": spoken.text}, "logprobs": logprobs, "finish_reason": None}
        return self._chunk({**choice, **self._ids(spoken.ids)})

    def ending(self, text: str, reason: str) -> dict[str, Any]:
        """The last chunk: text held back until now, and why it ends."""
        if self._kind is BodyKind.COMPLETION:
            choice: dict[str, Any] = {"text": text, "logprobs": None, "finish_reason": reason}
        else:
            choice = {"delta": {"content": text} if text else {}, "logprobs": None, "finish_reason": reason}
        return self._chunk({**choice, **self._ids(())})

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._chunk({}), "choices": [], "usage": usage}

    def whole(self, tokens: Sequence[Token], text: str, reason: str, usage: dict[str, Any]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "logprobs": self._logprobs(tokens), "finish_reason": reason}
        if self._kind is BodyKind.COMPLETION:
            choice["text"] = text
            kind = "text_completion"
        else:
            choice["message"] = {"role": "assistant", "content": text}
            kind = "chat.completion"
        choice |= self._ids([one for each in tokens for one in each.ids])
        answer = {**self._head, "object": kind, "choices": [choice], "usage": usage}
        if self._kind is BodyKind.CHAT and self._prompt_ids is not None:
            answer["prompt_token_ids"] = list(self._prompt_ids)
        return answer

    def _ids(self, ids: Sequence[int]) -> dict[str, Any]:
        """As vLLM tells them: of a completion the prompt's in its first choice, of a chat beside the choices."""
        if self._prompt_ids is None:
            return {}
        told: dict[str, Any] = {"token_ids": list(ids)}
        if self._kind is BodyKind.COMPLETION and not self._is_begun:
            told["prompt_token_ids"] = list(self._prompt_ids)
        self._is_begun = True
        return told

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        kind = "text_completion" if self._kind is BodyKind.COMPLETION else "chat.completion.chunk"
        return {**self._head, "object": kind, "choices": [{"index": 0, **choice}]}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        if self._kind is BodyKind.CHAT:
            return {"content": [chat_logprob(each, self._top, self._token_text) for each in tokens if each.logprobs]}
        told = [each for each in tokens if each.logprobs]
        texts = [self._token_text(each.logprobs[0][0]) for each in told]
        offsets = []
        for text in texts:
            offsets.append(self._offset)
            self._offset += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [rounded(each.logprobs[0][1]) for each in told],
            "top_logprobs": [self._likeliest(each) for each in told] if self._top else None,
            "text_offset": offsets,
        }

    def _likeliest(self, spoken: Token) -> dict[str, float]:
        pairs = spoken.logprobs[1 : 1 + (self._top or 0)]
        return {self._token_text(token): rounded(logprob) for token, logprob in pairs}


def chat_logprob(spoken: Token, top: int, token_text: Callable[[int], str]) -> dict[str, Any]:
    """The log probabilities of one token, as chats and responses tell them."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        text = token_text(token)
        return {"token": text, "logprob": rounded(logprob), "bytes": list(text.encode())}

    (token, logprob), *likeliest = spoken.logprobs
    return {**one(token, logprob), "top_logprobs": [one(*each) for each in likeliest[:top]]}


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def rounded(value: float) -> float:
    """A float as answers write it, without an exponent."""
    return (round(value, _DECIMALS) + 0.0) if math.isfinite(value) else -9999.0
