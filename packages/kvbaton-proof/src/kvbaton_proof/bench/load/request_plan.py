"""The plan of a load: prompts, lengths and times of requests, drawn or recorded.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

is a line of a recorded load, as Mooncake's traces have them. `hash_ids` name blocks of 512 tokens: equal ids are equal
tokens, so prefixes that were shared are shared again; what they do not cover is this request's own. `pieces` (ours:
names and lengths) take their place where they stand, since 512 cannot say every length. A file that begins with

    TIMESTAMP,ContextTokens,GeneratedTokens

is one of Azure's: a date, and two lengths; nothing is shared. Both may be compressed (`.gz`).

Laws: pure, but for `read_file`. A line that cannot be meant is refused by its number and field. A seed decides
everything, and every target gets the same plan in every round. Prompts are token ids that every tokenizer has, so that
a length is what was asked for in tokens, whatever the model.
"""

from __future__ import annotations

import contextlib
import gzip
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated

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


BLOCK_TOKENS = 512
CSV_HEAD = b"TIMESTAMP,ContextTokens,GeneratedTokens"
LINE_BYTES_MAX = 1 << 20
PIECES_MAX = 65_536

_Length = Annotated[int, msgspec.Meta(ge=1, le=TOKENS_MAX)]


class TraceError(ValueError):
    """A trace that cannot be replayed; the message names the line and the field."""


class Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request of a trace. Other fields pass."""

    timestamp: float  # milliseconds
    input_length: _Length
    output_length: _Length
    hash_ids: Annotated[list[int], msgspec.Meta(max_length=PIECES_MAX)] = []
    pieces: Annotated[list[Piece], msgspec.Meta(max_length=PIECES_MAX)] = []


_decode = msgspec.json.Decoder(Line).decode
_encode = msgspec.json.Encoder().encode


def read_file(path: Path, *, speed: float = 1.0, scale: float = 1.0, requests_max: int = REQUESTS_MAX) -> list[Ask]:
    """The requests of a trace's file, also of a compressed one."""
    with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as lines:
        try:
            return read(lines, speed=speed, scale=scale, requests_max=requests_max)
        except (gzip.BadGzipFile, EOFError) as error:
            raise TraceError(f"it ends in .gz and cannot be unpacked: {error}") from None


def read(
    lines: Iterable[bytes], *, speed: float = 1.0, scale: float = 1.0, requests_max: int = REQUESTS_MAX
) -> list[Ask]:
    """The requests of a trace by their time, the first at 0; times divided by `speed`, lengths times `scale`."""
    timed: list[tuple[float, Line]] = []
    parse = _parsed
    for number, data in enumerate(lines, 1):
        if not data.strip():
            continue
        if number == 1 and data.strip() == CSV_HEAD:
            parse = _row
            continue
        if len(timed) >= requests_max:
            break
        timed.append(parse(number, data))
    if not timed:
        raise TraceError("it is empty: expected a line of JSON for each request")
    timed.sort(key=lambda each: each[0])
    begun_ms = timed[0][0]
    return [
        Ask(
            index,
            (at_ms - begun_ms) / 1e3 / speed,
            tuple(_pieces(index, line, scale)),
            max(1, round(line.output_length * scale)),
        )
        for index, (at_ms, line) in enumerate(timed)
    ]


def _parsed(number: int, data: bytes) -> tuple[float, Line]:
    if len(data) > LINE_BYTES_MAX:
        raise TraceError(f"line {number}: longer than {LINE_BYTES_MAX} bytes; is this a file of JSON lines?")
    try:
        line = _decode(data)
    except msgspec.ValidationError as error:
        reason, _, where = str(error).partition(" - at `$.")
        field = where.rstrip("`") or "fields"
        raise TraceError(f"line {number}: {field}: {reason[:1].lower()}{reason[1:]}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"line {number}: not JSON ({error})") from None
    if not (math.isfinite(line.timestamp) and line.timestamp >= 0):
        raise TraceError(f"line {number}: timestamp: got {line.timestamp}, expected milliseconds of at least 0")
    if any(not 1 <= piece.tokens <= TOKENS_MAX for piece in line.pieces):
        raise TraceError(f"line {number}: pieces: expected 1 to {TOKENS_MAX} tokens in each")
    if line.pieces and sum(piece.tokens for piece in line.pieces) != line.input_length:
        raise TraceError(f"line {number}: pieces: their tokens are not input_length {line.input_length} together")
    return line.timestamp, line


def _row(number: int, data: bytes) -> tuple[float, Line]:
    """A line of Azure's traces."""
    cells = data.decode(errors="replace").strip().split(",")
    with contextlib.suppress(ValueError):
        date, prompt_tokens, answer_tokens = cells
        at = datetime.fromisoformat(date).timestamp() * 1e3
        lengths = {"input_length": int(prompt_tokens), "output_length": int(answer_tokens)}
        return at, msgspec.convert({"timestamp": at, **lengths}, Line)
    raise TraceError(
        f"line {number}: got {','.join(cells)[:80]!r}, expected a date and two lengths of 1 to {TOKENS_MAX}"
    )


def shorter(asks: Sequence[Ask], tokens_max: int) -> list[Ask]:
    """Those whose prompt and answer have at most that many tokens together."""
    return [ask for ask in asks if ask.input_tokens + ask.output_tokens <= tokens_max]


def at_rate(asks: Sequence[Ask], rate: float) -> list[Ask]:
    """The same requests in the same rhythm, so many a second on the mean."""
    begun, lasts = asks[0].due_s, asks[-1].due_s - asks[0].due_s
    if lasts <= 0:
        raise TraceError("timestamp: all requests have the same; expected times that differ")
    stretch = (len(asks) - 1) / rate / lasts
    return [msgspec.structs.replace(ask, due_s=(ask.due_s - begun) * stretch) for ask in asks]


def _pieces(index: int, line: Line, scale: float) -> Iterator[Piece]:
    if line.pieces:
        yield from (Piece(piece.name, max(1, round(piece.tokens * scale))) for piece in line.pieces)
        return
    left, block = max(1, round(line.input_length * scale)), max(1, round(BLOCK_TOKENS * scale))
    for each in line.hash_ids:
        if left <= 0:
            return
        yield Piece(f"h{each}", min(block, left))
        left -= block
    if left > 0:
        yield Piece(f"u{index}", left)


def written(ask: Ask, sent_s: float) -> bytes:
    """A line that says what was sent, and when."""
    line = Line(
        timestamp=round(sent_s * 1e3, 3), input_length=ask.input_tokens, output_length=ask.output_tokens,
        pieces=list(ask.pieces),
    )  # fmt: skip
    return bytes(_encode(line)) + b"\n"
