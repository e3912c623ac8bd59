"""A decode engine's account of its prompts: where the KV of each token came from, and why it computed what it did.

Laws: each request is counted once, when it is first computed, with what the engine then has of its prompt: so the sum
over all sources is the prompt's length. The last token is D's to compute in any case, as is the rest of a prompt whose
handoff was delivered. What is remembered of a request goes with it. The engine's thread writes, any thread reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from kvbaton.observe.codes.reasons import FIELD, PLANNED, SOURCES, UNASKED, WORDS
from kvbaton.observe.flight.flight_records import Moment
from kvbaton.protocol.ids import LeaseId, RequestId

HANDOFF = "handoff"
PREFILL = "prefill"
"""Beside the words of `alone_reasons`: KV was promised; this engine is the P."""
TOLD_MAX = 4
"""Reasons in a report, those of most tokens first."""


def word_of(raw: object) -> str:
    """What `kv_transfer_params` say of who computes the prompt. Whatever a client sent, this does not raise."""
    if not isinstance(raw, Mapping):
        return UNASKED
    if raw.get("do_remote_decode") is True:
        return PREFILL
    if raw.get("empty") is True:
        refused = raw.get("refused")
        return "prefill_full" if isinstance(refused, str) else "nothing"
    if raw.get("do_remote_prefill") is True:
        return HANDOFF
    word = raw.get(FIELD)
    return word if isinstance(word, str) and word in WORDS else UNASKED


@dataclass(slots=True)
class _Prompt:
    tokens: int
    word: str
    local: int = 0  # that the prefix cache had when it was last looked at
    of_store: bool = False


class PromptAccount:
    """Of one engine, in its decode role."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        self._tokens: Counter[str] = Counter(dict.fromkeys(SOURCES, 0))
        self._alone: Counter[str] = Counter()

    def came(self, request: str, tokens: int, word: str) -> None:
        """A request is in the engine. `word`: of `word_of`."""
        if word != PREFILL:
            self._prompts[request] = _Prompt(tokens, word)

    def looked(self, request: str, local_tokens: int, *, of_store: bool = False) -> None:
        """The prefix cache has so many of its tokens; more may come from a P, or from the store."""
        prompt = self._prompts.get(request)
        if prompt is not None:
            prompt.local, prompt.of_store = local_tokens, of_store

    def failed(self, request: str, reason: str) -> None:
        """Its handoff has failed."""
        prompt = self._prompts.get(request)
        if prompt is not None and prompt.word == HANDOFF:
            prompt.word = reason

    def begun(self, request: str, known_tokens: int) -> None:
        """The engine computes all of the prompt but its first `known_tokens`."""
        prompt = self._prompts.pop(request, None)
        if prompt is None:
            return
        known = min(known_tokens, prompt.tokens)
        cached = min(prompt.local, known)
        self._tokens["cached"] += cached
        self._tokens["store" if prompt.of_store else "handoff"] += known - cached
        computed = prompt.tokens - known
        own = computed if prompt.word in PLANNED or prompt.word == HANDOFF else min(computed, 1)
        self._tokens["planned"] += own
        if computed > own:
            self._tokens["alone"] += computed - own
            self._alone[prompt.word] += computed - own

    def left(self, request: str) -> None:
        """The request is over."""
        self._prompts.pop(request, None)

    def __len__(self) -> int:
        return len(self._prompts)

    def figures(self) -> dict[str, Any]:
        """By the names of metrics. From any thread."""
        return {"prompt_tokens_total": dict(self._tokens), "alone_tokens_total": dict(self._alone)}

    def gauges(self) -> dict[str, float]:
        """For the router: all prompt tokens, those computed for want of a P, and the main reasons."""
        tokens, alone = dict(self._tokens), dict(self._alone)
        main = sorted(alone, key=lambda reason: -alone[reason])[:TOLD_MAX]
        return {
            "prompt_tokens_total": float(sum(tokens.values())),
            "alone_tokens_total": float(sum(alone.values())),
            **{f"alone_tokens.{reason}": float(alone[reason]) for reason in main},
        }


ACCEPTED = "accepted"
SCHEDULED = "scheduled"
PROMPTS_MAX = 4096
UNRECORDED_MAX = 1024
"""Leases whose record has not begun: the node is a turn behind at most."""


class PromptTimes:
    """When P's engine got a prompt that it computes for others, and when it first had a place for it. Any thread.

    A lease begins with the first chunk, or in mode pull when all is computed: what came before, only the engine knows.
    Law: nothing is decided by these times. They are by the wall clock, and go with the request or its lease's record.
    """

    def __init__(self, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._prompts: dict[RequestId, tuple[Moment, ...]] = {}
        self._leases: dict[LeaseId, tuple[Moment, ...]] = {}

    def accepted(self, request: RequestId, at: float | None = None) -> None:
        """A prompt came to be computed for others; `at`: earlier than now."""
        now = self._wall()
        self._prompts[request] = (Moment(ACCEPTED, now if at is None else min(at, now)),)

    def scheduled(self, request: RequestId) -> None:
        """It has a place; said again after a preemption, the first time counts."""
        known = self._prompts.get(request, ())
        if len(known) == 1:
            self._prompts[request] = (*known, Moment(SCHEDULED, self._wall()))
            _bound(self._prompts, PROMPTS_MAX)  # one that left meanwhile, in another thread, is there for good

    def leased(self, request: RequestId, lease: LeaseId) -> None:
        known = self._prompts.pop(request, ())
        if known:
            self._leases[lease] = known
            _bound(self._leases, UNRECORDED_MAX)

    def left(self, request: RequestId) -> None:
        self._prompts.pop(request, None)

    def take(self, lease: int) -> tuple[Moment, ...]:
        """For the record of a lease that has begun."""
        return self._leases.pop(LeaseId(lease), ())

    def __len__(self) -> int:
        return len(self._prompts) + len(self._leases)


def _bound(times: dict[Any, tuple[Moment, ...]], most: int) -> None:
    if len(times) > most:
        times.pop(next(iter(list(times))), None)  # a copy: any thread
