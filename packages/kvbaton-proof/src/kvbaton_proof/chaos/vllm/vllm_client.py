"""The client of a P and a D, both legs of a request in its own hand, and what it makes of their answers.

Laws: it knows no connector: what P answers with goes to D untouched, but for `NOT_FOR_D`. Every request ends: by an
answer, by an error, or at its deadline, when the client hangs up and the request counts as late. An answer is right
when its tokens are those of one engine that hands nothing over.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
NOT_FOR_D = "remote_prefill_cached_tokens"
"""P's cache hits, which vLLM has D report in place of its own: then D would not say whether it computed a prompt."""

Prompt = list[int]


class Told(msgspec.Struct, frozen=True, kw_only=True):
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
    """What clients were told during one step."""

    right: int = 0
    wrong: int = 0
    late: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    slowest_s: float = 0.0

    @property
    def requests(self) -> int:
        return self.right + self.wrong + self.late + self.errors.total()

    def count(self, told: Told, expected: Sequence[str]) -> bool:
        """Judge one request; whether it was answered rightly: `expected` may be the beginning of the right answer."""
        self.slowest_s = max(self.slowest_s, told.seconds)
        if told.late:
            self.late += 1
        elif told.error:
            self.errors[told.error] += 1
        elif told.tokens[: len(expected) or None] == tuple(expected):
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
) -> Told:
    """One leg; with `likely` 2 with gaps; `more` goes into the body. Never raises, unless it is cancelled: then the
    client has hung up."""
    body: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "logprobs": likely, **more}
    if params is not None:
        body["kv_transfer_params"] = params
    told_apart = {"X-Request-Id": request_id} if request_id else {}
    loop = asyncio.get_running_loop()
    begun = loop.time()
    try:
        async with (
            asyncio.timeout(deadline_s),
            session.post(f"{url}{PATH}", json=body, headers={**told_apart, **(headers or {})}) as answer,
        ):
            text = await answer.read()
            told = _told(text) if answer.status == 200 else _refused(answer.status, text)
    except TimeoutError:
        told = Told(late=True, error="late")
    except (aiohttp.ClientError, OSError) as error:
        told = Told(error=type(error).__name__)
    return msgspec.structs.replace(told, seconds=loop.time() - begun, request_id=request_id)


def _refused(status: int, text: bytes) -> Told:
    return Told(error=f"status {status}", detail=text[:DETAIL_CHARS].decode(errors="replace"))


def _told(text: bytes) -> Told:
    """An answer with status 200; anything but a completion with tokens is an error too."""
    try:
        told = json.loads(text)
        numbers = told["choices"][0]["logprobs"]
        details = (told.get("usage") or {}).get("prompt_tokens_details") or {}
        return Told(
            tokens=tuple(numbers["tokens"]), params=_for_d(told.get("kv_transfer_params")),
            cached=details.get("cached_tokens"),
            gaps=tuple(_gap(each or {}) for each in numbers.get("top_logprobs") or ()),
        )  # fmt: skip
    except (ValueError, LookupError, TypeError, AttributeError):
        return Told(error="no completion")


def _for_d(params: dict[str, Any] | None) -> dict[str, Any] | None:
    return None if params is None else {name: value for name, value in params.items() if name != NOT_FOR_D}


def _gap(likely: Mapping[str, float]) -> float:
    """Between the two likeliest; 0, as of a tie, where a second one is not told."""
    best = sorted(likely.values(), reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else 0.0


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
) -> Told:
    """P, then D with what P answered; one deadline over both."""
    first = await ask(
        session, p_url, prompt, tokens=1, params=dict(TO_PREFILL), deadline_s=deadline_s, request_id=request_id,
        more=more,
    )  # fmt: skip
    if first.error:
        return msgspec.structs.replace(first, error=f"P: {first.error}")
    second = await ask(
        session, d_url, prompt, params=first.params, deadline_s=max(0.1, deadline_s - first.seconds),
        request_id=request_id, tokens=tokens, more=more,
    )  # fmt: skip
    error = f"D: {second.error}" if second.error else ""
    return msgspec.structs.replace(second, error=error, seconds=first.seconds + second.seconds)
