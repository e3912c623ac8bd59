"""Part `answers`: greedy tokens of a P and a D compared with one engine's, in float32: wrong KV shows in them.

Laws: those of `trial`; the engine alone runs its steps the same way as the pair. Of each wrong answer that nobody made
wrong it is kept what tells one reason from another.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import msgspec

from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.gpu_test.trial import HEAD, MODES, Round, Trial, not_served
from kvbaton_proof.rig import meters, oracle
from kvbaton_proof.rig.client import Prompt, prompt_of
from kvbaton_proof.rig.oracle import SURE_MIN, Doubts, Right
from kvbaton_proof.rig.record import Page, Table
from kvbaton_proof.rig.servers import GIB, Group, Say, Spec, Variant

PREEMPTIONS = "vllm:num_preemptions_total"
PREFIX_HITS = "vllm:prefix_cache_hits_total"
RUNNER_V2 = "Using V2 Model Runner"
SPARE_DAMAGED = 4  # times as many are learned, of which the longest to be compared are asked
NO_ANSWER = Right((), ())


def specs(sizes: Sizes) -> list[Spec]:
    """An engine alone for each way of running steps that matters to the numbers, and a pair for each variant."""
    shared = Spec(
        name="", model="small", chunk_tokens=sizes.chunk_tokens, cache_bytes=4 * GIB, max_model_len=4096,
        settings={"kvbaton": {"claim_timeout": 8.0, "transfer_timeout": 20.0}},
    )  # fmt: skip
    graphs = dict.fromkeys(variant.graphs for variant in sizes.variants)
    alone = [
        msgspec.structs.replace(shared, name=_alone(each), variant=Variant(sizes.variants[0].runner, each))
        for each in graphs
    ]
    pairs = [
        msgspec.structs.replace(
            shared, name=f"answers-{each.label}", variant=each, connector="kvbaton", front="kvbaton",
            d_blocks=sizes.d_blocks, has_control=True,
        ) for each in sizes.variants
    ]  # fmt: skip
    return [*alone, *pairs]


def _alone(graphs: bool) -> str:
    return f"alone-{'graphs' if graphs else 'eager'}"


@dataclass(slots=True)
class Questions:
    """What is asked, and the right answers by way of running steps."""

    fresh: dict[str, list[Prompt]]  # by mode: prompts of which no engine knows anything yet
    sharing: list[Prompt]  # each begins as a prompt of the first mode does
    long: list[Prompt]
    damaged: list[Prompt]
    answers: dict[bool, dict[int, Right]]  # by graphs, then by id of the prompt

    def right(self, graphs: bool, prompt: Prompt) -> Right:
        return self.answers[graphs][id(prompt)]

    def everything(self) -> list[Prompt]:
        return [*(prompt for case in self.fresh.values() for prompt in case), *self.sharing, *self.damaged, *self.long]

    def sure(self, prompt: Prompt) -> int:
        """How many tokens can be compared, whatever way steps are run."""
        return min((len(each.get(id(prompt), NO_ANSWER).sure) for each in self.answers.values()), default=0)

    def narrowed(self, damaged: int) -> tuple[int, int]:
        """Drop what cannot be compared; how many prompts there were, and how many of them are left."""
        self.damaged = sorted(self.damaged, key=self.sure, reverse=True)[:damaged]
        before = len(self.everything())
        self.fresh = {case: self._kept(prompts) for case, prompts in self.fresh.items()}
        self.sharing, self.long, self.damaged = map(self._kept, (self.sharing, self.long, self.damaged))
        return before, len(self.everything())

    def _kept(self, prompts: list[Prompt]) -> list[Prompt]:
        return [prompt for prompt in prompts if self.sure(prompt) >= SURE_MIN]


def questions(sizes: Sizes) -> Questions:
    rng = random.Random("gpu_test answers")
    spread = sizes.longest_tokens - sizes.shortest_tokens

    def lengths(count: int) -> list[int]:
        return [sizes.shortest_tokens + spread * number // max(1, count - 1) for number in range(count)]

    fresh = {mode: [prompt_of(n, f"answers {mode} {n}") for n in lengths(sizes.prompts)] for mode in MODES}
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
                page.note(oracle.counted(list(asked.answers[variant.graphs].values()), alone.name))
    before, left = asked.narrowed(sizes.damaged)
    page.verdict("prompts that can be compared", f"{left} of {before}", "at least three in four", left >= 0.75 * before)
    table = page.table("Answers beside one engine's, float32, TRITON_ATTN, greedy", ("runner", "what", *HEAD))
    trials = await asyncio.gather(
        *(_variant(sizes, variant, groups, asked, session, page, table, say) for variant in sizes.variants)
    )
    oracle.tell(page, [trial.doubts for trial in trials if trial is not None])


async def _learned(session: aiohttp.ClientSession, alone: Group, asked: Questions, sizes: Sizes) -> dict[int, Right]:
    """Of those that were answered."""
    long = {id(prompt) for prompt in asked.long}
    usual = [prompt for prompt in asked.everything() if id(prompt) not in long]
    found: dict[int, Right] = {}
    for prompts, tokens in ((usual, sizes.answer_tokens), (asked.long, sizes.preempt_answer)):
        answers = await oracle.learned(session, alone.alone.url, prompts, sizes.at_once, tokens)
        found |= {id(prompt): each for prompt, each in zip(prompts, answers, strict=True) if isinstance(each, Right)}
    return found


async def _variant(
    sizes: Sizes, variant: Variant, groups: dict[str, Group], asked: Questions, session: aiohttp.ClientSession,
    page: Page, table: Table, say: Say,
) -> AnswersTrial | None:  # fmt: skip
    pair, alone = groups[f"answers-{variant.label}"], groups[_alone(variant.graphs)]
    page.commands(pair.commands()[-2:] if variant == sizes.variants[0] else [])
    if not pair.is_up or variant.graphs not in asked.answers:
        not_served(page, alone if pair.is_up else pair, variant.name)
        return None
    ran = {runner_of(engine.log) for engine in (pair.p, pair.d)}
    page.verdict(
        f"{variant.name}: the model runner", " and ".join(sorted(ran)), variant.runner, ran == {variant.runner}
    )
    trial = AnswersTrial(
        sizes, pair, session, page, table, say, (variant.name,), at_once=sizes.at_once, asked=asked, variant=variant,
        doubts=Doubts(variant.name, session, alone.alone.url),
    )  # fmt: skip
    for mode in MODES:
        await trial.fresh(mode)
    await trial.shared()
    await trial.preempted()
    await trial.rest()
    page.figure(f"{variant.name}: ends", meters.ends(await pair.d.figures(session)))
    await trial.control(asked.damaged, trial.sure(asked.damaged))
    return trial


def runner_of(log: Path) -> str:
    """Which one an engine says that it uses; vLLM mentions only the newer."""
    return "V2" if RUNNER_V2 in log.read_text(errors="replace") else "V1"


@dataclass(slots=True, kw_only=True)
class AnswersTrial(Trial):
    """One pair under examination."""

    asked: Questions
    variant: Variant
    doubts: Doubts

    def sure(self, prompts: Sequence[Prompt]) -> list[tuple[str, ...]]:
        return [self.asked.right(self.variant.graphs, prompt).sure for prompt in prompts]

    async def _held(
        self, what: str, prompts: Sequence[Prompt], mode: str, tokens: int, seen: tuple[str, str] | None = None
    ) -> None:
        """All right and, unless a cache may have had them, all handed over; `seen`: the counter of P or of D that must
        have risen, and what it counts."""
        engine = self.pair.p if seen is not None and seen[0] == PREFIX_HITS else self.pair.d
        before = await meters.counter(self.session, engine, seen[0]) if seen is not None else 0
        result = await self.round(prompts, self.sure(prompts), mode, what, tokens)
        await self._look_into(prompts, result, mode, tokens)
        least = len(prompts) if seen is None else 1
        reached = f"{result.tally.right} of {len(prompts)} right, {result.handed} handed over"
        bound = f"{len(prompts)} right, {least} handed over"
        ok = result.tally.right == len(prompts) and result.handed >= least
        if seen is not None:
            count = await meters.counter(self.session, engine, seen[0]) - before
            reached, bound, ok = f"{reached}, {count} {seen[1]}", f"{bound}, {seen[1]} above 0", ok and count > 0
        self.page.verdict(f"{self.name}: {what}", reached, bound, ok)

    async def _look_into(self, prompts: Sequence[Prompt], result: Round, mode: str, tokens: int) -> None:
        """Every wrong answer, in a batch as large."""
        others = self.asked.fresh["pull"][: self.at_once - 1]
        for number, (prompt, answer) in enumerate(zip(prompts, result.answers, strict=True)):
            right = self.asked.right(self.variant.graphs, prompt)
            if answer.error or answer.late or answer.tokens[: len(right.sure)] == right.sure:
                continue
            if mode != "pull":  # the router has D say what P had cached
                answer = msgspec.structs.replace(answer, cached=None)
            await self.doubts.look_into(mode, number, prompt, answer, right, others, tokens)
            oracle.keep(self.page, self.doubts)

    async def fresh(self, mode: str) -> None:
        """Prompts that nobody knows; those above a chunk are prefilled in several steps."""
        await self._held(mode, self.asked.fresh[mode], mode, self.sizes.answer_tokens)

    async def shared(self) -> None:
        """Prompts of which both P and D have the beginning in their prefix caches."""
        seen = (PREFIX_HITS, "tokens from P's cache")
        await self._held("prefix-cache hits", self.asked.sharing, "pull", self.sizes.answer_tokens, seen)

    async def preempted(self) -> None:
        """More than D has blocks for, so that it throws requests out and takes them up again."""
        seen = (PREEMPTIONS, "preemptions")
        await self._held("preemption", self.asked.long, "pull", self.sizes.preempt_answer, seen)
