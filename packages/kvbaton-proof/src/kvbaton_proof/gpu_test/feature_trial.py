"""One pair of the part `features` under examination: answers, drafts, what another connector has, refusals.

Laws: where drafts are counted, requests go one after the other, and a count is read once the engine's own figures have
all tokens of the answer. A count of drafts is compared only for requests whose whole answer is the one engine's: from
the first other token on everything is another text. What is told of a request and what is judged are the same numbers.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.chaos.vllm.vllm_client import Tally, both_legs
from kvbaton_proof.chaos.vllm.vllm_process import Engine, Figures
from kvbaton_proof.gpu_test import gpu_client
from kvbaton_proof.gpu_test.gpu_client import Prompt, Told, ask, prompt_of
from kvbaton_proof.gpu_test.gpu_oracle import SURE_MIN, Right
from kvbaton_proof.gpu_test.gpu_record import Page, Table
from kvbaton_proof.gpu_test.gpu_turns import forget
from kvbaton_proof.gpu_test.servers import Group, Say
from kvbaton_proof.gpu_test.sizes import Sizes

T = TypeVar("T")
MODES = ("pull", "stream", "push")
HEAD = ("pair", "what", "right", "wrong", "errors", "handed over", "tokens of prompts that D computed")
DRAFTS_HEAD = (
    "pair", "requests", "compared", "with as many accepted as alone", "by chance", "accepted of drafted",
    "alone, accepted of drafted",
)  # fmt: skip
DEADLINE_S = 90.0
LAG_S = 5.0
LOOK_S = 0.02
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


@dataclass(slots=True)
class FeatureTrial:
    """`alone` says what is right to `pair`."""

    sizes: Sizes
    alone: Group
    pair: Group
    session: aiohttp.ClientSession
    page: Page
    tables: tuple[Table, Table]  # of answers, of drafts
    say: Say
    asks: Mapping[str, str] = field(default_factory=dict)
    near: float = 0.1
    alike_min: float = 0.9
    known: dict[str, list[Learned]] = field(default_factory=dict)  # by mode, and for what else they are asked
    has_drafts: bool = False

    @property
    def name(self) -> str:
        return self.pair.name

    async def learn(self, has_drafts: bool, adapter: str) -> None:
        """Right answers, one after the other where drafts are counted."""
        self.has_drafts = has_drafts
        lengths = self.sizes.feature_tokens
        asked = {mode: [prompt_of(length, f"{self.name} {mode}") for length in lengths] for mode in MODES}
        asked[KEPT] = [prompt_of(KEPT_TOKENS + n, f"{self.name} kept") for n in range(KEPT_PROMPTS)]
        asked[HARMED] = [prompt_of(max(lengths) // 2 + n, f"{self.name} harmed") for n in range(3 * self.sizes.damaged)]
        everything = [prompt for prompts in asked.values() for prompt in prompts]
        told = await self._all([self._said(self.alone.alone, prompt) for prompt in everything])
        known = {id(each.prompt): each for each in told if isinstance(each, Learned)}
        if reasons := Counter(each for each in told if isinstance(each, str)):
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
        other = sum(each.right.tokens != told.tokens for each, told in zip(known, plain, strict=True))
        self.page.verdict(f"{self.name}: answers that {adapter} changes", f"{other} of {len(known)}", "some", other > 0)

    async def _said(self, engine: Engine, prompt: Prompt) -> Learned | str:
        """A text where too little of it is sure, or there is no answer."""
        told, drafts = await self._counted(engine, lambda: self._ask(engine.url, prompt, likely=2))
        if told.error:
            return f"{told.error} {told.detail}".strip()
        right = Right(told.tokens, told.gaps, self.near)
        return Learned(prompt, right, drafts) if len(right.sure) >= SURE_MIN else "too little is sure"

    async def handed_over(self) -> None:
        """In each mode; then drafts of all of them."""
        ours: list[Drafts] = []
        theirs: list[Drafts] = []
        for mode in MODES:
            known = self.known[mode]
            told = await self._held(mode, known)
            for one, (answer, drafts) in zip(known, told, strict=True):
                if answer.tokens == one.right.tokens:
                    ours.append(drafts)
                    theirs.append(one.drafts)
        if self.has_drafts:
            self._judge_drafts(ours, theirs, sum(len(self.known[mode]) for mode in MODES))

    def _judge_drafts(self, ours: Sequence[Drafts], theirs: Sequence[Drafts], requests: int) -> None:
        same, chance = alike(ours, theirs)
        row = (requests, len(ours), same, f"{chance:.0%}", rate(ours), rate(theirs))
        self.page.row(self.tables[1], self.name, *row)
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

    async def _held(self, mode: str, known: Sequence[Learned], what: str = "") -> list[tuple[Told, Drafts]]:
        told, tally, handed, computed = await self._asked(known, mode, what)
        if tally.wrong:
            await self._heard_again(known, told, tally, what or mode)
        ok = tally.right == len(known) > 0 and handed == len(known)
        bound = "all right, all handed over"
        if mode == "pull":  # of a prompt that came whole vLLM computes the last token, and may not count it
            ok = ok and isinstance(computed, int) and computed <= len(known)
            bound = f"{bound}, at most one token each"
        reached = f"{tally.right} of {len(known)} right, {handed} handed over, D computed {computed} of their tokens"
        self.page.verdict(f"{self.name}: {what or mode}", reached, bound, ok)
        return told

    async def _heard_again(
        self, known: Sequence[Learned], told: Sequence[tuple[Told, Drafts]], tally: Tally, what: str
    ) -> None:
        """A second opinion about each wrong answer: the engine alone computes that prompt anew, several times at once.
        What it then says too is its own doubt, not another KV: in 8 bits the last digit of a number decides what is
        kept of it."""
        for number, (one, (answer, _)) in enumerate(zip(known, told, strict=True)):
            length = len(one.right.sure)
            if answer.error or answer.late or answer.tokens[:length] == one.right.sure:
                continue
            salts = [{**self.asks, "cache_salt": f"{self.name} {what} {number} {salt}"} for salt in range(OPINIONS)]
            url = self.alone.alone.url
            opinions = await asyncio.gather(*(self._ask(url, one.prompt, more=salted) for salted in salts))
            alike = sum(each.tokens[:length] == answer.tokens[:length] for each in opinions)
            changed = sum(each.tokens[:length] != one.right.sure for each in opinions)
            said = f"{alike} of {OPINIONS} times the engine alone says it too, {changed} times other than before"
            self.page.note(f"{self.name}: {what}: prompt {number}, {len(one.prompt)} tokens: a wrong answer; {said}")
            self.say(f"{self.name}: {what}: a wrong answer; {said}")
            if alike:
                tally.wrong, tally.right = tally.wrong - 1, tally.right + 1

    async def _asked(
        self, known: Sequence[Learned], mode: str, what: str = ""
    ) -> tuple[list[tuple[Told, Drafts]], Tally, int, int | str]:
        """What was told, how it was judged, how many were handed over, how many tokens D computed if it says so."""
        before = gpu_client.delivered(await self.pair.d.figures(self.session))

        async def one_of(number: int, prompt: Prompt) -> tuple[Told, Drafts]:
            request_id = f"{self.name}-{what or mode}-{number}"
            return await self._counted(self.pair.d, lambda: self._one(request_id, prompt, mode))

        told = await self._all([one_of(number, each.prompt) for number, each in enumerate(known)])
        tally = Tally()
        for one, (answer, _) in zip(known, told, strict=True):
            tally.count(answer, one.right.sure)
        handed = await gpu_client.delivered_since(self.session, self.pair.d, before, len(known))
        cached = [answer.cached for answer, _ in told]
        computed: int | str = "not told"
        if mode == "pull" and None not in cached:  # the router has D say what P had cached
            computed = sum(len(each.prompt) for each in known) - sum(each or 0 for each in cached)
        errors = ", ".join(f"{count} x {kind}" for kind, count in tally.errors.items()) or "0"
        errors += f", {tally.late} late" if tally.late else ""
        if detail := next((answer.detail for answer, _ in told if answer.detail), ""):
            self.page.note(f"{self.name}: {what or mode}: {detail}")
        self.page.row(self.tables[0], self.name, what or mode, tally.right, tally.wrong, errors, handed, computed)
        counts = f"{tally.right} right, {tally.wrong} wrong, {errors} errors, {handed} handed over"
        self.say(f"{self.name}: {what or mode}: {counts}, D computed {computed}")
        return told, tally, handed, computed

    async def offloaded(self) -> None:
        """What P and D lose from their own caches comes back from the other connector, and is right."""
        known = self.known[KEPT]
        await self._held("pull", known, "to be lost")
        for engine in (self.pair.d, self.pair.p):
            for number in range(FLUSHES):
                await self._ask(engine.url, prompt_of(20, f"{self.name} flush {number}"))
            await forget(self.session, engine)
            before = await self._figure(engine, EXTERNAL)
            tally = Tally()
            for each in known:
                tally.count(await self._ask(engine.url, each.prompt), each.right.sure)
            wanted = sum(len(each.prompt) for each in known)
            hits = await self._risen(engine, EXTERNAL, before, int(KEPT_SHARE * wanted))
            reached = f"{tally.right} of {len(known)} right, {hits} of {wanted} tokens from it"
            ok = tally.right == len(known) > 0 and hits >= KEPT_SHARE * wanted
            what = f"{self.name}: {engine.name} has lost its cache, the other connector has it"
            self.page.verdict(what, reached, f"all right, {KEPT_SHARE:.0%} of the tokens", ok)
            self.say(f"{what}: {reached}")

    async def rest(self) -> None:
        calm = await gpu_client.at_rest(self.session, [self.pair.p, self.pair.d])
        self.page.verdict(f"{self.name}: nothing held afterwards", "yes" if calm else "no", "yes", calm)

    async def damaged(self) -> None:
        """The control: with two blocks, or the halves of a state, in each other's place answers must be wrong. Not all:
        where a model has few words another KV may lead to the same ones."""
        harmed = self.known[HARMED]
        self.pair.flag.touch()
        try:
            _, tally, _, _ = await self._asked(harmed, "pull", "control: misplaced")
        finally:
            self.pair.flag.unlink(missing_ok=True)
        seen = f"{tally.wrong} of {len(harmed)} seen"
        ok = 3 * tally.wrong >= len(harmed) > 0
        self.page.verdict(f"{self.name}: control: damage is seen", seen, "at least a third", ok)

    async def refused(self, field_name: str) -> None:
        """D takes nothing over and says by which field; it computes the prompts, and is right."""
        tally, prompts = Tally(), [prompt_of(REFUSED_TOKENS + n, self.name) for n in range(REFUSED_PROMPTS)]
        for number, prompt in enumerate(prompts):
            told = await self._one(f"{self.name}-{number}", prompt, "pull")
            salted = {**self.asks, "cache_salt": "alone"}
            said = await ask(
                self.session, self.pair.d.url, prompt, deadline_s=DEADLINE_S, tokens=self.sizes.answer_tokens, likely=2,
                more=salted,
            )  # fmt: skip
            tally.count(told, Right(said.tokens, said.gaps, self.near).sure or ("nothing is sure",))
        found = await self._ends(len(prompts))
        self.page.row(
            self.tables[0], self.name, "refused", tally.right, tally.wrong, tally.errors.total(), found, "all"
        )
        reached = f"{tally.right} of {len(prompts)} as D says alone, ends {found}"
        ok = tally.right == len(prompts) and set(found) == {"incompatible"}
        self.page.verdict(f"{self.name}: nothing is taken over", reached, "all right, all incompatible", ok)
        is_named = field_name in _end_of(self.pair.d.log)
        told_so = "yes" if is_named else f"no {field_name} in {self.pair.d.log.name}"
        self.page.verdict(f"{self.name}: D's log names {field_name}", told_so, "yes", is_named)
        self.say(f"{self.name}: {reached}, {field_name} named: {told_so}")

    async def _ends(self, wanted: int) -> dict[str, int]:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LAG_S
        while True:
            found = gpu_client.ends(await self.pair.d.figures(self.session))
            if sum(found.values()) >= wanted or loop.time() > deadline:
                return found
            await asyncio.sleep(LOOK_S)

    async def _all(self, asked: Sequence[Awaitable[T]]) -> list[T]:
        """One after the other where drafts are counted, else as many at once as may be."""
        room = asyncio.Semaphore(1 if self.has_drafts else self.sizes.at_once)

        async def one(each: Awaitable[T]) -> T:
            async with room:
                return await each

        return await asyncio.gather(*map(one, asked))

    async def _counted(self, engine: Engine, asking: Callable[[], Awaitable[Told]]) -> tuple[Told, Drafts]:
        if not self.has_drafts:
            return await asking(), Drafts()
        before = await engine.figures(self.session) or {}
        told = await asking()
        after = await self._settled(engine, before.get(GENERATED, 0.0) + len(told.tokens))
        accepted, drafted = (int(after.get(name, 0.0) - before.get(name, 0.0)) for name in (ACCEPTED, DRAFTED))
        return told, Drafts(accepted, drafted)

    async def _settled(self, engine: Engine, generated: float) -> Figures:
        """Its figures, once they have so many tokens; waits, bounded."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LAG_S
        while True:
            found = await engine.figures(self.session) or {}
            if found.get(GENERATED, 0.0) >= generated or loop.time() > deadline:
                return found
            await asyncio.sleep(LOOK_S)

    async def _figure(self, engine: Engine, name: str) -> int:
        return int((await engine.figures(self.session) or {}).get(name, 0.0))

    async def _risen(self, engine: Engine, name: str, before: int, wanted: int) -> int:
        """By how much; waits, bounded, until it is `wanted`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LAG_S
        while True:
            found = await self._figure(engine, name) - before
            if found >= wanted or loop.time() > deadline:
                return found
            await asyncio.sleep(LOOK_S)

    async def _ask(self, url: str, prompt: Prompt, *, likely: int = 1, more: Mapping[str, str] | None = None) -> Told:
        tokens = self.sizes.answer_tokens
        body = self.asks if more is None else more
        return await ask(self.session, url, prompt, deadline_s=DEADLINE_S, tokens=tokens, likely=likely, more=body)

    async def _one(self, request_id: str, prompt: Prompt, mode: str) -> Told:
        """Both legs by the client's own hand, or through the router."""
        tokens, more = self.sizes.answer_tokens, self.asks
        if mode == "pull":
            return await both_legs(
                self.session, self.pair.p.url, self.pair.d.url, prompt, deadline_s=DEADLINE_S, request_id=request_id,
                tokens=tokens, more=more,
            )  # fmt: skip
        return await ask(
            self.session, self.pair.router.url, prompt, deadline_s=DEADLINE_S, tokens=tokens, request_id=request_id,
            headers={MODE_HEADER: mode}, more=more,
        )  # fmt: skip


def _end_of(log: Path) -> str:
    """The last part of a log; "" if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - LOG_BYTES_MAX))
            return file.read().decode(errors="replace")
    except OSError:
        return ""
