"""Long streams of all kinds, kept open while members are hurt, and what became of each.

Laws: each stream is judged, once, when it has ended or when its time is over. Who was hurt is told to this load: it
knows which streams were cut: those that had begun at that D, as far as a client can know.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvbaton.api import sse
from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.router.openai_api import MODE_HEADER, PAIR_HEADER
from kvbaton_proof.chaos.judged_request import Board, Ended, Verdict
from kvbaton_proof.chaos.streams.stream_judge import BAD, Fate, Right, judge
from kvbaton_proof.chaos.streams.stream_reader import Choice, StreamReader, whole
from kvbaton_proof.rig.client import percentile

LEARN_AT_ONCE = 16
LEARN_S = 120.0
AFTER_ERROR_S = 0.5
GONE_PART, GONE_S = 12, 8.0
"""Of so many clients one hangs up, at any moment of these: also while its stream moves."""
GAPS_MAX = 100_000
SAID_MAX = 20
FAILURES = BAD | {Fate.LATE}
POLL_S = 0.05
STAYING_PART = 4
"""What cannot go on is so much shorter: a D that drains waits for it."""


class Kind(msgspec.Struct, frozen=True):
    """One way to ask for a stream. `stops`: at a text of its own answer, so that the stream ends within it."""

    name: str
    api: BodyKind = BodyKind.COMPLETION
    fields: Mapping[str, Any] = {}
    stops: bool = False
    goes_on: bool = True  # when it is cut
    is_one_text: bool = True  # else nobody can know what is right of it but its length
    modes: tuple[Mode, ...] = tuple(Mode)


SEEDED: Mapping[str, Any] = {"temperature": 0.9, "seed": 11}
USAGE: Mapping[str, Any] = {"stream_options": {"include_usage": True}}
LIMIT: Mapping[BodyKind, str] = {BodyKind.RESPONSES: "max_output_tokens"}

EMBEDDED: tuple[Kind, ...] = (
    Kind("greedy", fields={"temperature": 0, **USAGE}),
    Kind("seeded", fields=SEEDED),
    Kind("stop text", fields=SEEDED, stops=True),
    Kind("log probabilities", fields={**SEEDED, "logprobs": 2}),
    Kind("two choices", fields={**SEEDED, "n": 2, **USAGE}),
    Kind("token ids", fields={**SEEDED, "return_token_ids": True}),
    Kind("no seed", fields={"temperature": 0.9}, is_one_text=False),
    Kind("seed forbidden", fields={"temperature": 0.9, "seed": None}, is_one_text=False),
    Kind("chat", BodyKind.CHAT, {"temperature": 0, **USAGE}),
    Kind("chat, log probabilities", BodyKind.CHAT, {**SEEDED, "logprobs": True, "top_logprobs": 2}),
    Kind("chat, stop text", BodyKind.CHAT, SEEDED, stops=True),
    Kind("responses", BodyKind.RESPONSES, SEEDED, goes_on=False),
    Kind("messages", BodyKind.MESSAGES, {"temperature": 0}, goes_on=False),
)  # fmt: skip
VLLM: tuple[Kind, ...] = (
    Kind("greedy", fields={"temperature": 0, **USAGE}),
    Kind("log probabilities", fields={"temperature": 0, "logprobs": 1, **USAGE}),
    Kind("stop text", fields={"temperature": 0}, stops=True),
    Kind("token ids", fields={"temperature": 0, "return_token_ids": True}),
    Kind("chat", BodyKind.CHAT, {"temperature": 0, **USAGE}),
    Kind("seeded", fields=SEEDED, goes_on=False),
    Kind("penalties", fields={"temperature": 0, "presence_penalty": 1.2, "repetition_penalty": 1.1}, goes_on=False),
)  # fmt: skip
"""What vLLM's model runner V1 may go on with, greedy without penalties, and some that it may not."""


class Asked(msgspec.Struct, frozen=True):
    """One stream to ask for, and what is right of it."""

    kind: Kind
    body: dict[str, Any]
    right: Right


