"""The client of a P and a D, both legs of a request in its own hand: whole answers, and streamed ones with their times.

Laws: it knows no connector: what P answers with goes to D untouched, but for `NOT_FOR_D`. Every request ends: by an
answer, by an error, or at its deadline, when the client hangs up and the request counts as late. An answer is right
when its tokens are those of one engine that hands nothing over. Times are of the client's clock: from when a request
is sent until a chunk with tokens is read.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import aiohttp
import msgspec

TOKENS = 12
PATH = "/v1/completions"
TO_PREFILL: Mapping[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
VOCABULARY = range(10, 500)
DETAIL_CHARS = 300
STREAM_S = 120.0  # of a streamed answer, unless another deadline is given
_DATA, _DONE = b"data:", b"[DONE]"
NOT_FOR_D = "remote_prefill_cached_tokens"
"""P's cache hits, which vLLM has D report in place of its own: then D would not say whether it computed a prompt."""

Prompt = list[int]


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """How a request ended. `error` is its kind; "" where there is an answer."""

    tokens: tuple[str, ...] = ()
    params: dict[str, Any] | None = None
    error: str = ""
    late: bool = False
    seconds: float = 0.0
    gaps: tuple[float, ...] = ()  # of each token, how much likelier it was than the next (nats), if two were asked for
    cached: int | None = None  # tokens of the prompt that the engine did not compute, if it says so
    request_id: str = ""
    detail: str = ""  # what an engine said in place of an answer


@dataclass(slots=True)
class Tally:
    """How the requests of one step ended."""

    right: int = 0
    wrong: int = 0
    late: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.right + self.wrong + self.late + self.errors.total()

    def count(self, answer: Answer, expected: Sequence[str]) -> bool:
        """Judge one request; whether it was answered rightly: `expected` may be the beginning of the right answer."""
        self.slowest_s = max(self.slowest_s, answer.seconds)
        if answer.late:
            self.late += 1
        elif answer.error:
            self.errors[answer.error] += 1
        elif answer.tokens[: len(expected) or None] == tuple(expected):
            self.right += 1
            return True
        else:
            self.wrong += 1
        return False


def prompt_of(length: int, seed: object) -> Prompt:
    """Token ids drawn from a seed, so that no two prompts share a block by accident."""
    rng = random.Random(f"{seed}/{length}")
    return [rng.choice(VOCABULARY) for _ in range(length)]


async def ask(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    *,
    deadline_s: float,
    tokens: int = TOKENS,
    params: object = None,
    request_id: str = "",
    headers: Mapping[str, str] | None = None,
    likely: int = 1,
    more: Mapping[str, Any] = {},
) -> Answer:
    """One leg; with `likely` 2 with gaps; `more` goes into the body. Never raises, unless it is cancelled: then the
    client has hung up."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": likely, **more}
    if params is not None:
        body["kv_transfer_params"] = params
    identified = {"X-Request-Id": request_id} if request_id else {}
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with (
            asyncio.timeout(deadline_s),
            session.post(f"{url}{PATH}", json=body, headers={**identified, **(headers or {})}) as response,
        ):
            text = await response.read()
            answer = _completion(text) if response.status == 200 else _refused(response.status, text)
    except TimeoutError:
        answer = Answer(late=True, error="late")
    except (aiohttp.ClientError, OSError) as error:
        answer = Answer(error=type(error).__name__)
    return msgspec.structs.replace(answer, seconds=loop.time() - begun, request_id=request_id)


def _refused(status: int, text: bytes) -> Answer:
    return Answer(error=f"status {status}", detail=text[:DETAIL_CHARS].decode(errors="replace"))


def _completion(text: bytes) -> Answer:
    """An answer with status 200; anything but a completion with tokens is an error too."""
    try:
        body = json.loads(text)
        numbers = body["choices"][0]["logprobs"]
        details = (body.get("usage") or {}).get("prompt_tokens_details") or {}
        return Answer(
            tokens=tuple(numbers["tokens"]), params=_for_d(body.get("kv_transfer_params")),
            cached=details.get("cached_tokens"),
            gaps=tuple(lead(each or {}) for each in numbers.get("top_logprobs") or ()),
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, AttributeError):
        return Answer(error="no completion")


def _for_d(params: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if params is None else {name: value for name, value in params.items() if name != NOT_FOR_D}


def lead(likely: Mapping[str, float]) -> float:
    """How much likelier the likeliest token was than the next; 0, as of a tie, where a second one is not told."""
    best = sorted(likely.values(), reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else 0.0


async def prefilled(
    session: aiohttp.ClientSession,
    p_url: str,
    prompt: Prompt,
    *,
    deadline_s: float = STREAM_S,
    request_id: str = "",
    more: Mapping[str, Any] = {},
) -> Answer:
    """P's leg; what it gives for D is in `params`."""
    params = dict(TO_PREFILL)
    return await ask(
        session, p_url, prompt, tokens=1, params=params, deadline_s=deadline_s, request_id=request_id, more=more
    )


async def both_legs(
    session: aiohttp.ClientSession,
    p_url: str,
    d_url: str,
    prompt: Prompt,
    *,
    deadline_s: float,
    request_id: str,
    tokens: int = TOKENS,
    more: Mapping[str, Any] = {},
) -> Answer:
    """P, then D with what P answered; one deadline over both."""
    first = await prefilled(session, p_url, prompt, deadline_s=deadline_s, request_id=request_id, more=more)
    if first.error:
        return msgspec.structs.replace(first, error=f"P: {first.error}")
    second = await ask(
        session, d_url, prompt, params=first.params, deadline_s=max(0.1, deadline_s - first.seconds),
        request_id=request_id, tokens=tokens, more=more,
    )  # fmt: skip
    error = f"D: {second.error}" if second.error else ""
    return msgspec.structs.replace(second, error=error, seconds=first.seconds + second.seconds)


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
        return [self.begun + seconds for seconds in self.times]


async def streamed(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    *,
    tokens: int,
    params: object = None,
    headers: Mapping[str, str] | None = None,
    deadline_s: float = STREAM_S,
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
    deadline_s: float = STREAM_S,
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
                    chunk = _chunk(line)
                    if chunk is True:
                        times.append(loop.time() - begun)
                        heard()
                    elif chunk is not False:
                        error = chunk
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
        body = json.loads(line[len(_DATA) :])
    except ValueError:
        return "not JSON"
    if "error" in body:
        return str(body["error"])[:200]
    return bool(body.get("choices"))


def percentile(values: Sequence[float], part: int) -> float:
    """`part` of 100; NaN of nothing."""
    if len(values) < 2:
        return values[0] if values else float("nan")
    return quantiles(values, n=100, method="inclusive")[part - 1]
