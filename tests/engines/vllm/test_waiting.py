"""Requests that wait without blocks: a few are asked about, the others are put aside, and all come back once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from kvbaton.engines.vllm.block_pool import ASKED_MAX, Waiting

ASIDE = "aside"


def requests(count: int) -> list[Any]:
    return [SimpleNamespace(request_id=str(each), status="waiting", is_finished=lambda: False) for each in range(count)]


def test_beyond_a_few_they_are_put_aside_and_come_back_when_they_wait_no_more() -> None:
    blocked = {str(each) for each in range(10)}
    waiting, some = Waiting(lambda request: request.request_id in blocked, ASIDE), requests(10)
    for _ in range(2):  # each is asked about again at the next step
        for request in some:
            if request.status != ASIDE:
                waiting.waits(request)
    assert [request.status for request in some] == ["waiting"] * ASKED_MAX + [ASIDE] * (10 - ASKED_MAX)
    assert waiting and not waiting.over()
    blocked -= {"5", "7"}
    assert waiting.over() == ["5", "7"]
    waiting.back_to_vllm("5")
    assert waiting.over() == ["7"], "reported once"
    assert waiting.comes_back("5") and not waiting.comes_back("5"), "once more among those without blocks"
    assert not waiting.comes_back("7")


def test_an_answer_makes_room_for_another_to_be_asked_about() -> None:
    waiting, some = Waiting(lambda request: True, ASIDE), requests(ASKED_MAX + 1)
    for request in some[:ASKED_MAX]:
        waiting.waits(request)
    waiting.answered("0")
    waiting.waits(some[-1])
    assert some[-1].status == "waiting" and not waiting


def test_one_that_was_aborted_is_reported_and_not_waited_for() -> None:
    waiting, some = Waiting(lambda request: not request.is_finished(), ASIDE), requests(ASKED_MAX + 1)
    for request in some:
        waiting.waits(request)
    some[-1].is_finished = lambda: True
    waiting.left(some[-1].request_id)
    assert waiting.over() == [some[-1].request_id]
    waiting.back_to_vllm(some[-1].request_id)
    assert not waiting and not waiting.comes_back(some[-1].request_id)


def test_where_vllm_is_not_known_nobody_is_put_aside() -> None:
    waiting, some = Waiting(lambda request: True), requests(ASKED_MAX + 9)
    for request in some:
        waiting.waits(request)
    assert {request.status for request in some} == {"waiting"} and not waiting
