"""What goes to the shared store: whole blocks that are computed and are still the request's, under bounded pins."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.side.stored_puts import AnswerCopies, StoredPrompt, StoredPuts

HASHES = tuple(bytes([each]) * 32 for each in range(3))
TABLE = [[11, 12, 13, 14]]


class Engine:
    """As much of an engine as puts touch: one group of blocks of 4 tokens, 40 blocks in all."""

    def __init__(self) -> None:
        self.put_blocks = 0
        self.put_: list[tuple[Any, Any]] = []
        self.held: Counter[int] = Counter()
        self.broken = False
        grouping: Any = SimpleNamespace(
            block_tokens=(4,), cut=lambda tables, lo, hi: (tuple(tables[0][lo[0] : hi[0]]),)
        )
        self.counts: Counter[str] = Counter()
        copies = AnswerCopies(self, self, grouping, self, 0, 0, self.counts)  # type: ignore[arg-type]
        self.puts = StoredPuts(self, self, grouping, 40, self.counts, copies)  # type: ignore[arg-type]
        self.prompts: dict[str, StoredPrompt] = {}

    def put(self, blocks: Any, hashes: Any) -> None:
        if self.broken:
            raise RuntimeError("broken")
        self.put_.append((blocks, hashes))
        self.put_blocks += sum(map(len, blocks))

    def touch(self, ids: Any) -> None:
        self.held.update(ids)

    def tokens(self, request: Any, first: int, last: int) -> list[int]:
        return list(range(first, last))

    def unpin(self, ids: Any) -> None:
        self.held.subtract(ids)

    def prompt(self, name: str = "a", computed: int = 0, known: int = 0) -> StoredPrompt:
        request = SimpleNamespace(request_id=name, num_computed_tokens=computed)
        self.prompts[name] = StoredPrompt(request, HASHES, 3, known=known)
        return self.prompts[name]

    def step(self, number: int, **chunks: int) -> bool:
        return self.puts.scheduled(number, chunks, self.prompts, lambda name: TABLE)


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_a_prompt_is_put_when_its_last_whole_block_has_been_computed(engine: Engine) -> None:
    engine.prompt(computed=4)
    assert not engine.step(1, a=4, b=9), "two of three blocks"
    engine.prompts["a"].request.num_computed_tokens = 8
    assert engine.step(2, a=6)
    engine.puts.computed(1, engine.prompts)
    assert not engine.put_, "that step is not done"
    engine.puts.computed(2, engine.prompts)
    assert engine.put_ == [(((11, 12, 13),), HASHES)]
    assert engine.held == Counter((11, 12, 13))
    assert not engine.step(3, a=1), "once"


def test_what_the_store_has_is_left_out(engine: Engine) -> None:
    engine.prompt(known=2)
    assert engine.step(1, a=14)
    engine.puts.computed(1, engine.prompts)
    assert engine.put_ == [(((13,),), HASHES[2:])]
    engine.prompt("b", known=3)
    assert not engine.step(2, b=14)


def test_one_that_was_preempted_is_put_when_it_has_been_computed_again(engine: Engine) -> None:
    engine.prompt()
    assert engine.step(1, a=14)
    engine.puts.drop("a")
    engine.puts.computed(1, engine.prompts)
    assert not engine.put_
    assert engine.step(2, a=14)
    engine.puts.computed(2, engine.prompts)
    assert len(engine.put_) == 1


def test_one_that_ends_before_its_step_was_told_is_put_at_its_end(engine: Engine) -> None:
    prompt = engine.prompt(computed=12)
    engine.puts.finished(prompt, TABLE)
    engine.puts.finished(prompt, TABLE)
    assert len(engine.put_) == 1
    engine.puts.finished(engine.prompt("b", computed=11), TABLE)
    assert len(engine.put_) == 1, "not all of it was computed"


def test_pins_for_puts_are_bounded(engine: Engine) -> None:
    engine.put_blocks = 18
    engine.puts.finished(engine.prompt(computed=12), TABLE)
    assert not engine.put_ and not engine.held and engine.counts["puts.skipped"] == 1
    engine.put_blocks = 17
    engine.puts.finished(engine.prompt(computed=12), TABLE)
    assert len(engine.put_) == 1


def test_a_door_that_breaks_leaves_no_pin(engine: Engine) -> None:
    engine.broken = True
    with pytest.raises(RuntimeError):
        engine.puts.finished(engine.prompt(computed=12), TABLE)
    assert not any(engine.held.values())


def test_after_a_reset_nothing_is_due(engine: Engine) -> None:
    engine.prompt()
    assert engine.step(1, a=14)
    engine.puts.drop_all()
    engine.puts.computed(1, engine.prompts)
    assert not engine.put_


def test_the_longest_answers_are_copied_first_and_the_others_when_there_is_room(engine: Engine) -> None:
    engine.puts.copies.blocks_most, engine.puts.copies.hashes_most = 1, 99
    for name, length in (("short", 17), ("long", 21)):  # of both a block of the answer is whole
        prompt = engine.prompt(name, computed=15)
        prompt.request.num_tokens, prompt.is_put = length, True
    assert engine.step(1, short=1, long=1)
    engine.put_blocks = 0
    engine.puts.computed(1, engine.prompts)
    [(blocks, _)] = engine.put_
    assert blocks == ((14,),) and (engine.prompts["long"].copied, engine.prompts["short"].copied) == (1, 0)
    engine.put_blocks = 0
    assert engine.step(2, short=1), "not forgotten"
    engine.puts.computed(2, engine.prompts)
    assert engine.prompts["short"].copied == 1


def test_nothing_is_copied_behind_what_was_not_put(engine: Engine) -> None:
    engine.puts.copies.blocks_most, engine.puts.copies.hashes_most = 9, 99
    engine.prompt(computed=15)
    engine.step(1, a=1)
    engine.puts.drop("a")
    engine.puts.computed(1, engine.prompts)
    assert not engine.put_
    engine.prompts["a"].is_put = True
    assert engine.step(2, a=1), "its prompt is there"
