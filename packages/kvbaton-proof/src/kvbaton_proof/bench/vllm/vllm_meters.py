"""Engines' own metrics and the kernel's: blocks in use, handoffs by end, CPU seconds.

Laws: an engine is the session that its first process leads, with all that ever ran in it. A gauge is read, never
inferred: an engine that does not answer is not at rest.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

import msgspec

from kvbaton.observe.metrics.scraping import Sample, samples, total
from kvbaton.processes.proc_stat import all_stats, foreign_cpu_s

USED = "vllm:kv_cache_usage_perc"
PINNED = "kvbaton_pinned_blocks"
ENDS = "kvbaton_ends_total"
DELIVERED = "delivered"
NIXL_READS = "vllm:nixl_xfer_time_seconds_count"
NIXL_ENDS = (
    "num_failed_transfers",
    "num_failed_notifications",
    "num_kv_expired_reqs",
    "num_notifications_after_expiry",
)
POLL_S = 0.25

Fetch = Callable[[str], Awaitable[str]]
"""Gives the text behind a URL; raises OSError if there is none."""


def ends(found: Sequence[Sample]) -> dict[str, int]:
    """How handoffs ended in this engine: kvbaton's own words, or NIXL's."""
    told: dict[str, int] = {}
    for name, labels, value in found:
        if name == ENDS and "end" in labels:
            told[labels["end"]] = told.get(labels["end"], 0) + int(value)
    reads = total(found, NIXL_READS)
    if reads is not None and not told:  # kvbaton tells some of its own by NIXL's names too
        told[DELIVERED] = int(reads)
        told |= {end: int(total(found, f"vllm:nixl_{end}_total") or 0) for end in NIXL_ENDS}
    return told


def gained(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What was added to counters, without those that stayed."""
    differences = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in differences.items() if count}


def is_at_rest(found: Sequence[Sample]) -> bool:
    """No block in use, none pinned. One without a connector of ours has no pins to tell of."""
    return total(found, USED) == 0 and not total(found, PINNED)


class Rest(msgspec.Struct, frozen=True):
    """Whether engines came to rest, after how long, and what holds the last of them."""

    at_rest: bool
    seconds: float
    holding: tuple[str, ...] = ()


async def come_to_rest(engines: Mapping[str, str], fetch: Fetch, within_s: float) -> Rest:
    """Poll the engines (name and URL) until all are at rest, or time is up."""
    begun = time.monotonic()
    while True:
        holding = [said for name, url in engines.items() if (said := await _holding(name, url, fetch)) is not None]
        seconds = time.monotonic() - begun
        if not holding or seconds > within_s:
            return Rest(not holding, round(seconds, 2), tuple(holding))
        await asyncio.sleep(POLL_S)


async def _holding(name: str, url: str, fetch: Fetch) -> str | None:
    try:
        found = samples(await fetch(f"{url}/metrics"))
    except OSError as error:
        return f"{name} does not tell: {error}"
    if is_at_rest(found):
        return None
    return f"{name} has {total(found, USED)} of its KV in use and {total(found, PINNED) or 0:.0f} blocks pinned"


class Cpu(msgspec.Struct, frozen=True):
    """CPU seconds since each began, at one moment."""

    at: float
    engines: float
    router: float
    others: float  # everything on this host except these, the load generator and this process

    def until(self, later: Cpu) -> Cpu:
        return Cpu(later.at - self.at, later.engines - self.engines, later.router - self.router,
                   later.others - self.others)  # fmt: skip


def cpu(engines: Iterable[int], router: int | None, load: int) -> Cpu:
    """The sum over each one's processes; they are named by the sessions they lead."""
    everything, by_session = foreign_cpu_s(), _by_session()
    ours = sum(by_session.get(session, 0.0) for session in engines)
    front = 0.0 if router is None else by_session.get(router, 0.0)
    own = sum(os.times()[:4]) + by_session.get(load, 0.0)
    return Cpu(time.monotonic(), ours, front, everything - ours - front - own)


def _by_session() -> dict[int, float]:
    """CPU seconds of living processes and of the children they waited for."""
    found: dict[int, float] = {}
    for each in all_stats().values():
        found[each.session] = found.get(each.session, 0.0) + each.family_cpu_s
    return found
