"""Whole conversations of a P and a D, of every kind, for recording with old code and for repeating with new.

Law: nothing here is drawn or timed, so the same code says the same bytes each time; and only what the harness of the
oldest recorded release has is used (`tests/protocol/pair.py` of that tree).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.wire import messages as m

Conversation = Callable[[Any], None]
P, D = "p", "d"


def pull(pair: Any) -> None:
    pair.d.want("r", pair.p.grant())
    pair.settle()
    pair.d.want("s", pair.p.grant(2, 3), 2, 3)
    pair.settle()


def pull_with_losses(pair: Any) -> None:
    """Everything once more: Hello, Joined, Claim and Commit are repeated, and answered the same."""
    for kind in (m.Welcome, m.Linked, m.Granted, m.Committed):
        pair.lose(kind)
    pair.d.want("r", pair.p.grant())
    pair.run(10)


def stream(pair: Any) -> None:
    pair.d.want("r", pair.router_ticket())
    pair.settle()
    source = pair.p.begin()
    pair.p.chunk(source, 2)
    pair.settle()
    pair.run(3)
    pair.p.chunk(source, 1)
    pair.p.complete(source)
    pair.settle()


def preempted(pair: Any) -> None:
    pair.d.want("r", pair.router_ticket())
    pair.settle()
    source = pair.p.begin()
    pair.p.chunk(source, 2)
    pair.settle()
    pair.p.tell(ev.SourceEnded(source.lease, Reason.SOURCE_PREEMPTED))
    pair.settle()


def push(pair: Any) -> None:
    pair.d.want("r", pair.router_ticket(), push=True)
    pair.settle()
    source = pair.p.begin()
    pair.p.chunk(source, 2)
    pair.settle()
    pair.p.chunk(source, 1)
    pair.p.complete(source)
    pair.settle()


def revoked(pair: Any) -> None:
    pair.p.habits.copies = False
    pair.p.stream()
    pair.d.want("r", pair.router_ticket(), push=True)
    pair.settle()
    pair.d.give_up("r")
    pair.settle()
    pair.p.finish()
    pair.settle()


def abandoned(pair: Any) -> None:
    pair.d.habits.copies = False
    pair.d.want("r", pair.p.grant())
    pair.settle()
    pair.d.give_up("r")
    pair.settle()
    pair.d.finish()
    pair.settle()


def stale(pair: Any) -> None:
    """D's copy outlasts the lease, and P's blocks are reused meanwhile."""
    pair.d.habits.copies = False
    pair.d.want("r", pair.p.grant())
    pair.settle()
    pair.cut(D)
    pair.run(20)
    pair.p.reuse(1)
    pair.heal()
    pair.run(5)
    pair.d.finish()
    pair.settle()


def claim_refused(pair: Any) -> None:
    ticket = pair.p.grant()
    pair.d.want("r", ticket, content=9)
    pair.settle()


def restarted(pair: Any) -> None:
    """P is another one since; D greets again, and its ticket is of the former life."""
    pair.d.want("r", pair.p.grant())
    pair.settle()
    ticket = pair.p.grant(2)
    pair.restart(P)
    pair.d.want("s", ticket, 2)
    pair.settle()
    pair.d.want("t", pair.p.grant(3), 3)
    pair.settle()


def goodbye(pair: Any) -> None:
    pair.d.want("r", pair.p.grant())
    pair.settle()
    pair.d.leave()
    pair.settle()


def hello_refused(pair: Any) -> None:
    pair.add(D, compat={"model": "another"})
    pair.d.want("r", pair.p.grant())
    pair.settle()


CONVERSATIONS: dict[str, Conversation] = {
    each.__name__: each
    for each in (
        pull,
        pull_with_losses,
        stream,
        preempted,
        push,
        revoked,
        abandoned,
        stale,
        claim_refused,
        restarted,
        goodbye,
        hello_refused,
    )
}


def too_new(pair: Any) -> None:
    """A D of a release to come greets: what only old code answers in these words. D's Hello is not on record."""
    hello = m.Hello(1, pair.d.ledger.desk.identity.card())
    frame = msgspec.msgpack.encode((3, D, int(pair.d.me.incarnation), 0, 0, hello))
    pair.p.receive(pair.d.name, frame)


REFUSALS: dict[str, Conversation] = {"too_new": too_new}
"""Recorded, but not repeated: new code has other words for them."""


def record(pair: Any, conversation: Conversation) -> list[dict[str, Any]]:
    """What was put on the wire, in order: when, by whom, to whom, and the bytes."""
    conversation(pair)
    return [
        {"at": round(at, 6), "from": str(entry.source), "to": str(entry.target), "frame": entry.raw.hex()}
        for entry, at in zip(pair.log, pair.times, strict=True)
        if hasattr(entry, "raw") and entry.fate != "arrives at last"
    ]
