"""One request and its judgement: the answer against the one right answer, within the time that it has.

Law: 200 with another text is wrong, and so is a stream that has begun otherwise; everything else that is told, or a
connection that ends, is an error; what is not over in its time is late.

The outcome of every request: one line each, from which rows and totals are counted.

Law: a request is counted once, when it is over or when its time is; what nobody expected of it does not count it.
"""

from __future__ import annotations

import asyncio
import enum
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

from kvbaton.api import sse
from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.router.openai_api import MODE_HEADER, PAIR_HEADER

LINES_MAX = 1 << 20
WRONGS_MAX = 20
"""Kept word for word; all are counted."""


class Verdict(enum.StrEnum):
    RIGHT = "right"
    ERROR = "error"  # told so, with a status, an event or by a closed connection
    WRONG = "wrong"
    LATE = "late"


class Ended(msgspec.Struct, frozen=True):
    """One request. Instants on the conductor's clock."""

    began_at: float
    ended_at: float
    verdict: Verdict
    kind: str = ""  # of an error
    pair: str = ""  # who answered, P/D, where the router said so


class Counts(msgspec.Struct, frozen=True):
    requests: int
    right: int
    errors: int
    wrong: int
    late: int


@dataclass(slots=True)
class Board:
    """All requests of a run. Totals never forget; lines are kept up to a bound, for the rows."""

    totals: Counter[Verdict] = field(default_factory=Counter)
    kinds: Counter[str] = field(default_factory=Counter)
    wrongs: list[str] = field(default_factory=list)
    lates: list[str] = field(default_factory=list)
    slowest_s: float = 0.0
    lines: deque[Ended] = field(default_factory=lambda: deque(maxlen=LINES_MAX))

    def note(self, ended: Ended, what: str = "") -> None:
        self.totals[ended.verdict] += 1
        self.lines.append(ended)
        self.slowest_s = max(self.slowest_s, ended.ended_at - ended.began_at)
        if ended.verdict is Verdict.ERROR:
            self.kinds[ended.kind] += 1
        elif ended.verdict is Verdict.WRONG and len(self.wrongs) < WRONGS_MAX:
            self.wrongs.append(what)
        elif ended.verdict is Verdict.LATE and len(self.lates) < WRONGS_MAX:
            self.lates.append(what)

    def counts(self) -> Counts:
        return _counts(self.totals)

    def between(self, begin: float, end: float) -> Counts:
        """The requests that ended in this time."""
        found: Counter[Verdict] = Counter()
        for line in reversed(self.lines):  # nearly in the order in which they ended: late ones are noted when it is so
            if line.ended_at < begin:
                break
            if line.ended_at <= end:
                found[line.verdict] += 1
        return _counts(found)

    def right_since(self, instant: float, who: str = "") -> float | None:
        """When the first right answer ended that began after `instant`; None: none yet.

        `who` has part in it: a member, or both ends of a link (p0-d1). The router has part in every one.
        """
        needed = {name for name in who.split("-") if name and name != "router"}
        ends = []
        for line in reversed(self.lines):
            if line.ended_at < instant:
                break
            is_it = line.verdict is Verdict.RIGHT and line.began_at >= instant
            if is_it and any(needed <= set(pair.split("/")) for pair in line.pair.split(",")):
                ends.append(line.ended_at)
        return min(ends, default=None)


def _counts(found: Counter[Verdict]) -> Counts:
    return Counts(
        sum(found.values()), found[Verdict.RIGHT], found[Verdict.ERROR], found[Verdict.WRONG], found[Verdict.LATE]
    )


CODE_CHARS_MAX = 40


class Prompt(msgspec.Struct, frozen=True):
    """A prompt and what one engine answers to it, in so many tokens."""

    text: str
    right: str
    max_tokens: int


class Way(msgspec.Struct, frozen=True):
    """How a prompt is asked."""

    url: str
    mode: Mode | None = Mode.PULL
    stream: bool = False
    salt: str = ""  # another one: nobody has its KV yet
    late_s: float = 30.0
    more: dict[str, Any] = {}  # further fields of the body
    headers: dict[str, str] = {}


