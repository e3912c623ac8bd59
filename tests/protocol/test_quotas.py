"""What one peer may take of what all share. The others' part of it is never touched."""

from __future__ import annotations

import math

import msgspec
import pytest
from layout_builders import wide
from pair import Make, Pair

from kvbaton.protocol import bounded
from kvbaton.protocol.bounded import Buckets, Held, PerPeer, block_bytes, promised_bytes
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, Reader, WorkerId
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import Hello, HelloRefused, Joined, Welcome

D, E = WorkerId("d"), WorkerId("e")


def reader(worker: WorkerId = D, attempt: int = 1, life: int = 1) -> Reader:
    return Reader(PeerId(worker, Incarnation(life)), attempt)


class TestBuckets:
    def test_what_costs_more_takes_more_and_never_more_than_there_can_be(self) -> None:
        buckets: Buckets[str] = Buckets(1.0, 4.0)
        assert buckets.take("a", 0.0, 3.0) and not buckets.take("a", 0.0, 2.0) and buckets.take("a", 0.0)
        assert not buckets.take("a", 3.9, 1000.0) and buckets.take("a", 4.0, 1000.0)
        assert not buckets.take("a", 4.5)

    def test_a_burst_is_let_through_and_then_so_many_a_second(self) -> None:
        buckets: Buckets[str] = Buckets(8.0, 3.0)
        assert [buckets.take("d", 5.0) for _ in range(5)] == [True] * 3 + [False] * 2
        assert [buckets.take("d", 5.125) for _ in range(2)] == [True, False]
        assert [buckets.take("d", 99.0) for _ in range(4)] == [True] * 3 + [False], "no more than a burst is saved up"

    def test_one_peers_flood_is_not_anothers(self) -> None:
        buckets: Buckets[str] = Buckets(1.0, 1.0)
        assert buckets.take("d", 0.0) and not buckets.take("d", 0.0)
        assert buckets.take("e", 0.0)

    def test_time_that_goes_back_gives_and_takes_nothing(self) -> None:
        buckets: Buckets[str] = Buckets(1.0, 2.0)
        assert buckets.take("d", 9.0) and buckets.take("d", 3.0) and not buckets.take("d", 3.0)

    def test_the_first_refusal_is_told_from_the_others(self) -> None:
        buckets: Buckets[str] = Buckets(1.0, 1.0)
        said = []
        for _ in range(4):
            buckets.take("d", 0.0)
            said.append(buckets.is_first_refusal("d"))
        assert said == [False, True, False, False]

    def test_without_a_rate_nothing_is_counted(self) -> None:
        buckets: Buckets[str] = Buckets(math.inf, 1.0)
        assert all(buckets.take("d", 0.0) for _ in range(9))

    def test_the_peers_remembered_are_bounded(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bounded, "BUCKETS_MAX", 2)
        buckets: Buckets[str] = Buckets(1.0, 1.0)
        for name in ("d", "d", "e", "f"):
            buckets.take(name, 0.0)
        assert buckets.take("d", 0.0), "who was quiet longest begins anew"


class TestPerPeer:
    def test_each_worker_is_counted_over_all_of_its_lives(self) -> None:
        held: PerPeer[str] = PerPeer()
        for each in (reader(), reader(attempt=2), reader(life=2), reader(E)):
            held[each] = "x"
        held[reader()] = "again"
        assert (held.of(D), held.of(E), len(held)) == (3, 1, 4)
        del held[reader()]
        assert held.take(reader(attempt=2)) == "x" and held.take(reader(attempt=2)) is None
        assert held.take(reader(E)) == "x"
        assert (held.of(D), held.of(E), list(held)) == (1, 0, [reader(life=2)])


class TestHeld:
    def test_seats_and_bytes_come_and_go_once(self) -> None:
        held = Held()
        held.take(LeaseId(1), reader(), 100)
        held.take(LeaseId(2), reader(), 10)
        held.take(LeaseId(1), reader(E), 7)
        for _ in range(2):
            held.give(LeaseId(1), reader())
        assert (held.seats(D), held.bytes(D), held.seats(E), held.bytes(E)) == (1, 10, 1, 7)
        held.give(LeaseId(2), reader())
        assert (held.seats(D), held.bytes(D)) == (0, 0)


def test_what_is_promised_is_what_the_copies_move(make_pair: Make) -> None:
    pair = make_pair("p", "d")
    load = pair.d.want("r", pair.p.grant(1, tokens=8), 1, tokens=8)
    pair.settle()
    assert load.end is not None and load.end.delivered
    layout = pair.p.ledger.desk.identity.layout
    assert promised_bytes(layout, block_bytes(layout), 8) == pair.d.counts["bytes_moved"] > 0


def parked_too_many(make_pair: Make) -> Pair:
    pair = make_pair("p", "d", "e", settings=Settings(parked_max=9, parked_per_peer_max=2))
    for number in range(3):
        pair.d.want(f"r{number}", pair.router_ticket(number), number)
    pair.settle()
    return pair


