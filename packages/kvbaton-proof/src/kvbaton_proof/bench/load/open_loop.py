"""A load on one OpenAI-compatible address: requests that are sent when they are due, streamed, timed and judged.

    due      by the plan (a rate or a trace), else at once
    slots    at most so many under way; who is due and finds none waits, and the record says how long
    time     counts from when a request is sent, as `vllm bench serve` counts it

Laws: every request that was sent has one record, which ends within its time as right or as an error by name. A load
ends by its deadline, whatever the server does; whoever cancels it finds in `records` what was measured until then.

One streamed answer as its bytes come: when its tokens were there, and whether it is the one that was asked for.

Laws: pure; time is an argument. An answer is right only if it came to its end and has as many tokens as were asked
for; everything else has a name, from a short list. Tokens that come in one read came at one time.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp
import msgspec

from kvbaton.api import sse
from kvbaton.api.bodies import BodyKind
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.bench.load.request_plan import Ask, Piece, prompt
from kvbaton_proof.rig.client import lead

CODE_CHARS_MAX = 40
SHORT, LONG = "short answer", "long answer"
MALFORMED, NO_END = "malformed event", "stream without an end"


class _Likely(msgspec.Struct, frozen=True):
    top_logprobs: tuple[dict[str, float] | None, ...] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str = ""
    logprobs: _Likely | None = None
    finish_reason: str | None = None
    token_ids: tuple[int, ...] | None = None


class _Usage(msgspec.Struct, frozen=True):
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct, frozen=True):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class Answer(msgspec.Struct, frozen=True):
    """A right answer. Seconds since the request was sent, and between its tokens."""

    ttft_s: float
    e2e_s: float
    gaps_s: tuple[float, ...]
    tokens: int
    digest: bytes  # of its text
    ids: tuple[int, ...] = ()  # of its tokens, where they were asked for
    leads: tuple[float, ...] = ()  # of each token, how much likelier it was than the next (nats), likewise

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first; None if there is none."""
        return sum(self.gaps_s) / (self.tokens - 1) if self.tokens > 1 else None


class TokenStream:
    """Feed it until the connection has no more; then ask for the `answer`."""

    __slots__ = ("_at", "_done", "_ended_at", "_gaps", "_relay", "_sent_at", "_usage", "_wrong", "events", "ids",
                 "leads", "text")  # fmt: skip

    def __init__(self, sent_at: float) -> None:
        self.events = 0  # that bore a token
        self.text: list[str] = []
        self.ids: list[int] = []  # where the server tells them
        self.leads: list[float] = []
        self._sent_at = sent_at
        self._at: list[float] = []  # of the first and of the last token
        self._ended_at: float | None = None  # of the event that says that it is over
        self._gaps: list[float] = []
        self._usage: int | None = None
        self._relay = sse.Relay()
        self._wrong = ""
        self._done = False

    def feed(self, data: bytes, now: float) -> None:
        """What has come by now; after something wrong nothing more is read."""
        if self._wrong or self._done:
            return
        try:
            for payload in sse.payloads(self._relay.feed(data)):
                self._take(payload, now)
        except (sse.TooLongError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            self._wrong = MALFORMED

    def _take(self, payload: bytes, now: float) -> None:
        if payload == b"[DONE]":
            self._done = True
            return
        chunk = _decode(payload)
        if chunk.error is not None:
            self._wrong = self._wrong or f"error event: {code_of(chunk.error)}"
            return
        if chunk.usage is not None and chunk.usage.completion_tokens is not None:
            self._usage = chunk.usage.completion_tokens
        for choice in chunk.choices[:1]:
            self.ids += choice.token_ids or ()
            if choice.logprobs is not None:
                self.leads += [lead(each or {}) for each in choice.logprobs.top_logprobs or ()]
            if choice.text or choice.finish_reason is None:  # some engines end with an event that has no token
                self._token(choice.text, now)
            else:
                self._ended_at = now

    def _token(self, text: str, now: float) -> None:
        self.events += 1
        self.text.append(text)
        if self._at:
            self._gaps.append(now - self._at[1])
            self._at[1] = now
        else:
            self._at = [now, now]

    def answer(self, wanted: int) -> Answer | str:
        """The answer, or why it is wrong."""
        if self._wrong:
            return self._wrong
        if not self._done:
            return NO_END
        tokens = self.events if self._usage is None else self._usage
        if not self._at and self._usage == 1 and self._ended_at is not None:
            self._at = [self._ended_at, self._ended_at]  # its only token has no text: the last event bore it
        if tokens != wanted or not self._at:
            return SHORT if tokens <= wanted else LONG
        digest = hashlib.blake2b("".join(self.text).encode(errors="replace"), digest_size=8).digest()
        first, last = self._at
        return Answer(
            first - self._sent_at, last - self._sent_at, tuple(self._gaps), tokens, digest, tuple(self.ids),
            tuple(self.leads),
        )  # fmt: skip


def code_of(error: Any) -> str:
    """The code of an error object, short."""
    if isinstance(error, dict):
        error = error.get("code") or error.get("type") or "without a code"
    return " ".join(str(error).split())[:CODE_CHARS_MAX]


def refusal(status: int, data: bytes) -> str:
    """A status that is not 200, with the code that the body gives."""
    try:
        return f"status {status}: {code_of(msgspec.json.decode(data)['error'])}"
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError):
        return f"status {status}"


