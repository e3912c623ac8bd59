"""Answers that are generated: each token is a function of the KV that its engine holds, and of how it is sampled.

So an engine that goes on from the KV of another prompt, of another answer or of nobody says other tokens, and so does
one that has forgotten its seed, what it has said, or how far its grammar is. What one engine without any fault says is
`unbroken`.

Laws: KV is read when a token is sampled, in every cell that attention looks at. A step that samples is not issued
before the token in front of it is known. Of a history's last token nobody has the KV: whoever goes on computes it.
"""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from kvbaton.api.params import HistoryWay
from kvbaton_proof.sim.promises import Broken
from kvbaton_proof.sim.world.sim_device import Work
from kvbaton_proof.sim.world.sim_engine import SimEngine
from kvbaton_proof.sim.world.sim_memory import Said, word_at
from kvbaton_proof.sim.world.sim_request import Phase, SimRequest

VOCABULARY, EOS = 24, 0
HALVES = frozenset((5, 11, 17))
"""Tokens that are half a character: nothing is shown of them before the next one."""
STATES = 7
"""Of a grammar, and of each all but every third token is forbidden."""
SCORES = 1 << 16
_MIXES = 0x9E3779B97F4A7C15


class Task(msgspec.Struct, frozen=True):
    """A prompt, and how its answer is to be sampled."""

    prompt: int
    tokens: int
    max_tokens: int
    seed: int | None = 0  # None: chance decides, and nobody can go on with that
    greedy: bool = False
    penalty: bool = False  # a token that was said is said again only if it is far likelier
    grammar: bool = False

    def said(self, answer: Iterable[int] = ()) -> Said:
        """Prompt and answer as KV is made of them."""
        found = Said(self.prompt, self.tokens)
        for token in answer:
            found = found.and_then(token)
        return found


def drawn_fields(rng: random.Random, prompts: int) -> dict[str, Any]:
    """A client's body. Few prompts, so that several answers to one are under way, and in one cache."""
    prompt = rng.randint(1, prompts)
    fields: dict[str, Any] = {
        "prompt": [prompt] * (1 + prompt % 7), "max_tokens": rng.randint(1, 14), "stream": True,
        "temperature": rng.choice((0, 1.0, 1.0)),
    }  # fmt: skip
    if fields["temperature"] and rng.random() < 0.5:
        fields["seed"] = rng.randint(0, 3)
    if rng.random() < 0.3:
        fields["presence_penalty"] = 1.0
    if rng.random() < 0.3:
        fields["response_format"] = {"type": "json_object"}
    if rng.random() < 0.5:
        fields["return_token_ids"] = True
    if rng.random() < 0.5:
        fields["stream_options"] = {"include_usage": True}
    return fields


def task_of(fields: Mapping[str, Any]) -> Task:
    """A body as an engine reads it."""
    prompt, greedy = fields["prompt"], not fields["temperature"]
    return Task(
        prompt[0], len(prompt), fields["max_tokens"], fields.get("seed", 0 if greedy else None), greedy,
        bool(fields.get("presence_penalty")), "response_format" in fields,
    )  # fmt: skip


def letters(tokens: Iterable[int]) -> str:
    """What a client reads."""
    return "".join(chr(ord("a") - 1 + token) for token in tokens)


class Sampler:
    """What one engine knows of an answer beside its KV."""

    def __init__(self, task: Task, dice: Callable[[], int]) -> None:
        self.task = task
        self.counts: Counter[int] = Counter()
        self.state = 0  # of the grammar
        self.drawn = 0  # tokens, which is where a seeded generator is
        self._dice = dice

    def resume(self, history: Sequence[int], way: HistoryWay) -> None:
        """Behind tokens that another engine said: as output they count, as more of the prompt they do not."""
        if way is HistoryWay.OUTPUT:
            for token in history:
                self.accept(token)

    def accept(self, token: int) -> None:
        self.drawn += 1
        self._count(token)
        self._advance(token)

    def choose(self, kv: int) -> int:
        """The next token, by what attention has read."""
        base = kv if self.task.greedy else _mixed(kv, self._chance(), self.drawn)
        scores = {token: _mixed(base, token) % SCORES - self._malus(token) for token in self._allowed()}
        return max(scores, key=lambda token: (scores[token], token))

    def _chance(self) -> int:
        return self._dice() if self.task.seed is None else self.task.seed

    def _count(self, token: int) -> None:
        self.counts[token] += 1

    def _advance(self, token: int) -> None:
        self.state = (self.state * 5 + token + 1) % STATES

    def _malus(self, token: int) -> int:
        return self.counts[token] * SCORES // 2 if self.task.penalty else 0

    def _allowed(self) -> list[int]:
        every = range(VOCABULARY)
        return [token for token in every if (token + self.state) % 3 == 0] if self.task.grammar else list(every)


