"""Wrong ideas about streams that go on at another D (rule 37): of what the client has, and of what an engine must know.

Routers of the production do what is told here; where an engine goes on, the simulator's stands in for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvbaton.api.params import HistoryWay
from kvbaton.router.flow import delivered
from kvbaton.router.flow.continuing import StreamLife
from kvbaton.router.flow.said_text import SaidText
from kvbaton_proof.sim.mutants.mutation import Mutant, swap
from kvbaton_proof.sim.world.sim_fronts import Connection
from kvbaton_proof.sim.world.sim_generation import Sampler
from kvbaton_proof.sim.world.sim_pool import Prefixes

# --- the router


def _last_letter_again(original: Any) -> Any:
    def left(self: Any, text: str) -> str:
        owed, found = self.owed, original(self, text)
        return text[owed - 1 :] if owed and found else found

    return left


def _all_before_the_seam(original: Any) -> Any:
    """What the client is said to have: all that the next D tells at once with what it has."""

    def left(self: Any, text: str) -> str:
        owed, found = self.owed, original(self, text)
        return "" if owed else found

    return left


def _silent_with_the_last_word(original: Any) -> Any:
    def told(self: Any, events: bytes) -> bytes:
        shown: bytes = original(self, events)
        return b"" if self.broken_off else shown

    return told


def _history_of_another(original: Any) -> Any:
    before: list[tuple[int, ...]] = []

    def history(self: Any) -> tuple[int, ...]:
        before.append(original.fget(self))
        return before.pop(0) if len(before) > 1 else before[0]

    return property(history)


def _closed_and_read(original: Any) -> Any:
    def close(self: Any) -> None:
        original(self)
        self.closed = self.router is None

    return close


def _seed_of_the_moment(original: Any) -> Any:
    def asked(self: Any, body: bytes, worker: Any) -> Any:
        if self._seed is not None:
            self._seed += 1
        return original(self, body, worker)

    return asked


def _told_by_both(original: Any) -> Any:
    """P's token goes to the client as if it were another stream's."""

    def say_first(self: Any, first: Any) -> bytes:
        shown = original(self, first)
        self.delivered.__init__(self._room, ids_wanted=self._ids_wanted)
        return bytes(shown)

    return say_first


# --- the engine that goes on


def _resumes_without(forgotten: str) -> Any:
    def make(original: Any) -> Any:
        def resume(self: Any, history: Sequence[int], way: HistoryWay) -> None:
            remembered = getattr(Sampler, forgotten)
            setattr(Sampler, forgotten, lambda self, token: None)
            try:
                original(self, history, way)
            finally:
                setattr(Sampler, forgotten, remembered)

        return resume

    return make


def _named_by_the_prompt(original: Any) -> Any:
    def name(self: Any, request: Any, index: int) -> int:
        return request.content if isinstance(request.content, int) else request.content.prompt

    return name


ANSWER_MUTANTS: tuple[Mutant, ...] = (
    Mutant("token_said_twice", "37", "where two engines' answers meet, the last token is shown again",
           swap(SaidText, "left", _last_letter_again)),
    Mutant("token_lost", "37", "what is told in one piece with what the client has is taken for that",
           swap(SaidText, "left", _all_before_the_seam)),
    Mutant("token_lost_with_the_last_word", "37", "what comes in one piece with an engine's farewell is not shown",
           swap(delivered.Delivered, "told", _silent_with_the_last_word)),
    Mutant("history_of_another_request", "37, 38", "the next D gets what another stream has said",
           swap(delivered.Delivered, "history", _history_of_another)),
    Mutant("two_engines_speak", "37", "the D that was left is still read: it was only slow",
           swap(Connection, "close", _closed_and_read)),
    Mutant("seed_forgotten", "39", "dynamo: each D draws a seed of its own where the client named none",
           swap(StreamLife, "asked", _seed_of_the_moment)),
    Mutant("first_token_told_twice", "37", "P's token is the client's, and so is D's",
           swap(StreamLife, "say_first", _told_by_both)),
    Mutant("first_token_by_another_seed", "39", "P is asked for a token that nobody reads: it samples as it likes",
           swap(StreamLife, "sampled", lambda original: lambda self: b"")),
    Mutant("grammar_not_advanced", "39", "vLLM, runner V1: a history is prompt, and the grammar begins behind it",
           swap(Sampler, "resume", _resumes_without("_advance"))),
    Mutant("penalties_forgotten", "39", "a history is prompt, and what was said counts for nothing",
           swap(Sampler, "resume", _resumes_without("_count"))),
    Mutant("resumed_on_stale_kv", "39", "blocks of another answer to the same prompt are found in P's cache",
           swap(Prefixes, "_name", _named_by_the_prompt)),
)  # fmt: skip
