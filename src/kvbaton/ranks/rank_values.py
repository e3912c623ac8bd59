"""One rank's part of a block as a value of the store: which bytes, in which order, under which keys. Pure.

Law: two ranks, of one engine or of two, have the same `Space` only if their values are interchangeable byte by byte. It
is named by what the bytes are (layers, heads, tokens, order of the cells), not by a rank's number: ranks that hold the
same heads share values (MLA, more ranks than heads), and so do engines with different memory layouts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

import msgspec

from kvbaton.protocol.geometry.layout import EngineLayout, Group, GroupKind, Share, cell_axes
from kvbaton.store.content_keys import VALUE_BYTES_MAX, Space
from kvbaton.store.interface import Pieces

CELLS_MAX = 1 << 20  # of one page: sorted once, when an engine starts
PIECES_MAX = 4096  # of one value

_WHY = {
    GroupKind.SLIDING: "its blocks leave the window as the prompt grows, so no prefix of them is complete",
    GroupKind.CHUNKED: "its blocks leave the window as the prompt grows, so no prefix of them is complete",
    GroupKind.STATE: "a state is updated in place, so it represents one position, not a block of tokens",
}


class NotStorable(ValueError):
    """This engine's KV cannot go into the shared store; the message names the group and the reason."""


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Contiguous bytes: `bytes` at `offset + block * block_stride` of a region."""

    region: int
    offset: int
    block_stride: int
    bytes: int


class RankValues(msgspec.Struct, frozen=True):
    """How one rank's blocks become values."""

    space: Space
    block_count: int
    runs: tuple[Run, ...]

    def pieces(self, regions: Sequence[memoryview], block: int) -> Pieces:
        """A block's value in the rank's memory; ValueError when there is no such block."""
        if not 0 <= block < self.block_count:
            raise ValueError(f"block {block} is outside 0..{self.block_count - 1}")
        found = []
        for run in self.runs:
            at = run.offset + block * run.block_stride
            found.append(regions[run.region][at : at + run.bytes])
        return tuple(found)


def rank_values(layout: EngineLayout, rank: int, compat: str) -> RankValues:
    """Of one rank of a layout that `validate` has passed. `compat`: the digest of the engine's key."""
    group = _storable(layout)
    share = layout.ranks[rank].shares[0]
    if not share.places:
        raise NotStorable(f"group {group.name!r}: rank {rank} has none of its layers, which the store requires")
    pages, order = _page(group, share, layout.page_tokens(0))
    places = sorted(share.places, key=lambda place: place.layer)
    runs: list[Run] = []
    for place in places:
        for at, size in pages:
            _join(runs, Run(place.region, place.offset + at, place.block_stride, size))
    if len(runs) > PIECES_MAX:
        raise NotStorable(f"group {group.name!r}: a block is in {len(runs)} pieces, at most {PIECES_MAX} can be moved")
    value_bytes = sum(run.bytes for run in runs)
    if value_bytes > VALUE_BYTES_MAX:
        raise NotStorable(f"group {group.name!r}: a block has {value_bytes} bytes, at most {VALUE_BYTES_MAX}")
    coordinates = layout.ranks[rank]
    facts = (
        str(group.kind),
        group.dtype,
        (share.head_start, share.head_count, group.heads),
        tuple((cell.name, cell.bytes, str(cell.per)) for cell in group.cells),
        tuple(group.layers[place.layer] for place in places),
        order,
        (coordinates.dcp, layout.dcp, layout.dcp_interleave) if layout.dcp > 1 else (),
    )
    space = Space(
        compat=compat,
        block_tokens=group.block_tokens,
        value_bytes=value_bytes,
        group=group.name,
        layer_start=places[0].layer,
        layer_stop=places[-1].layer + 1,
        part=share.head_start,
        layout=msgspec.msgpack.encode(facts).hex(),
    )
    return RankValues(space, share.block_count, tuple(runs))


def _storable(layout: EngineLayout) -> Group:
    """The one group; the store keeps a value for each block of a prefix, so each must be complete by itself."""
    for group in layout.groups:
        if group.kind in _WHY:
            raise NotStorable(f"group {group.name!r} is {group.kind}: {_WHY[group.kind]}; run without the store")
    if len(layout.groups) > 1:
        names = ", ".join(repr(group.name) for group in layout.groups)
        raise NotStorable(f"groups {names}: the store keeps the blocks of one group; run without it")
    return layout.groups[0]


def _page(group: Group, share: Share, tokens: int) -> tuple[list[tuple[int, int]], bytes]:
    """(offset, bytes) of a page's contents, in memory order, and the name of that order."""
    cells: list[tuple[int, int, int, int, int]] = []
    for index, (plane, cell) in enumerate(zip(share.planes, group.cells, strict=True)):
        size, heads, run = cell_axes(cell, share.head_count, tokens)
        if len(cells) + heads * run > CELLS_MAX:
            raise NotStorable(f"group {group.name!r}: a page has more than {CELLS_MAX} cells")
        cells += [
            (plane.offset + head * plane.head_stride + token * plane.token_stride, size, index, head, token)
            for head in range(heads)
            for token in range(run)
        ]
    cells.sort()
    found: list[tuple[int, int]] = []
    for at, size, *_ in cells:
        if found and at < sum(found[-1]):
            raise NotStorable(f"group {group.name!r}: two planes of a page overlap at byte {at}")
        if found and at == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((at, size))
    order = array("I", [number for cell in cells for number in cell[2:]])
    return found, hashlib.blake2b(order.tobytes(), digest_size=8).digest()


def _join(runs: list[Run], run: Run) -> None:
    """Append, or extend the last where both are contiguous in every block."""
    last = runs[-1] if runs else Run(-1, 0, 0, 0)
    if (last.region, last.block_stride) == (run.region, run.block_stride) and last.offset + last.bytes == run.offset:
        runs[-1] = Run(last.region, last.offset, last.block_stride, last.bytes + run.bytes)
    else:
        runs.append(run)
