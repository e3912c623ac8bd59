"""P's book of sessions: one confirmed session per worker, bounded, and everything of a replaced one ends (rule 3)."""

from __future__ import annotations

import msgspec
import pytest
from pair import Make, Pair

from kvbaton.protocol.effects import Connect, Disconnect
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import Departed
from kvbaton.protocol.ids import Incarnation, WorkerId
from kvbaton.protocol.machines.pairing_state import Sessions
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.messages import Commit, Goodbye, Hello, HelloRefused, Joined, Linked, Reset, Welcome
from kvbaton_proof.sim.world.sim_memory import Shape


def joined(pair: Pair) -> list[tuple[str, int]]:
    return [(str(s.peer.worker), s.number) for s in pair.p.ledger.sessions.by_number.values() if s.joined]


def greet(pair: Pair, name: str = "d") -> None:
    """Have a D link up with P."""
    party = pair.parties[WorkerId(name)]
    party.ledger.consumer.links.need(WorkerId("p"), party.now)
    party.carry_out()
    pair.settle()


def test_a_greeting_ends_in_a_session_with_data_connections_both_ways(pair: Pair) -> None:
    greet(pair)
    assert joined(pair) == [("d", 1)]
    assert [type(message).__name__ for message in (*pair.said(Hello), *pair.said(Joined), *pair.said(Linked))] == [
        "Hello",
        "Joined",
        "Linked",
    ]
    assert [effect.peer for effect in pair.done(Connect, "p")] == [pair.d.me]
    assert [effect.peer for effect in pair.done(Connect, "d")] == [pair.p.me]


def test_endpoints_are_minted_for_every_pair_of_ranks(make_pair: Make) -> None:
    pair = make_pair("d", shape=Shape(ranks=2))
    pair.add("p", shape=Shape(ranks=1))
    greet(pair)
    assert len(pair.said(Welcome)[0].endpoints) == 2 == len(pair.said(Joined)[0].endpoints)


def test_a_repeated_hello_gets_the_same_session(pair: Pair) -> None:
    pair.lose(Welcome)
    greet(pair)
    pair.run(1)
    assert joined(pair) == [("d", 1)]
    assert len(pair.said(Welcome)) == 2


def test_a_repeated_joined_is_confirmed_again_and_connects_once(pair: Pair) -> None:
    pair.lose(Linked)
    greet(pair)
    pair.run(1)
    assert (len(pair.said(Linked)), len(pair.done(Connect, "p"))) == (2, 1)


def test_a_delayed_hello_of_a_dead_d_replaces_nobody(pair: Pair) -> None:
    """A session counts only once D has confirmed it."""
    pair.hold(Hello)
    greet(pair)
    pair.restart("d")
    greet(pair)
    before = joined(pair)
    pair.release(Hello)
    assert joined(pair) == before == [("d", 1)]
    assert len(pair.p.ledger.sessions.by_number) == 2


def test_a_new_life_ends_the_old_one_s_session(pair: Pair) -> None:
    greet(pair)
    old = pair.d.me
    pair.restart("d")
    greet(pair)
    assert joined(pair) == [("d", 3)]
    assert [effect.peer for effect in pair.done(Disconnect, "p")] == [old]
    assert len(pair.done(Connect, "p")) == 2


def test_a_link_that_is_made_anew_by_the_same_life_keeps_its_connection(pair: Pair) -> None:
    """The new session takes hold before the old one lets go."""
    greet(pair)
    pair.d.tell(Departed(pair.p.name))
    greet(pair)
    assert joined(pair) == [("d", 3)]
    assert pair.p.holders == {pair.d.me: {("session", 3)}} and pair.d.me in pair.p.connected


def test_a_joined_of_a_link_long_over_confirms_nothing(pair: Pair) -> None:
    pair.hold(Joined)
    greet(pair)
    pair.d.tell(Departed(pair.p.name))
    greet(pair)
    assert joined(pair) == [("d", 3)]
    pair.release(Joined)
    assert joined(pair) == [("d", 3)]


def test_a_joined_that_a_later_session_overtook_ends_its_own(pair: Pair) -> None:
    pair.lose(Joined, times=2)
    greet(pair)
    pair.d.tell(Departed(pair.p.name))
    greet(pair)
    pair.inject("d", "p", Joined((b"1",)), session=3)
    card = pair.d.ledger.desk.identity.card()
    pair.inject("d", "p", Hello(9, card), session=0, to=0)
    pair.inject("d", "p", Joined((b"1",)), session=5)
    assert joined(pair) == [("d", 5)]
    assert list(pair.p.ledger.sessions.by_number) == [5]


def test_a_joined_with_a_wrong_number_of_endpoints_confirms_nothing(pair: Pair) -> None:
    pair.lose(Joined, times=9)
    greet(pair)
    pair.inject("d", "p", Joined((b"1", b"2")), session=1)
    assert joined(pair) == [] and pair.p.counts["illegal.joined"] == 1


def test_talk_in_a_session_that_is_not_confirmed_is_late(pair: Pair) -> None:
    pair.lose(Joined, times=99)
    greet(pair)
    pair.inject("d", "p", Commit(1, 1), session=1)
    assert pair.p.counts["late.session"] == 1 and not pair.said(Reset)


def test_a_session_is_only_for_the_peer_that_it_was_granted_to(make_pair: Make) -> None:
    """Promise 5: a session number is no password."""
    pair = make_pair("p", "d", "e")
    greet(pair)
    pair.inject("e", "p", Commit(1, 1), session=1)
    assert [message.incarnation for message in pair.said(Reset)] == [pair.p.me.incarnation]


