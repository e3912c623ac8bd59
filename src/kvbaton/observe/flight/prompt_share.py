"""The share of prompt tokens that decode workers computed although a prefill worker should have, by their reports.

Law: pure. Reports are of authenticated workers, and may still be wrong: what is no count is taken as none.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import msgspec

from kvbaton.observe.flight.worker_reports import WorkerGauges

TOKENS, ALONE, BY_REASON = "prompt_tokens_total", "alone_tokens_total", "alone_tokens."
RESETS, RESET_BLOCKS = "cache_resets_total", "cache_reset_blocks_total"
REASONS_MAX = 8


class PromptShare(msgspec.Struct, frozen=True):
    """Of all workers that are registered now, since each of them started."""

    tokens: int = 0
    alone: int = 0
    reasons: dict[str, int] = {}  # the main ones
    resets: int = 0  # of prefix caches, since a member was removed
    reset_blocks: int = 0  # that these dropped


def share_of(workers: Iterable[WorkerGauges]) -> PromptShare:
    tokens = alone = resets = blocks = 0
    reasons: Counter[str] = Counter()
    for worker in workers:
        if not worker.here:
            continue
        tokens += _count(worker, TOKENS)
        alone += _count(worker, ALONE)
        resets += _count(worker, RESETS)
        blocks += _count(worker, RESET_BLOCKS)
        for name in worker.gauges:
            if name.startswith(BY_REASON):
                reasons[name.removeprefix(BY_REASON)] += _count(worker, name)
    return PromptShare(tokens, alone, dict(reasons.most_common(REASONS_MAX)), resets, blocks)


def _count(worker: WorkerGauges, name: str) -> int:
    value = worker.gauges.get(name, 0.0)
    return int(value) if value > 0 else 0
