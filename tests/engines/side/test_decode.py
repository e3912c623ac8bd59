"""D's half of the scheduler side: what it is asked, and what becomes of requests that it cannot serve."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from kvbaton.engines.side.decode import DecodeSide
from kvbaton.engines.side.protocols import Grouping
from kvbaton.engines.vllm.content.request_content import VllmRequests
from kvbaton.node.doorway import Match, MatchState
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.layout import Cell, EngineLayout, Group, GroupKind

FOR_D = {"do_remote_prefill": True, "mode": "pull", "ticket": "t"}


Make = Callable[..., tuple[Any, Counter[str]]]


class FakeDoor:
    """As much of the doorway as is used; what it was told."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.answer = Match(MatchState.UNKNOWN)

    def disown(self, ticket: str, reason: Reason) -> None:
        self.told.append(("disown", ticket, reason))

    def match(self, request: str) -> Match:
        return self.answer

    def not_needed(self, request: str) -> None:
        self.told.append(("not_needed", request))

    def want(self, request: str, ticket: str, digest: bytes, tokens: int, **options: Any) -> None:
        self.told.append(("want", request))

    def gave_up(self, request: str) -> None:
        self.told.append(("gave_up", request))

    def waits(self, request: str) -> bool:
        return self.answer.state is MatchState.NOT_YET

    def allocated(self, request: str, blocks: Any, first_token: int) -> None:
        self.told.append(("allocated", request, blocks, first_token))


def grouping() -> Grouping:
    return Grouping(
        EngineLayout((Group("0.full", GroupKind.FULL, 16, ("a",), 1, (Cell("kv", 8),), "float32"),), ()), (0,)
    )


@pytest.fixture(name="decode")
def decode_of() -> Callable[..., tuple[Any, Counter[str]]]:
    def make(door: FakeDoor, *, recomputes: bool = True, blocks: int = 0) -> tuple[Any, Counter[str]]:
        ends: Counter[str] = Counter()
        pool = SimpleNamespace(touch=lambda ids: None)
        requests = VllmRequests(grouping())
        made = DecodeSide(door, pool, grouping(), requests, recomputes, True, blocks_total=blocks)  # type: ignore[arg-type]
        made.failed.refused = ends
        return made, ends

    return make


def asked(params: Any, name: str = "r") -> Any:
    return SimpleNamespace(
        request_id=name, num_prompt_tokens=40, kv_transfer_params=params, prompt_token_ids=[1] * 40, cache_salt=None
    )


@pytest.mark.parametrize("recomputes", [True, False])
def test_p_is_told_of_a_request_whose_parameters_are_refused(decode: Make, recomputes: bool) -> None:
    """Promise 3: its lease would be kept for nobody."""
    door = FakeDoor()
    d, ends = decode(door, recomputes=recomputes)
    d.refused(asked({**FOR_D, "mode": "carrier pigeon"}), End(Reason.BAD_MESSAGE, "mode"))
    assert door.told == [("disown", "t", Reason.BAD_MESSAGE)] and ends.total() == 1
    assert d.match(asked(FOR_D), 0) == ((0, False) if recomputes else (40, True))
    assert ends.total() == 1, "one end for one handoff"


@pytest.mark.parametrize("params", [None, 5, {}, {"do_remote_prefill": True}, {**FOR_D, "do_remote_prefill": False}])
def test_nobody_is_told_where_there_is_no_ticket_to_read_by(decode: Make, params: Any) -> None:
    door = FakeDoor()
    decode(door)[0].refused(asked(params), End(Reason.BAD_MESSAGE))
    assert not door.told


TARGET = SimpleNamespace(ticket="t", mode="pull", trace="")


@pytest.mark.parametrize("computed", [True, False])
def test_blocks_are_taken_before_p_s_answer_only_for_what_p_has_computed(decode: Make, computed: bool) -> None:
    """Decision 0002: who reads behind a P that has not begun would hold blocks that P may need to begin."""
    door = FakeDoor()
    d, _ = decode(door, blocks=100)
    d.accepted(asked(FOR_D), TARGET)
    door.answer = Match(MatchState.NOT_YET, computed=computed)
    assert d.match(asked(FOR_D), 16) == ((24, True) if computed else (None, False))
    assert d.blocked(asked(FOR_D))


