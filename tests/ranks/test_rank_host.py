"""The rank's end of a rank link alone: who gets which command, what is said when, and the order of its end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any, cast

import msgspec
import pytest

from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import JobId, LeaseId
from kvbaton.ranks.rank_host import _HERE, REFUSALS_S, RankHost, host_of
from kvbaton.ranks.rank_messages import (
    NEWS_BATCH_MAX,
    TRANSPORTS_MAX,
    Cancel,
    MappedBytes,
    News,
    Progressed,
    Rested,
    decode_news,
    encode_command,
)
from kvbaton.ranks.rank_store_messages import (
    RankStoreAsk,
    RankStoreEnded,
    RankStoreHas,
    RankStoreLookup,
    RankStoreOpen,
    ids_of,
    pack_hashes,
)
from kvbaton.ranks.rank_stream import StreamEnvelope
from kvbaton.store.interface import OrderEnded, OrderId
from kvbaton.transports.core.transport import CopyRested, Transport

from .rank_stubs import Heard, StubCarrier

SESSION = 7


class Hosted:
    """A host of planes `a` and `b`, and the engine's side of its line."""

    def __init__(self, store: bool = False, planes: tuple[str, ...] = ("a", "b")) -> None:
        self.now = 0.0
        self.journal: list[tuple[Any, ...]] = []
        self.carrier = StubCarrier()
        self.planes = {name: Heard(name, self.journal, drain=list) for name in planes}
        self.store = Heard("store", self.journal, drain=list, counters={})
        self.host = RankHost(
            3,
            cast("dict[str, Transport]", self.planes),
            clock=lambda: self.now,
            store=(lambda compat: cast(Any, self.store)) if store else None,
            carrier=cast(Any, self.carrier),
        )
        self.line, self.loop = self.carrier.lines[0], self.carrier.loops[0]
        self.frames = self.known = 0

    def say(self, *commands: Any, now: float = 0.0) -> float | None:
        """What an engine says in one turn; with it comes that it has everything."""
        for command in commands:
            self.frames += 1
            self.frame(encode_command(command), self.frames)
        if not commands:
            self.frame(b"", 0)
        return self.loop.turn(now)

    def frame(self, body: bytes, number: int) -> None:
        self.line.inbox.append(msgspec.msgpack.encode(StreamEnvelope(SESSION, number, self.known, False, body)))

    def batches(self) -> list[list[News]]:
        """What the host has said since the last time."""
        sent, self.line.sent = self.line.sent, []
        envelopes = [msgspec.msgpack.decode(frame, type=StreamEnvelope) for frame in sent]
        self.known = max([self.known, *(each.number for each in envelopes)])
        return [decode_news(each.body) for each in envelopes if each.number]

    def asked(self, *besides: str) -> list[tuple[Any, ...]]:
        """What planes and store were asked, but for what each turn asks."""
        journal = [call for call in self.journal if call[1] not in ("drain", "set_waker", *besides)]
        self.journal.clear()
        return journal


@pytest.fixture
def made() -> Iterator[list[Hosted]]:
    made: list[Hosted] = []
    yield made
    for hosted in made:
        _HERE.pop(hosted.host.invitation.rank_public, None)


@pytest.fixture
def hosted(made: list[Hosted]) -> Hosted:
    made.append(Hosted())
    return made[-1]


@pytest.fixture
def with_store(made: list[Hosted]) -> Hosted:
    made.append(Hosted(store=True))
    return made[-1]


@pytest.mark.parametrize("count", [0, TRANSPORTS_MAX + 1])
def test_a_rank_has_a_few_planes(count: int) -> None:
    planes = {f"plane{number}": cast(Transport, Heard()) for number in range(count)}
    with pytest.raises(ValueError, match=f"transports: {count} given"):
        RankHost(0, planes, carrier=cast(Any, StubCarrier()))


