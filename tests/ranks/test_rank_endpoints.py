"""Endpoints that come in time, late, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from kvbaton.node.node import Node
from kvbaton.protocol.effects import Invitation
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId, rank_peer
from kvbaton.ranks import rank_endpoints
from kvbaton.ranks.rank_endpoints import Endpoints
from kvbaton.ranks.rank_messages import Minted, MintFailed

D = PeerId(WorkerId("d#0"), Incarnation(7))
ENGINE = PeerId(WorkerId("d"), Incarnation(7))


class Rank:
    """Answers at once, by `answer`, or not at all."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(rank_endpoints, "ENDPOINT_WAIT_S", 0.01)
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
    monkeypatch.setattr(rank_endpoints, "ENDPOINT_WAIT_S", 10.0)
    rank.answer = lambda number: Minted("tcp", number, b"endpoint")
    assert rank.endpoints.get(D) == b"endpoint" and rank.asked == [1, 2]


def test_a_failure_in_time_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = Rank(monkeypatch)
    monkeypatch.setattr(rank_endpoints, "ENDPOINT_WAIT_S", 10.0)
    rank.answer = lambda number: MintFailed("tcp", number, "broken")
    with pytest.raises(RuntimeError, match="broken"):
        rank.endpoints.get(D)
    rank.answer = lambda number: Minted("tcp", number, b"endpoint")
    assert rank.endpoints.get(D) == b"endpoint" and rank.asked == [1, 2]


def test_while_one_rank_is_late_the_others_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 ranks that each take longer than one wait, for 2 of the peer: asked one after the other, a handshake of 8
    rounds."""
    monkeypatch.setattr(rank_endpoints, "ENDPOINT_WAIT_S", 0.01)
    asked: list[list[PeerId]] = [[] for _ in range(4)]
    mint = [lambda _, peer, said=said: said.append(peer) for said in asked]
    ranks = [Endpoints(f"rank {n}", ask, threading.Condition(threading.RLock())) for n, ask in enumerate(mint)]
    transports = [SimpleNamespace(endpoint=each.get, ask_endpoint=each.ask) for each in ranks]
    node = SimpleNamespace(ranks=[{"tcp": each} for each in transports], _hold=lambda _: None)
    with pytest.raises(TimeoutError):
        Node._endpoints(node, Invitation(ENGINE, "tcp", 2, ("link", 1)))  # type: ignore[arg-type]
    assert asked == [[rank_peer(ENGINE, 0), rank_peer(ENGINE, 1)]] * 4
    for rank in ranks:
        for number in (1, 2):
            rank.take(Minted("tcp", number, b"endpoint"))
    assert len(Node._endpoints(node, Invitation(ENGINE, "tcp", 2, ("link", 1)))) == 8  # type: ignore[arg-type]
