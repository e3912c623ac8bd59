"""D that offers its blocks, data planes that cannot be opened, and a node that is P and D at once."""

from __future__ import annotations

import random
from typing import Any

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, RequestId, ReservationId, WorkerId, rank_peer
from kvbaton_proof.sim.questions.exam import Question, same
from kvbaton_proof.sim.questions.interview import DIGEST, ev, fx, handoff, m
from kvbaton_proof.sim.questions.interview_d import READ, D, drop, failed, report

_R = Reason
WRITE = fx.Direction.WRITE
ONE = ReservationId(1)


class Offering(D):
    """A decoder whose first handoff is a push."""

    def offer(self, number: int = 1, attempt: int = 1, reservation: int = 1) -> Any:
        return self.say(m.Offer(self.lease, attempt, ReservationId(reservation), 0, self.packed, DIGEST))

    def offered(self) -> None:
        self.up(push=True, deferred=True)
        self.expect("granted and offered", self.to_blocks(), self.offer(), *self.lent())

    def lent(self) -> list[Any]:
        return [("lend", rank, self.plane, self.other, WRITE, self.blocks) for rank in range(self.shape.ranks)]

    def stops(self) -> list[Any]:
        return [("stop", rank, self.plane) for rank in range(self.shape.ranks)]

    def back(self, what: str, *expected: Any, unwritten: int | None = 0) -> None:
        """The ranks have nothing lent any more, and say how much of what was due did not come."""
        jobs = self.jobs()
        for job in jobs[:-1]:
            self.expect("some are back", self.tell(ev.CopyEnded(job, _R.CANCELLED, unwritten=0)))
        self.expect(what, self.tell(ev.CopyEnded(jobs[-1], _R.CANCELLED, unwritten=unwritten)), *expected)

    def revoke(self, reason: Reason) -> Any:
        return self.say(m.Revoke(self.lease, 1, ONE, reason))

    def renew(self) -> Any:
        return self.say(m.Renew(self.lease, 1, tuple(len(ids) for ids in self.blocks), True))

    def fences(self) -> list[Any]:
        ranks = range(self.shape.ranks)
        return [fx.StartFence(rank, self.plane, rank_peer(self.other, remote)) for rank in ranks for remote in ranks]

    def gone(self) -> Any:
        return fx.Disconnect(self.other, self.plane, self.shape.ranks, ("link", self.nonce))


def written(rng: random.Random) -> None:
    """An offer is said until it is accepted; Written is acknowledged as often as it is said, and counts once."""
    d = Offering(rng)
    d.offered()
    d.expect("not accepted yet", d.later(0.51), d.offer(), d.renew())
    d.hear(m.Accepted(ReservationId(7)))
    d.expect("another was accepted", d.later(0.51), d.offer(), d.renew())
    d.expect("accepted", d.hear(m.Accepted(ONE)))
    d.expect("there is nothing to say", d.later(0.49))
    d.expect("until the lease must be renewed", d.later(0.52), d.renew())
    d.hear(m.Renewed(d.lease, 1, 3.0, 1))
    d.expect("which is a while", d.later(0.9))
    ack = d.say(m.Ack(d.lease, 9, ONE))
    d.expect("another attempt is written", d.hear(m.Written(d.lease, 9, ONE, DIGEST)), ack)
    ack = d.say(m.Ack(d.lease, 1, ONE))
    word = m.Written(d.lease, 1, ONE, DIGEST)
    d.expect("written", d.hear(word), ack, *d.stops())
    d.expect("written again", d.hear(word), ack)
    d.expect("quiesced after that", d.hear(m.Quiesced(ONE, None)))
    d.back("all of it is there", report(None), drop())
    d.expect("written once more", d.hear(word), ack)
    d.expect("another, of which nothing is pushed", d.tell(d.want(2)), d.claims(2, 2))
    found = d.to_blocks(2, attempt=2)
    d.expect("is read", found, *d.reads())


def stopped(rng: random.Random) -> None:
    """P stops of its own accord, or is told to; the blocks are D's again when it says that it is quiet."""
    d = Offering(rng)
    d.offered()
    d.expect("another is quiet", d.hear(m.Quiesced(ReservationId(7), None)))
    how = rng.random()
    if how < 0.3:
        other = d.hear(m.Written(d.lease, 1, ONE, b"another prompt"))
        mismatch = _R.CONTENT_MISMATCH
        ack = d.say(m.Ack(d.lease, 1, ONE))
        d.expect("another prompt", other, ack, report(mismatch), d.revoke(mismatch), *d.stops())
        d.back("at rest", drop())
        return
    if how < 0.6:
        reason = rng.choice((None, "stale", "transfer_failed"))
        why = _R.SOURCE_ABORTED if reason is None else Reason(reason)
        d.expect("P stops", d.hear(m.Quiesced(ONE, reason)), report(why), d.revoke(why), *d.stops())
        d.back("at rest", drop())
        return
    d.expect("given up", d.tell(ev.GaveUp(RequestId("r1"))), report(_R.ABORTED), d.revoke(_R.ABORTED), *d.stops())
    d.expect("P may not have heard", d.later(0.51), d.revoke(_R.ABORTED))
    word = rng.choice((m.Quiesced(ONE, None), m.Written(d.lease, 1, ONE, DIGEST)))
    acks = [d.say(m.Ack(d.lease, 1, ONE))] * isinstance(word, m.Written)
    d.expect("P has stopped", d.hear(word), *acks)
    d.expect("nothing is left to say", d.later(20.0))
    d.back("at rest", drop())
    d.over()


