"""Part `answers`: greedy tokens of a P and a D compared with one engine's, in float32: wrong KV shows in them.

Laws: every answer is compared with that of an engine without a connector which runs its steps the same way, as far as
that one is sure (`oracle`). An answer counts only if D's own counter says that its prompt's KV came from P. And the
comparison is itself tried: with two blocks in each other's place it must see wrong answers, or the part fails.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.chaos.vllm.vllm_client import Tally, both_legs
from kvbaton_proof.gpu_test import gpu_client, gpu_oracle
from kvbaton_proof.gpu_test.gpu_client import Prompt, Told, ask, prompt_of
from kvbaton_proof.gpu_test.gpu_oracle import SURE_MIN, Doubts, Right
from kvbaton_proof.gpu_test.gpu_record import Page, Table
from kvbaton_proof.gpu_test.servers import GIB, Group, Say, Spec
from kvbaton_proof.gpu_test.sizes import Sizes, Variant

DEADLINE_S = 90.0
HEAD = ("runner", "what", "right", "wrong", "errors", "handed over", "seen")
PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
RUNNER_V2 = "Using V2 Model Runner"
SPARE_DAMAGED = 4  # times as many are learned, of which the longest to be compared are asked


def specs(sizes: Sizes) -> list[Spec]:
    """An engine alone for each way of running steps that matters to the numbers, and a pair for each variant."""
    shared = Spec(
        name="", model="small", chunk_tokens=sizes.chunk_tokens, cache_bytes=4 * GIB, max_model_len=4096,
        settings={"claim_timeout": 8.0, "transfer_timeout": 20.0},
    )  # fmt: skip
    graphs = dict.fromkeys(variant.graphs for variant in sizes.variants)
    alone = [
        msgspec.structs.replace(shared, name=_alone(each), variant=Variant(sizes.variants[0].runner, each))
        for each in graphs
    ]
    pairs = [
        msgspec.structs.replace(
            shared, name=f"answers-{each.label}", variant=each, connector="kvbaton", d_blocks=sizes.d_blocks,
            has_control=True,
        ) for each in sizes.variants
    ]  # fmt: skip
    return [*alone, *pairs]


def _alone(graphs: bool) -> str:
    return f"alone-{'graphs' if graphs else 'eager'}"


@dataclass(slots=True)
class Questions:
    """What is asked, and the right answers by way of running steps."""

    fresh: dict[str, list[Prompt]]  # by case: prompts of which no engine knows anything yet
    sharing: list[Prompt]  # each begins as a prompt of the first case does
    long: list[Prompt]
    damaged: list[Prompt]
    answers: dict[bool, dict[int, Right]]  # by graphs, then by id of the prompt

    def right(self, graphs: bool, prompt: Prompt) -> Right:
        return self.answers[graphs][id(prompt)]

    def everything(self) -> list[Prompt]:
        return [*(prompt for case in self.fresh.values() for prompt in case), *self.sharing, *self.damaged, *self.long]

    def sure(self, prompt: Prompt) -> int:
        """How many tokens can be compared, whatever way steps are run."""
        nothing = Right((), ())
        return min((len(each.get(id(prompt), nothing).sure) for each in self.answers.values()), default=0)

    def narrowed(self, damaged: int) -> tuple[int, int]:
        """Drop what cannot be compared; how many prompts there were, and how many of them are left."""
        self.damaged = sorted(self.damaged, key=self.sure, reverse=True)[:damaged]
        before = len(self.everything())
        self.fresh = {case: self._kept(prompts) for case, prompts in self.fresh.items()}
        self.sharing, self.long, self.damaged = map(self._kept, (self.sharing, self.long, self.damaged))
        return before, len(self.everything())

    def _kept(self, prompts: list[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if self.sure(prompt) >= SURE_MIN]


CASES = ("pull", "stream", "push")


def questions(sizes: Sizes) -> Questions:
    rng = random.Random("gpu_test answers")
    spread = sizes.longest_tokens - sizes.shortest_tokens

    def lengths(count: int) -> list[int]:
        return [sizes.shortest_tokens + spread * number // max(1, count - 1) for number in range(count)]

    fresh = {case: [prompt_of(n, f"answers {case} {n}") for n in lengths(sizes.prompts)] for case in CASES}
    sharing = []
    for prompt in fresh["pull"][1::2]:
        kept = rng.randrange(len(prompt) // 2, len(prompt))
        sharing.append(prompt[:kept] + prompt_of(97, f"answers sharing {kept}"))
    long = [prompt_of(sizes.preempt_tokens + n, f"answers long {n}") for n in range(sizes.preempt_prompts)]
    damaged = [
        prompt_of(sizes.longest_tokens // 2 + n, f"answers damaged {n}") for n in range(sizes.damaged * SPARE_DAMAGED)
    ]
    return Questions(fresh, sharing, long, damaged, {})


async def run(sizes: Sizes, groups: dict[str, Group], session: aiohttp.ClientSession, page: Page, say: Say) -> None:
    """All pairs at once; each row is written when it is known."""
    asked = questions(sizes)
    for variant in sizes.variants:
        if variant.graphs not in asked.answers:
            alone = groups[_alone(variant.graphs)]
            if alone.is_up:
                asked.answers[variant.graphs] = await _learned(session, alone, asked, sizes)
                say(f"{alone.name}: answered {len(asked.answers[variant.graphs])} prompts")
                page.note(gpu_oracle.counted(list(asked.answers[variant.graphs].values()), alone.name))
    before, left = asked.narrowed(sizes.damaged)
    page.verdict("prompts that can be compared", f"{left} of {before}", "at least three in four", left >= 0.75 * before)
    table = page.table("Answers beside one engine's, float32, TRITON_ATTN, greedy", HEAD)
    trials = await asyncio.gather(
        *(_variant(sizes, variant, groups, asked, session, page, table, say) for variant in sizes.variants)
    )
    tried = [each for each in trials if each is not None]
    gpu_oracle.tell(page, [each.doubts for each in tried])


async def _learned(session: aiohttp.ClientSession, alone: Group, asked: Questions, sizes: Sizes) -> dict[int, Right]:
    """Of those that were answered."""
    long = {id(prompt) for prompt in asked.long}
    usual = [prompt for prompt in asked.everything() if id(prompt) not in long]
    found: dict[int, Right] = {}
    for prompts, tokens in ((usual, sizes.answer_tokens), (asked.long, sizes.preempt_answer)):
        told = await gpu_oracle.learned(session, alone.alone.url, prompts, sizes.at_once, tokens)
        found |= {id(prompt): each for prompt, each in zip(prompts, told, strict=True) if isinstance(each, Right)}
    return found


async def _variant(
    sizes: Sizes, variant: Variant, groups: dict[str, Group], asked: Questions, session: aiohttp.ClientSession,
    page: Page, table: Table, say: Say,
) -> Trial | None:  # fmt: skip
    pair = groups[f"answers-{variant.label}"]
    page.commands(pair.commands()[-2:] if variant == sizes.variants[0] else [])
    if not pair.is_up or variant.graphs not in asked.answers:
        problem = pair.problem or f"{_alone(variant.graphs)}: {groups[_alone(variant.graphs)].problem}"
        page.verdict(f"{variant.name}: served", "no", "yes", False)
        page.note(f"{variant.name}: {problem}")
        return None
    ran = {runner_of(engine.log) for engine in (pair.p, pair.d)}
    page.verdict(
        f"{variant.name}: the model runner", " and ".join(sorted(ran)), variant.runner, ran == {variant.runner}
    )
    alone = groups[_alone(variant.graphs)].alone
    trial = Trial(sizes, variant, pair, asked, session, page, table, say, Doubts(variant.name, session, alone.url))
    for case in CASES:
        await trial.fresh(case)
    await trial.shared()
    await trial.preempted()
    await trial.rest()
    await trial.damaged()
    return trial


def runner_of(log: Path) -> str:
    """Which one an engine says that it uses; vLLM mentions only the newer."""
    return "V2" if RUNNER_V2 in log.read_text(errors="replace") else "V1"


@dataclass(slots=True)
class Trial:
    """One pair under examination."""

    sizes: Sizes
    variant: Variant
    pair: Group
    asked: Questions
    session: aiohttp.ClientSession
    page: Page
    table: Table
    say: Say
    doubts: Doubts
    number: int = 0

    async def one(self, prompt: Prompt, tally: Tally, mode: str, tokens: int) -> None:
        """Both legs by the client's own hand, or through the router."""
        self.number += 1
        request_id = f"{self.pair.name}-{self.number}"
        if mode == "pull":
            told = await both_legs(
                self.session, self.pair.p.url, self.pair.d.url, prompt, deadline_s=DEADLINE_S, request_id=request_id,
                tokens=tokens,
            )  # fmt: skip
        else:
            told = await ask(
                self.session, self.pair.router.url, prompt, deadline_s=DEADLINE_S, tokens=tokens,
                request_id=request_id, headers={MODE_HEADER: mode},
            )  # fmt: skip
        right = self.asked.right(self.variant.graphs, prompt)
        if tally.count(told, right.sure) or told.error or self.pair.flag.exists():
            return
        await self.doubt(prompt, told, right, mode, tokens)

    async def doubt(self, prompt: Prompt, told: Told, right: Right, mode: str, tokens: int) -> None:
        """Look into a wrong answer that nobody made wrong."""
        if mode != "pull":  # the router has D say what P had cached
            told = msgspec.structs.replace(told, cached=None)
        others = self.asked.fresh["pull"][: self.sizes.at_once - 1]
        await self.doubts.look_into(mode, self.number, prompt, told, right, others, tokens)
        gpu_oracle.keep(self.page, self.doubts)

    async def all(self, prompts: Sequence[Prompt], mode: str, tokens: int) -> tuple[Tally, int]:
        """All at once, as many as may be; what was told, and how many were handed over."""
        before = gpu_client.delivered(await self.pair.d.figures(self.session))
        tally, room = Tally(), asyncio.Semaphore(self.sizes.at_once)

        async def turn(prompt: Prompt) -> None:
            async with room:
                await self.one(prompt, tally, mode, tokens)

        await asyncio.gather(*map(turn, prompts))
        return tally, await gpu_client.delivered_since(self.session, self.pair.d, before, len(prompts))

    def told(self, what: str, tally: Tally, handed: int, seen: str = "") -> None:
        errors = ", ".join(f"{count} x {kind}" for kind, count in tally.errors.items())
        bad = f"{tally.errors.total()} ({errors})" if errors else "0"
        bad += f", {tally.late} late" if tally.late else ""
        self.page.row(self.table, self.variant.name, what, tally.right, tally.wrong, bad, handed, seen)
        counts = f"{tally.right} right, {tally.wrong} wrong, errors {bad}, {handed} handed over"
        self.say(f"{self.variant.name}: {what}: {counts}. {seen}")

    def judged(self, what: str, tally: Tally, wanted: int, handed: int, seen: tuple[int, str] | None = None) -> None:
        """All right and, unless a cache may have had them, all handed over; `seen`: what must have happened once."""
        least = wanted if seen is None else 1
        reached, bound = (
            f"{tally.right} of {wanted} right, {handed} handed over",
            f"{wanted} right, {least} handed over",
        )
        if seen is not None:
            reached, bound = f"{reached}, {seen[0]} {seen[1]}", f"{bound}, {seen[1]} above 0"
        ok = tally.right == wanted and handed >= least and (seen is None or seen[0] > 0)
        self.page.verdict(f"{self.variant.name}: {what}", reached, bound, ok)

    async def fresh(self, mode: str) -> None:
        """Prompts that nobody knows; those above a chunk are prefilled in several steps."""
        prompts = self.asked.fresh[mode]
        chunked = sum(len(prompt) > self.sizes.chunk_tokens for prompt in prompts)
        tally, handed = await self.all(prompts, mode, self.sizes.answer_tokens)
        self.told(f"{mode}, {self.sizes.at_once} at once", tally, handed, f"{chunked} prefilled in chunks")
        self.judged(mode, tally, len(prompts), handed)

    async def shared(self) -> None:
        """Prompts of which both P and D have the beginning in their prefix caches."""
        before = await self.pair.p.figures(self.session) or {}
        tally, handed = await self.all(self.asked.sharing, "pull", self.sizes.answer_tokens)
        after = await self.pair.p.figures(self.session) or {}
        hits = int(after.get(PREFIX_HITS, 0) - before.get(PREFIX_HITS, 0))
        self.told("pull, beginning in the prefix cache", tally, handed, f"{hits} tokens from P's prefix cache")
        self.judged("prefix-cache hits", tally, len(self.asked.sharing), handed, (hits, "tokens from P's cache"))

    async def preempted(self) -> None:
        """More than D has blocks for, so that it throws requests out and takes them up again."""
        before = await self.pair.d.figures(self.session) or {}
        tally, handed = await self.all(self.asked.long, "pull", self.sizes.preempt_answer)
        after = await self.pair.d.figures(self.session) or {}
        thrown = int(after.get(PREEMPTIONS, 0) - before.get(PREEMPTIONS, 0))
        self.told("pull, D short of blocks", tally, handed, f"{thrown} preemptions")
        self.judged("preemption", tally, len(self.asked.long), handed, (thrown, "preemptions"))

    async def rest(self) -> None:
        calm = await gpu_client.at_rest(self.session, [self.pair.p, self.pair.d])
        ends = gpu_client.ends(await self.pair.d.figures(self.session))
        self.page.verdict(f"{self.variant.name}: nothing held afterwards", "yes" if calm else "no", "yes", calm)
        self.page.figure(f"{self.variant.name}: ends", ends)

    async def damaged(self) -> None:
        """The control: with two blocks in each other's place answers must be wrong."""
        self.pair.flag.touch()
        try:
            tally, handed = await self.all(self.asked.damaged, "pull", self.sizes.answer_tokens)
        finally:
            self.pair.flag.unlink(missing_ok=True)
        self.told("control: two blocks misplaced", tally, handed, "must be wrong")
        reached = f"{tally.wrong} of {len(self.asked.damaged)} seen"
        self.page.verdict(
            f"{self.variant.name}: control: damage is seen", reached, "all", tally.wrong == len(self.asked.damaged)
        )
