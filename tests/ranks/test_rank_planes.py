"""A data plane in its rank that throws: nobody in the engine's process can know, so the rank asks again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId
from kvbaton.ranks import rank_planes
from kvbaton.ranks.rank_messages import (
    Cancel,
    Command,
    ConnectFailed,
    Fence,
    Fenced,
    Mint,
    MintFailed,
    RankConnect,
    RankDisconnect,
    TablePart,
)
from kvbaton.ranks.rank_planes import AGAIN_MAX, AGAIN_S, HostedPlane
from kvbaton.transports.core.transport import CopyEnded, FenceEnded, OpenFailed, Transport, TransportEvent

D = PeerId(WorkerId("d#0"), Incarnation(7))
STOPS: list[Command] = [Cancel("fake", JobId(1)), RankDisconnect("fake", D), Fence("fake", D)]


class Throwing:
    """Remembers what it was asked to do, and throws at some of it."""

    def __init__(self, throws: str = "") -> None:
        self.throws = throws
        self.asked: list[str] = []
        self.news: list[TransportEvent] = []

    def __getattr__(self, name: str) -> Callable[..., bytes]:
        def ask(*about: Any) -> bytes:
            self.asked.append(name)
            if name == self.throws:
                raise RuntimeError(f"{name} threw")
            return b"endpoint"

        return ask

    def drain(self) -> Sequence[TransportEvent]:
        if self.throws == "drain":
            raise RuntimeError("drain threw")
        news, self.news = self.news, []
        return news


def hosted(throws: str) -> tuple[HostedPlane, Throwing]:
    transport = Throwing(throws)
    return HostedPlane("fake", cast(Transport, transport)), transport


@pytest.mark.parametrize("command", STOPS, ids=lambda command: type(command).__name__.lower())
def test_what_stops_is_asked_for_again_until_it_has_not_thrown(command: Command) -> None:
    """Else one hiccup of a library keeps a loan, D's blocks, or the access of a peer that was let go for ever."""
    what = type(command).__name__.removeprefix("Rank").lower()
    plane, transport = hosted(what)
    plane.carry_out(command)
    assert plane.turn(10.0) == 10.0 + AGAIN_S
    assert plane.turn(10.0 + AGAIN_S / 2) == 10.0 + AGAIN_S and transport.asked == [what], "not in between"
    later = plane.turn(10.0 + AGAIN_S)
    assert transport.asked == [what, what] and later == 10.0 + 2 * AGAIN_S
    transport.throws = ""
    assert plane.turn(later) is None and transport.asked == [what] * 3
    assert plane.turn(99.0) is None and len(transport.asked) == 3, "done"


def test_news_that_could_not_be_had_are_asked_for_again() -> None:
    plane, transport = hosted("drain")
    transport.news = [CopyEnded(JobId(1), Reason.CANCELLED), FenceEnded(D)]
    due = plane.turn(1.0)
    assert due == 1.0 + AGAIN_S and not plane.take_news()
    transport.throws = ""
    assert plane.turn(due) is None and Fenced("fake", D) in plane.take_news()


def test_a_peer_that_is_connected_anew_is_not_let_go_afterwards() -> None:
    plane, transport = hosted("disconnect")
    plane.carry_out(RankDisconnect("fake", D))
    due = plane.turn(0.0)
    transport.throws = ""
    plane.carry_out(RankConnect("fake", D, b"endpoint"))
    plane.turn(due or 0.0)
    assert transport.asked == ["disconnect", "connect"]


def test_a_peer_that_was_not_let_go_is_let_go_before_its_next_endpoint() -> None:
    """Else the old connection and the old secret stay; and after it, the new one would be taken away."""
    plane, transport = hosted("disconnect")
    plane.carry_out(RankDisconnect("fake", D))
    plane.carry_out(Mint("fake", 1, D))
    assert transport.asked == ["disconnect"] * 2 and [type(news) for news in plane.take_news()] == [MintFailed]
    due = plane.turn(0.0)
    transport.throws = ""
    plane.carry_out(Mint("fake", 2, D))
    plane.turn(due or 0.0)
    assert transport.asked[2:] == ["disconnect", "endpoint"], "and not again"


def test_a_fence_that_threw_comes_before_the_next_endpoint() -> None:
    """After it, it would shut out the peer that was just invited."""
    plane, transport = hosted("fence")
    plane.carry_out(Fence("fake", D))
    plane.carry_out(Fence("fake", D))
    plane.carry_out(Mint("fake", 1, D))
    assert transport.asked == ["fence"] * 3, "still not fenced: nothing is minted"
    assert [type(news) for news in plane.take_news()] == [MintFailed]
    transport.throws = ""
    plane.carry_out(Mint("fake", 2, PeerId(WorkerId("other#0"), D.incarnation)))
    assert transport.asked[3:] == ["endpoint"], "another peer's fence is not waited for"
    plane.carry_out(Mint("fake", 3, D))
    assert transport.asked[4:] == ["fence", "fence", "endpoint"]
    plane.turn(0.0)
    assert plane.turn(99.0) is None and transport.asked.count("fence") == 5, "each once more, and no later one"


def test_a_connection_that_failed_after_it_was_asked_for_is_told() -> None:
    plane, transport = hosted("")
    transport.news = [OpenFailed(D, "x" * 9999)]
    plane.turn(0.0)
    (news,) = plane.take_news()
    assert isinstance(news, ConnectFailed) and news.peer == D and len(news.detail) < 9999


def test_a_plane_that_always_throws_does_not_grow_without_bound() -> None:
    plane, transport = hosted("cancel")
    for job in range(AGAIN_MAX + 5):
        plane.carry_out(Cancel("fake", JobId(job)))
    plane.turn(0.0)
    transport.throws = ""
    plane.turn(AGAIN_S)
    assert transport.asked.count("cancel") == 2 * AGAIN_MAX + 5


def test_tables_that_come_in_parts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_planes, "TABLE_BYTES_MAX", 64)
    plane, _ = hosted("")
    plane.waiting_max = 2
    for job, size in ((1, 64), (2, 65), (2, 32), (3, 8)):
        plane.carry_out(TablePart("fake", JobId(job), bytes(size)))
    assert plane.faults == 2 and {job: len(table) for job, table in plane._parts.items()} == {1: 64, 2: 32}


def test_a_closed_plane_is_asked_for_nothing_more() -> None:
    plane, transport = hosted("fence")
    plane.carry_out(Fence("fake", D))
    plane.close()
    plane.turn(0.0)
    plane.turn(AGAIN_S)
    assert transport.asked == ["fence", "close"]
