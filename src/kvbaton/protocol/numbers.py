"""The allowed range of every number that comes from outside, by its meaning. Nowhere else.

Law: every number of every message has one of these types, or is in one of these ranges, and so is refused where bytes
become messages if it is outside; NaN and the infinities are outside all of them. A test
(`tests/security/members/test_numbers.py`) walks the types of all messages and fails for a field that has no minimum or
no maximum. Settings have the same ranges, so no honest node sends what another refuses.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

ID = Meta(ge=0, le=(1 << 63) - 1)
"""Only compared and counted: ids, incarnations, nonces, sessions, feature bits."""
Number = Annotated[int, ID]
Version = Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]

TERM_S_MIN, TERM_S_MAX = 0.001, 7 * 86_400.0
Term = Annotated[float, Meta(ge=TERM_S_MIN, le=TERM_S_MAX)]
"""Seconds for which something is promised. What is over sooner cannot be renewed by anybody."""
DURATION_S_MIN = 0.05
"""The least that a setting may be, and the least interval at which a node repeats anything, whatever a peer asks."""
UnixSeconds = Annotated[float, Meta(ge=0.0, le=float(1 << 40))]

TOKENS_MAX = (1 << 31) - 1
Tokens = Annotated[int, Meta(ge=0, le=TOKENS_MAX)]
LISTED_MAX = 1 << 20
Listed = Annotated[int, Meta(ge=0, le=LISTED_MAX)]
"""Blocks of one group of one prompt."""
READERS_MAX = 4096
Readers = Annotated[int, Meta(ge=1, le=READERS_MAX)]
Port = Annotated[int, Meta(ge=0, le=65_535)]

# --- layouts

GROUPS_MAX = 64
LAYERS_MAX = 1024
RANKS_MAX = 256
REGIONS_MAX = 64
HEADS_MAX = 1024
CELLS_MAX = 8
DCP_MAX = 64
BLOCK_TOKENS_MAX = 1 << 24  # a state group's block may span the longest context
BLOCKS_MAX = 1 << 31
BYTES_MAX = 1 << 56  # leaves room for sums in a signed 64-bit span

Layers = Annotated[int, Meta(ge=0, le=LAYERS_MAX)]
RankIndex = Annotated[int, Meta(ge=0, le=RANKS_MAX - 1)]
RegionIndex = Annotated[int, Meta(ge=0, le=REGIONS_MAX - 1)]
Heads = Annotated[int, Meta(ge=0, le=HEADS_MAX)]
Dcp = Annotated[int, Meta(ge=0, le=DCP_MAX)]
BlockTokens = Annotated[int, Meta(ge=0, le=BLOCK_TOKENS_MAX)]
Blocks = Annotated[int, Meta(ge=0, le=BLOCKS_MAX)]
Bytes = Annotated[int, Meta(ge=0, le=BYTES_MAX)]
