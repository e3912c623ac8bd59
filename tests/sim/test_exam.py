"""Questions with known answers (`proof/sim/questions/exam.py`), and the books of a ledger
(`proof/sim/checks/ledger_consistency.py`, `proof/sim/checks/timer_checks.py`)."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton_proof.sim.looking import look
from kvbaton_proof.sim.mutants import mutating
from kvbaton_proof.sim.promises import Broken
from kvbaton_proof.sim.questions import exam
from kvbaton_proof.sim.questions.exam_bank import BANK


def test_every_question_is_answered_as_it_should_be() -> None:
    for seed in range(100, 100 + exam.TURNS):
        exam.asked(BANK, seed)


def test_in_so_many_worlds_every_question_has_its_turn() -> None:
    asked: Counter[int] = Counter()
    bank = [lambda rng, number=number: asked.update([number]) for number in range(9)]  # type: ignore[misc]
    for seed in range(exam.TURNS):
        exam.asked(bank, seed)  # type: ignore[arg-type]
    assert asked == Counter(range(9))


def test_what_is_refused_must_be_so_for_its_reason() -> None:
    def refuse(reason: Reason) -> None:
        raise ProtocolError(reason, "words")

    exam.refused("right", Reason.BUSY, refuse, Reason.BUSY)
    assert exam.taken("right", len, "two") == 3
    for wrong in (
        lambda: exam.refused("another reason", Reason.BUSY, refuse, Reason.STALE),
        lambda: exam.refused("nothing", Reason.BUSY, len, ""),
        lambda: exam.taken("refused", refuse, Reason.BUSY),
        lambda: exam.same("different", 1, 2),
    ):
        with pytest.raises(Broken):
            wrong()


def test_a_bound_that_was_lowered_is_what_it_was_whatever_happens() -> None:
    before = exam.TURNS
    with pytest.raises(KeyError), exam.lowered(exam, "TURNS", 1):
        assert exam.TURNS == 1
        raise KeyError
    assert before == exam.TURNS


@pytest.mark.parametrize(
    ("name", "question"),
    [
        ("protocol.clock:Timers.set:drop:2", "timers"),
        ("protocol.ids:is_handoff_id:edge:1", "names"),
        ("protocol.geometry.progress:_check:early:1", "progresses"),
        ("protocol.geometry.spans:segments:drop:3", "handovers"),
        ("protocol.geometry.pages:_bands:never:1", "lent_pages"),
        ("protocol.geometry.layout:_validate_rank:off_up:4", "layouts"),
        ("protocol.machines.producer:Producer.on_commit:operand:6", "readers"),
        ("protocol.machines.pairing_source:Sessions.on_hello:operand:1", "names"),
        ("protocol.machines.consumer_book:ConsumerBook.heal:forget:1", "worn"),
        ("protocol.machines.push_writer:Writer._flush_if_done:operand:3", "growing"),
        ("node.node:Node._fenced:turn:2", "invitations"),
        ("node.doorway:Doorway.gave_up:operand:1", "wants"),
    ],
)
def test_what_no_world_meets_a_question_does(name: str, question: str) -> None:
    asked = [each for each in BANK if each.__name__ == question]
    with mutating.switched(name), pytest.raises((Broken, Exception)):
        for seed in range(16):
            for each in asked:
                each(random.Random(seed))


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("protocol.machines.claims:Claims._answer_parked:drop:1", "for a lease that there is"),
        ("protocol.machines.producer:Producer.on_progressed:always:3", ""),
        ("protocol.machines.producer:Producer.on_session_ended:once:1", "reads lease"),
    ],
)
def test_the_books_show_what_breaks_no_promise_within_a_world(name: str, word: str) -> None:
    with mutating.switched(name):
        seen = next(filter(None, map(look, range(4))))
    assert word in seen.what


def test_a_timer_that_is_set_for_another_time_is_seen() -> None:
    with mutating.switched("protocol.machines.claims:Claims._park:arithmetic:1"):
        seen = next(filter(None, map(look, range(6))))
    assert "is due in" in seen.what
