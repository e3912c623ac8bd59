"""How much of a prompt's KV is ready, and what has become ready since.

Law: the rectangles of successive `advance`s tile exactly what the last progress covers; nothing is reported twice and
nothing is left out. Progress only grows; a peer that takes some back is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Annotated

import msgspec

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.protocol.numbers import BLOCKS_MAX, GROUPS_MAX, Layers, Listed

SLOWEST_KEPT = 1024
_BEYOND = 1 << 30  # any layer past those ahead


class GroupProgress(msgspec.Struct, frozen=True, array_like=True):
    """One group: layers below `layers_ahead` have `blocks_ahead` blocks ready, the others `blocks_done`."""

    blocks_done: Listed = 0
    blocks_ahead: Listed = 0
    layers_ahead: Layers = 0

    def ready(self, layer: int) -> int:
        """How many blocks of that layer are ready."""
        return self.blocks_ahead if layer < self.layers_ahead else self.blocks_done


Progress = Annotated[tuple[GroupProgress, ...], msgspec.Meta(max_length=GROUPS_MAX)]
"""One per group, in the order of the source's groups."""


class Rect(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Layers [lo, hi) of blocks [lo, hi) of a group; all are indexes in the source's lists."""

    group: int
    layer_lo: int
    layer_hi: int
    block_lo: int
    block_hi: int

    def cut(self, blocks_max: int) -> list[Rect]:
        """The same in pieces of at most `blocks_max` blocks, in order."""
        return [
            Rect(self.group, self.layer_lo, self.layer_hi, lo, min(lo + blocks_max, self.block_hi))
            for lo in range(self.block_lo, self.block_hi, blocks_max)
        ]


def nothing(groups: int) -> Progress:
    """The start of every handoff."""
    return (GroupProgress(),) * groups


def whole(block_counts: Sequence[int]) -> Progress:
    """Every layer of so many blocks per group: the final progress of a prefill."""
    return tuple(GroupProgress(blocks_done=count) for count in block_counts)


def slowest(ranks: Sequence[Progress]) -> Progress:
    """The progress that is true of every rank; exact when all of them go through the same sequence of chunks.

    A rank speaks for its own layers only: it counts layers of other pipeline stages as ready.
    """
    return tuple(_slowest(group) for group in zip(*ranks, strict=True))


def complete(progress: Progress, counts: Sequence[int]) -> bool:
    """Whether every layer of that many blocks is ready."""
    return all(group.blocks_done >= count for group, count in zip(progress, counts, strict=True))


def covers(new: Progress, old: Progress) -> bool:
    """Whether `new` covers at least what `old` did; false for messages that were overtaken."""
    return all(
        group.ready(layer) >= before.ready(layer)
        for group, before in zip(new, old, strict=True)
        for layer in (0, before.layers_ahead, group.layers_ahead, _BEYOND)
    )


def advance(old: Progress, new: Progress, layer_counts: Sequence[int]) -> list[Rect]:
    """The rectangles that are ready in `new` and were not in `old`, for groups of so many layers."""
    if not len(old) == len(new) == len(layer_counts):
        raise ProtocolError(
            Reason.BAD_MESSAGE, f"progress: {len(new)} groups after {len(old)} and of {len(layer_counts)}"
        )
    rects: list[Rect] = []
    for group, (before, after, layers) in enumerate(zip(old, new, layer_counts, strict=True)):
        _check(group, after, layers)
        rects += _grown(group, before, after, layers)
    return rects


@lru_cache(maxsize=SLOWEST_KEPT)
def _slowest(ranks: tuple[GroupProgress, ...]) -> GroupProgress:
    done = min(rank.blocks_done for rank in ranks)
    ahead = min(rank.ready(0) for rank in ranks)
    if ahead <= done:
        return GroupProgress(done)
    return GroupProgress(done, ahead, min(rank.layers_ahead for rank in ranks if rank.blocks_done < ahead))


def _check(group: int, progress: GroupProgress, layers: int) -> None:
    field = f"progress[{group}]"
    if not (0 <= progress.blocks_done <= BLOCKS_MAX and 0 <= progress.blocks_ahead <= BLOCKS_MAX):
        raise ProtocolError(Reason.BAD_MESSAGE, f"{field}.blocks: outside 0..{BLOCKS_MAX}")
    if not 0 <= progress.layers_ahead <= layers:
        raise ProtocolError(Reason.BAD_MESSAGE, f"{field}.layers_ahead: {progress.layers_ahead} is outside 0..{layers}")
    if progress.layers_ahead and progress.blocks_ahead < progress.blocks_done:
        raise ProtocolError(
            Reason.BAD_MESSAGE,
            f"{field}.blocks_ahead: {progress.blocks_ahead} is behind blocks_done {progress.blocks_done}",
        )


def _grown(group: int, before: GroupProgress, after: GroupProgress, layers: int) -> list[Rect]:
    """Both are steps over the layers, so between their edges everything is one rectangle."""
    edges = sorted({0, before.layers_ahead, after.layers_ahead, layers})
    rects: list[Rect] = []
    for lo, hi in pairwise(edges):
        had, has = before.ready(lo), after.ready(lo)
        if has < had:
            raise ProtocolError(
                Reason.BAD_MESSAGE, f"progress[{group}]: layer {lo} goes back from {had} blocks to {has}"
            )
        if has == had:
            continue
        if rects and (rects[-1].layer_hi, rects[-1].block_lo, rects[-1].block_hi) == (lo, had, has):
            lo = rects.pop().layer_lo
        rects.append(Rect(group, lo, hi, had, has))
    return rects
