"""Engines' own metrics: blocks in use, handoffs by how they ended.

Laws: a gauge is read, never inferred: an engine that does not answer is not at rest. Whatever waits has a deadline.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import aiohttp
import msgspec

from kvbaton.local_cluster.vllm_engine import fetch
from kvbaton.observe.metrics.exposition import figures as parsed
from kvbaton_proof.rig.connectors import CONNECTORS
from kvbaton_proof.rig.server import Engine, Figures

USED = "vllm:kv_cache_usage_perc"
HELD = ("kvbaton_pinned_blocks", "kvbaton_leases_held")
ENDS = "kvbaton_ends_total{"
_END = re.compile(r'end="((?:[^"\\]|\\.)*)"')
DELIVERED = "delivered"
NIXL_ENDS = (
    "num_failed_transfers",
    "num_failed_notifications",
    "num_kv_expired_reqs",
    "num_notifications_after_expiry",
)
MANY_BLOCKS = 1 << 14
"""The pool of an engine whose size is not known."""
POLL_S, LOOK_S = 0.2, 0.02
REST_S = 30.0
LAG_S = 3.0  # vLLM's figures follow its steps

Fetch = Callable[[str], Awaitable[str]]
"""Gives the text behind a URL; raises OSError if there is none."""


def ends(figures: Figures | None) -> dict[str, int]:
    """How handoffs ended in this engine: kvbaton's own words, or NIXL's."""
    found: dict[str, int] = {}
    for name, value in (figures or {}).items():
        if name.startswith(ENDS) and (end := _END.search(name)) is not None:
            found[end[1]] = found.get(end[1], 0) + int(value)
    reads = (figures or {}).get(CONNECTORS["nixl"].handed)
    if reads is not None and not found:  # kvbaton tells some of its own by NIXL's names too
        found[DELIVERED] = int(reads)
        found |= {end: int((figures or {}).get(f"vllm:nixl_{end}_total", 0)) for end in NIXL_ENDS}
    return found


def handed(figures: Figures, connector: str) -> int:
    """Prompts that came to this engine whole from elsewhere, by what its connector counts."""
    counter = CONNECTORS[connector].handed
    if "{" not in counter:
        return int(figures.get(counter, 0.0))
    name, _, label = counter.partition("{")
    return int(sum(value for each, value in figures.items() if each.startswith(f"{name}{{") and label in each))


def gained(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """What was added to counters, without those that stayed."""
    differences = {name: count - before.get(name, 0) for name, count in after.items()}
    return {name: count for name, count in differences.items() if count}


def held(figures: Figures, blocks: int = MANY_BLOCKS) -> int:
    """Blocks in use, by vLLM's count or by what kvbaton says it holds, whichever is more."""
    share = figures.get(USED, 0.0)
    used = max(round(share * (blocks - 1)), int(share > 0))
    return max(used, *(int(figures.get(name, 0.0)) for name in HELD))


def is_at_rest(figures: Figures | None) -> bool:
    """No block in use, none pinned. One without a connector of ours has no pins to tell of."""
    return figures is not None and USED in figures and not held(figures)


class Rest(msgspec.Struct, frozen=True):
    """Whether engines came to rest, after how long, and what holds the last of them."""

    at_rest: bool
    seconds: float
    holding: tuple[str, ...] = ()


async def come_to_rest(engines: Mapping[str, str], fetch: Fetch, within_s: float) -> Rest:
    """Poll the engines (name and URL) until all are at rest, or time is up."""
    begun = time.monotonic()
    while True:
        looked = [await _holding(name, url, fetch) for name, url in engines.items()]
        holding = tuple(filter(None, looked))
        seconds = time.monotonic() - begun
        if not holding or seconds > within_s:
            return Rest(not holding, round(seconds, 2), holding)
        await asyncio.sleep(POLL_S)


async def _holding(name: str, url: str, fetch: Fetch) -> str:
    try:
        figures = parsed(await fetch(f"{url}/metrics"))
    except OSError as error:
        return f"{name} does not tell: {error}"
    if is_at_rest(figures):
        return ""
    return f"{name} has {figures.get(USED)} of its KV in use and {figures.get(HELD[0], 0.0):.0f} blocks pinned"


async def at_rest(engines: Sequence[Engine], within_s: float = REST_S) -> bool:
    """Wait, bounded, until none of them holds anything."""
    return (await come_to_rest({engine.name: engine.url for engine in engines}, fetch, within_s)).at_rest


async def counter(session: aiohttp.ClientSession, engine: Engine, name: str) -> int:
    return int((await engine.figures(session) or {}).get(name, 0.0))


async def delivered(session: aiohttp.ClientSession, engine: Engine, connector: str = "kvbaton") -> int:
    """What `handed` counts so far; 0 if the engine does not say."""
    return handed(await engine.figures(session) or {}, connector)


async def delivered_since(
    session: aiohttp.ClientSession, engine: Engine, before: int, wanted: int, connector: str = "kvbaton"
) -> int:
    """How many more were handed over; waits, bounded, until they are `wanted`."""
    return await risen(lambda: delivered(session, engine, connector), before, wanted, LAG_S)


async def risen(read: Callable[[], Awaitable[int]], before: int, wanted: int, within_s: float) -> int:
    """By how much a counter has grown; waits until it is `wanted`."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        found = await read() - before
        if found >= wanted or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(LOOK_S)
