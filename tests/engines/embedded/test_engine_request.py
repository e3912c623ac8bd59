from __future__ import annotations

import pytest

from kvbaton.engines.embedded.engine_request import HOLDING, NEXT, RequestState, Sequence
from kvbaton.engines.embedded.memory.block_cache import HashChain

from .helpers import prompt, request


def sequence(state: RequestState) -> Sequence:
    return Sequence(request("r", prompt(1, 9)), list(prompt(1, 9)), HashChain(8), [[]], state)


def test_every_state_is_decided() -> None:
    assert set(NEXT) == set(RequestState)
    assert NEXT[RequestState.ENDED] == frozenset()


@pytest.mark.parametrize("state", RequestState)
def test_states_change_along_the_table_only(state: RequestState) -> None:
    for after in RequestState:
        subject = sequence(state)
        if after in NEXT[state]:
            subject.enter(after)
            assert subject.state is after
        else:
            with pytest.raises(AssertionError, match="illegal"):
                subject.enter(after)


@pytest.mark.parametrize(
    "state", [state for state in RequestState if state not in HOLDING and state is not RequestState.WAITING]
)
def test_a_request_that_is_over_may_not_keep_blocks(state: RequestState) -> None:
    subject = sequence(RequestState.RUNNING)
    subject.tables = [[0, 3]]
    with pytest.raises(AssertionError, match="keeps blocks"):
        subject.enter(state)


def test_null_entries_are_not_blocks() -> None:
    subject = sequence(RequestState.RUNNING)
    subject.tables = [[0, 0]]
    subject.enter(RequestState.ENDED)
