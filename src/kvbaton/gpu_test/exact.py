"""Parts `bytes` and `mla`: in 16 bits the tokens of two engines differ by rounding, so bytes are compared instead.

How, with plain servers: P prefills a prompt of some whole blocks and one token. Asked for the whole answer then, P has
all but that token in its prefix cache: it runs one step of one token over its own blocks, and then decodes. D, which
loads those blocks, runs the very same steps. The same kernel on the same bytes gives the same numbers: so log
probabilities of D must be those of P to the last digit, for every token of the answer. With two blocks misplaced they
must not be.

Laws: one request at a time, so that no batch changes a kernel. D's counter says that every prompt was handed over.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from kvbaton.chaos.vllm_client import PATH
from kvbaton.gpu_test import client
from kvbaton.gpu_test.client import Prompt, prompt_of
from kvbaton.gpu_test.record import Page
from kvbaton.gpu_test.servers import EAGER, GIB, GRAPHS, Group, Say, Spec
from kvbaton.gpu_test.sizes import Sizes

ASK_S = 60.0
TOP = 5
HEAD = ("prompt tokens", "prompts", "same to the last digit", "same tokens", "largest difference", "handed over")

BYTES = Spec(
    name="bytes", model="small", connector="kvbaton", dtype="bfloat16", backend="FLASH_ATTN", variant=GRAPHS,
    cache_bytes=2 * GIB,
)  # fmt: skip
MLA = Spec(
    name="mla", model="latent", connector="kvbaton", dtype="bfloat16", backend="", variant=EAGER, cache_bytes=2 * GIB
)
Numbers = tuple[tuple[str, float], ...]
"""Of each token of an answer, what was likely and how likely, in a fixed order."""


def specs(spec: Spec, sizes: Sizes) -> list[Spec]:
    return [msgspec.structs.replace(spec, has_control=True, settings={"claim_timeout": 8.0, "transfer_timeout": 20.0})]


async def numbers(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, tokens: int, params: object = None
) -> Numbers | str:
    """The log probabilities of an answer; a text if there is none."""
    body: dict[str, Any] = {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "logprobs": TOP,
        "ignore_eos": True,
    }
    if params is not None:
        body["kv_transfer_params"] = params
    try:
        async with asyncio.timeout(ASK_S), session.post(f"{url}{PATH}", json=body) as answer:
            told = await answer.json(content_type=None)
            likely = told["choices"][0]["logprobs"]["top_logprobs"]
    except (aiohttp.ClientError, OSError, TimeoutError, LookupError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:200]
    return tuple(sorted((f"{at} {word}", value) for at, words in enumerate(likely) for word, value in words.items()))


def difference(one: Numbers | str, other: Numbers | str) -> float:
    """The largest between two answers' log probabilities; infinite if their words differ, or one is none."""
    if isinstance(one, str) or isinstance(other, str) or [word for word, _ in one] != [word for word, _ in other]:
        return float("inf")
    return max((abs(a - b) for (_, a), (_, b) in zip(one, other, strict=True)), default=float("inf"))


async def run(
    spec: Spec, sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say
) -> None:
    pair = groups[spec.name]
    page.commands(pair.commands()[-2:])
    if not pair.is_up:
        page.verdict("served", "no", "yes", False)
        page.note(pair.problem)
        return
    table = page.table(f"P and D, {spec.dtype}, {spec.backend or 'the backend that vLLM chooses'}", HEAD)
    same = asked = handed_all = 0
    for tokens in sizes.exact_tokens:
        prompts = [prompt_of(tokens, f"{spec.name} {number}") for number in range(sizes.exact_prompts)]
        found, handed, problem = await _compared(sizes, pair, session, prompts)
        exact = sum(each == 0.0 for each in found)
        words = sum(each < float("inf") for each in found)
        largest = max(found)
        page.row(table, tokens, len(found), exact, words, f"{largest:.2g}", handed)
        say(f"{spec.name}: {tokens} tokens: {exact} of {len(found)} the same, {handed} handed over {problem}")
        same, asked, handed_all = same + exact, asked + len(found), handed_all + handed
    reached = f"{same} of {asked}, {handed_all} handed over"
    page.verdict(
        "P's numbers and D's are the same", reached, f"all {asked}, all handed over", same == handed_all == asked
    )
    await _controlled(spec, sizes, pair, session, page, say)
    calm = await client.at_rest(session, [pair.p, pair.d])
    page.verdict("nothing held afterwards", "yes" if calm else "no", "yes", calm)


async def _compared(
    sizes: Sizes, pair: Group, session: aiohttp.ClientSession, prompts: list[Prompt]
) -> tuple[list[float], int, str]:
    """Differences, how many were handed over, and what went wrong last."""
    before = client.delivered(await pair.d.figures(session))
    found, problem = [], ""
    for prompt in prompts:
        first = await client.prefilled(session, pair.p.url, prompt)
        theirs = await numbers(session, pair.d.url, prompt, sizes.exact_answer, first.params)
        ours = await numbers(session, pair.p.url, prompt, sizes.exact_answer)
        found.append(difference(ours, theirs))
        problem = first.error or next((each for each in (ours, theirs) if isinstance(each, str)), problem)
    return found, await client.delivered_since(session, pair.d, before, len(prompts)), problem


async def _controlled(
    spec: Spec, sizes: Sizes, pair: Group, session: aiohttp.ClientSession, page: Page, say: Say
) -> None:
    tokens = max(sizes.exact_tokens) - 16
    prompts = [prompt_of(tokens, f"{spec.name} damaged {number}") for number in range(sizes.damaged)]
    pair.flag.touch()
    try:
        found, handed, _ = await _compared(sizes, pair, session, prompts)
    finally:
        pair.flag.unlink(missing_ok=True)
    seen = sum(each > 0.0 for each in found)
    say(f"{spec.name}: control: {seen} of {len(found)} damaged ones seen, {handed} handed over")
    page.verdict("control: damage is seen", f"{seen} of {len(found)}", "all", seen == len(found) and handed > 0)
