"""D's half of the scheduler side: what it is asked, and what becomes of requests that it cannot serve."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from kvbaton.integrations.vllm.tables import Grouping
from kvbaton.protocol.effects import End
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.layout import Cell, EngineLayout, Group, Kind
from kvbaton.runtime.doorway import Match, MatchState

FOR_D = {"do_remote_prefill": True, "mode": "pull", "ticket": "t"}


Make = Callable[..., tuple[Any, list[End]]]


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


def grouping() -> Grouping:
    return Grouping(EngineLayout((Group("0.full", Kind.FULL, 16, ("a",), 1, (Cell("kv", 8),), "float32"),), ()), (0,))


@pytest.fixture(name="decode")
def decode_of(adapter: Callable[[str], ModuleType]) -> Callable[..., tuple[Any, list[End]]]:
    def make(door: FakeDoor, *, recomputes: bool = True) -> tuple[Any, list[End]]:
        ends: list[End] = []
        return adapter("decode").Decode(door, SimpleNamespace(), grouping(), recomputes, True, ends.append), ends

    return make


def asked(params: Any) -> Any:
    return SimpleNamespace(request_id="r", num_prompt_tokens=40, kv_transfer_params=params)


@pytest.mark.parametrize("recomputes", [True, False])
def test_p_is_told_of_a_request_whose_parameters_are_refused(decode: Make, recomputes: bool) -> None:
    """Promise 3: its lease would be kept for nobody."""
    door = FakeDoor()
    d, ends = decode(door, recomputes=recomputes)
    d.refused(asked({**FOR_D, "mode": "carrier pigeon"}), End(Reason.BAD_MESSAGE, "mode"))
    assert door.told == [("disown", "t", Reason.BAD_MESSAGE)] and len(ends) == 1
    assert d.match(asked(FOR_D), 0) == ((0, False) if recomputes else (40, True))
    assert len(ends) == 1, "one end for one handoff"


@pytest.mark.parametrize("params", [None, 5, {}, {"do_remote_prefill": True}, {**FOR_D, "do_remote_prefill": False}])
def test_nobody_is_told_where_there_is_no_ticket_to_read_by(decode: Make, params: Any) -> None:
    door = FakeDoor()
    decode(door)[0].refused(asked(params), End(Reason.BAD_MESSAGE))
    assert not door.told
