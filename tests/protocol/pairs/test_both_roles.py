"""Two workers that decode from each other (rules 14 and 16): what one role lost the other must not give back."""

from __future__ import annotations

from pair import Pair

from kvbaton.protocol.events import Departed
from kvbaton.protocol.wire.messages import Goodbye, Hello, Joined, Welcome


def test_a_fenced_writer_does_not_get_back_in_by_its_other_role():
    """Promise 1: P was fenced unnoticed; as a reader of D it gets a new admission, but writes nothing more."""
    pair = Pair("p", "d")
    load = pair.d.want("r1", pair.router_ticket(1), 1, push=True)
    source = pair.p.begin(1)
    pair.settle()
    pair.p.chunk(source, 1)
    pair.settle()
    pair.d.tell(Departed(pair.p.name))
    pair.settle()
    assert load.drops == 1, "fenced, and let go"
    back = pair.p.want("back", pair.d.grant(2), 2, source="d")
    pair.settle()
    pair.p.chunk(source, 1)  # the harness asserts that no byte lands in a block that no handoff holds
    pair.settle()
    assert back.end is not None
    assert back.end.delivered
    pair.finish()


def test_pairing_in_the_other_role_leaves_a_living_session_alone():
    pair = Pair("p", "d")
    first = pair.d.want("r1", pair.router_ticket(1), 1, push=True)
    source = pair.p.begin(1)
    pair.settle()
    back = pair.p.want("back", pair.d.grant(2), 2, source="d")
    pair.settle()
    pair.p.chunk(source, 3)
    pair.p.complete(source)
    pair.settle()
    for load in (first, back):
        assert load.end is not None
        assert load.end.delivered
    pair.finish()


def test_a_word_of_the_past_does_not_mislead_the_other_role():
    """Found by the simulator: D has lost its link and P linked to it since, when D's Joined of before comes to P.

    It names an endpoint that D has closed, and took the place of the one that P reads by: the next read over a link
    that both took for good ended as `peer_unknown`.
    """
    pair = Pair("p", "d")
    pair.hold(Joined, source="d")
    pair.d.want("r1", pair.router_ticket(1), 1)
    pair.settle()
    pair.d.tell(Departed(pair.p.name))
    pair.settle()
    first = pair.p.want("first", pair.d.grant(2), 2, source="d")
    pair.settle()
    assert first.end is not None
    assert first.end.delivered
    pair.release(Joined)
    pair.settle()
    second = pair.p.want("second", pair.d.grant(3), 3, source="d")
    pair.settle()
    assert second.end is not None
    assert second.end.delivered
    assert len(pair.said(Hello, "p")) == 2, "P asked D once more where it is"
    pair.finish()


def test_a_link_is_kept_where_both_roles_are_reached_alike():
    pair = Pair("p", "d")
    loads = [pair.d.want("r1", pair.p.grant(1), 1)]
    pair.settle()
    loads.append(pair.p.want("r2", pair.d.grant(2), 2, source="d"))
    pair.settle()
    loads.append(pair.d.want("r3", pair.p.grant(3), 3))
    pair.settle()
    assert all(load.end is not None and load.end.delivered for load in loads)
    assert len(pair.said(Hello)) == 2
    pair.finish()


def test_who_leaves_in_one_role_stays_in_the_other():
    """Found by the simulator: both gave their first session the same number, and a Goodbye is said in a number."""
    pair = Pair("p", "d")
    pair.d.want("r1", pair.p.grant(1), 1)
    pair.settle()
    pair.p.habits.copies = False
    back = pair.p.want("back", pair.d.grant(2), 2, source="d")
    pair.settle()
    assert pair.p.copies, "P is reading from D"
    pair.inject("d", "p", Goodbye())  # D has no more need of P as a source
    pair.inject("d", "p", Goodbye())  # and says so twice
    assert not pair.p.ledger.sessions.by_number
    assert back.end is None
    pair.p.finish()
    pair.settle()
    assert back.end is not None
    assert back.end.delivered
    pair.finish()


def test_a_welcome_of_before_a_session_does_not_end_it():
    """Found by the simulator: D's Welcome says that D is not linked to P, was held up, and D is linked by now."""
    pair = Pair("p", "d")
    pair.hold(Welcome, source="d")
    back = pair.p.want("back", pair.d.grant(2), 2, source="d")
    pair.settle()
    load = pair.d.want("r1", pair.router_ticket(1), 1, push=True)
    source = pair.p.begin(1)
    pair.settle()
    pair.p.chunk(source, 1)
    pair.settle()
    pair.release(Welcome)
    pair.settle()
    assert len(pair.said(Hello, "p")) == 2, "asked again"
    assert load.end is None
    pair.p.chunk(source, 2)
    pair.p.complete(source)
    pair.settle()
    for each in (load, back):
        assert each.end is not None
        assert each.end.delivered
    pair.finish()
