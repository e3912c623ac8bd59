"""Bytes as tokens: every text can be encoded, and every answer is readable.

A model of random weights would answer with broken UTF-8, so its head may only choose printable ASCII or EOS
(`SPEAKABLE`). Each answer token is then one whole character, and a stream can be cut after any of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

BOS = 256
EOS = 257
SYSTEM = 258
USER = 259
ASSISTANT = 260
VOCAB = 264  # a multiple of 8; the rest is unused

SPEAKABLE = (*range(32, 127), EOS)

_ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT}


def encode(text: str) -> list[int]:
    """BOS and the bytes of `text`."""
    return [BOS, *text.encode()]


def encode_chat(turns: Iterable[tuple[str, str]]) -> list[int]:
    """BOS, each (role, text) behind its mark, and the mark of the answer; roles not known speak as the user."""
    tokens = [BOS]
    for role, text in turns:
        tokens += [_ROLES.get(role, USER), *text.encode()]
    return [*tokens, ASSISTANT]


def decode(tokens: Sequence[int]) -> str:
    """Text of `tokens` without marks; bytes that are no UTF-8 (prompts may be cut anywhere) become U+FFFD."""
    return bytes(token for token in tokens if token < BOS).decode(errors="replace")
