"""A handoff has one end in D's books, whatever ends it and whatever is heard of it afterwards (rule 17).

Not so a request: one that the router sends again is another handoff, with an end of its own.
"""

from __future__ import annotations

import itertools

import pytest
from pair import Pair

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import Side, Step
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.wire.messages import Committed, Granted, Linked, Welcome

P = WorkerId("p")
NEWS = {
    "unknown": lambda pair: pair.d.tell(ev.Departed(P, reason=Reason.PEER_UNKNOWN)),
    "departed": lambda pair: pair.d.tell(ev.Departed(P)),
    "aborted": lambda pair: pair.d.give_up("r"),
    "replaced": lambda pair: pair.d.tell(ev.CacheReplaced()),
}


@pytest.mark.parametrize("held", [Welcome, Linked, Granted, Committed], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("push", [False, True], ids=["stream", "push"])
@pytest.mark.parametrize("first", NEWS)
def test_a_p_that_dies_under_a_stream_is_one_end(pair: Pair, held: type, push: bool, first: str) -> None:
    """In every state, with all that can be heard of its death, in any order, and with the engine's own abort."""
    pair.hold(held, times=float("inf"))
    pair.d.want("r", pair.router_ticket(), push=push)
    pair.p.stream()
    pair.settle()
    for name in (first, *itertools.chain(NEWS, NEWS)):
        NEWS[name](pair)
        pair.settle()
    pair.release()
    pair.run(120)
    ended = sum(count for name, count in pair.d.counts.items() if name.startswith("ends."))
    marks = [each for each in pair.d.ledger.take_marks() if each.side is Side.DECODE and each.step is Step.ENDED]
    assert ended == 1 and len(marks) == 1