def fenced(rng: random.Random) -> None:
    """Who does not say that it is quiet is shut out, rank by rank; then the blocks are D's again."""
    d = Offering(rng)
    d.offered()
    how = rng.choice(("silent", "goodbye", "reset"))
    if how == "silent":
        d.tell(ev.GaveUp(RequestId("r1")))
        for _ in range(2):
            d.expect("silence", d.later(0.51), d.revoke(_R.ABORTED))
        found, expected = d.later(0.51), [*d.fences(), d.gone()]
        found = [each for each in found if each != d.revoke(_R.ABORTED)]
    elif how == "goodbye":
        found, expected = d.hear(m.Goodbye()), [report(_R.PEER_GONE), *d.stops(), *d.fences(), d.gone()]
    else:
        found = d.hear(m.Reset(d.other.incarnation))
        expected = [report(_R.WRONG_INCARNATION), *d.stops(), *d.fences(), d.gone()]
    d.expect(how, found, *expected)
    pairs = [(rank, rank_peer(d.other, remote)) for rank in range(d.shape.ranks) for remote in range(d.shape.ranks)]
    same("is idle while a fence is under way", d.ledger.is_idle(), False)
    d.expect("a fence of another ends", d.tell(ev.RankFenced(0, rank_peer(PeerId(WorkerId("p9"), Incarnation(1)), 0))))
    for pair in pairs[:-1]:
        d.expect("a rank is fenced", d.tell(ev.RankFenced(*pair)))
    d.expect("all are", d.tell(ev.RankFenced(*pairs[-1])))
    d.back("at rest", drop())
    same("is idle", d.ledger.is_idle(), True)


def judged(rng: random.Random) -> None:
    """What P says that it wrote is asked of every rank, when nothing moves under its loan any more (rule 35)."""
    d = Offering(rng)
    d.offered()
    ack = d.say(m.Ack(d.lease, 1, ONE))
    how = rng.choice(("less", "unknown", "early", "left", "given up", "silent"))
    if how == "early":
        broken = _R.TRANSFER_FAILED
        found = d.tell(ev.CopyEnded(d.jobs()[0], broken, unwritten=0))
        d.expect("a loan that ends too early", found, report(broken), d.revoke(broken), *d.stops()[1:])
        return
    d.expect("written", d.hear(m.Written(d.lease, 1, ONE, DIGEST)), ack, *d.stops())
    if how in ("less", "unknown"):
        abandon = d.say(m.Abandon(handoff(1), 1, _R.NOT_WRITTEN))
        unwritten = 7 if how == "less" else None
        first, *others = d.jobs()
        found = d.tell(ev.CopyEnded(first, _R.CANCELLED, unwritten=unwritten))
        d.expect(how, found, report(_R.NOT_WRITTEN), abandon, *d.stops()[1:], *([] if others else [drop()]))
        if others:
            d.back("at rest", drop())
    elif how == "left":
        found = d.hear(m.Goodbye())
        d.expect("P leaves, and is not needed", found, d.gone())
        d.back("all of it is there", report(None), drop())
    elif how == "given up":
        abandon = d.say(m.Abandon(handoff(1), 1, _R.ABORTED))
        d.expect("given up", d.tell(ev.GaveUp(RequestId("r1"))), report(_R.ABORTED), abandon, *d.stops())
        d.back("at rest", drop())
    else:
        same("a rank that says nothing", report(_R.TRANSFER_TIMEOUT) in d.later(40.0), True)


def unfenced(rng: random.Random) -> None:
    """Where the writer cannot be shut out, D reads (rule 16)."""
    d = Offering(rng, "cma")
    d.up(push=True, deferred=True)
    d.expect("granted", d.to_blocks(), *d.reads())


