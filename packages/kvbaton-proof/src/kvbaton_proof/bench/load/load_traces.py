"""Recorded loads: a line of JSON for each request, as Mooncake's traces have them, and as `--record` writes them.

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}

Laws: pure. A line that cannot be meant is refused by its number and field. `hash_ids` name blocks of 512 tokens: equal
ids are equal tokens, so prefixes that were shared are shared again; what they do not cover is this request's own.
`pieces` (ours: names and lengths) take their place where they stand, since 512 cannot say every length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Annotated

import msgspec

from kvbaton_proof.bench.load.request_plan import REQUESTS_MAX, TOKENS_MAX, Ask, Piece

BLOCK_TOKENS = 512
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


def read(
    lines: Iterable[bytes], *, speed: float = 1.0, scale: float = 1.0, requests_max: int = REQUESTS_MAX
) -> list[Ask]:
    """The requests of a trace by their time, the first at 0; times divided by `speed`, lengths times `scale`."""
    timed: list[tuple[float, Line]] = []
    for number, data in enumerate(lines, 1):
        if not data.strip():
            continue
        if len(timed) >= requests_max:
            break
        timed.append(_parsed(number, data))
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