def body_of(kind: Kind, text: str, tokens: int) -> dict[str, Any]:
    """Without `stream`, and to go on to its limit."""
    said: dict[str, Any]
    if kind.api is BodyKind.COMPLETION:
        said = {"prompt": text}
    elif kind.api is BodyKind.RESPONSES:
        said = {"input": text}
    else:
        said = {"messages": [{"role": "user", "content": text}]}
    return {**said, LIMIT.get(kind.api, "max_tokens"): tokens, "ignore_eos": True, **kind.fields}


async def learned(
    session: aiohttp.ClientSession, url: str, headers: Mapping[str, str], kinds: Sequence[Kind], texts: Sequence[str],
    tokens: int, margin: float = 0.0,
) -> list[Asked]:  # fmt: skip
    """Every kind of every text, and what one engine answers to it at its own door, where nothing is handed over.

    With a `margin`, texts are compared up to the first token that was less than that likelier than the next.
    """
    room = asyncio.Semaphore(LEARN_AT_ONCE)

    async def whole_of(kind: Kind, body: Mapping[str, Any]) -> Any:
        said = {name: value for name, value in body.items() if name != "stream_options"}  # of streams alone
        call = session.post(url + kind.api.value, json=said, headers=headers)
        async with room, asyncio.timeout(LEARN_S), call as answer:
            told = await answer.json(content_type=None)
            if answer.status != 200:
                raise RuntimeError(f"the right answer of {kind.name}: status {answer.status}: {str(told)[:200]}")
            return told

    async def one(kind: Kind, text: str, number: int) -> Asked:
        body = body_of(kind, text, tokens if kind.goes_on else tokens // STAYING_PART)
        told = await whole_of(kind, body)
        if kind.stops:
            found = whole(kind.api, told)[0][0].text
            at = len(found) // 3 + number * 7 % max(1, len(found) // 2)
            body["stop_sequences" if kind.api is BodyKind.MESSAGES else "stop"] = [found[at : at + 5]]
            told = await whole_of(kind, body)
        choices, usage = whole(kind.api, told)
        sure = await sure_chars(kind, body) if margin else None
        return Asked(kind, body, Right(choices, usage, sure, kind.is_one_text))

    async def sure_chars(kind: Kind, body: Mapping[str, Any]) -> int:
        more = {"logprobs": 2} if kind.api is BodyKind.COMPLETION else {"logprobs": True, "top_logprobs": 2}
        return sure_of(whole(kind.api, await whole_of(kind, {**body, **more}))[0][0], margin)

    return await asyncio.gather(*(one(kind, text, n) for n, text in enumerate(texts) for kind in kinds))


def sure_of(choice: Choice, margin: float) -> int:
    """Characters before the first near tie."""
    count = 0
    for each in choice.logprobs:
        text, top = (each[0], each[2].values()) if isinstance(each, list) else (each["token"], _top(each))
        best = sorted(top, reverse=True)
        if len(best) < 2 or best[0] - best[1] < margin:
            break
        count += len(text)
    return min(count, len(choice.text))


def _top(each: Mapping[str, Any]) -> list[float]:
    return [one["logprob"] for one in each["top_logprobs"]]


def moves_of(stats: Mapping[str, Any]) -> dict[str, int]:
    """Streams that went on at another D, by reason, and those that could not, as the router counts them."""
    failed = {f"not, {reason}": count for reason, count in stats.get("moves_failed_total", {}).items()}
    return {**stats.get("moves_total", {}), **failed}


class Counts(msgspec.Struct, frozen=True):
    """What became of all streams. `cut`: streams under way at a D when it was hurt; `cuts`: how often that happened."""

    streams: int
    cut: int
    cuts: int
    fates: Mapping[str, int]
    gap_p50_s: float | None = None  # the longest that a stream was silent after a cut
    gap_p99_s: float | None = None
    prefill_p50_s: float | None = None  # the same D's, meanwhile: a prompt and half of an answer, computed anew
    by_kind: Mapping[str, Mapping[str, int]] = {}
    ends: Mapping[str, int] = {}  # events that ended those that could not go on
    moves: Mapping[str, int] = {}  # as the router counts them, by reason
    must_go_on: bool = True  # each that is cut, but for kinds that cannot

    @property
    def ok(self) -> bool:
        return not any(self.fates[fate] for fate in (FAILURES | {Fate.LOST} if self.must_go_on else FAILURES))


@dataclass(slots=True, eq=False)
class Flow:
    """One stream under way."""

    asked: Asked
    where: set[str] = field(default_factory=set)  # its D's, as far as a client knows
    told_at: float = 0.0  # when it last had news; 0: none yet
    gap_s: float = 0.0  # the longest without news since it was cut: what D said before may still be on its way
    cuts: int = 0
    is_hurt: bool = False  # its D was, whether or not it had told anything


@dataclass(slots=True)
class StreamBoard:
    """All streams of a run."""

    fates: Counter[Fate] = field(default_factory=Counter)
    by_kind: dict[str, Counter[str]] = field(default_factory=dict)
    ends: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    cuts: int = 0
    gaps: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_MAX))
    prefills: deque[float] = field(default_factory=lambda: deque(maxlen=GAPS_MAX))
    said: list[str] = field(default_factory=list)
    flows: set[Flow] = field(default_factory=set)
    must_go_on: bool = True

    def hurt(self, name: str, others: Sequence[str]) -> int:
        """A D is hurt from now on, and `others` are not: how many streams that cuts."""
        found = 0
        for flow in self.flows:
            if name not in flow.where:
                continue
            flow.is_hurt = True  # of what is on its way from a D, something may yet be told
            if not flow.told_at:
                continue
            found += 1
            self.cut += not flow.cuts
            self._keep_gap(flow)
            flow.cuts += 1
            flow.where = {*(flow.where - {name}), *(others if len(flow.where) == 1 else ())}
        self.cuts += found
        return found

    def at(self, name: str) -> int:
        """Streams that flow at a D."""
        return sum(name in flow.where and bool(flow.told_at) for flow in self.flows)

    def told(self, flow: Flow, now: float) -> None:
        """A stream told some text."""
        if flow.cuts:
            flow.gap_s = max(flow.gap_s, now - flow.told_at)
        flow.told_at = now

    def _keep_gap(self, flow: Flow) -> None:
        if flow.gap_s:
            self.gaps.append(flow.gap_s)
        flow.gap_s = 0.0

    def end(self, flow: Flow, fate: Fate, said: str) -> None:
        self.fates[fate] += 1
        self._keep_gap(flow)
        row = self.by_kind.setdefault(flow.asked.kind.name, Counter())
        row["streams"] += 1
        row["cut"] += bool(flow.cuts)
        row[fate.value] += 1
        if fate is Fate.ENDED:
            self.ends[said] += 1
        elif (fate in FAILURES or (fate is Fate.LOST and self.must_go_on)) and len(self.said) < SAID_MAX:
            self.said.append(f"{fate}: {flow.asked.kind.name}, cut {flow.cuts} times: {said}")

    def counts(self, moves: Mapping[str, int]) -> Counts:
        middle, most = (round(percentile(self.gaps, part), 3) for part in (50, 99)) if self.gaps else (None, None)
        fates = {str(fate): self.fates[fate] for fate in Fate}
        return Counts(
            streams=self.fates.total(), cut=self.cut, cuts=self.cuts, fates=fates,
            gap_p50_s=middle, gap_p99_s=most,
            prefill_p50_s=round(percentile(self.prefills, 50), 3) if self.prefills else None,
            by_kind={name: dict(row) for name, row in sorted(self.by_kind.items())}, ends=dict(self.ends), moves=moves,
            must_go_on=self.must_go_on,
        )  # fmt: skip


