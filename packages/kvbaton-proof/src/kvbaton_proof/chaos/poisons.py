"""Bodies that no client should send: malformed, huge and forged.

Law: what is answered to one of these is an error, or the truth about the prompt in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from kvbaton.api.params import FIELD
from kvbaton_proof.chaos.judged_request import Prompt

DEEP = 20_000
HUGE_CHARS = 5 << 20
"""More than any door takes."""
LONG_CHARS = 20_000
"""More than the model's context."""


def _body(prompt: Prompt, **more: Any) -> bytes:
    fields = {"prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0, **more}
    return msgspec.json.encode(fields)


def _target(prompt: Prompt, **params: Any) -> bytes:
    return _body(prompt, **{FIELD: {"do_remote_prefill": True, **params}})


POISONS: Mapping[str, Callable[[Prompt], bytes]] = {
    "no JSON": lambda _: b"\x00\xff{",
    "nothing": lambda _: b"",
    "a list": lambda _: b"[]",
    "deep": lambda _: b"[" * DEEP,
    "huge": lambda _: b'{"prompt":"' + b"a" * HUGE_CHARS + b'"}',
    "too long": lambda _: msgspec.json.encode({"prompt": "a" * LONG_CHARS, "max_tokens": 1}),
    "a number as prompt": lambda _: b'{"prompt":7}',
    "tokens out of range": lambda _: b'{"prompt":[1,2,99999999999,-5],"max_tokens":1}',
    "minus one token": lambda prompt: _body(prompt, max_tokens=-1),
    "2**62 tokens": lambda prompt: _body(prompt, max_tokens=2**62),
    "2**62 choices": lambda prompt: _body(prompt, n=2**62),
    "warm": lambda prompt: _body(prompt, temperature="warm"),
    "params as text": lambda prompt: _body(prompt, **{FIELD: "x"}),
    "only the flag": _target,
    "both flags": lambda prompt: _target(prompt, do_remote_decode=True, ticket="x"),
    "a forged ticket": lambda prompt: _target(prompt, ticket="kvb1." + "A" * 400),
    "a huge ticket": lambda prompt: _target(prompt, ticket="A" * 1_000_000),
    "a ticket of lists": lambda prompt: _target(prompt, ticket=[["x"]]),
    "an odd mode": lambda prompt: _target(prompt, ticket="x", mode="steal"),
    "another's host": lambda prompt: _target(
        prompt, ticket="x", remote_host="203.0.113.9", remote_port=1, remote_block_ids=[2**62]
    ),
}