def test_an_invitation_says_how_to_reach_it_and_what_it_has(hosted: Hosted, with_store: Hosted) -> None:
    invitation = hosted.host.invitation
    keys = invitation.rank_public, invitation.engine_public, invitation.engine_secret
    assert (invitation.rank, invitation.endpoint, keys) == (3, hosted.line.endpoint, hosted.line.keys)
    assert set(invitation.capabilities) == {"a", "b"}
    assert (invitation.has_store, with_store.host.invitation.has_store) == (False, True)
    assert host_of(invitation) is hosted.host
    assert hosted.carrier.sleepers == [hosted.line] and hosted.loop.name == "kvbaton-rank-3"


def test_planes_and_store_wake_the_host_from_its_start_on(with_store: Hosted) -> None:
    with_store.host.start()
    assert with_store.loop.started == 1
    for _, asked, waker in with_store.journal:
        assert asked == "set_waker"
        waker()
    assert with_store.line.wakes == 2
    with_store.say(RankStoreOpen("c" * 32))
    (waker,) = [call[2] for call in with_store.journal if call[:2] == ("store", "set_waker")]
    waker()
    assert with_store.line.wakes == 3
    assert with_store.host.strangers == 4
    assert (with_store.host.stop(), with_store.host.stop(0.5), with_store.loop.timeouts) == (True, False, [10.0, 0.5])


def test_each_command_reaches_its_plane_and_others_cost_a_line(
    hosted: Hosted, caplog: pytest.LogCaptureFixture
) -> None:
    stray = [Cancel("nobody", JobId(3)), RankStoreAsk(1)]
    with caplog.at_level(logging.ERROR):
        hosted.say(Cancel("b", JobId(1)), *stray, Cancel("a", JobId(2)))
        hosted.frame(b"\xc1", 5)
        hosted.line.inbox.append(b"\xc1")
        hosted.loop.turn(0.0)
    assert hosted.asked() == [("b", "cancel", 1), ("a", "cancel", 2)]
    assert hosted.host.counters == {"unknown_transport": 1, "no_store": 1, "malformed": 2}
    assert len(caplog.records) == 4 and all("rank 3" in record.message for record in caplog.records)


def test_a_plane_that_threw_says_when_it_is_asked_again(hosted: Hosted) -> None:
    assert hosted.say(Cancel("a", JobId(1))) is None
    hosted.planes["b"].throws.add("cancel")
    assert hosted.say(Cancel("b", JobId(2)), now=1.0) == 1.1
    hosted.planes["a"].throws.add("cancel")
    assert hosted.say(Cancel("a", JobId(3)), now=1.05) == 1.1, "the first of them"


def test_news_goes_out_in_batches_and_only_to_an_engine(hosted: Hosted) -> None:
    hosted.host.batch_max = 2
    hosted.planes["a"].answers["drain"] = lambda: [CopyRested(JobId(number)) for number in range(5)]
    hosted.loop.turn(0.0)
    assert hosted.line.sent == [], "nobody has spoken yet"
    hosted.planes["a"].answers["drain"] = list
    hosted.say()
    assert hosted.batches() == [
        [Rested("a", JobId(first + at)) for at in range(size)] for first, size in ((0, 2), (2, 2), (4, 1))
    ]
    assert Hosted().host.batch_max == NEWS_BATCH_MAX