class Found(msgspec.Struct, frozen=True):
    """What came back."""

    verdict: Verdict
    kind: str = ""
    pair: str = ""
    text: str = ""
    params: Any = None  # kv_transfer_params, where there were


async def ask(session: aiohttp.ClientSession, board: Board, prompt: Prompt, way: Way) -> Found:
    """Ask, judge, and put it on the board."""
    clock = asyncio.get_running_loop().time
    began_at = clock()
    try:
        async with asyncio.timeout(way.late_s):
            found = await _ask(session, prompt, way)
    except TimeoutError:
        found = Found(Verdict.LATE)
    said = f"{way.url} {way.mode} stream={way.stream} {len(prompt.text)} bytes {prompt.text[:24]!r} by {found.pair}"
    what = f"{said}: expected {prompt.right!r}, got {found.text!r} after {clock() - began_at:.1f} s"
    board.note(Ended(began_at, clock(), found.verdict, found.kind, found.pair), what)
    return found


def body_of(prompt: Prompt, way: Way) -> dict[str, Any]:
    body: dict[str, Any] = {"prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0}
    if way.stream:
        body["stream"] = True
    if way.salt:
        body["cache_salt"] = way.salt
    return body | way.more


async def _ask(session: aiohttp.ClientSession, prompt: Prompt, way: Way) -> Found:
    headers = way.headers | ({MODE_HEADER: str(way.mode)} if way.mode is not None else {})
    pair = ""
    parts: list[str] = []
    try:
        async with session.post(
            way.url + BodyKind.COMPLETION.value, json=body_of(prompt, way), headers=headers
        ) as response:
            pair = response.headers.get(PAIR_HEADER, "")
            if way.stream and response.status == 200:
                return await _streamed(response, prompt, pair, parts)
            data = await response.read()
    except (aiohttp.ClientError, OSError) as error:
        if not prompt.right.startswith("".join(parts)):
            return Found(Verdict.WRONG, pair=pair, text="".join(parts))
        return Found(Verdict.ERROR, f"closed:{type(error).__name__}", pair)
    if response.status != 200:
        return Found(Verdict.ERROR, f"{response.status}:{_code(data)}", pair)
    return judged(prompt, data, pair)


def judged(prompt: Prompt, data: bytes, pair: str = "") -> Found:
    """A whole answer with status 200."""
    try:
        told = msgspec.json.decode(data)
        text = str(told["choices"][0]["text"])
    except (msgspec.DecodeError, KeyError, IndexError, TypeError):
        return Found(Verdict.WRONG, pair=pair, text=data[:80].decode(errors="replace"))
    verdict = Verdict.RIGHT if text == prompt.right else Verdict.WRONG
    return Found(verdict, pair=pair, text=text, params=told.get("kv_transfer_params"))


async def _streamed(response: aiohttp.ClientResponse, prompt: Prompt, pair: str, parts: list[str]) -> Found:
    async for line in response.content:
        for payload in sse.payloads(line):
            if payload == b"[DONE]":
                text = "".join(parts)
                return Found(Verdict.RIGHT if text == prompt.right else Verdict.WRONG, pair=pair, text=text)
            kind = take_chunk(payload, parts)
            if kind:
                is_fine = prompt.right.startswith("".join(parts))
                return Found(Verdict.ERROR if is_fine else Verdict.WRONG, kind, pair, "".join(parts))
    is_fine = prompt.right.startswith("".join(parts))
    return Found(Verdict.ERROR if is_fine else Verdict.WRONG, "closed:no [DONE]", pair, "".join(parts))


def take_chunk(payload: bytes, parts: list[str]) -> str:
    """Add an event's text to `parts`; the kind of the error that it tells instead."""
    try:
        chunk = msgspec.json.decode(payload)
        if "error" in chunk:
            return f"event:{_code(payload)}"
        parts += [choice["text"] for choice in chunk["choices"]]
    except (msgspec.DecodeError, KeyError, TypeError):
        return "event:malformed"
    return ""


def _code(data: bytes) -> str:
    try:
        error = msgspec.json.decode(data)["error"]
        return str(error.get("code") or error.get("type"))[:CODE_CHARS_MAX]
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        return "no body"
