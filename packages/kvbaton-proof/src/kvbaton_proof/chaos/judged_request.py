"""One request and its judgement: the answer against the one right answer, within the time that it has.

Law: 200 with another text is wrong, and so is a stream that has begun otherwise; everything else that is told, or a
connection that ends, is an error; what is not over in its time is late.
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from kvbaton.api import sse
from kvbaton.api.bodies import BodyKind
from kvbaton.api.params import Mode
from kvbaton.router.openai_api import MODE_HEADER, PAIR_HEADER
from kvbaton_proof.chaos.board import Board, Ended, Verdict

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
