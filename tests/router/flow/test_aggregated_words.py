"""What the router tells D that answers alone, and what a P's refusal means to it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvbaton.api.api_errors import ApiError
from kvbaton.api.params import NOTHING_FOR_D, REFUSED_FOR_D, target_params
from kvbaton.node.prompt_account import word_of
from kvbaton.observe.codes.reasons import MISSED, PLANNED
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.router.flow.aggregated_words import check_kept, word_for, word_params
from kvbaton.router.flow.worker_leg import Leg, LegError
from kvbaton.router.workers.directory import ListedEngine, WorkerListState

STATES = WorkerListState


def engine(name: str, role: Any, state: WorkerListState = STATES.SERVING, incarnation: int = 1) -> ListedEngine:
    return ListedEngine(WorkerId(name), role, "http://x", Incarnation(incarnation), state=state)


P, D = engine("p", "prefill"), engine("d", "decode")


def failed(side: Any, status: int = 502, *, busy: bool = False, type: str = "worker_error") -> LegError:
    return LegError(side, P if side == "prefill" else D, ApiError(status, "why", type=type), busy=busy)


@pytest.mark.parametrize(
    ("last", "workers", "word"),
    [
        (None, [D], "no_prefill"),
        (None, [engine("p", "prefill", STATES.DRAINING), D], "prefill_draining"),
        (None, [engine("p", "prefill", STATES.BROKEN), D], "prefill_broken"),
        (None, [engine("p", "prefill", STATES.BROKEN), engine("q", "prefill", STATES.DRAINING), D], "prefill_broken"),
        (None, [P, D], "no_pair"),
        (failed("prefill", 429, busy=True), [P, D], "prefill_full"),
        (failed("prefill"), [P, D], "prefill_failed"),
        (failed("decode", type="handoff_failed"), [P, D], "handoff_failed"),
        (failed("decode"), [D], "no_prefill"),
    ],
)
def test_a_fallback_has_a_word_that_names_what_is_wrong(last: Any, workers: Any, word: str) -> None:
    assert word_for("fallback", last, workers) == word
    assert word in MISSED


@pytest.mark.parametrize("word", ["short", "cached", "prompt_logprobs", "echo", "prompt_embeds", "search"])
def test_what_is_planned_is_told_as_it_is(word: str) -> None:
    assert word_for(word, failed("prefill"), [D]) == word
    assert word in PLANNED
    params = word_params(word, D)
    assert params is not None and word_of(msgspec.json.decode(params)) == word


def test_only_members_of_the_cluster_are_told() -> None:
    assert word_params("short", engine("d", "decode", incarnation=0)) is None
    assert word_params("a word that nobody knows", D) is None


def answer(params: object) -> bytes:
    return msgspec.json.encode({"choices": [], "kv_transfer_params": params})


def test_a_p_that_keeps_nothing_for_want_of_room_is_busy() -> None:
    leg = Leg("prefill", P, "/v1/completions", (), b"{}")
    with pytest.raises(LegError) as caught:
        check_kept(leg, answer(REFUSED_FOR_D))
    error = caught.value
    assert error.busy and not error.lost and not error.final
    assert (error.fault.status, error.fault.code) == (429, "pins_full")
    assert error.fault.retry_after_s
    assert "p has no room" in error.fault.message


@pytest.mark.parametrize(
    "data",
    [answer(target_params("pull", "t")), answer(NOTHING_FOR_D), answer(None), b"{}", b"no answer at all", b"[]",
     answer({"refused": "another reason"})],
)  # fmt: skip
def test_every_other_answer_is_somebody_elses_to_judge(data: bytes) -> None:
    check_kept(Leg("prefill", P, "/v1/completions", (), b"{}"), data)