def test_unconfirmed_sessions_give_way_first(make_pair: Make) -> None:
    pair = make_pair("p", "d", "e", "f", settings=Settings(sessions_max=2))
    greet(pair, "d")
    pair.lose(Joined, times=1)
    greet(pair, "e")
    assert len(pair.p.ledger.sessions.by_number) == 2
    greet(pair, "f")
    assert joined(pair) == [("d", 1), ("f", 5)]


def test_idle_sessions_give_way_next_and_their_d_greets_again(make_pair: Make) -> None:
    pair = make_pair("p", "d", "e", settings=Settings(sessions_max=1))
    greet(pair, "d")
    loads = [pair.e.want("r", pair.p.grant(1), 1)]
    pair.settle()
    assert joined(pair) == [("e", 3)]
    loads.append(pair.d.want("s", pair.p.grant(2), 2))
    pair.settle()
    assert all(load.end is not None and load.end.delivered for load in loads)


@pytest.mark.parametrize("waits", ["parked", "reading"])
def test_a_d_too_many_is_told_that_p_is_busy(make_pair: Make, waits: str) -> None:
    pair = make_pair("p", "d", "e", settings=Settings(sessions_max=1))
    pair.d.habits.copies = False
    pair.d.want("q", pair.router_ticket(2) if waits == "parked" else pair.p.grant(2), 2)
    pair.settle()
    load = pair.e.want("r", pair.p.grant())
    pair.settle()
    assert load.failed is not None and load.failed.reason is Reason.BUSY
    assert [message.reason for message in pair.said(HelloRefused)] == [Reason.BUSY]
    assert joined(pair) == [("d", 1)]


def test_a_hello_that_does_not_fit_is_refused_by_name(make_pair: Make) -> None:
    pair = make_pair("p")
    pair.add("d", compat={"model": "another"})
    load = pair.pull()
    assert load.failed is not None
    assert load.failed.reason is Reason.INCOMPATIBLE
    assert load.failed.detail == "compat.model: ours is 'm', theirs is 'another'"
    assert pair.p.counts["hello_refused.incompatible"] == 1


def test_a_long_refusal_is_cut_to_what_a_message_may_carry(make_pair: Make) -> None:
    pair = make_pair("p", compat={f"field{n}": "v" * 200 for n in range(9)})
    pair.add("d", compat={"field0" + "x" * 50: "w" * 250, "field0": "v" * 250 + "ü"})
    load = pair.pull()
    assert load.failed is not None and 0 < len(load.failed.detail) <= 512


def test_goodbye_ends_a_session_and_what_was_held_for_it(pair: Pair) -> None:
    pair.d.habits.allocates = False
    pair.pull()
    pair.d.leave()
    pair.settle()
    assert joined(pair) == [] and len(pair.done(Disconnect, "p")) == 1
    assert not pair.p.ledger.producer.leases


def test_goodbye_of_another_life_or_session_ends_nothing(pair: Pair) -> None:
    greet(pair)
    pair.inject("d", "p", Goodbye(), incarnation=5)
    pair.inject("d", "p", Goodbye(), session=77)
    assert joined(pair) == [("d", 1)]


def test_goodbye_in_one_direction_leaves_the_other(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an older worker's sessions and ours both may have one number, where a pair hands over both ways."""
    monkeypatch.setattr(Sessions, "_next_number", lambda self, peer: 1)
    greet(pair)
    pair.p.ledger.consumer.links.need(WorkerId("d"), pair.p.now)
    pair.p.carry_out()
    pair.settle()
    (ours,) = pair.p.ledger.consumer.links.by_worker.values()
    assert ours.session == 1 and joined(pair) == [("d", 1)]
    pair.inject("d", "p", Goodbye(), session=1)
    assert joined(pair) == [] and list(pair.p.ledger.consumer.links.by_worker.values()) == [ours]
    pair.inject("d", "p", Goodbye(), session=1)
    assert not pair.p.ledger.consumer.links.by_worker, "d leaves, and says so in each"


@pytest.mark.parametrize(("incarnation", "left"), [(0, 0), (-1, 0), (12345, 1)])
def test_a_worker_that_departed_loses_its_sessions(pair: Pair, incarnation: int, left: int) -> None:
    """The registry may name the life that is gone; another life's session stays."""
    greet(pair)
    life = pair.d.me.incarnation if incarnation == -1 else Incarnation(incarnation)
    pair.p.tell(Departed(pair.d.name, life), Departed(WorkerId("nobody")))
    assert len(joined(pair)) == left


def test_leaving_tells_unconfirmed_peers_too(pair: Pair) -> None:
    pair.lose(Joined, times=99)
    greet(pair)
    pair.p.leave()
    assert len(pair.said(Goodbye, "p")) == 1 and len(pair.done(Disconnect, "p")) == 1, "its invitation is void"
    assert not pair.p.ledger.sessions.by_number


def test_a_hello_with_fields_of_a_later_version_is_answered(pair: Pair) -> None:
    """Forward compatibility end to end: an extra trailing field on Hello and on its envelope."""
    greeting = Hello(1, pair.d.ledger.desk.identity.card())
    body = msgspec.msgpack.decode(msgspec.msgpack.encode(greeting))
    frame = msgspec.msgpack.encode((1, "d", int(pair.d.me.incarnation), 0, 0, [*body, {"new": 1}], "more"))
    pair.p.receive(pair.d.name, frame)
    assert len(pair.said(Welcome)) == 1
