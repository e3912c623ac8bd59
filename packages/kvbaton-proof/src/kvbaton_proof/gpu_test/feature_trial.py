"""One pair of the part `features` under examination: answers, drafts, what another connector has, refusals.

Laws: those of `trial`. Where drafts are counted, requests go one after the other, and a count is read once the engine's
own figures have all tokens of the answer. A count of drafts is compared only for requests whose whole answer is the one
engine's: from the first other token on everything is another text. What is told of a request and what is judged are the
same numbers.
"""

from __future__ import annotations

import asyncio
import functools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from kvbaton_proof.gpu_test.gpu_turns import forget
from kvbaton_proof.gpu_test.trial import DEADLINE_S, MODES, Round, Trial
from kvbaton_proof.rig import meters
from kvbaton_proof.rig.client import Answer, Prompt, Tally, ask, prompt_of
from kvbaton_proof.rig.oracle import SURE_MIN, Right
from kvbaton_proof.rig.record import Table
from kvbaton_proof.rig.server import Engine
from kvbaton_proof.rig.servers import Group

T = TypeVar("T")
DRAFTS_HEAD = (
    "pair", "requests", "compared", "with as many accepted as alone", "by chance", "accepted of drafted",
    "alone, accepted of drafted",
)  # fmt: skip
LAG_S = 5.0
REFUSED_TOKENS = 300
REFUSED_PROMPTS = 2
OPINIONS = 8
KEPT, HARMED = "kept", "harmed"
KEPT_TOKENS, KEPT_PROMPTS = 400, 3
KEPT_SHARE = 0.75  # of the prompts' tokens must come from the other connector, which keeps whole chunks
FLUSHES = 3  # requests after which what was to be offloaded is: it goes with the steps that follow
GENERATED = "vllm:generation_tokens_total"
ACCEPTED, DRAFTED = "vllm:spec_decode_num_accepted_tokens_total", "vllm:spec_decode_num_draft_tokens_total"
EXTERNAL = "vllm:external_prefix_cache_hits_total"
REASONS_MAX = 3
LOG_BYTES_MAX = 4 << 20


class Drafts(msgspec.Struct, frozen=True):
    """Of one answer."""

    accepted: int = 0
    drafted: int = 0


@dataclass(slots=True)
class Learned:
    """What the engine alone says to a prompt."""

    prompt: Prompt
    right: Right
    drafts: Drafts


def alike(ours: Sequence[Drafts], theirs: Sequence[Drafts]) -> tuple[int, float]:
    """How many have as many accepted; and what share would have, if each were compared with the next one's."""
    same = sum(a.accepted == b.accepted for a, b in zip(ours, theirs, strict=True))
    turned = [*theirs[1:], *theirs[:1]]
    chance = sum(a.accepted == b.accepted for a, b in zip(ours, turned, strict=True))
    return same, chance / len(ours) if ours else 1.0


def rate(of: Sequence[Drafts]) -> str:
    accepted, drafted = sum(each.accepted for each in of), sum(each.drafted for each in of)
    return f"{accepted} of {drafted} ({accepted / drafted:.0%})" if drafted else "0 of 0"