def test_of_each_lease_the_latest_progress_goes_out_in_batches(hosted: Hosted) -> None:
    hosted.host.leases_max, hosted.host.batch_max = 3, 2
    for lease, blocks in ((1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (2, 5)):
        hosted.host.progressed(LeaseId(lease), whole([blocks]))
    assert hosted.line.wakes == 6 and hosted.host.counters == {"progress_lost": 1}
    hosted.loop.turn(0.0)
    hosted.say()
    assert hosted.batches() == [[Progressed(LeaseId(1), whole([2])), Progressed(LeaseId(2), whole([5]))]]
    assert hosted.line.wakes == 7, "for the rest"
    hosted.say()
    assert hosted.batches() == [[Progressed(LeaseId(3), whole([1]))]]
    assert hosted.line.wakes == 7


def test_while_the_engine_lags_progress_waits_and_nobody_looks_at_refusals(hosted: Hosted) -> None:
    hosted.say()
    hosted.host._stream.window_max = 0
    hosted.host.progressed(LeaseId(1), whole([1]))
    hosted.planes["a"].mapped_bytes = 5  # type: ignore[attr-defined]
    hosted.say(now=REFUSALS_S)
    hosted.host._stream.window_max = 8
    assert hosted.batches() == []
    hosted.say(now=REFUSALS_S)
    assert hosted.batches() == [[MappedBytes("a", 5), Progressed(LeaseId(1), whole([1]))]]


def test_who_was_turned_away_is_looked_up_once_a_second(hosted: Hosted) -> None:
    hosted.say()
    for number, (now, told) in enumerate([(0.5, False), (REFUSALS_S, True), (1.5, False), (2 * REFUSALS_S, True)], 1):
        hosted.planes["b"].mapped_bytes = number  # type: ignore[attr-defined]
        hosted.say(now=now)
        assert hosted.batches() == ([[MappedBytes("b", number)]] if told else [])


def test_the_store_is_served_beside_the_planes(with_store: Hosted) -> None:
    with_store.say(RankStoreAsk(4))
    ((answer,),) = with_store.batches()
    assert isinstance(answer, RankStoreHas) and (answer.ask, list(ids_of(answer.orders))) == (4, [])


def test_ends_of_the_store_are_collected_in_every_turn(with_store: Hosted) -> None:
    with_store.store.answers["lookup"] = True
    with_store.say(RankStoreOpen("c" * 32), RankStoreLookup(5, pack_hashes([bytes(32)]), 2.0))
    assert with_store.batches() == []
    with_store.store.answers["drain"] = lambda: [OrderEnded(OrderId(5), 1)]
    with_store.say()
    assert with_store.batches() == [[RankStoreEnded.of(OrderEnded(OrderId(5), 1))]]


def test_an_engine_of_this_process_is_given_the_planes_once(hosted: Hosted) -> None:
    told: list[int] = []
    invitation = hosted.host.invitation
    other = msgspec.structs.replace(invitation, engine_secret="0" * 40)
    assert hosted.host.give(other, SESSION, lambda: None) is None
    hosted.loop.is_stopping = True
    assert hosted.host.give(invitation, SESSION, lambda: None) is None
    hosted.loop.is_stopping = False
    given = hosted.host.give(invitation, SESSION, lambda: told.append(1))
    assert given is not None
    assert {name: plane.transport for name, plane in given.items()} == hosted.planes
    assert hosted.host.give(invitation, SESSION, lambda: None) is None
    hosted.say(Cancel("a", JobId(1)))
    assert hosted.asked() == [] and hosted.host.counters == {"unknown_transport": 1}
    hosted.host.progressed(LeaseId(1), whole([1]))
    hosted.say()
    assert (told, hosted.line.wakes, hosted.batches()) == ([1], 0, [])
    assert hosted.host.take_progress() == [Progressed(LeaseId(1), whole([1]))]
    assert hosted.host.take_progress() == []
    hosted.loop.finish()
    assert hosted.asked() == [("a", "close"), ("b", "close")]


def test_who_is_served_already_gives_nothing_away(hosted: Hosted) -> None:
    hosted.say()
    assert hosted.host.give(hosted.host.invitation, SESSION, lambda: None) is None


def test_at_the_end_the_store_closes_before_the_planes_and_the_line_last(with_store: Hosted) -> None:
    with_store.say(RankStoreOpen("c" * 32))
    with_store.asked()
    with_store.planes["b"].answers["drain"] = lambda: [CopyRested(JobId(9))]
    with_store.loop.finish()
    assert [call[:2] for call in with_store.asked("counters")] == [("store", "close"), ("a", "close"), ("b", "close")]
    assert with_store.batches() == [[Rested("b", JobId(9))]]
    assert with_store.line.closed == 1


def test_whatever_breaks_at_the_end_the_line_is_closed(hosted: Hosted) -> None:
    hosted.say()
    hosted.host._stream.due = lambda now: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        hosted.loop.finish()
    assert hosted.line.closed == 1