class StreamLoad:
    """The clients: as many streams as they are, each begun when the one before has ended."""

    def __init__(
        self, url: str, asked: Sequence[Asked], count: int, board: Board, late_s: float, rng: random.Random
    ) -> None:
        self.board = StreamBoard()
        self._url = url
        self._asked = asked
        self.count = count
        self._rows = board
        self._late_s = late_s
        self._rng = rng
        self._next: Iterator[int] = itertools.count()
        self._is_over = asyncio.Event()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Streams from now on; after the context all have ended."""
        timeout = aiohttp.ClientTimeout(None)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            tasks = [asyncio.create_task(self._client(session)) for _ in range(self.count)]
            try:
                yield
                self._is_over.set()
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def flowing(self, name: str, least: int, within_s: float) -> int:
        """Wait until so many streams flow at a D; how many do."""
        clock = asyncio.get_running_loop().time
        until = clock() + within_s
        while (count := self.board.at(name)) < least and clock() < until:
            await asyncio.sleep(POLL_S)
        return count

    async def _client(self, session: aiohttp.ClientSession) -> None:
        while not self._is_over.is_set():
            number = next(self._next)
            flow = Flow(self._asked[number % len(self._asked)])
            gone_s = self._rng.uniform(0, GONE_S) if number % GONE_PART == GONE_PART - 1 else self._late_s
            fate = await self._one(session, flow, f"s{number}", gone_s)
            if fate is not Fate.RIGHT:
                await asyncio.sleep(AFTER_ERROR_S)

    async def _one(self, session: aiohttp.ClientSession, flow: Flow, salt: str, late_s: float) -> Fate:
        """Ask, read, judge, and put it on both boards."""
        clock = asyncio.get_running_loop().time
        kind = flow.asked.kind
        reader = StreamReader(kind.api, ids_asked="return_token_ids" in flow.asked.body)
        body = {**flow.asked.body, "stream": True, "cache_salt": salt}
        headers = {MODE_HEADER: str(self._rng.choice(kind.modes))}
        began_at, pair, how, is_refused = clock(), "", "", False
        self.board.flows.add(flow)
        try:
            async with (
                asyncio.timeout(late_s),
                session.post(self._url + kind.api.value, json=body, headers=headers) as response,
            ):
                pair = response.headers.get(PAIR_HEADER, "")
                flow.where = {each.partition("/")[2] for each in pair.split(",") if "/" in each}
                is_refused = response.status != 200
                if is_refused:
                    how = f"status {response.status}: {(await response.text())[:160]}"
                else:
                    await self._read(response, reader, flow)
        except TimeoutError:
            how = "late"
        except (aiohttp.ClientError, OSError) as error:
            how = type(error).__name__
        finally:
            self.board.flows.discard(flow)
        was = {"was_cut": flow.is_hurt, "goes_on": kind.goes_on, "is_refused": is_refused}
        fate, said = judge(reader, flow.asked.right, **was)
        if how == "late" and late_s < self._late_s and not reader.problems:
            self.board.end(flow, Fate.GONE, "")
            return Fate.GONE
        if how == "late":
            fate, said = Fate.LATE, f"not over after {self._late_s:g} s; {said}"
        self.board.end(flow, fate, f"{how} {said}".strip())
        verdict = Verdict.LATE if fate is Fate.LATE else Verdict.WRONG if fate in BAD else Verdict.ERROR
        verdict = Verdict.RIGHT if fate is Fate.RIGHT else verdict
        what = f"a stream, {kind.name}, {pair}: {how} {said}"
        self._rows.note(Ended(began_at, clock(), verdict, f"stream:{fate}:{reader.error or how}"[:80], pair), what)
        return fate

    async def _read(self, response: aiohttp.ClientResponse, reader: StreamReader, flow: Flow) -> None:
        clock = asyncio.get_running_loop().time
        async for line in response.content:
            for payload in sse.payloads(line):
                if reader.feed(payload):
                    self.board.told(flow, clock())
