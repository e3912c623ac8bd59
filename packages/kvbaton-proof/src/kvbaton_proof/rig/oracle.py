"""The right answers, as one engine gives them, as far as it is sure of them; and what can be known of a wrong one.

Another batch changes the last digits of every number, in float32 too. Where the two likeliest tokens are nearly as
likely that may change the token, and from there on the whole answer: which says nothing about KV.

Laws: an answer is compared up to the first token that was less than `MARGIN` likelier than the next, and no further; a
prompt of which too little can be compared is not asked. An answer that differs before is wrong, whatever the reason
may be. Of each, as many as `DOUBTS_MAX`, is kept what tells one reason from another: where it differs, how sure the
engine was there, whether the prompt's KV came from P, and what the engine alone says when it is asked again right away
in a batch as large.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
import msgspec

from kvbaton_proof.rig.client import TOKENS, Answer, Prompt, ask
from kvbaton_proof.rig.record import Page

MARGIN = 0.02  # nats
SURE_MIN = 4  # tokens
DOUBTS_MAX = 12
LEARN_S, AGAIN_S = 120.0, 60.0
HEAD = (
    "who", "during", "prompt", "request", "differs at token", "answer", "one engine", "its margin there, nats",
    "prompt's KV", "one engine, asked again",
)  # fmt: skip


class Right(msgspec.Struct, frozen=True):
    """What one engine answered."""

    tokens: tuple[str, ...]
    gaps: tuple[float, ...]
    margin: float = MARGIN

    @property
    def sure(self) -> tuple[str, ...]:
        """The tokens before the first near tie."""
        near = (at for at, gap in enumerate(self.gaps) if gap < self.margin)
        return self.tokens[: next(near, len(self.gaps))]

    @property
    def is_whole(self) -> bool:
        return len(self.sure) == len(self.tokens)


class Doubt(msgspec.Struct, kw_only=True):
    """A wrong answer. `cached`: tokens of its prompt that D did not compute; None: it does not say."""

    who: str
    during: str
    prompt: int
    tokens: int  # of the prompt
    request_id: str
    at: int  # the first token that differs
    got: str
    expected: str
    gap: float | None
    cached: int | None
    answer: tuple[str, ...]
    again: str = "not asked"

    def cells(self) -> tuple[str, ...]:
        gap = "not told" if self.gap is None else f"{self.gap:.4f}"
        source = "not told" if self.cached is None else f"{self.cached} of {self.tokens} tokens not computed by D"
        shown = (f"`{token}`" for token in (self.got, self.expected))
        return (
            self.who, self.during, f"{self.prompt} ({self.tokens} tokens)", self.request_id, str(self.at), *shown, gap,
            source, self.again,
        )  # fmt: skip


def doubted(who: str, during: str, number: int, prompt: Prompt, answer: Answer, right: Right) -> Doubt:
    """What is known of a wrong answer at once; pure."""
    at = _first_difference(answer.tokens, right.tokens)
    return Doubt(
        who=who, during=during, prompt=number, tokens=len(prompt), request_id=answer.request_id, at=at,
        got=_at(answer.tokens, at), expected=_at(right.tokens, at),
        gap=right.gaps[at] if at < len(right.gaps) else None, cached=answer.cached, answer=answer.tokens,
    )  # fmt: skip


def _at(tokens: Sequence[str], at: int) -> str:
    return tokens[at] if at < len(tokens) else "(none)"


def _first_difference(one: Sequence[str], other: Sequence[str]) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


async def learned(
    session: aiohttp.ClientSession,
    url: str,
    prompts: Sequence[Prompt],
    at_once: int,
    tokens: int = TOKENS,
    margin: float = MARGIN,
    deadline_s: float = LEARN_S,
) -> list[Right | str]:
    """One engine's answers; a text in place of one that did not come."""
    room = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> Right | str:
        async with room:
            answer = await ask(session, url, prompt, deadline_s=deadline_s, tokens=tokens, likely=2)
        return answer.error or Right(answer.tokens, answer.gaps, margin)

    return await asyncio.gather(*map(one, prompts))


def chosen(found: Sequence[Right | str], wanted: int) -> list[int]:
    """Which prompts to ask: those that can be compared whole, in their order, then those that can be furthest; `wanted`
    of them, some of them twice if there are too few. ValueError if there is none.
    """
    usable = [number for number, each in enumerate(found) if isinstance(each, Right) and len(each.sure) >= SURE_MIN]
    if not usable:
        raise ValueError(f"none of {len(found)} prompts has {SURE_MIN} tokens that are sure; the first: {found[:1]}")

    def order(number: int) -> tuple[bool, int]:
        right = found[number]
        assert isinstance(right, Right)
        return not right.is_whole, 0 if right.is_whole else -len(right.sure)

    usable.sort(key=order)
    return [usable[number % len(usable)] for number in range(wanted)]


async def again(
    session: aiohttp.ClientSession, url: str, prompt: Prompt, right: Right, others: Sequence[Prompt], tokens: int
) -> str:
    """A second opinion of the engine that said what is right, while it answers others; in words."""
    asked = [prompt, *others]
    answer, *_ = await asyncio.gather(
        *(ask(session, url, each, deadline_s=AGAIN_S, tokens=tokens, likely=2) for each in asked)
    )
    crowd = f"among {len(asked)} at once"
    if answer.error:
        return f"{answer.error}, {crowd}"
    if answer.tokens == right.tokens:
        return f"as before, {crowd}"
    at = _first_difference(answer.tokens, right.tokens)
    return f"another answer too, from token {at} (`{_at(answer.tokens, at)}`), {crowd}"


@dataclass(slots=True)
class Doubts:
    """The wrong answers of one pair, looked into; no more than `DOUBTS_MAX` of them."""

    who: str
    session: aiohttp.ClientSession
    alone_url: str  # of the engine that said what is right
    found: list[Doubt] = field(default_factory=list)
    more: int = 0  # that were not looked into

    async def look_into(
        self,
        during: str,
        number: int,
        prompt: Prompt,
        answer: Answer,
        right: Right,
        others: Sequence[Prompt],
        tokens: int,
    ) -> None:
        if len(self.found) >= DOUBTS_MAX:
            self.more += 1
            return
        doubt = doubted(self.who, during, number, prompt, answer, right)
        self.found.append(doubt)
        doubt.again = await again(self.session, self.alone_url, prompt, right, others, tokens)


def keep(page: Page, doubts: Doubts) -> None:
    """In the JSON, as soon as they are known: a run that is killed has them."""
    page.figure(f"{doubts.who}: wrong answers", msgspec.to_builtins(doubts.found))


def tell(page: Page, all_doubts: Sequence[Doubts]) -> None:
    """All wrong answers, as a table."""
    found = [doubt for each in all_doubts for doubt in each.found]
    more = sum(each.more for each in all_doubts)
    if found:
        table = page.table("Wrong answers", HEAD)
        for doubt in found:
            page.row(table, *doubt.cells())
    if more:
        page.note(f"{more} more wrong answers were counted and not looked into")


def counted(found: Sequence[Right], name: str) -> str:
    """How much can be compared, for the page."""
    whole = sum(each.is_whole for each in found)
    tokens, sure = sum(len(each.tokens) for each in found), sum(len(each.sure) for each in found)
    return (
        f"{name}: of {len(found)} answers of one engine {whole} are compared whole, the others up to the first token "
        f"that was less than {MARGIN} nats likelier than the next: {sure} of {tokens} tokens"
    )
