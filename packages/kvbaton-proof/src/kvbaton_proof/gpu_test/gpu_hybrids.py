"""Part `hybrids`: models whose layers keep a state, alone or beside attention; answers beside one engine's, float32.

Laws: those of `trial`, and D must have computed exactly the last token of each prompt: a state one token off, or a
prompt that D computed itself, cannot pass for a handoff. In a model of states alone nothing but a damaged state can
make the control's answers wrong.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.gpu_test.trial import HEAD, MODES, Trial, not_served
from kvbaton_proof.rig import oracle
from kvbaton_proof.rig.client import Prompt, prompt_of
from kvbaton_proof.rig.oracle import SURE_MIN, Right
from kvbaton_proof.rig.record import Page, Table
from kvbaton_proof.rig.servers import GIB, Group, Say, Spec

MARGIN = 0.1
"""In nats: a scan over a prompt and a step of one token round differently, and more than attention does."""
UNCACHED = 2
"""So many of the models are also served without a prefix cache, where vLLM keeps one state for a request."""
NO_ANSWER = Right((), ())


def specs(sizes: Sizes) -> list[Spec]:
    shared = Spec(
        name="", model="", chunk_tokens=sizes.chunk_tokens, cache_bytes=GIB, max_model_len=2048, at_once=sizes.at_once,
        settings={"kvbaton": {"claim_timeout": 20.0, "transfer_timeout": 20.0}},
    )  # fmt: skip
    found = []
    for number, kind in enumerate(sizes.hybrids):
        alone = msgspec.structs.replace(shared, name=_alone(kind), model=kind)
        pair = msgspec.structs.replace(alone.pair(kind, 0.0), has_control=True)
        found += [alone, pair]
        if number < UNCACHED:
            found.append(msgspec.structs.replace(pair, name=_uncached(kind), prefix_caching=False))
    return found


def _alone(kind: str) -> str:
    return f"{kind}-alone"


def _uncached(kind: str) -> str:
    return f"{kind}-uncached"


@dataclass(slots=True)
class Asked:
    """The prompts of one model, and the right answers by the id of a prompt."""

    fresh: dict[str, list[Prompt]]
    sharing: list[Prompt]  # each begins as one that was handed over by pull
    damaged: list[Prompt]
    answers: dict[int, Right] = field(default_factory=dict)

    def everything(self) -> list[Prompt]:
        return [*(prompt for mode in MODES for prompt in self.fresh[mode]), *self.sharing, *self.damaged]

    def comparable(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if len(self.sure(prompt)) >= SURE_MIN]

    def sure(self, prompt: Prompt) -> tuple[str, ...]:
        return self.answers.get(id(prompt), NO_ANSWER).sure


def questions(sizes: Sizes, kind: str) -> Asked:
    """Prompts of two tokens, around the ends of blocks, and of several chunks."""
    fresh = {mode: [prompt_of(tokens, f"{kind} {mode}") for tokens in sizes.hybrid_tokens] for mode in MODES}
    sharing = [prompt + prompt_of(37, f"{kind} more") for prompt in fresh["pull"] if len(prompt) > 1]
    longest = max(sizes.hybrid_tokens)
    return Asked(fresh, sharing, [prompt_of(longest // 2 + n, f"{kind} damaged") for n in range(sizes.damaged)])


async def run(sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say) -> None:
    head = ("model", "prefix cache", "what", *HEAD)
    table = page.table("Answers beside one engine's, float32, greedy", head)
    await asyncio.gather(*(_model(sizes, kind, groups, session, page, table, say) for kind in sizes.hybrids))


async def _model(
    sizes: Sizes,
    kind: str,
    groups: dict[str, Group],
    session: aiohttp.ClientSession,
    page: Page,
    table: Table,
    say: Say,
) -> None:
    alone, asked = groups[_alone(kind)], questions(sizes, kind)
    if not alone.is_up:
        not_served(page, alone)
        return
    everything = asked.everything()
    found = await oracle.learned(
        session, alone.alone.url, everything, sizes.at_once, sizes.answer_tokens, margin=MARGIN
    )
    asked.answers = {
        id(prompt): each for prompt, each in zip(everything, found, strict=True) if isinstance(each, Right)
    }
    left = len(asked.comparable(everything))
    compared = f"{left} of {len(everything)}"
    page.verdict(f"{kind}: prompts that can be compared", compared, "at least half", 2 * left >= len(everything))
    for name, cached in ((kind, "yes"), (_uncached(kind), "no")):
        if name not in groups:
            continue
        pair = groups[name]
        page.commands(pair.commands()[-2:] if cached == "yes" else [])
        if not pair.is_up:
            not_served(page, pair)
            continue
        trial = HybridTrial(
            sizes, pair, session, page, table, say, (name, cached), at_once=sizes.at_once, asked=asked
        )  # fmt: skip
        await trial.all()


@dataclass(slots=True, kw_only=True)
class HybridTrial(Trial):
    """One pair under examination."""

    asked: Asked

    async def all(self) -> None:
        for mode in MODES:
            await self._held(mode, mode, self.asked.fresh[mode])
        if self.pair.spec.prefix_caching:
            await self._held("beginning known", "pull", self.asked.sharing)
        await self.rest()
        damaged = self.asked.comparable(self.asked.damaged)
        await self.control(damaged, [*map(self.asked.sure, damaged)])

    async def _held(self, what: str, mode: str, asked: Sequence[Prompt]) -> None:
        prompts = self.asked.comparable(asked)
        result = await self.round(prompts, [*map(self.asked.sure, prompts)], mode, what)
        right, handed = result.tally.right, result.handed
        ok = right == len(prompts) > 0 and handed == len(prompts)
        if what == "pull":
            ok = ok and result.computed == len(prompts)
        reached = f"{right} of {len(prompts)} right, {handed} handed over, D computed {result.computed} of their tokens"
        self.page.verdict(f"{self.name}: {what}", reached, "all right, all handed over, one token each", ok)