def _mixed(*numbers: int) -> int:
    found = 1
    for number in numbers:
        found = (found ^ number) * _MIXES & (1 << 64) - 1
        found ^= found >> 29
    return found


@dataclass(slots=True)
class Generation:
    """An answer on one engine. `answer` begins with what other engines said of it."""

    task: Task
    answer: list[int]
    sampler: Sampler
    say: Callable[[int], None]  # a token
    finished: str = ""

    @property
    def known(self) -> int:
        """Tokens of prompt and answer."""
        return self.task.tokens + len(self.answer)

    @property
    def given(self) -> int:
        """What of them has its KV before the next token is sampled: all but an answer's last one."""
        return self.known - (1 if self.answer else 0)

    @property
    def whole_characters(self) -> int:
        """Tokens of the answer that can be shown now."""
        return len(self.answer) - (1 if self.answer and self.answer[-1] in HALVES else 0)

    @property
    def most_tokens(self) -> int:
        return self.task.tokens + self.task.max_tokens

    def goes_on(self, kv: int) -> None:
        """One token more, or the end."""
        token = self.sampler.choose(kv)
        if token == EOS:
            self.finished = "stop"
            return
        self.sampler.accept(token)
        self.answer.append(token)
        self.say(token)
        if len(self.answer) >= self.task.max_tokens:
            self.finished = "length"


def unbroken(task: Task) -> tuple[list[int], str]:
    """What one engine answers, and how that ends; of a task without seed, whatever chance says is right."""
    one = Generation(task, [], Sampler(task, lambda: 0), lambda token: None)
    while not one.finished:
        one.goes_on(word_at(task.said(one.answer), one.known - 1))
    return one.answer, one.finished


class GeneratingEngine(SimEngine):
    """One whose answers are made of tokens."""

    way = HistoryWay.NONE  # how it goes on

    def generation(self, task: Task, history: Sequence[int], say: Callable[[int], None]) -> Generation:
        sampler = Sampler(task, lambda: self.world.rng.getrandbits(32))
        sampler.resume(history, self.way)
        return Generation(task, list(history), sampler, say)

    def _finish_prefill(self, request: SimRequest) -> None:
        """P's own token is sampled with the prompt's last chunk."""
        if request.generation is not None:
            request.generation.goes_on(self._read(request, request.tokens))
        super()._finish_prefill(request)

    def _decode(self, request: SimRequest) -> list[Work]:
        made = request.generation
        if made is None or request.role == "prefill":
            return super()._decode(request)
        if self.world.chance(self.preempt):
            self._preempt(request)
        if request.phase is not Phase.DECODING or request.decode_issued:
            return []
        request.decode_issued = 1
        first = min(request.computed, made.known - 1)  # where all is there, the last one is computed once more
        request.computed = made.known
        return [Work(request, request.blocks, first, made.known, request.turn)]

    def _output(self, work: Work) -> None:
        request = work.request
        made = request.generation
        if made is None or request.role == "prefill" or request.phase is not Phase.DECODING:
            super()._output(work)
            return
        request.decode_issued = 0
        made.goes_on(self._read(request, made.known))
        if made.finished:
            self.finish(request, "answered", made.finished)
        else:
            request.content = made.task.said(made.answer)

    def _read(self, request: SimRequest, tokens: int) -> int:
        """What attention makes of what lies in the request's blocks: of right KV the same on every engine."""
        try:
            self._check_tokens(request, tokens, "as read")
        except Broken:
            pages = (self.shape.page(layer, ids[0]) for ids in request.blocks for layer in range(self.shape.layers))
            return zlib.crc32(b"".join(self.memory_at(page) for page in pages))
        return word_at(request.content, tokens - 1)

    def memory_at(self, offset: int) -> bytes:
        return bytes(self.device.memory[0][offset : offset + self.shape.page_bytes])

    def _preempt(self, request: SimRequest) -> None:
        super()._preempt(request)
        if request.generation is not None and request.role != "prefill":
            request.tokens = request.generation.given
