"""One pair of a part under examination: prompts that are asked in every mode, beside what one engine alone says.

Laws: an answer is compared as far as the one engine is sure (`rig.oracle`), and a round says how many prompts came from
P by D's own counter: who judges it demands that all did. The comparison is itself tried: while `misplaced`, blocks or
the halves of a state are filled with others, and answers must be wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import aiohttp

from kvbaton.router.openai_api import MODE_HEADER
from kvbaton_proof.gpu_test.sizes import Sizes
from kvbaton_proof.rig import meters
from kvbaton_proof.rig.client import Answer, Prompt, Tally, ask, both_legs
from kvbaton_proof.rig.record import Page, Table
from kvbaton_proof.rig.servers import Group, Say

MODES = ("pull", "stream", "push")
DEADLINE_S = 90.0
HEAD = ("right", "wrong", "errors", "handed over", "tokens of prompts that D computed")
CONTROL = "control: misplaced"


@dataclass(slots=True)
class Round:
    """What came of prompts that were asked together, in their order."""

    answers: list[Answer]
    tally: Tally
    handed: int  # prompts that came from P
    computed: int | str  # tokens of prompts that D computed, where it says so

    @property
    def errors(self) -> str:
        kinds = ", ".join(f"{count} x {kind}" for kind, count in self.tally.errors.items()) or "0"
        return f"{kinds}, {self.tally.late} late" if self.tally.late else kinds

    def cells(self) -> tuple[object, ...]:
        return self.tally.right, self.tally.wrong, self.errors, self.handed, self.computed

    def __str__(self) -> str:
        counts = f"{self.tally.right} right, {self.tally.wrong} wrong, {self.errors} errors, {self.handed} handed over"
        return f"{counts}, D computed {self.computed}"


@dataclass(slots=True)
class Trial:
    """A pair, and where what is seen of it goes."""

    sizes: Sizes
    pair: Group
    session: aiohttp.ClientSession
    page: Page
    table: Table
    say: Say
    named: tuple[str, ...]  # the first cells of its rows; the first of them names it in verdicts
    more: Mapping[str, str] = field(default_factory=dict)  # in the body of each request
    at_once: int = 16

    @property
    def name(self) -> str:
        return self.named[0]

    async def one(self, request_id: str, prompt: Prompt, mode: str, tokens: int) -> Answer:
        """Both legs by the client's own hand, or through the router."""
        if mode == "pull":
            return await both_legs(
                self.session, self.pair.p.url, self.pair.d.url, prompt, deadline_s=DEADLINE_S, request_id=request_id,
                tokens=tokens, more=self.more,
            )  # fmt: skip
        return await ask(
            self.session, self.pair.router.url, prompt, deadline_s=DEADLINE_S, tokens=tokens, request_id=request_id,
            headers={MODE_HEADER: mode}, more=self.more,
        )  # fmt: skip

    async def round(
        self, prompts: Sequence[Prompt], sure: Sequence[Sequence[str]], mode: str, what: str = "", tokens: int = 0
    ) -> Round:
        """As many at once as may be; the row is written. `sure`: the beginning of each right answer."""
        what, tokens, connector = what or mode, tokens or self.sizes.answer_tokens, self.pair.spec.connector
        before = await meters.delivered(self.session, self.pair.d, connector)
        room = asyncio.Semaphore(self.at_once)

        async def one(number: int, prompt: Prompt) -> Answer:
            async with room:
                return await self.one(f"{self.pair.name}-{what}-{number}", prompt, mode, tokens)

        answers = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(prompts)))
        tally = Tally()
        for answer, beginning in zip(answers, sure, strict=True):
            tally.count(answer, beginning)
        handed = await meters.delivered_since(self.session, self.pair.d, before, len(prompts), connector)
        cached = [answer.cached for answer in answers]
        computed: int | str = "not told"
        if mode == "pull" and None not in cached:  # the router has D say what P had cached
            computed = sum(map(len, prompts)) - sum(count or 0 for count in cached)
        result = Round(answers, tally, handed, computed)
        if detail := next((answer.detail for answer in answers if answer.detail), ""):
            self.page.note(f"{self.name}: {what}: {detail}")
        self.page.row(self.table, *self.named, what, *result.cells())
        self.say(f"{self.name}: {what}: {result}")
        return result

    async def rest(self) -> None:
        calm = await meters.at_rest([self.pair.p, self.pair.d])
        self.page.verdict(f"{self.name}: nothing held afterwards", "yes" if calm else "no", "yes", calm)

    @contextlib.contextmanager
    def misplaced(self) -> Iterator[None]:
        """D's blocks are filled with other blocks while the context lasts."""
        self.pair.flag.touch()
        try:
            yield
        finally:
            self.pair.flag.unlink(missing_ok=True)

    async def control(self, prompts: Sequence[Prompt], sure: Sequence[Sequence[str]], share: float = 1.0) -> None:
        """Damage must be seen: in all answers, or where other KV may lead to the same words in a share of them."""
        with self.misplaced():
            wrong = (await self.round(prompts, sure, "pull", CONTROL)).tally.wrong
        bound = "all" if share == 1.0 else f"at least {share:.0%}"
        ok = wrong >= share * len(prompts) > 0
        self.page.verdict(f"{self.name}: control: damage is seen", f"{wrong} of {len(prompts)} seen", bound, ok)


def not_served(page: Page, group: Group, name: str = "") -> None:
    """The verdict over servers that are not there, and why."""
    page.verdict(f"{name or group.name}: served", "no", "yes", False)
    page.note(f"{name or group.name}: {group.problem}\nlogs/{group.name}*.log have the rest")