def test_the_claims_of_one_d_that_wait_are_bounded_and_others_find_room(make_pair: Make) -> None:
    pair = parked_too_many(make_pair)
    assert pair.p.counts["claim_refused.busy"] == 1
    load = pair.e.want("s", pair.router_ticket(7), 7)
    pair.settle()
    assert load.failed is None and pair.p.ledger.producer.parked.of(E) == 1
    pair.p.stream(7)
    pair.settle()
    assert load.end is not None and load.end.delivered
    pair.run(100)
    assert pair.p.ledger.producer.claims.waiting == 0, "they were answered in time"


def refused(pair: Pair) -> str:
    pair.d.habits.copies = False
    first = pair.d.want("r", pair.p.grant(1), 1)
    pair.settle()
    second = pair.d.want("s", pair.p.grant(2), 2)
    pair.settle()
    assert first.failed is None and second.failed is not None and second.failed.reason is Reason.BUSY
    other = pair.e.want("t", pair.p.grant(3), 3)
    pair.settle()
    assert other.end is not None and other.end.delivered, "the others are served"
    return second.failed.detail


def test_the_leases_that_one_d_reads_are_bounded(make_pair: Make) -> None:
    pair = make_pair("p", "d", "e", settings=Settings(seats_per_peer_max=1))
    assert refused(pair) == "seats_per_peer_max: d reads 1 leases already"


def test_the_bytes_that_one_d_was_granted_are_bounded_but_one_lease_is_always_granted(make_pair: Make) -> None:
    pair = make_pair("p", "d", "e", settings=Settings(bytes_per_peer_max=1))
    assert refused(pair).startswith("bytes_per_peer_max: d holds ")


@pytest.mark.parametrize("ending", ["delivered", "given up", "expired", "goodbye"])
def test_however_a_handoff_ends_nothing_stays_counted(make_pair: Make, ending: str) -> None:
    pair = make_pair("p", "d")
    pair.d.habits.copies = ending == "delivered"
    pair.d.want("r", pair.p.grant(1), 1)
    pair.settle()
    held = pair.p.ledger.producer.held
    assert held.seats(D) == (0 if ending == "delivered" else 1)
    if ending == "given up":
        pair.d.give_up("r")
    elif ending == "expired":
        pair.cut("d")
    elif ending == "goodbye":
        pair.d.leave()
    pair.run(60)
    assert (held.seats(D), held.bytes(D)) == (0, 0)
    pair.heal()


def hello(pair: Pair, nonce: int) -> Hello:
    identity = pair.d.ledger.desk.identity
    return Hello(nonce, identity.card())


def test_a_d_that_greets_ever_again_pushes_out_only_its_own_sessions(make_pair: Make) -> None:
    pair = make_pair("p", "d", "e", settings=Settings(unconfirmed_per_peer_max=2, sessions_max=4))
    pair.lose(Joined, source="e")
    pair.e.want("r", pair.p.grant(1), 1)
    pair.settle()
    pair.lose(Welcome, times=math.inf, source="p")
    for nonce in range(100, 110):
        pair.inject("d", "p", hello(pair, nonce))
    numbers = [str(s.peer.worker) for s in pair.p.ledger.sessions.by_number.values()]
    assert sorted(numbers) == ["d", "d", "e"]
    assert pair.p.counts["over_quota.sessions"] == 8
    pair.heal()
    pair.run(5)
    assert pair.p.counts["commits.good"] == 1, "e's greeting was not lost by it"


def test_a_repeated_greeting_pushes_nothing_out(make_pair: Make) -> None:
    pair = make_pair("p", "d", settings=Settings(unconfirmed_per_peer_max=1))
    pair.lose(Welcome, times=math.inf)
    for _ in range(3):
        pair.inject("d", "p", hello(pair, 7))
    assert pair.p.counts["over_quota.sessions"] == 0 and len(pair.p.ledger.sessions.by_number) == 1
    pair.heal()


def test_greetings_beyond_their_rate_are_not_answered(make_pair: Make) -> None:
    pair = make_pair("p", "d", settings=Settings(greetings_per_s_max=1.0, greetings_burst_max=3.0))
    for nonce in range(5):
        pair.inject("d", "p", hello(pair, 100 + nonce))
    assert len(pair.said(Welcome)) + len(pair.said(HelloRefused)) == 3
    assert pair.p.counts["over_quota.greetings"] == 2


def test_a_greeting_costs_what_its_card_does(make_pair: Make) -> None:
    """Rule 27: a card of 64 ranks takes a thousand times as long to check and to map as the smallest."""
    pair = make_pair("p", "d")
    card = msgspec.structs.replace(pair.d.ledger.desk.identity.card(), layout=wide(64, 128, per=1))
    for nonce in range(20):
        pair.inject("d", "p", Hello(100 + nonce, card))
    read = pair.p.counts["hello_refused.incompatible"]
    assert 1 <= read <= 5 and pair.p.counts["over_quota.greetings"] == 20 - read
    pair.run(3.0)
    pair.inject("d", "p", Hello(200, card))
    assert pair.p.counts["hello_refused.incompatible"] == read + 1


def test_the_defaults_leave_room_for_a_thousand_requests_of_one_d() -> None:
    settings = Settings()
    assert settings.parked_per_peer_max >= 1024 <= settings.seats_per_peer_max
    assert settings.bytes_per_peer_max >= 1024 * 131_072 * (512 << 10), "long prompts that share most of it"
    assert settings.parked_per_peer_max < settings.parked_max, "or one D could take all there is"
