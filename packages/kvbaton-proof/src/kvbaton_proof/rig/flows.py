"""Streams through a router that are watched while their D's are hurt: what was told, and when.

Laws: nothing is retried and nothing is mended. A stream is lost if it was not told its whole end, and wrong if what was
told contradicts itself (`StreamReader`) or is not as long as it says. Moments are of this process's clock.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp

from kvbaton.api import sse
from kvbaton.router.openai_api import PAIR_HEADER
from kvbaton_proof.chaos.streams.stream_load import Kind
from kvbaton_proof.chaos.streams.stream_reader import Choice, StreamReader

LATE_S = 120.0
LOOK_S = 0.01
SHOWN = 160


@dataclass(slots=True)
class Flow:
    """One stream."""

    kind: Kind
    body: Mapping[str, Any]
    reader: StreamReader
    begun: float = 0.0
    moments: list[float] = field(default_factory=list)  # of events that told something
    decoder: str = ""  # where it began
    failed: str = ""

    @property
    def choice(self) -> Choice:
        return self.reader.choices.get(0) or Choice()

    @property
    def is_over(self) -> bool:
        return bool(self.failed) or self.reader.is_done

    @property
    def loss(self) -> str:
        """Why it did not come to its end; "" where it did."""
        if self.failed or self.reader.error:
            return f"{self.failed} {self.reader.error}".strip()
        return "" if self.reader.is_done and self.choice.finish else "no end"

    @property
    def problem(self) -> str:
        """What cannot be right of it, whatever the model says."""
        if self.reader.problems:
            return self.reader.problems[0]
        told, ids = (self.reader.usage or {}).get("completion_tokens"), self.choice.ids
        rows = [len(each) for each in (ids, self.choice.logprobs) if each]
        due = told if told is not None else self.body.get("max_tokens") if self.body.get("ignore_eos") else None
        if due is not None and any(count != due for count in rows):
            return f"{rows} tokens, {due} were due"
        return ""

    def gaps(self, begun: float, ended: float) -> list[float]:
        """Those that end in a time."""
        return [b - a for a, b in pairwise(self.moments) if begun < b <= ended]


@dataclass(slots=True)
class Flows:
    """Streams that were asked for together."""

    every: list[Flow]
    work: asyncio.Future[Any]

    async def until(self, told: int, share: float = 1.0, within_s: float = LATE_S) -> bool:
        """Until a share of them have told so many events, or are over; whether it came to that."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + within_s
        while sum(len(flow.moments) >= told or flow.is_over for flow in self.every) < share * len(self.every):
            if clock() > deadline:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def ended(self) -> list[Flow]:
        await self.work
        return self.every

    def at(self, decoder: str) -> list[Flow]:
        return [flow for flow in self.every if flow.decoder == decoder]


def asked(
    session: aiohttp.ClientSession,
    url: str,
    bodies: Sequence[tuple[Kind, Mapping[str, Any]]],
    headers: Mapping[str, str] = {},
    late_s: float = LATE_S,
) -> Flows:
    """All at once; they are read until they are over."""
    every = [Flow(kind, body, StreamReader(kind.api, ids_asked="return_token_ids" in body)) for kind, body in bodies]
    return Flows(every, asyncio.gather(*(_read(session, url, flow, headers, late_s) for flow in every)))


async def _read(
    session: aiohttp.ClientSession, url: str, flow: Flow, headers: Mapping[str, str], late_s: float
) -> None:
    clock, body = asyncio.get_running_loop().time, {**flow.body, "stream": True}
    flow.begun = clock()
    try:
        async with (
            asyncio.timeout(late_s),
            session.post(url + flow.kind.api.value, json=body, headers=headers) as answer,
        ):
            flow.decoder = answer.headers.get(PAIR_HEADER, "").rpartition("/")[2]
            if answer.status != 200:
                flow.failed = f"status {answer.status}: {(await answer.text())[:SHOWN]}"
                return
            async for line in answer.content:
                for payload in sse.payloads(line):
                    if flow.reader.feed(payload):
                        flow.moments.append(clock())
    except TimeoutError:
        flow.failed = "late"
    except (aiohttp.ClientError, OSError) as error:
        flow.failed = type(error).__name__
    if not flow.reader.is_done and not flow.reader.error:
        flow.failed = flow.failed or "closed without its end"
