"""Endpoints that come in time, late, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.ranks import rank_transport
from kvbaton.ranks.rank_messages import Minted, MintFailed
from kvbaton.ranks.rank_transport import Endpoints

D = PeerId(WorkerId("d#0"), Incarnation(7))


class Rank:
    """Answers at once, by `answer`, or not at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rank_transport, "ENDPOINT_WAIT_S", 0.01)
        self.asked: list[int] = []
        self.answer: Callable[[int], Minted | MintFailed] | None = None
        self.endpoints = Endpoints("rank 0", self._ask, threading.Condition(threading.RLock()))

    def _ask(self, number: int, peer: PeerId) -> None:
        self.asked.append(number)
        if self.answer is not None:
            answer = self.answer(number)
            threading.Thread(target=lambda: self.endpoints.take(answer)).start()


def test_an_endpoint_that_comes_late_is_there_for_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    with pytest.raises(TimeoutError):
        rank.endpoints.get(D)
    rank.endpoints.take(Minted("tcp", 1, b"endpoint"))
    assert rank.endpoints.get(D) == b"endpoint" and rank.asked == [1]


def test_a_failure_that_comes_late_is_of_another_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed 101888: kept for a minute, it failed a greeting when all had long been well."""
    rank = Rank(monkeypatch)
    with pytest.raises(TimeoutError):
        rank.endpoints.get(D)
    rank.endpoints.take(MintFailed("tcp", 1, "broken"))
    monkeypatch.setattr(rank_transport, "ENDPOINT_WAIT_S", 10.0)
    rank.answer = lambda number: Minted("tcp", number, b"endpoint")
    assert rank.endpoints.get(D) == b"endpoint" and rank.asked == [1, 2]


def test_a_failure_in_time_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    monkeypatch.setattr(rank_transport, "ENDPOINT_WAIT_S", 10.0)
    rank.answer = lambda number: MintFailed("tcp", number, "broken")
    with pytest.raises(RuntimeError, match="broken"):
        rank.endpoints.get(D)
    rank.answer = lambda number: Minted("tcp", number, b"endpoint")
    assert rank.endpoints.get(D) == b"endpoint" and rank.asked == [1, 2]
