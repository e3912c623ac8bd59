"""Part `turns`: conversations of several turns, with a D that keeps them and one that keeps none, and one engine alone.

Laws: the next turn's prompt is the one before, the answer that was given, and more. Answers count as right beside one
engine's only if P's own counter says that it took each turn from D. Times are of the shape of an 8B model, in one run,
all ways in turn: with the P of the turn before, which has that prompt in its cache, and with a P that has nothing of
it, as another one would: its cache is emptied before each turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from statistics import median

import aiohttp

from kvbaton_proof.bench.turn_talks import streamed_turn
from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.rig import meters
from kvbaton_proof.rig.client import Prompt, ask, prompt_of
from kvbaton_proof.rig.record import Page
from kvbaton_proof.rig.server import Engine
from kvbaton_proof.rig.servers import GRAPHS, SERVED, Group, Say, Spec

RIGHT, RIGHT_ALONE = "turns-right", "turns-right-alone"
KEPT, PLAIN, ALONE = "turns-kept", "turns-none", "turns-alone"
KEEP_S = 300.0
DEADLINE_S = 90.0
MARGIN = 0.05
"""In nats: nearer to each other than this, two tokens may change places between two ways to compute them."""
SAME, OTHER = "the same P", "another P"
AGGREGATED = "aggregated"
TAKEN, TOKENS = "kvbaton_turn_loads_total{", "kvbaton_turn_tokens_total"
RESET_TRIES = 50


def specs(sizes: Sizes) -> list[Spec]:
    grows = sizes.talk_turns * (sizes.talk_answer + sizes.talk_more) + 64
    right = Spec(
        name=RIGHT_ALONE, model="small", chunk_tokens=sizes.chunk_tokens, max_model_len=sizes.talk_right + grows
    )
    fast = Spec(
        name=ALONE, model="8b", dtype="bfloat16", backend="FLASH_ATTN", variant=GRAPHS, cache_bytes=10 * 10**9,
        max_model_len=sizes.talk_first + grows, chunk_tokens=8192,
    )  # fmt: skip
    return [
        right, right.pair(RIGHT, KEEP_S),
        fast, fast.pair(KEPT, KEEP_S), fast.pair(PLAIN, 0.0),
    ]  # fmt: skip


async def run(
    sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say, judged: bool
) -> None:
    """`judged`: on a CPU times are told and not held against anything."""
    for name, group in groups.items():
        if name.startswith("turns") and not group.is_up:
            page.note(f"{name}: {group.problem}")
            page.verdict(f"{name} served", "no", "yes", False)
    if groups[RIGHT].is_up and groups[RIGHT_ALONE].is_up:
        page.commands(groups[RIGHT].commands())
        await _right(sizes, groups, session, page, say)
    if all(groups[name].is_up for name in (KEPT, PLAIN, ALONE)):
        page.commands(groups[KEPT].commands())
        await _timed(sizes, groups, session, page, say, judged)


async def _right(sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say) -> None:
    pair, alone = groups[RIGHT], groups[RIGHT_ALONE].alone.url
    before, right, wrong = await _taken(session, pair.p), 0, 0
    talks = 2 * sizes.talks
    for number in range(talks):
        prompt = prompt_of(sizes.talk_right, f"right {number}")
        for turn in range(sizes.talk_turns):
            told, _ = await _asked(session, pair.router.url, prompt, sizes.talk_answer)
            if await _is_right(session, alone, prompt, told, sizes.talk_answer):
                right += 1
            else:
                wrong += 1
            prompt = [*prompt, *told, *prompt_of(sizes.talk_more, f"right {number} {turn}")]
    wanted = talks * (sizes.talk_turns - 1)
    taken = await _taken(session, pair.p) - before
    say(f"answers: {right} right, {wrong} wrong; P took {taken} of {wanted} turns")
    page.verdict("answers beside one engine's", f"{right} of {right + wrong} right", "all", wrong == 0 < right)
    page.verdict("turns that P took from D", f"{taken} of {wanted}", "all", taken == wanted > 0)
    figures = await pair.p.figures(session) or {}
    page.figure("prompt tokens that P did not compute", figures.get(TOKENS, 0.0))


async def _is_right(
    session: aiohttp.ClientSession, alone: str, prompt: Prompt, told: Sequence[int], tokens: int
) -> bool:
    """The same tokens, or another one where one engine was of two minds."""
    expected, _ = await _asked(session, alone, prompt, tokens)
    at = next((at for at, (a, b) in enumerate(zip(told, expected, strict=False)) if a != b), None)
    if at is None:
        return len(told) == len(expected) > 0
    sure = await ask(session, alone, prompt, deadline_s=DEADLINE_S, tokens=tokens, likely=2)
    return at < len(sure.gaps) and sure.gaps[at] < MARGIN


async def _timed(
    sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say, judged: bool
) -> None:
    times: dict[tuple[str, str], list[list[float]]] = {}
    for number in range(sizes.talks + 1):  # the first warms all of them up
        for which in (SAME, OTHER):
            for name in (ALONE, KEPT, PLAIN):
                if name == ALONE and which == OTHER:
                    continue
                found = await _talk(sizes, groups[name], session, f"{number} {which} {name}", cold=which == OTHER)
                if number:
                    for turn, seconds in enumerate(found):
                        times.setdefault((name, which), [[] for _ in found])[turn].append(seconds)
    table = page.table(
        f"Time to first token, ms, medians of {sizes.talks}: first prompt {sizes.talk_first:,} tokens, answers "
        f"{sizes.talk_answer}, {sizes.talk_more} more at each turn; 8b shape, bfloat16, CUDA graphs",
        ("way", *(f"turn {turn + 1}" for turn in range(sizes.talk_turns))),
    )
    medians = {key: [1000 * median(each) for each in found] for key, found in times.items()}
    words = {ALONE: AGGREGATED, KEPT: "D keeps turns", PLAIN: "D keeps none"}
    for (name, which), found in medians.items():
        way = words[name] if name == ALONE else f"{words[name]}, {which}"
        page.row(table, way, *(f"{each:.1f}" for each in found))
        say(f"{way}: {', '.join(f'{each:.1f}' for each in found)} ms")
    for which in (SAME, OTHER):
        kept, plain = (sum(medians[name, which][1:]) for name in (KEPT, PLAIN))
        page.verdict(
            f"turns 2 on, {which}: time to first token, kept over not kept", f"{kept / plain:.2f}", "below 1",
            kept < plain, judged=judged and which == OTHER,
        )  # fmt: skip


async def _talk(sizes: Sizes, group: Group, session: aiohttp.ClientSession, seed: str, *, cold: bool) -> list[float]:
    """The seconds to the first token of each turn of one conversation."""
    url = group.alone.url if group.name == ALONE else group.router.url
    prompt, found = prompt_of(sizes.talk_first, seed), []
    for turn in range(sizes.talk_turns):
        if cold and turn:
            await forget(session, group.p)
        told, seconds = await _asked(session, url, prompt, sizes.talk_answer)
        found.append(seconds)
        prompt = [*prompt, *told, *prompt_of(sizes.talk_more, f"{seed} {turn}")]
    return found


async def _asked(session: aiohttp.ClientSession, url: str, prompt: Prompt, tokens: int) -> tuple[list[int], float]:
    """The ids of an answer, and the seconds to the first of them."""
    told, seconds = await streamed_turn(session, url, SERVED, prompt, tokens)
    assert not isinstance(told, str)
    return told, seconds


async def forget(session: aiohttp.ClientSession, engine: Engine) -> None:
    """Empty its prefix cache; vLLM does so only while nothing of it is pinned."""
    for _ in range(RESET_TRIES):
        async with session.post(f"{engine.url}/reset_prefix_cache") as answer:
            text = await answer.text()
        if answer.status == 200 and "false" not in text.lower() and meters.is_at_rest(await engine.figures(session)):
            return
        await asyncio.sleep(0.05)
    raise RuntimeError(f"{engine.name}: its prefix cache was not emptied")


async def _taken(session: aiohttp.ClientSession, engine: Engine) -> int:
    figures = await engine.figures(session) or {}
    return int(sum(value for name, value in figures.items() if name.startswith(TAKEN) and 'outcome="taken"' in name))