@dataclass(slots=True, kw_only=True)
class FeatureTrial(Trial):
    """`alone` says what is right to `pair`."""

    alone: Group
    drafts_table: Table
    near: float = 0.1
    alike_min: float = 0.9
    known: dict[str, list[Learned]] = field(default_factory=dict)  # by mode, and for what else they are asked
    has_drafts: bool = False
    drafts: dict[int, Drafts] = field(default_factory=dict)  # of D's last answer, by id of the prompt

    async def learn(self, has_drafts: bool, adapter: str) -> None:
        """Right answers, one after the other where drafts are counted."""
        self.has_drafts, self.at_once = has_drafts, 1 if has_drafts else self.sizes.at_once
        lengths = self.sizes.feature_tokens
        asked = {mode: [prompt_of(length, f"{self.name} {mode}") for length in lengths] for mode in MODES}
        asked[KEPT] = [prompt_of(KEPT_TOKENS + n, f"{self.name} kept") for n in range(KEPT_PROMPTS)]
        asked[HARMED] = [prompt_of(max(lengths) // 2 + n, f"{self.name} harmed") for n in range(3 * self.sizes.damaged)]
        everything = [prompt for prompts in asked.values() for prompt in prompts]
        answers = await self._all([self._learned(self.alone.alone, prompt) for prompt in everything])
        known = {id(each.prompt): each for each in answers if isinstance(each, Learned)}
        if reasons := Counter(each for each in answers if isinstance(each, str)):
            most = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common(REASONS_MAX))
            self.page.note(f"{self.alone.name}: not compared: {most}")
        self.known = {what: [known[id(each)] for each in asked[what] if id(each) in known] for what in asked}
        left, all_of_them = len(known), len(everything)
        what = f"{self.name}: prompts that can be compared"
        self.page.verdict(what, f"{left} of {all_of_them}", "at least a third", 3 * left >= all_of_them)
        if adapter:
            await self._changed(adapter, self.known["pull"])

    async def _changed(self, adapter: str, known: Sequence[Learned]) -> None:
        plain = [await self._ask(self.alone.alone.url, each.prompt, more={}) for each in known]
        other = sum(each.right.tokens != answer.tokens for each, answer in zip(known, plain, strict=True))
        self.page.verdict(f"{self.name}: answers that {adapter} changes", f"{other} of {len(known)}", "some", other > 0)

    async def _learned(self, engine: Engine, prompt: Prompt) -> Learned | str:
        """A text where too little of it is sure, or there is no answer."""
        answer, drafts = await self._counted(engine, lambda: self._ask(engine.url, prompt, likely=2))
        if answer.error:
            return f"{answer.error} {answer.detail}".strip()
        right = Right(answer.tokens, answer.gaps, self.near)
        return Learned(prompt, right, drafts) if len(right.sure) >= SURE_MIN else "too little is sure"

    async def one(self, request_id: str, prompt: Prompt, mode: str, tokens: int) -> Answer:
        """And its drafts, where they are counted."""
        answer, self.drafts[id(prompt)] = await self._counted(
            self.pair.d, lambda: Trial.one(self, request_id, prompt, mode, tokens)
        )
        return answer

    async def handed_over(self) -> None:
        """In each mode; then drafts of all of them."""
        ours: list[Drafts] = []
        theirs: list[Drafts] = []
        for mode in MODES:
            known = self.known[mode]
            result = await self._held(mode, known)
            for one, answer in zip(known, result.answers, strict=True):
                if answer.tokens == one.right.tokens:
                    ours.append(self.drafts[id(one.prompt)])
                    theirs.append(one.drafts)
        if self.has_drafts:
            self._judge_drafts(ours, theirs, sum(len(self.known[mode]) for mode in MODES))

    def _judge_drafts(self, ours: Sequence[Drafts], theirs: Sequence[Drafts], requests: int) -> None:
        same, chance = alike(ours, theirs)
        row = (requests, len(ours), same, f"{chance:.0%}", rate(ours), rate(theirs))
        self.page.row(self.drafts_table, self.name, *row)
        counts = f"{rate(ours)}; alone {rate(theirs)}"
        self.say(f"{self.name}: drafts: {same} of {len(ours)} alike ({chance:.0%} by chance), {counts}")
        enough = 3 * len(ours) >= requests > 0 and same >= self.alike_min * len(ours)
        reached = f"{same} of {len(ours)} requests alike; accepted {rate(ours)}, alone {rate(theirs)}"
        bound = f"{self.alike_min:.0%} of those with the same answer, at least a third of {requests}"
        accepted = sum(each.accepted for each in theirs)
        self.page.verdict(f"{self.name}: drafts as good as on one engine", reached, bound, enough and accepted > 0)
        seen = f"{chance:.0%} alike"
        self.page.verdict(
            f"{self.name}: control: counts of other prompts",
            seen,
            f"below {self.alike_min:.0%}",
            chance < self.alike_min,
        )

    async def _held(self, mode: str, known: Sequence[Learned], what: str = "") -> Round:
        result = await self._asked(known, mode, what)
        if result.tally.wrong:
            await self._heard_again(known, result, what or mode)
        right, handed, computed = result.tally.right, result.handed, result.computed
        ok = right == len(known) > 0 and handed == len(known)
        bound = "all right, all handed over"
        if mode == "pull":  # of a prompt that came whole vLLM computes the last token, and may not count it
            ok = ok and isinstance(computed, int) and computed <= len(known)
            bound = f"{bound}, at most one token each"
        reached = f"{right} of {len(known)} right, {handed} handed over, D computed {computed} of their tokens"
        self.page.verdict(f"{self.name}: {what or mode}", reached, bound, ok)
        return result

    async def _asked(self, known: Sequence[Learned], mode: str, what: str = "") -> Round:
        return await self.round([each.prompt for each in known], [each.right.sure for each in known], mode, what)

    async def _heard_again(self, known: Sequence[Learned], result: Round, what: str) -> None:
        """A second opinion about each wrong answer: the engine alone computes that prompt anew, several times at once.
        What it then says too is its own doubt, not another KV: in 8 bits the last digit of a number decides what is
        kept of it."""
        for number, (one, answer) in enumerate(zip(known, result.answers, strict=True)):
            length = len(one.right.sure)
            if answer.error or answer.late or answer.tokens[:length] == one.right.sure:
                continue
            salts = [{**self.more, "cache_salt": f"{self.name} {what} {number} {salt}"} for salt in range(OPINIONS)]
            url = self.alone.alone.url
            opinions = await asyncio.gather(*(self._ask(url, one.prompt, more=salted) for salted in salts))
            alike = sum(opinion.tokens[:length] == answer.tokens[:length] for opinion in opinions)
            changed = sum(opinion.tokens[:length] != one.right.sure for opinion in opinions)
            text = f"{alike} of {OPINIONS} times the engine alone says it too, {changed} times other than before"
            self.page.note(f"{self.name}: {what}: prompt {number}, {len(one.prompt)} tokens: a wrong answer; {text}")
            self.say(f"{self.name}: {what}: a wrong answer; {text}")
            if alike:
                result.tally.wrong, result.tally.right = result.tally.wrong - 1, result.tally.right + 1

    async def offloaded(self) -> None:
        """What P and D lose from their own caches comes back from the other connector, and is right."""
        known = self.known[KEPT]
        await self._held("pull", known, "to be lost")
        for engine in (self.pair.d, self.pair.p):
            for number in range(FLUSHES):
                await self._ask(engine.url, prompt_of(20, f"{self.name} flush {number}"))
            await forget(self.session, engine)
            before = await meters.counter(self.session, engine, EXTERNAL)
            tally = Tally()
            for each in known:
                tally.count(await self._ask(engine.url, each.prompt), each.right.sure)
            wanted = sum(len(each.prompt) for each in known)
            read = functools.partial(meters.counter, self.session, engine, EXTERNAL)
            hits = await meters.risen(read, before, int(KEPT_SHARE * wanted), LAG_S)
            reached = f"{tally.right} of {len(known)} right, {hits} of {wanted} tokens from it"
            ok = tally.right == len(known) > 0 and hits >= KEPT_SHARE * wanted
            what = f"{self.name}: {engine.name} has lost its cache, the other connector has it"
            self.page.verdict(what, reached, f"all right, {KEPT_SHARE:.0%} of the tokens", ok)
            self.say(f"{what}: {reached}")

    async def damaged(self) -> None:
        """Not all answers need be wrong: where a model has few words another KV may lead to the same ones."""
        harmed = self.known[HARMED]
        await self.control([each.prompt for each in harmed], [each.right.sure for each in harmed], 1 / 3)

    async def refused(self, field_name: str) -> None:
        """D takes nothing over and says by which field; it computes the prompts, and is right."""
        tally, prompts = Tally(), [prompt_of(REFUSED_TOKENS + n, self.name) for n in range(REFUSED_PROMPTS)]
        for number, prompt in enumerate(prompts):
            answer = await self.one(f"{self.name}-{number}", prompt, "pull", self.sizes.answer_tokens)
            own = await self._ask(self.pair.d.url, prompt, likely=2, more={**self.more, "cache_salt": "alone"})
            tally.count(answer, Right(own.tokens, own.gaps, self.near).sure or ("nothing is sure",))
        found = await self._ends(len(prompts))
        self.page.row(self.table, self.name, "refused", tally.right, tally.wrong, tally.errors.total(), found, "all")
        reached = f"{tally.right} of {len(prompts)} as D says alone, ends {found}"
        ok = tally.right == len(prompts) and set(found) == {"incompatible"}
        self.page.verdict(f"{self.name}: nothing is taken over", reached, "all right, all incompatible", ok)
        is_named = field_name in _end_of(self.pair.d.log)
        named = "yes" if is_named else f"no {field_name} in {self.pair.d.log.name}"
        self.page.verdict(f"{self.name}: D's log names {field_name}", named, "yes", is_named)
        self.say(f"{self.name}: {reached}, {field_name} named: {named}")

    async def _ends(self, wanted: int) -> dict[str, int]:
        """How handoffs ended, once there are so many; waits, bounded."""
        ended: dict[str, int] = {}

        async def count() -> int:
            nonlocal ended
            ended = meters.ends(await self.pair.d.figures(self.session))
            return sum(ended.values())

        await meters.risen(count, 0, wanted, LAG_S)
        return ended

    async def _all(self, asked: Sequence[Awaitable[T]]) -> list[T]:
        """One after the other where drafts are counted, else as many at once as may be."""
        room = asyncio.Semaphore(self.at_once)

        async def one(request: Awaitable[T]) -> T:
            async with room:
                return await request

        return await asyncio.gather(*map(one, asked))

    async def _counted(self, engine: Engine, asking: Callable[[], Awaitable[Answer]]) -> tuple[Answer, Drafts]:
        if not self.has_drafts:
            return await asking(), Drafts()
        before = await engine.figures(self.session) or {}
        answer = await asking()
        read = functools.partial(meters.counter, self.session, engine, GENERATED)
        await meters.risen(read, int(before.get(GENERATED, 0.0)), len(answer.tokens), LAG_S)
        after = await engine.figures(self.session) or {}
        accepted, drafted = (int(after.get(name, 0.0) - before.get(name, 0.0)) for name in (ACCEPTED, DRAFTED))
        return answer, Drafts(accepted, drafted)

    async def _ask(self, url: str, prompt: Prompt, *, likely: int = 1, more: Mapping[str, str] | None = None) -> Answer:
        tokens = self.sizes.answer_tokens
        body = self.more if more is None else more
        return await ask(self.session, url, prompt, deadline_s=DEADLINE_S, tokens=tokens, likely=likely, more=body)


def _end_of(log: Path) -> str:
    """The last part of a log; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES_MAX))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
