"""The plan of a load: prompts, lengths and times of requests.

Laws: pure. A seed decides everything, and every target gets the same plan in every round. Prompts are token ids that
every tokenizer has, so that a length in tokens is what was asked for, whatever the model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import msgspec

REQUESTS = 32
REQUESTS_MAX = 100_000  # of one load; the record of each is kept until its figures are made
TOKENS_MAX = 1 << 20
IDS = range(32, 127)  # printable ASCII in a tokenizer of bytes, ordinary pieces in others
MARK_TOKENS = 8


class Lengths(msgspec.Struct, frozen=True):
    """Tokens: one number, or any from `low` to `high` with the same chance."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """`256`, or `64:512`. ValueError says what is wrong."""
        first, colon, last = text.partition(":")
        try:
            low, high = int(first), int(last) if colon else int(first)
        except ValueError:
            raise ValueError(f"got {text!r}, expected tokens, or lowest:highest such as 64:512") from None
        if not 1 <= low <= high <= TOKENS_MAX:
            raise ValueError(f"got {text}, expected 1 to {TOKENS_MAX} tokens, the lower number first")
        return cls(low, high)

    def draw(self, rng: random.Random) -> int:
        return rng.randint(self.low, self.high)

    def __str__(self) -> str:
        return str(self.low) if self.low == self.high else f"{self.low}:{self.high}"


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A run of tokens; two of one name and length are the same tokens, and the longer begins with the shorter."""

    name: str
    tokens: int


class Ask(msgspec.Struct, frozen=True):
    """One request: when it is due after the load began, what it holds, and how many tokens it wants."""

    index: int
    due_s: float
    pieces: tuple[Piece, ...]
    output_tokens: int

    @property
    def input_tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


class Shape(msgspec.Struct, frozen=True, kw_only=True):
    """A load that is drawn. Without a rate everything is due at once, and what is under way bounds it."""

    requests: int
    seed: int
    input: Lengths
    output: Lengths
    rate: float | None = None  # requests/s, arriving as in a Poisson process; None or inf: at once
    prefix_tokens: int = 0  # a beginning that prompts share, before `input`
    prefixes: int = 1  # how many of these there are


def drawn(shape: Shape) -> Iterator[Ask]:
    """The plan of a shape, one by one. Each choice has its own dice, so that one option changes one thing."""
    arrivals, lengths, sharing = (random.Random(f"{shape.seed}/{what}") for what in ("arrivals", "lengths", "sharing"))
    due_s = 0.0
    for index in range(shape.requests):
        pieces = [Piece(f"u{index}", shape.input.draw(lengths))]
        if shape.prefix_tokens:
            pieces.insert(0, Piece(f"p{sharing.randrange(shape.prefixes)}", shape.prefix_tokens))
        yield Ask(index, due_s, tuple(pieces), shape.output.draw(lengths))
        if shape.rate is not None and math.isfinite(shape.rate):
            due_s += arrivals.expovariate(shape.rate)


def prompt(ask: Ask, seed: int, mark: str = "") -> list[int]:
    """The tokens of a request. A mark changes the first ones: no two marks share a cached beginning."""
    found: list[int] = []
    for piece in ask.pieces:
        found += random.Random(f"{seed}/{piece.name}").choices(IDS, k=piece.tokens)
    if mark:
        count = min(MARK_TOKENS, len(found))
        found[:count] = random.Random(mark).choices(IDS, k=count)
    return found
