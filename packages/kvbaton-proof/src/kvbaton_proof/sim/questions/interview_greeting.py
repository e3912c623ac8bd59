"""A P that receives hellos, from peers that it should answer and peers that it should not."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, WorkerId
from kvbaton.protocol.privileges import Role
from kvbaton.protocol.wire.versions import Versions
from kvbaton_proof.sim.questions.exam import Question, same
from kvbaton_proof.sim.questions.interview import ev, fx, m
from kvbaton_proof.sim.questions.interview_p import P

_R = Reason


def sessions(rng: random.Random) -> None:
    """Who greets is answered in its own life and session, and in no other."""
    p = P(rng, sessions_max=2, unconfirmed_per_peer_max=2, greetings_per_s_max=1.0, greetings_burst_max=30.0)
    first = p.join()
    again = PeerId(p.other.worker, Incarnation(9))
    gone = fx.Disconnect(p.other, p.plane, p.shape.ranks, ("session", first))
    strange: list[tuple[str, dict[str, Any]]] = [
        ("unknown", {"session": 99}),
        ("of another life", {"to": Incarnation(3)}),
        ("of another D", {"who": again}),
    ]
    for what, how in strange:
        reset = p.say(m.Reset(how.get("to", p.me.incarnation)), **how)
        p.expect(f"a session that is {what}", p.hear(m.Commit(LeaseId(1), 1), **how), reset)
    p.expect("a frame of another", p.hear(m.Commit(LeaseId(1), 1), by=WorkerId("d7")))
    second = PeerId(WorkerId("d1"), Incarnation(5))
    p.hear(m.Hello(50, p.card()), who=second, to=Incarnation(0), session=0, version=1)
    number = max(p.ledger.sessions.by_number)
    same("sessions are odd for one of a pair, and even for the other", number % 2, int(not p.me < second))
    p.expect("who has not confirmed", p.hear(m.Commit(LeaseId(1), 1), who=second, session=number))
    p.expect("too few endpoints", p.hear(m.Joined((b"",) * (p.pairs - 1)), who=second, session=number))
    p.lease()
    p.hear(p.claim())
    third = PeerId(WorkerId("d2"), Incarnation(6))
    found = p.hear(m.Hello(60, p.card()), who=third, to=Incarnation(0), session=0, version=1)
    held = ("session", max(p.ledger.sessions.by_number))
    welcome = p.say(
        m.Welcome(60, p.identity.card(), p.plane, (), 0),
        fx.Invitation(third, p.plane, p.shape.ranks, held),
        who=third,
        session=held[1],
    )
    p.expect(
        "one that has not confirmed gives way",
        found,
        welcome,
        fx.Disconnect(second, p.plane, p.shape.ranks, ("session", number)),
    )
    ends = tuple(b"" for _ in range(p.pairs))
    p.hear(m.Joined(ends), who=third, session=held[1])
    p.lease(2)
    p.hear(p.claim(2), who=third, session=held[1])
    busy = p.say(m.HelloRefused(70, _R.BUSY, ""), who=second, session=0, version=1)
    p.expect("all are in use", p.hear(m.Hello(70, p.card()), who=second, to=Incarnation(0), session=0, version=1), busy)
    p.hear(m.Commit(LeaseId(2), 1), who=third, session=held[1])
    found = p.hear(m.Hello(71, p.card()), who=second, to=Incarnation(0), session=0, version=1)
    same("one that is idle gives way", fx.Disconnect(third, p.plane, p.shape.ranks, held) in found, True)
    p.expect("a goodbye", p.hear(m.Goodbye()), gone, fx.Unpin(LeaseId(1)))
    p.expect("a second goodbye", p.hear(m.Goodbye()))
    _refusals(p)


def _refusals(p: P) -> None:
    asks = {"who": p.other, "to": Incarnation(0), "session": 0}
    for version, card, reason in (
        (1, p.card(compat={"model": "x"}), _R.INCOMPATIBLE), (9, p.card(optional=7), _R.WRONG_VERSION),
        (1, p.card(transports=("none",)), _R.NO_TRANSPORT), (2, p.card(required=1 << 30), _R.WRONG_VERSION),
    ):  # fmt: skip
        refusal = p.say(m.HelloRefused(80, reason, ""), session=0, version=version)
        p.expect("a greeting that is refused", p.hear(m.Hello(80, card), **asks, version=version), refusal)
    p.identity.role_of = lambda worker: Role.PREFILL
    refusal = p.say(m.HelloRefused(81, _R.FORBIDDEN, ""), session=0, version=1)
    p.expect("a key that is not for this", p.hear(m.Hello(81, p.card()), **asks, version=1), refusal)
    p.expect("a word that it is not for", p.hear(m.Commit(LeaseId(1), 1)))
    p.identity.role_of = lambda worker: Role.BOTH
    answers = sum(bool(p.hear(m.Hello(100, p.card()), **asks, version=1)) for n in range(33))
    same("who greets ever again is answered some of the time", 5 < answers < 30, True)
    p.later(1.01)
    same("and again later", bool(p.hear(m.Hello(100, p.card()), **asks, version=1)), True)


def quota(rng: random.Random) -> None:
    """A greeting counts as one, and one more for each KiB of its card; what is over the quota is passed over."""
    burst = rng.choice((5.0, 9.0, 10.0))
    p = P(rng, greetings_per_s_max=2.0, greetings_burst_max=burst)
    card = p.card(host="h" * rng.choice((4, 128)))
    cost = 1 + len(msgspec.msgpack.encode(card)) // 1024
    asks = {"to": Incarnation(0), "session": 0, "version": 1}
    answers = sum(bool(p.hear(m.Hello(1, card), **asks)) for _ in range(15))
    same("greetings that are answered at once", answers, int(burst // cost))
    p.later(cost / 2 + 0.01)
    second = PeerId(WorkerId("d1"), Incarnation(5))
    same("another's greeting", bool(p.hear(m.Hello(1, card), who=second, **asks)), True)
    answers = sum(bool(p.hear(m.Hello(1, card), **asks)) for _ in range(5))
    same("and after so many seconds", answers, int((burst % cost + cost) // cost))


def unconfirmed(rng: random.Random) -> None:
    """Who greets anew and confirms nothing pushes out its own oldest session, and no other's."""
    p = P(rng, unconfirmed_per_peer_max=2)
    second = PeerId(WorkerId("d1"), Incarnation(5))
    asks = {"to": Incarnation(0), "session": 0, "version": 1}
    p.hear(m.Hello(1, p.card()), who=second, **asks)
    numbers = []
    for nonce in (1, 2, 3):
        p.hear(m.Hello(nonce, p.card()), **asks)
        numbers.append(max(p.ledger.sessions.by_number))
    left = {number for number, each in p.ledger.sessions.by_number.items() if each.peer == p.other}
    same("its sessions", left, set(numbers[1:]))
    same("the other's", len(p.ledger.sessions.by_number), 3)