CONNECT_S, PROBE_S = 10.0, 10.0
REFUSAL_BYTES_MAX = 64 << 10
UNDER_WAY_MAX = 2048
ERRORS_IN_A_ROW_MAX = 200
"""Then the server counts as gone, and nothing more is sent."""
WARMUP_TOKENS, WARMUP_ANSWER_TOKENS = 32, 2
LATE, CUT_OFF = "no answer in time", "deadline of the part"
_encode = msgspec.json.Encoder().encode

Clock = Callable[[], float]


class Aim(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go, and what all of them say."""

    url: str
    headers: Mapping[str, str] = {}
    model: str | None = None
    salt: str = ""  # of caches: what another salt left there is not found
    with_ids: bool = False  # answers tell their tokens' ids
    with_leads: bool = False
    in_prompt: bool = False  # the salt is in the prompt's beginning, for servers that know no `cache_salt`
    seed: int = 0
    timeout_s: float = 120.0


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a load goes."""

    concurrency: int = UNDER_WAY_MAX
    seconds: float | None = None  # ask no more after these
    deadline_s: float = 600.0
    timed: bool = False  # requests have a time at which they are due


class Record(msgspec.Struct):
    """What became of one request; seconds since the load began. Without an answer and an error it is under way."""

    ask: Ask
    sent_s: float
    ended_s: float | None = None
    answer: Answer | None = None
    error: str = ""


def body_of(ask: Ask, aim: Aim) -> bytes:
    """Greedy, streamed, and of exactly as many tokens as the plan says."""
    words = prompt(ask, aim.seed, aim.salt if aim.in_prompt else "")
    salt = {} if aim.in_prompt or not aim.salt else {"cache_salt": aim.salt}
    model = {} if aim.model is None else {"model": aim.model}
    ids = {"return_token_ids": True} if aim.with_ids else {}
    leads = {"logprobs": 2} if aim.with_leads else {}
    return request_body(words, ask.output_tokens, **model, **salt, **ids, **leads)


def request_body(words: str | list[int], tokens: int, **more: object) -> bytes:
    body = {
        "prompt": words, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, **more,
    }  # fmt: skip
    return bytes(_encode(body))


def session(aim: Aim) -> aiohttp.ClientSession:
    """Connections for one load; whoever has it closes it."""
    timeout = aiohttp.ClientTimeout(total=aim.timeout_s, sock_connect=CONNECT_S)
    headers = {"Content-Type": "application/json", **aim.headers}
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout, headers=headers)


async def streamed(
    client: aiohttp.ClientSession,
    url: str,
    body: bytes,
    clock: Clock = time.perf_counter,
    seen: Callable[[int], None] = lambda _: None,
) -> TokenStream | str:
    """What came of one request, or why nothing did. `seen` hears how many tokens there are, whenever some came."""
    stream = TokenStream(clock())
    try:
        async with client.post(
            url + BodyKind.COMPLETION.value, data=body, headers={"Content-Type": "application/json"}
        ) as response:
            if response.status != 200:
                return refusal(response.status, await response.content.read(REFUSAL_BYTES_MAX))
            async for data in response.content.iter_any():
                stream.feed(data, clock())
                seen(stream.events)
    except TimeoutError:
        return LATE
    except (aiohttp.ClientError, OSError) as error:
        return f"connection: {type(error).__name__}"
    return stream


