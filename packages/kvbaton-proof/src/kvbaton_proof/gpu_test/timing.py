"""Part `timing`: one request at a time, all methods in one run, medians.

Laws: within a repetition every way has its turn, so that what drifts drifts for all. A prompt is asked once, but for
the floor, which is the second time: so no cache helps anybody else. What a way reached counts only if D's counter says
that its prompts were handed over. A request that failed is infinitely slow.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from statistics import median

import aiohttp

from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.rig import meters
from kvbaton_proof.rig.client import Prompt, prefilled, prompt_of, streamed
from kvbaton_proof.rig.record import Page
from kvbaton_proof.rig.servers import GRAPHS, Group, Say, Spec

WARM_UPS = 2
TOKENS = 3
DEADLINE_S = 60.0
LEG_OVER_FLOOR, STREAM_OVER_ALONE = 1.3, 1.10
ALONE, KVBATON, NIXL = "8b-alone", "8b-kvbaton", "8b-nixl"
AGGREGATED, FLOOR = "aggregated TTFT", "floor"
OUR_P, OUR_D, STREAM, ROUTED = "kvbaton P", "kvbaton D", "stream TTFT", "pull TTFT through the router"
NIXL_P, NIXL_D = "NIXL P", "NIXL D"
HEAD = (
    "prompt tokens", AGGREGATED, FLOOR, OUR_P, OUR_D, "D / floor", STREAM, "stream / aggregated", ROUTED, NIXL_P,
    NIXL_D, "NIXL D / floor",
)  # fmt: skip


def specs(sizes: Sizes) -> list[Spec]:
    """Also those of `load`."""
    longest = max((*sizes.timed_tokens, sizes.crowd_tokens + sizes.crowd_answer, sizes.watched_answer + 64)) + 64

    def spec(name: str, connector: str) -> Spec:
        return Spec(
            name=name, model="8b", connector=connector, front="kvbaton" if connector == "kvbaton" else "",
            dtype="bfloat16", backend="FLASH_ATTN", variant=GRAPHS, cache_bytes=10 * 10**9, max_model_len=longest,
            chunk_tokens=min(8192, max(2048, longest)),
            settings={"kvbaton": {"lease_s": 30.0}, "nixl": {"kv_lease_duration": 30}},
        )  # fmt: skip

    found = [spec(ALONE, ""), spec(KVBATON, "kvbaton")]
    return [*found, spec(NIXL, "nixl")] if sizes.nixl else found


@dataclass(slots=True)
class Stopwatch:
    """Seconds by way and size, and what went wrong."""

    session: aiohttp.ClientSession
    groups: dict[str, Group]
    found: dict[tuple[str, int], list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def keep(self, way: str, size: int, seconds: float) -> None:
        self.found.setdefault((way, size), []).append(seconds)

    def ms(self, way: str, size: int) -> float:
        """The median; NaN if it was not run."""
        found = self.found.get((way, size))
        return math.nan if not found else median(found) * 1000

    async def first(
        self, url: str, prompt: Prompt, params: object = None, headers: dict[str, str] | None = None
    ) -> float:
        """Seconds to the first token."""
        answer = await streamed(
            self.session, url, prompt, tokens=TOKENS, params=params, headers=headers, deadline_s=DEADLINE_S
        )
        if answer.error:
            self.problems.append(answer.error)
        return answer.first_s

    async def alone(self, size: int, seed: str) -> None:
        self.keep(AGGREGATED, size, await self.first(self.groups[ALONE].alone.url, prompt_of(size, f"alone {seed}")))

    async def floor(self, size: int, seed: str) -> None:
        prompt, url = prompt_of(size, f"floor {seed}"), self.groups[KVBATON].d.url
        await self.first(url, prompt)
        self.keep(FLOOR, size, await self.first(url, prompt))

    async def legs(self, group: str, p_way: str, d_way: str, size: int, seed: str) -> None:
        prompt, pair = prompt_of(size, f"{group} {seed}"), self.groups[group]
        given = await prefilled(self.session, pair.p.url, prompt, deadline_s=DEADLINE_S)
        if given.error:
            self.problems.append(f"P: {given.error}")
        self.keep(p_way, size, math.inf if given.error else given.seconds)
        self.keep(d_way, size, await self.first(pair.d.url, prompt, given.params) if not given.error else math.inf)

    async def ours(self, size: int, seed: str) -> None:
        await self.legs(KVBATON, OUR_P, OUR_D, size, seed)

    async def theirs(self, size: int, seed: str) -> None:
        await self.legs(NIXL, NIXL_P, NIXL_D, size, seed)

    async def routed(self, mode: str, way: str, size: int, seed: str) -> None:
        prompt = prompt_of(size, f"{mode} {seed}")
        seconds = await self.first(self.groups[KVBATON].router.url, prompt, headers={MODE_HEADER: mode})
        self.keep(way, size, seconds)

    async def stream(self, size: int, seed: str) -> None:
        await self.routed("stream", STREAM, size, seed)

    async def pull(self, size: int, seed: str) -> None:
        await self.routed("pull", ROUTED, size, seed)


Way = Callable[[int, str], Awaitable[None]]


async def run(
    sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say, judged: bool
) -> None:
    """`judged`: on a CPU times are told and not held against anything."""
    watch = Stopwatch(session, groups)
    for group in groups.values():
        if not group.is_up and group.name.startswith("8b"):
            page.note(f"{group.name}: {group.problem}")
            page.verdict(f"{group.name} served", "no", "yes", False, judged=group.name != NIXL)
    ways = _ways(watch)
    if not ways:
        return
    for group in groups.values():
        if group.name.startswith("8b"):
            page.commands(group.commands())
    table = page.table(
        "Milliseconds, medians, one request at a time, 8b shape, bfloat16, FLASH_ATTN, CUDA graphs", HEAD
    )
    for size in sizes.timed_tokens:
        handed = await _measured(watch, ways, size, sizes.repetitions, session)
        page.figure(f"{size} tokens, ms", _all_ms(watch, size))
        page.row(table, *_cells(watch, size))
        say(" | ".join(f"{name} {cell}" for name, cell in zip(HEAD, _cells(watch, size), strict=True)))
        _judge(watch, size, sizes, handed, page, judged)
    for problem in dict.fromkeys(watch.problems):
        page.note(f"{watch.problems.count(problem)} x {problem}")


def _ways(watch: Stopwatch) -> list[Way]:
    up = {name for name, group in watch.groups.items() if group.is_up}
    ways: list[Way] = [watch.alone] if ALONE in up else []
    ways += [watch.floor, watch.ours, watch.stream, watch.pull] if KVBATON in up else []
    return [*ways, watch.theirs] if NIXL in up else ways


async def _measured(
    watch: Stopwatch, ways: list[Way], size: int, repetitions: int, session: aiohttp.ClientSession
) -> bool:
    """Whether every prompt that kvbaton was given was handed over."""
    for number in range(WARM_UPS):
        for way in ways:
            await way(size, f"warm {number}")
    watch.found = {key: found for key, found in watch.found.items() if key[1] != size}
    engine = watch.groups[KVBATON].d if watch.groups[KVBATON].is_up else None
    before = await meters.delivered(session, engine) if engine else 0
    for number in range(repetitions):
        for way in ways:
            await way(size, str(number))
    wanted = 3 * repetitions
    return engine is not None and await meters.delivered_since(session, engine, before, wanted) >= wanted


def _all_ms(watch: Stopwatch, size: int) -> dict[str, list[float | None]]:
    found = {way: seconds for (way, at), seconds in watch.found.items() if at == size}
    return {
        way: [round(each * 1000, 2) if math.isfinite(each) else None for each in seconds]
        for way, seconds in found.items()
    }


def _cells(watch: Stopwatch, size: int) -> list[str]:
    ms = {way: watch.ms(way, size) for way in HEAD}
    cells: dict[str, str] = {way: _shown(value) for way, value in ms.items()}
    cells["prompt tokens"] = f"{size:,}"
    cells["D / floor"] = _shown(ms[OUR_D] / ms[FLOOR], 2)
    cells["stream / aggregated"] = _shown(ms[STREAM] / ms[AGGREGATED], 2)
    cells["NIXL D / floor"] = _shown(ms[NIXL_D] / ms[FLOOR], 2)
    return [cells[name] for name in HEAD]


def _shown(value: float, digits: int = 1) -> str:
    return "-" if math.isnan(value) else "failed" if math.isinf(value) else f"{value:.{digits}f}"


def _judge(watch: Stopwatch, size: int, sizes: Sizes, handed: bool, page: Page, judged: bool) -> None:
    page.verdict(f"{size:,} tokens: every prompt handed over", "yes" if handed else "no", "yes", handed)
    ratio = watch.ms(OUR_D, size) / watch.ms(FLOOR, size)
    page.verdict(
        f"{size:,} tokens: D's leg over its floor", _shown(ratio, 2), f"at most {LEG_OVER_FLOOR}",
        ratio <= LEG_OVER_FLOOR, judged=judged,
    )  # fmt: skip
    if size >= sizes.streamed_from_tokens:
        ratio = watch.ms(STREAM, size) / watch.ms(AGGREGATED, size)
        page.verdict(
            f"{size:,} tokens: streaming TTFT over one engine's", _shown(ratio, 2), f"at most {STREAM_OVER_ALONE}",
            ratio <= STREAM_OVER_ALONE, judged=judged,
        )  # fmt: skip