def test_they_are_a_bounded_share_of_the_cache_until_reported(decode: Make) -> None:
    door = FakeDoor()
    d, _ = decode(door, blocks=24)  # 6 may be taken; a prompt takes 3
    door.answer = Match(MatchState.NOT_YET, computed=True)
    requests = [asked(FOR_D, name) for name in "abc"]
    for request in requests:
        d.accepted(request, TARGET)
    for request in requests[:2]:
        assert d.match(request, 0) == (40, True)
        d.allocated(request, [[1, 2, 3]], 40)
    assert d.match(requests[2], 0) == (None, False)
    d.reported(SimpleNamespace(rank=0, request="a", end=End(Reason.CLAIM_TIMEOUT)))
    assert d.match(requests[2], 0) == (40, True)
    door.answer = Match(MatchState.FOUND)
    assert d.match(requests[2], 0) == (40, True)


def test_what_is_here_already_waits_for_nobody(decode: Make) -> None:
    door = FakeDoor()
    d, _ = decode(door, blocks=24)
    d.accepted(asked(FOR_D), TARGET)
    door.answer = Match(MatchState.NOT_YET)
    assert d.match(asked(FOR_D), 40) == (0, False) and ("not_needed", "r") in door.told


@pytest.mark.parametrize("asked_of_p", [True, False])
def test_a_failed_handoff_is_one_end_however_often_vllm_asks(decode: Make, asked_of_p: bool) -> None:
    """The ledger counts what it was asked for; what was refused at the door is counted here, and an abort is no end."""
    door = FakeDoor()
    d, ends = decode(door)
    d.accepted(asked(FOR_D), TARGET)
    door.answer = Match(MatchState.FAILED, End(Reason.PEER_UNKNOWN), asked=asked_of_p)
    assert d.match(asked(FOR_D), 0) == (0, False)
    door.answer = Match(MatchState.UNKNOWN)  # a failure is told once
    assert d.match(asked(FOR_D), 0) == (0, False)
    d.finished(asked(FOR_D))
    assert ends.total() == (0 if asked_of_p else 1)


def test_a_load_that_only_fails_its_request_brings_nothing(decode: Make) -> None:
    """What an earlier load of the handoff brought is in that load's blocks, not in this one's."""
    door = FakeDoor()
    d, _ = decode(door, recomputes=False)
    d.has_second_source = True
    d.accepted(asked(FOR_D), TARGET)
    door.answer = Match(MatchState.FOUND)
    d.allocated(asked(FOR_D), [[1, 2, 3]], 40)
    d.reported(SimpleNamespace(rank=0, request="r", end=End(Reason.PEER_GONE, "killed", good_tokens=32)))
    [first] = d.take_verdicts()
    assert (first.failed, first.final, first.end.good_tokens) == (True, False, 32), "a second source is asked"
    door.answer = Match(MatchState.UNKNOWN)
    assert d.match(asked(FOR_D), 0) == (0, False) and d.doom("r", 40) == (40, True)
    d.allocated(asked(FOR_D), [[4, 5, 6]], 40)
    [last] = d.take_verdicts()
    assert (last.failed, last.final, last.end) == (True, True, End(Reason.PEER_GONE, "killed"))
    assert d.lost("r") is None


def test_a_failed_load_of_a_request_that_is_over_is_not_remembered(decode: Make) -> None:
    door = FakeDoor()
    d, _ = decode(door, recomputes=False)
    d.has_second_source = True
    d.accepted(asked(FOR_D), TARGET)
    door.answer = Match(MatchState.FOUND)
    d.allocated(asked(FOR_D), [[1, 2, 3]], 40)
    d.finished(asked(FOR_D))
    d.reported(SimpleNamespace(rank=0, request="r", end=End(Reason.ABORTED)))
    assert d.lost("r") is None and len(d.take_verdicts()) == 1
