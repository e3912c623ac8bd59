"""Requests of this command to engines: whole answers (`kvbaton_proof.chaos.vllm.vllm_client`), and streamed answers
with times.

Laws: it knows no connector: what P answers with goes to D untouched. Every request ends: by an answer, by an error, or
at its deadline. Times are of the client's clock: from when a request is sent until a chunk with tokens is read.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from statistics import quantiles
from typing import Any

import aiohttp
import msgspec

from kvbaton_proof.chaos.vllm.vllm_client import PATH, TO_PREFILL, Prompt, Told, ask, prompt_of
from kvbaton_proof.chaos.vllm.vllm_process import Engine, Figures

DEADLINE_S = 120.0
DELIVERED = 'end="delivered"'
ENDS = "kvbaton_ends_total{"
NIXL_READS = "vllm:nixl_xfer_time_seconds_count"
REST_S = 30.0
LAG_S = 3.0  # vLLM's figures follow its steps
_DATA, _DONE = b"data:", b"[DONE]"

__all__ = ["Prompt", "Told", "ask", "prompt_of"]


class Streamed(msgspec.Struct, frozen=True, kw_only=True):
    """An answer that was watched. `times`: seconds from the request to each chunk that had tokens."""

    times: tuple[float, ...] = ()
    begun: float = 0.0  # by the loop's clock
    error: str = ""

    @property
    def first_s(self) -> float:
        """Time to first token; infinite where there is none."""
        return self.times[0] if self.times and not self.error else float("inf")

    @property
    def moments(self) -> list[float]:
        return [self.begun + each for each in self.times]


async def streamed(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    *,
    tokens: int,
    params: object = None,
    headers: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    heard: Callable[[], None] = lambda: None,
) -> Streamed:
    """One request, watched; `heard` is called at each chunk. Never raises, unless it is cancelled."""
    data = encoded(prompt, tokens, params)  # before the clock starts: the same for every way
    return await sent(session, url, data, headers, deadline_s, heard)


def encoded(prompt: Prompt, tokens: int, params: object = None) -> bytes:
    """The body of a request that streams."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
    body["ignore_eos"] = True
    if params is not None:
        body["kv_transfer_params"] = params
    return msgspec.json.encode(body)


async def sent(
    session: aiohttp.ClientSession,
    url: str,
    data: bytes,
    headers: Mapping[str, str] | None = None,
    deadline_s: float = DEADLINE_S,
    heard: Callable[[], None] = lambda: None,
) -> Streamed:
    """The same of a body that was encoded before."""
    all_headers = {"Content-Type": "application/json", **(headers or {})}
    loop = asyncio.get_running_loop()
    begun, times, error = loop.time(), [], ""
    try:
        async with asyncio.timeout(deadline_s), session.post(f"{url}{PATH}", data=data, headers=all_headers) as answer:
            if answer.status != 200:
                error = f"status {answer.status}: {(await answer.text())[:200]}"
            else:
                async for line in answer.content:
                    found = _chunk(line)
                    if found is True:
                        times.append(loop.time() - begun)
                        heard()
                    elif found is not False:
                        error = found
    except TimeoutError:
        error = "late"
    except (aiohttp.ClientError, OSError) as failed:
        error = type(failed).__name__
    return Streamed(times=tuple(times), begun=begun, error=error or ("" if times else "no token"))


def _chunk(line: bytes) -> bool | str:
    """Whether a line of an answer has tokens; a text if it is an error."""
    if not line.startswith(_DATA) or _DONE in line:
        return False
    try:
        found = json.loads(line[len(_DATA) :])
    except ValueError:
        return "not JSON"
    if "error" in found:
        return str(found["error"])[:200]
    return bool(found.get("choices"))


async def prefilled(
    session: aiohttp.ClientSession, p_url: str, prompt: Prompt, request_id: str = "", deadline_s: float = DEADLINE_S
) -> Told:
    """P's leg; what it gives for D is in `params`."""
    return await ask(
        session, p_url, prompt, tokens=1, params=dict(TO_PREFILL), deadline_s=deadline_s, request_id=request_id
    )


def delivered(figures: Figures | None) -> int:
    """Prompts that came to this engine whole from elsewhere, by whichever connector."""
    if figures is None:
        return 0
    ours = [value for name, value in figures.items() if name.startswith(ENDS) and DELIVERED in name]
    return int(sum(ours)) if ours else int(figures.get(NIXL_READS, 0.0))


def ends(figures: Figures | None) -> dict[str, int]:
    """How handoffs ended, in kvbaton's words."""
    found = {name: value for name, value in (figures or {}).items() if name.startswith(ENDS) and value}
    return {name.split('end="', 1)[1].split('"', 1)[0]: int(value) for name, value in found.items() if 'end="' in name}


def held(figures: Figures | None) -> bool | None:
    """Whether an engine holds blocks or pins; None if it does not say."""
    if figures is None:
        return None
    names = ("vllm:kv_cache_usage_perc", "kvbaton_pinned_blocks", "kvbaton_leases_held")
    return any(figures.get(name, 0.0) > 0 for name in names)


async def at_rest(session: aiohttp.ClientSession, engines: Sequence[Engine], within_s: float = REST_S) -> bool:
    """Wait, bounded, until none of them holds anything."""
    deadline = asyncio.get_running_loop().time() + within_s
    while True:
        if all([held(await each.figures(session)) is False for each in engines]):
            return True
        if asyncio.get_running_loop().time() > deadline:
            return False
        await asyncio.sleep(0.2)


async def delivered_since(session: aiohttp.ClientSession, engine: Engine, before: int, wanted: int) -> int:
    """How many more were handed over; waits, bounded, until they are `wanted`."""
    deadline = asyncio.get_running_loop().time() + LAG_S
    while True:
        found = delivered(await engine.figures(session)) - before
        if found >= wanted or asyncio.get_running_loop().time() > deadline:
            return found
        await asyncio.sleep(0.2)


def percentile(values: Sequence[float], part: int) -> float:
    """`part` of 100; NaN of nothing."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[part - 1]