def planes(rng: random.Random) -> None:
    """The best plane is opened before anything depends on it; one that cannot be is left out, for a while."""
    d = D(rng, "shm", "tcp")
    d.expect("wanted", d.tell(d.want()), d.hello(("shm", "tcp")))
    d.session = 3
    ranks = range(d.shape.ranks)
    probes = [("copy", rank, "shm", rank_peer(d.other, remote), READ) for rank in ranks for remote in ranks]
    connect = fx.Connect(d.other, "shm", d.shape.ranks, d.ends, ("link", d.nonce))
    welcome = m.Welcome(d.nonce, d.card(transports=("shm", "tcp")), "shm", d.ends, 0)
    d.expect("welcome", d.hear(welcome), connect, *probes)
    gone = fx.Disconnect(d.other, "shm", d.shape.ranks, ("link", d.nonce))
    stops = [("stop", rank, "shm") for rank in ranks for _ in ranks]
    how = rng.choice(("opened", "fails", "slow", "left"))
    if how == "left":
        found = d.tell(ev.Departed(WorkerId("p0"), d.other.incarnation))
        d.expect("P has left", found, gone, *stops, failed(_R.PEER_GONE))
        d.expect("it could be opened, too late", d.tell(*(ev.CopyEnded(job) for job in d.jobs())))
        d.expect("and nobody waits", d.later(9.0))
        return
    if how == "opened":
        for job in d.jobs()[:-1]:
            d.expect("some are open", d.tell(ev.CopyEnded(job)))
        d.expect("all are open", d.tell(ev.CopyEnded(d.jobs()[-1])), d.confirms())
        return
    if how == "fails":
        found = d.tell(ev.CopyEnded(d.jobs()[0], _R.UNREACHABLE))
        stops = stops[1:]
    else:
        d.expect("in time", d.later(0.98))
        found = d.later(0.04)
    d.expect(how, found, ("given up", "p0", "shm"), gone, *stops, d.hello(("tcp",)))
    d.expect("what else comes of it", d.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in d.jobs())))
    d.plane = "tcp"
    welcome = m.Welcome(d.nonce, d.card(transports=("shm", "tcp")), "tcp", d.ends, 0)
    connect = fx.Connect(d.other, "tcp", d.shape.ranks, d.ends, ("link", d.nonce))
    d.expect("over the other", d.hear(welcome), connect, d.confirms())
    d.expect("linked", d.hear(m.Linked()), d.claims())
    gone = fx.Disconnect(d.other, "tcp", d.shape.ranks, ("link", d.nonce))
    d.later(2.5)
    d.expect("in use", d.tell(d.want(2)), d.claims(2, 2))
    d.hear(m.ClaimRefused(handoff(1), 1, "busy", ""))
    d.hear(m.ClaimRefused(handoff(2), 2, "busy", ""))
    d.expect("the better one is tried again", d.tell(d.want(3)), d.say(m.Goodbye()), gone, d.hello(("shm", "tcp")))


def both(rng: random.Random) -> None:
    """Two that decode from each other: a session of one role is none of the other's."""
    d = D(rng)
    d.up()
    d.hear(m.ClaimRefused(handoff(1), 1, "busy", ""))
    found = d.hear(m.Hello(8, d.card()), to=Incarnation(0), session=0, version=1)
    number = int(found[0][3])
    held = ("session", number)
    welcome = m.Welcome(8, d.identity.card(), d.plane, (), d.session)
    invited = fx.Invitation(d.other, d.plane, d.shape.ranks, held)
    d.expect("it greets in turn, and hears where we are linked to it", found, d.say(welcome, invited, session=number))
    same("its sessions and ours are told apart", number % 2 == d.session % 2 or number != d.session, True)
    connect = fx.Connect(d.other, d.plane, d.shape.ranks, d.ends, held)
    d.expect("it confirms", d.hear(m.Joined(d.ends), session=number), connect, d.say(m.Linked(), session=number))
    gone = fx.Disconnect(d.other, d.plane, d.shape.ranks, held)
    how = rng.random()
    if how < 0.4:
        d.expect("it says goodbye to its own", d.hear(m.Goodbye(), session=number), gone)
        d.expect("ours goes on", d.tell(d.want(2)), d.claims(2, 2))
    elif how < 0.7:
        let_go = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("link", d.nonce))
        d.expect("it says goodbye to ours", d.hear(m.Goodbye()), let_go)
        reset = d.say(m.Reset(d.me.incarnation), session=number)
        found = d.hear(m.Commit(LeaseId(1), 1), session=number)
        same("its own goes on", reset in found, False)
    else:
        moved = tuple(b"moved" for _ in d.ends)
        let_go = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("link", d.nonce))
        found = d.hear(m.Hello(9, d.card()), to=Incarnation(0), session=0, version=1)
        later = int(found[0][3])
        connect = fx.Connect(d.other, d.plane, d.shape.ranks, moved, ("session", later))
        linked = d.say(m.Linked(), session=later)
        found = d.hear(m.Joined(moved), session=later)
        d.expect("it says that it has moved", found, connect, gone, d.say(m.Goodbye()), let_go, linked)
        d.expect("so we ask", d.tell(d.want(2)), d.hello())


BANK: list[Question] = [written, stopped, fenced, judged, judged, unfenced, planes, planes, both]
