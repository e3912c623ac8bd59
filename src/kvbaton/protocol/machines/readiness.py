"""Questions about readiness that the two roles ask."""

from __future__ import annotations

from collections.abc import Sequence

from kvbaton.protocol.geometry.progress import Progress

_BEYOND = 1 << 30  # any layer past those ahead


def complete(progress: Progress, counts: Sequence[int]) -> bool:
    """Whether every layer of that many blocks is ready."""
    return all(group.blocks_done >= count for group, count in zip(progress, counts, strict=True))


def covers(new: Progress, old: Progress) -> bool:
    """Whether `new` has at least what `old` had; false for news that were overtaken on the way."""
    return all(
        group.ready(layer) >= before.ready(layer)
        for group, before in zip(new, old, strict=True)
        for layer in (0, before.layers_ahead, group.layers_ahead, _BEYOND)
    )
