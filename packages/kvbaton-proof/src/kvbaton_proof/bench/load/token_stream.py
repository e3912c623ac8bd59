"""One streamed answer as its bytes come: when its tokens were there, and whether it is the one that was asked for.

Laws: pure; time is an argument. An answer is right only if it came to its end and has as many tokens as were asked
for; everything else has a name, from a short list. Tokens that come in one read came at one time.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from kvbaton.api import sse

CODE_CHARS_MAX = 40
SHORT, LONG = "short answer", "long answer"
MALFORMED, NO_END = "malformed event", "stream without an end"


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Answer(msgspec.Struct, frozen=True):
    """A right answer. Seconds since the request was sent, and between its tokens."""

    ttft_s: float
    e2e_s: float
    gaps_s: tuple[float, ...]
    tokens: int
    digest: bytes  # of its text

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None if there is none."""
        return sum(self.gaps_s) / (self.tokens - 1) if self.tokens > 1 else None


class TokenStream:
    """Feed it until the connection has no more; then ask for the `answer`."""

    __slots__ = ("_at", "_done", "_gaps", "_relay", "_sent_at", "_usage", "_wrong", "events", "ids", "text")

    def __init__(self, sent_at: float) -> None:
        self.events = 0  # that bore a token
        self.text: list[str] = []
        self.ids: list[int] = []  # where the server tells them
        self._sent_at = sent_at
        self._at: list[float] = []  # of the first and of the last token
        self._gaps: list[float] = []
        self._usage: int | None = None
        self._relay = sse.Relay()
        self._wrong = ""
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """What has come by now; after something wrong nothing more is read."""
        if self._wrong or self._done:
            return
        try:
            for payload in sse.payloads(self._relay.feed(data)):
                self._take(payload, now)
        except (sse.TooLongError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._wrong = MALFORMED

    def _take(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        chunk = _decode(payload)
        if chunk.error is not None:
            self._wrong = self._wrong or f"error event: {code_of(chunk.error)}"
            return
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self._usage = chunk.usage.completion_tokens
        for choice in chunk.choices[:1]:
            self.ids += choice.token_ids or ()
            if choice.text or choice.finish_reason is None:  # some engines end with an event that has no token
                self._token(choice.text, now)

    def _token(self, text: str, now: float) -> None:
        self.events += 1
        self.text.append(text)
        if self._at:
            self._gaps.append(now - self._at[1])
            self._at[1] = now
        else:
            self._at = [now, now]

    def answer(self, wanted: int) -> Answer | str:
        """The answer, or why it is wrong."""
        if self._wrong:
            return self._wrong
        if not self._done:
            return NO_END
        tokens = self.events if self._usage is None else self._usage
        if tokens != wanted or not self._at:
            return SHORT if tokens <= wanted else LONG
        digest = hashlib.blake2b("".join(self.text).encode(errors="replace"), digest_size=8).digest()
        first, last = self._at
        return Answer(first - self._sent_at, last - self._sent_at, tuple(self._gaps), tokens, digest)


def code_of(error: Any) -> str:
    """The code of an error object, short."""
    if isinstance(error, dict):
        error = error.get("code") or error.get("type") or "without a code"
    return " ".join(str(error).split())[:CODE_CHARS_MAX]


def refusal(status: int, data: bytes) -> str:
    """A status that is not 200, with the code that the body gives."""
    try:
        return f"status {status}: {code_of(msgspec.json.decode(data)['error'])}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return f"status {status}"