def restarts(rng: random.Random) -> None:
    """A new life of a worker ends what the old one had, in this order: told to stop, connected, let go."""
    p = P(rng)
    old = p.join()
    id = p.lease()
    p.hear(p.claim())
    life = PeerId(p.other.worker, Incarnation(int(p.other.incarnation) + 1))
    found = p.hear(m.Hello(9, p.card()), who=life, to=Incarnation(0), session=0, version=1)
    number = int(found[0][3])
    ends = tuple(b"%d" % n for n in range(p.pairs))
    found = p.hear(m.Joined(ends), who=life, session=number)
    connect = fx.Connect(life, p.plane, p.shape.ranks, ends, ("session", number))
    let_go = fx.Disconnect(p.other, p.plane, p.shape.ranks, ("session", old))
    same("a new life", found, [fx.Unpin(id), connect, let_go, p.say(m.Linked(), who=life, session=number)])
    p.expect("the old one's word", p.hear(m.Renew(id, 1, (), True)), p.say(m.Reset(p.me.incarnation)))
    p.expect("news of its death", p.tell(ev.Departed(p.other.worker, p.other.incarnation)))
    p.expect(
        "a plane that fails",
        p.tell(ev.PlaneFailed(life, ("session", number))),
        fx.Disconnect(life, p.plane, p.shape.ranks, ("session", number)),
    )
    p.other, p.session = life, 0
    p.join()
    p.lease(2, target=life.worker)
    p.expect(
        "it has gone",
        p.tell(ev.Departed(life.worker)),
        fx.Unpin(LeaseId(2)),
        fx.Disconnect(life, p.plane, p.shape.ranks, ("session", p.session)),
    )


def narrow(rng: random.Random) -> None:
    """Who no longer speaks a version does not hear it either, but for greetings."""
    p = P(rng)
    p.join()
    p.identity.versions = Versions(2, 2)
    strange = m.Commit(LeaseId(9), 1)
    p.expect("a word in another version", p.hear(strange, version=1))
    stale = p.say(m.Stale(LeaseId(9), 1, (), _R.UNKNOWN_LEASE))
    p.expect("it in the right one", p.hear(strange), stale)


BANK: list[Question] = [sessions, quota, unconfirmed, restarts]