class Load:
    """One load. `on_end` hears of every request that ended."""

    def __init__(
        self, aim: Aim, pace: Pace, *, on_end: Callable[[], None] = lambda: None, clock: Clock = time.perf_counter
    ) -> None:
        self.records: list[Record] = []
        self.ended = self.failed = 0
        self._aim = aim
        self._pace = pace
        self._on_end = on_end
        self._clock = clock
        self._slots = asyncio.Semaphore(pace.concurrency)
        self._under_way: set[asyncio.Task[None]] = set()
        self._begun = 0.0
        self._failed_in_a_row = 0

    @property
    def seconds(self) -> float:
        """From the first that was sent to the last that ended."""
        return max((each.ended_s for each in self.records if each.ended_s is not None), default=0.0)

    async def run(self, asks: Iterable[Ask]) -> None:
        """Send the plan, and wait for what it brings."""
        async with session(self._aim) as client:
            self._begun = self._clock()
            try:
                async with asyncio.timeout(self._pace.deadline_s):
                    await self._send_all(client, asks)
                    if self._under_way:
                        await asyncio.wait(self._under_way)
            except TimeoutError:
                await self._cut_off()
                for record in self.records:
                    if record.answer is None and not record.error:
                        record.error, record.ended_s = CUT_OFF, self._now()
            finally:
                await self._cut_off()

    async def _send_all(self, client: aiohttp.ClientSession, asks: Iterable[Ask]) -> None:
        until = float("inf") if self._pace.seconds is None else self._pace.seconds
        for ask in asks:
            body = body_of(ask, self._aim)
            if ask.due_s >= until or not await self._until(ask.due_s):
                return
            await self._slots.acquire()
            if self._now() >= until or self._is_hopeless:
                return
            record = Record(ask, self._now())
            self.records.append(record)
            task = asyncio.create_task(self._one(client, record, body))
            self._under_way.add(task)
            task.add_done_callback(self._under_way.discard)

    async def _until(self, due_s: float) -> bool:
        """False if nothing will come of it any more."""
        left = due_s - self._now()
        if left > 0:
            await asyncio.sleep(left)
        return not self._is_hopeless

    async def _one(self, client: aiohttp.ClientSession, record: Record, body: bytes) -> None:
        try:
            stream = await streamed(client, self._aim.url, body, self._clock)
        finally:
            self._slots.release()
        answer = stream if isinstance(stream, str) else stream.answer(record.ask.output_tokens)
        record.ended_s = self._now()
        self.ended += 1
        if isinstance(answer, str):
            record.error = answer
            self.failed += 1
            self._failed_in_a_row += 1
        else:
            record.answer = answer
            self._failed_in_a_row = 0
        self._on_end()

    @property
    def _is_hopeless(self) -> bool:
        return self._failed_in_a_row >= ERRORS_IN_A_ROW_MAX

    def _now(self) -> float:
        return self._clock() - self._begun

    async def _cut_off(self) -> None:
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def warm_up(aim: Aim, count: int) -> None:
    """Requests that nobody counts: code paths, connections and handshakes of engines come into being."""
    asks = [Ask(number, 0.0, (Piece(f"w{number}", WARMUP_TOKENS),), WARMUP_ANSWER_TOKENS) for number in range(count)]
    async with session(aim) as client:
        await asyncio.gather(*(streamed(client, aim.url, body_of(ask, aim)) for ask in asks))


class Served(msgspec.Struct, frozen=True):
    """What a server says of its first model; None where it says nothing."""

    model: str | None = None
    tokens_max: int | None = None


class _Card(msgspec.Struct, frozen=True):
    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Card, ...] = ()


async def ask_for_models(name: str, url: str) -> Served:
    """`CommandError` with the next step if nobody is there, or nobody who could serve; one without a list is up."""
    timeout = aiohttp.ClientTimeout(total=PROBE_S)
    try:
        async with aiohttp.ClientSession(timeout=timeout) as client, client.get(f"{url}/v1/models") as response:
            data = await response.read()
    except TimeoutError:
        raise CommandError(f"target {name}: {url} gave no answer within {PROBE_S:.0f} s; is it up?") from None
    except (aiohttp.ClientError, OSError) as error:
        errno = getattr(error, "errno", None)
        why = os.strerror(errno) if errno and errno > 0 else type(error).__name__
        raise CommandError(f"target {name}: {url} cannot be reached ({why}); start one, e.g.: kvbaton up") from None
    if response.status >= 500:
        raise CommandError(f"target {name}: {url} answers {response.status}; see: curl {url}/health")
    try:
        first = msgspec.json.decode(data, type=_Models).data[0]
    except (msgspec.DecodeError, IndexError):
        return Served()
    return Served(first.id, first.max_model_len)
