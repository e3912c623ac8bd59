"""Parts `bytes` and `mla`: in 16 bits the tokens of two engines differ by rounding, so bytes are compared instead.

How, with plain servers: P prefills a prompt of some whole blocks and one token, and D loads it and answers. Asked for
the same answer once more, both have all but that one token in their prefix caches: P the blocks that it computed, D
those that it loaded. Both run one step of one token over them, and then decode. The same kernel on the same bytes
gives the same numbers: so log probabilities of D must be those of P to the last digit, for every token of the answer.
With blocks misplaced they must not be.

Laws: one request at a time, so that no batch changes a kernel. Counters say that every prompt was handed over, and that
the second answers came from prefix caches. P is asked twice: where it does not agree with itself nothing is shown, and
the verdict is that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.gpu_test.trial import not_served
from kvbaton_proof.rig import meters
from kvbaton_proof.rig.client import PATH, Prompt, prefilled, prompt_of
from kvbaton_proof.rig.record import Page
from kvbaton_proof.rig.server import Engine
from kvbaton_proof.rig.servers import EAGER, GIB, GRAPHS, Group, Say, Spec

ASK_S = 60.0
TIMES = {"claim_timeout": 8.0, "transfer_timeout": 20.0}
TOP = 5
HEAD = (
    "prompt tokens", "prompts", "D as P, to the last digit", "largest difference", "P as itself",
    "D's first answer as P", "handed over", "tokens from prefix caches",
)  # fmt: skip
HITS = "vllm:prefix_cache_hits_total"

BYTES = Spec(
    name="bytes", model="small", connector="kvbaton", front="kvbaton", dtype="bfloat16", backend="FLASH_ATTN",
    variant=GRAPHS, cache_bytes=2 * GIB,
)  # fmt: skip
MLA = Spec(
    name="mla", model="latent", connector="kvbaton", front="kvbaton", dtype="bfloat16", backend="", variant=EAGER,
    cache_bytes=2 * GIB,
)  # fmt: skip
Numbers = tuple[tuple[str, float], ...]
"""What was likely, and how likely, for each token of an answer, in a fixed order."""


def specs(spec: Spec, sizes: Sizes) -> list[Spec]:
    return [msgspec.structs.replace(spec, has_control=True, settings={"kvbaton": TIMES})]


async def numbers(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, tokens: int, params: object = None
) -> Numbers | str:
    """The log probabilities of an answer; a text if there is none."""
    request: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": TOP}
    request["ignore_eos"] = True
    if params is not None:
        request["kv_transfer_params"] = params
    try:
        async with asyncio.timeout(ASK_S), session.post(f"{url}{PATH}", json=request) as answer:
            body = await answer.json(content_type=None)
            likely = body["choices"][0]["logprobs"]["top_logprobs"]
    except (aiohttp.ClientError, OSError, TimeoutError, LookupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return tuple(sorted((f"{at} {word}", value) for at, words in enumerate(likely) for word, value in words.items()))


def difference(one: Numbers | str, other: Numbers | str) -> float:
    """The largest between two answers' log probabilities; infinite if their words differ, or one is none."""
    if isinstance(one, str) or isinstance(other, str) or [word for word, _ in one] != [word for word, _ in other]:
        return float("inf")
    return max((abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True)), default=float("inf"))


class Compared(msgspec.Struct, kw_only=True):
    """Differences between answers to the same prompts, in their order."""

    again: list[float] = []  # of D's second answer from P's
    itself: list[float] = []  # of P's second from its first
    first: list[float] = []  # of D's first, right after the load, from P's
    handed: int = 0
    hits: int = 0  # tokens that P and D had in their prefix caches, together
    problem: str = ""


async def run(
    spec: Spec, sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say
) -> None:
    pair = groups[spec.name]
    page.commands(pair.commands()[-2:])
    if not pair.is_up:
        not_served(page, pair)
        return
    table = page.table(f"P and D, {spec.dtype}, {spec.backend or 'the backend that vLLM chooses'}", HEAD)
    good = asked = handed = 0
    for tokens in sizes.exact_tokens:
        prompts = [prompt_of(tokens, f"{spec.name} {number}") for number in range(sizes.exact_prompts)]
        found = await _compared(sizes, pair, session, prompts)
        same, itself, first = (sum(each == 0.0 for each in one) for one in (found.again, found.itself, found.first))
        page.row(table, tokens, len(prompts), same, f"{max(found.again):.2g}", itself, first, found.handed, found.hits)
        counts = f"{same} of {len(prompts)} the same (P as itself: {itself}, D's first answer: {first})"
        say(f"{spec.name}: {tokens} tokens: {counts}, {found.handed} handed over, {found.hits} cached {found.problem}")
        cached = found.hits >= 3 * len(prompts) * (tokens - 1)  # P twice, D once
        if not cached:
            page.note(f"{tokens} tokens: only {found.hits} came from prefix caches, so that equal numbers show nothing")
        good += min(same, itself) if cached else 0
        asked, handed = asked + len(prompts), handed + found.handed
    reached = f"{good} of {asked}, {handed} handed over"
    page.verdict("P's numbers and D's are the same", reached, f"{asked}, all handed over", good == handed == asked)
    await _controlled(spec, sizes, pair, session, page, say)
    calm = await meters.at_rest([pair.p, pair.d])
    page.verdict("nothing held afterwards", "yes" if calm else "no", "yes", calm)


async def _compared(sizes: Sizes, pair: Group, session: aiohttp.ClientSession, prompts: list[Prompt]) -> Compared:
    engines = (pair.p, pair.d)
    before = await meters.delivered(session, pair.d)
    hits = await _hits(session, engines)
    found = Compared()
    for prompt in prompts:
        given = await prefilled(session, pair.p.url, prompt)
        answers = [await numbers(session, pair.d.url, prompt, sizes.exact_answer, given.params)]
        for url in (pair.p.url, pair.p.url, pair.d.url):
            answers.append(await numbers(session, url, prompt, sizes.exact_answer))
        first, ours, itself, again = answers
        found.again.append(difference(ours, again))
        found.itself.append(difference(ours, itself))
        found.first.append(difference(ours, first))
        found.problem = given.error or next((each for each in answers if isinstance(each, str)), found.problem)
    found.handed = await meters.delivered_since(session, pair.d, before, len(prompts))
    found.hits = await _hits(session, engines) - hits
    return found


async def _hits(session: aiohttp.ClientSession, engines: Sequence[Engine]) -> int:
    return sum([await meters.counter(session, engine, HITS) for engine in engines])


async def _controlled(
    spec: Spec, sizes: Sizes, pair: Group, session: aiohttp.ClientSession, page: Page, say: Say
) -> None:
    tokens = max(sizes.exact_tokens)
    prompts = [prompt_of(tokens, f"{spec.name} damaged {number}") for number in range(sizes.damaged)]
    pair.flag.touch()
    try:
        found = await _compared(sizes, pair, session, prompts)
    finally:
        pair.flag.unlink(missing_ok=True)
    seen = sum(each > 0.0 for each in found.again)
    say(f"{spec.name}: control: {seen} of {len(prompts)} damaged ones seen, {found.handed} handed over")
    page.verdict(
        "control: damage is seen", f"{seen} of {len(prompts)}", "all", seen == len(prompts) and found.handed > 0
    )
