"""Part `hybrids`: models whose layers keep a state, alone or beside attention; answers beside one engine's, float32.

Laws: an answer counts only if D's own counter says that its prompt came from P, and D must have computed exactly the
last token of each prompt: a state one token off, or a prompt that D computed itself, cannot pass for a handoff. The
comparison is itself tried: with a state's halves, or two blocks, in each other's place answers must be wrong. In a
model of states alone there is nothing else that could make them so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.chaos.vllm.vllm_client import Tally, both_legs
from kvbaton_proof.gpu_test import gpu_client, gpu_oracle
from kvbaton_proof.gpu_test.gpu_client import Prompt, Told, ask, prompt_of
from kvbaton_proof.gpu_test.gpu_oracle import SURE_MIN, Right
from kvbaton_proof.gpu_test.gpu_record import Page, Table
from kvbaton_proof.gpu_test.servers import GIB, Group, Say, Spec
from kvbaton_proof.gpu_test.sizes import Sizes

MODES = ("pull", "stream", "push")
DEADLINE_S = 90.0
MARGIN = 0.1
"""In nats: a scan over a prompt and a step of one token round differently, and more than attention does."""
HEAD = ("model", "prefix cache", "what", "right", "wrong", "errors", "handed over", "tokens of prompts that D computed")
UNCACHED = 2
"""So many of the models are also served without a prefix cache, where vLLM keeps one state for a request."""


def specs(sizes: Sizes) -> list[Spec]:
    shared = Spec(
        name="", model="", chunk_tokens=sizes.chunk_tokens, cache_bytes=GIB, max_model_len=2048, at_once=sizes.at_once,
        settings={"claim_timeout": 20.0, "transfer_timeout": 20.0},
    )  # fmt: skip
    found = []
    for number, kind in enumerate(sizes.hybrids):
        found.append(msgspec.structs.replace(shared, name=_alone(kind), model=kind))
        pair = msgspec.structs.replace(shared, name=kind, model=kind, connector="kvbaton", has_control=True)
        found.append(pair)
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
        return [prompt for prompt in prompts if len(self.answers.get(id(prompt), NO_ANSWER).sure) >= SURE_MIN]


NO_ANSWER = Right((), ())


def questions(sizes: Sizes, kind: str) -> Asked:
    """Prompts of two tokens, around the ends of blocks, and of several chunks."""
    fresh = {mode: [prompt_of(tokens, f"{kind} {mode}") for tokens in sizes.hybrid_tokens] for mode in MODES}
    sharing = [prompt + prompt_of(37, f"{kind} more") for prompt in fresh["pull"] if len(prompt) > 1]
    longest = max(sizes.hybrid_tokens)
    return Asked(fresh, sharing, [prompt_of(longest // 2 + n, f"{kind} damaged") for n in range(sizes.damaged)])


async def run(sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say) -> None:
    table = page.table("Answers beside one engine's, float32, greedy", HEAD)
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
        page.verdict(f"{kind}: one engine served", "no", "yes", False)
        page.note(f"{kind}: {alone.problem}")
        return
    everything = asked.everything()
    told = await gpu_oracle.learned(
        session, alone.alone.url, everything, sizes.at_once, sizes.answer_tokens, margin=MARGIN
    )
    asked.answers = {id(prompt): each for prompt, each in zip(everything, told, strict=True) if isinstance(each, Right)}
    left = len(asked.comparable(everything))
    compared = f"{left} of {len(everything)}"
    page.verdict(f"{kind}: prompts that can be compared", compared, "at least half", 2 * left >= len(everything))
    for name, cached in ((kind, True), (_uncached(kind), False)):
        if name not in groups:
            continue
        pair = groups[name]
        page.commands(pair.commands()[-2:] if cached else [])
        if not pair.is_up:
            page.verdict(f"{name}: served", "no", "yes", False)
            page.note(f"{name}: {pair.problem}")
            continue
        await _Trial(sizes, kind, pair, asked, session, page, table, say).all()


@dataclass(slots=True)
class _Trial:
    """One pair under examination."""

    sizes: Sizes
    kind: str
    pair: Group
    asked: Asked
    session: aiohttp.ClientSession
    page: Page
    table: Table
    say: Say

    async def all(self) -> None:
        for mode in MODES:
            await self._held(mode, mode, self.asked.comparable(self.asked.fresh[mode]))
        if self.pair.spec.prefix_caching:
            await self._held("beginning known", "pull", self.asked.comparable(self.asked.sharing), shares=True)
        calm = await gpu_client.at_rest(self.session, [self.pair.p, self.pair.d])
        self.page.verdict(f"{self.pair.name}: nothing held afterwards", "yes" if calm else "no", "yes", calm)
        await self._control()

    async def _held(self, what: str, mode: str, prompts: Sequence[Prompt], *, shares: bool = False) -> None:
        tally, handed, computed = await self._asked(prompts, mode)
        ok = tally.right == len(prompts) > 0 and handed == len(prompts)
        if mode == "pull" and not shares:
            ok = ok and computed == len(prompts)
        reached = f"{tally.right} of {len(prompts)} right, {handed} handed over, D computed {computed} of their tokens"
        self.page.verdict(f"{self.pair.name}: {what}", reached, "all right, all handed over, one token each", ok)

    async def _control(self) -> None:
        prompts = self.asked.comparable(self.asked.damaged)
        self.pair.flag.touch()
        try:
            tally, _, _ = await self._asked(prompts, "pull", "control: misplaced")
        finally:
            self.pair.flag.unlink(missing_ok=True)
        seen = f"{tally.wrong} of {len(prompts)} seen"
        self.page.verdict(f"{self.pair.name}: control: damage is seen", seen, "all", tally.wrong == len(prompts) > 0)

    async def _asked(self, prompts: Sequence[Prompt], mode: str, what: str = "") -> tuple[Tally, int, int | str]:
        """What was told, how many were handed over, and how many of their tokens D computed, where it says so."""
        before = gpu_client.delivered(await self.pair.d.figures(self.session))
        tally, room = Tally(), asyncio.Semaphore(self.sizes.at_once)

        async def one(number: int, prompt: Prompt) -> Told:
            async with room:
                told = await self._one(f"{self.pair.name}-{what or mode}-{number}", prompt, mode)
            tally.count(told, self.asked.answers[id(prompt)].sure)
            return told

        told = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
        handed = await gpu_client.delivered_since(self.session, self.pair.d, before, len(prompts))
        cached = [each.cached for each in told]
        computed: int | str = "not told"
        if mode == "pull" and None not in cached:  # the router has D say what P had cached
            computed = sum(map(len, prompts)) - sum(each or 0 for each in cached)
        on = "yes" if self.pair.spec.prefix_caching else "no"
        errors = ", ".join(f"{count} x {kind}" for kind, count in tally.errors.items()) or "0"
        self.page.row(self.table, self.kind, on, what or mode, tally.right, tally.wrong, errors, handed, computed)
        counts = f"{tally.right} right, {tally.wrong} wrong, {errors} errors, {handed} handed over"
        self.say(f"{self.pair.name}: {what or mode}: {counts}, D computed {computed}")
        return tally, handed, computed

    async def _one(self, request_id: str, prompt: Prompt, mode: str) -> Told:
        """Both legs by the client's own hand, or through the router."""
        tokens = self.sizes.answer_tokens
        if mode == "pull":
            return await both_legs(
                self.session, self.pair.p.url, self.pair.d.url, prompt, deadline_s=DEADLINE_S, request_id=request_id,
                tokens=tokens,
            )  # fmt: skip
        return await ask(
            self.session, self.pair.router.url, prompt, deadline_s=DEADLINE_S, tokens=tokens, request_id=request_id,
            headers={MODE_HEADER: mode},
        )  # fmt: skip
