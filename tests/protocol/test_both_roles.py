"""Two workers that decode from each other (rules 14 and 16): what one role lost the other must not give back."""

from __future__ import annotations

from pair import Pair

from kvbaton.protocol.events import Departed


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
