"""The answers to concurrent, reordered, or differently transported messages."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import Incarnation, LeaseId, PeerId, RequestId, ReservationId, WorkerId, rank_peer
from kvbaton.protocol.machines import disowned
from kvbaton.protocol.marks import Ended, Step
from kvbaton_proof.sim.questions.exam import Question, lowered, same
from kvbaton_proof.sim.questions.interview import DIGEST, ev, fx, handoff, m
from kvbaton_proof.sim.questions.interview_d import READ, D, drop, failed, report
from kvbaton_proof.sim.questions.interview_p import P
from kvbaton_proof.sim.questions.interview_push import Offering
from kvbaton_proof.sim.questions.interview_writer import stops_of, writes

_R = Reason


def ends(booth: Any, step: Step) -> list[Any]:
    """Of what was put on record since the last time: (key, why)."""
    marks = booth.ledger.take_marks()
    return [(mark.key, mark.what.end.reason) for mark in marks if mark.step is step and isinstance(mark.what, Ended)]


def readers(rng: random.Random) -> None:
    """Of several readers each leaves for itself, once."""
    p = P(rng)
    p.join()
    id = p.lease(readers=3)
    p.expect("who has no seat leaves", p.hear(m.Abandon(handoff(1), 8, "aborted")))
    p.hear(p.claim(attempt=1))
    p.hear(p.claim(attempt=2))
    p.expect("the first leaves", p.hear(m.Abandon(handoff(1), 1, "aborted")))
    p.expect("and again", p.hear(m.Abandon(handoff(1), 1, "aborted")))
    p.epochs[p.blocks[0][0]] = 1
    good = (0, *(len(ids) for ids in p.blocks[1:]))
    p.expect("the second is stale", p.hear(m.Commit(id, 2)), p.say(m.Stale(id, 2, good, _R.STALE)))
    p.expect("a commit of who left", p.hear(m.Commit(id, 1)), p.say(m.Stale(id, 1, good, _R.STALE)))
    p.expect("a third comes", p.hear(p.claim(attempt=3)), p.granted(attempt=3))
    p.epochs.clear()
    p.expect("and is the last", p.hear(m.Commit(id, 3)), p.say(m.Committed(id, 3)), fx.Unpin(id))
    same("how it ended", ends(p, Step.CLOSED), [(1, None)])
    p.lease(2)
    p.hear(p.claim(2))
    p.hear(m.Abandon(handoff(2), 1, "aborted"))
    p.lease(3)
    p.hear(p.claim(3))
    p.hear(m.Abandon(handoff(3), 1, ""))
    p.lease(4)
    p.hear(p.claim(4))
    p.epochs[p.blocks[0][0]] = 1
    p.hear(m.Commit(LeaseId(4), 1))
    p.lease(5)
    p.later(3.01)
    same(
        "how these ended",
        ends(p, Step.CLOSED),
        [(2, _R.ABORTED), (3, _R.PEER_GONE), (4, _R.STALE), (5, _R.LEASE_EXPIRED)],
    )


def names(rng: random.Random) -> None:
    """Two that greet with the same number are two; one that greets twice is one."""
    p = P(rng)
    second = PeerId(WorkerId("d1"), Incarnation(5))
    hello = m.Hello(4, p.card())
    first = p.hear(hello, to=Incarnation(0), session=0, version=1)
    other = p.hear(hello, who=second, to=Incarnation(0), session=0, version=1)
    again = p.hear(hello, to=Incarnation(0), session=0, version=1)
    same("who greets again", again, first)
    same("who else greets", (other[0][1], other[0][2], other[0][3] != first[0][3]), ("d1", 5, True))


def untold(rng: random.Random) -> None:
    """A pool that does not tell of reuse is believed while it is held, and not after."""
    p = P(rng)
    p.identity.exact_epochs = False
    p.join()
    id = p.lease(readers=2)
    p.hear(p.claim(attempt=1))
    p.hear(p.claim(attempt=2))
    p.expect("while it is held", p.hear(m.Commit(id, 1)), p.say(m.Committed(id, 1)))
    p.later(2.0)
    p.expect("its term is over", p.later(1.01), fx.Unpin(id))
    p.expect("after it is released", p.hear(m.Commit(id, 2)), p.say(m.Stale(id, 2, (), _R.LEASE_EXPIRED)))
    p.over()


def growing(rng: random.Random) -> None:
    """P writes as it computes, and says Written when all is computed and written, not before."""
    p = P(rng)
    p.join()
    id = p.lease(whole_=False)
    p.hear(p.claim())
    accepted = p.say(m.Accepted(ReservationId(1)))
    p.expect("offered", p.hear(m.Offer(id, 1, ReservationId(1), 0, p.packed, DIGEST)), accepted)
    p.expect("computed", p.grow(id, done=False), *writes(p))
    p.expect("written, and not all", p.tell(*(ev.CopyEnded(job) for job in list(p.ledger.desk.owners))))
    written = p.say(m.Written(id, 1, ReservationId(1), DIGEST))
    p.expect("all", p.tell(ev.LeaseCompleted(id)), written)
    if rng.random() < 0.5:
        p.expect("never heard", p.later(0.51), written)
        for _ in range(4):
            p.hear(m.Renew(id, 1, (), True))
            p.later(1.0)
        p.hear(m.Renew(id, 1, (), True))
        p.expect("for too long", p.later(0.7), fx.Unpin(id))
        p.over()
    else:
        quiet = p.say(m.Quiesced(ReservationId(1), None))
        p.expect("revoked after that", p.hear(m.Revoke(id, 1, ReservationId(1), "aborted")), quiet, fx.Unpin(id))


def stopping(rng: random.Random) -> None:
    """Whatever ends a lease ends what is written from it, and its blocks stay pinned until that rests."""
    p = P(rng)
    p.join()
    id = p.lease(readers=rng.choice((1, 2)))
    p.hear(p.claim())
    p.hear(m.Offer(id, 1, ReservationId(1), 0, p.packed, DIGEST))
    jobs = list(p.ledger.desk.owners)
    how = rng.choice(("replaced", "hold", "left", "goodbye", "departed"))
    quiet: list[Any] = [p.say(m.Quiesced(ReservationId(1), _R.UNKNOWN_LEASE if how == "replaced" else None))]
    gone = fx.Disconnect(p.other, p.plane, p.shape.ranks, ("session", p.session))
    more: list[Any] = []
    if how == "replaced":
        found = p.tell(ev.CacheReplaced())
    elif how == "hold":
        found, quiet = p.later(3.01), [p.say(m.Quiesced(ReservationId(1), _R.LEASE_EXPIRED))]
    elif how == "left":
        found = p.hear(m.Abandon(handoff(1), 1, "aborted"))
    else:
        found = p.hear(m.Goodbye()) if how == "goodbye" else p.tell(ev.Departed(p.other.worker))
        more, quiet = [gone], []
    p.expect(how, found, *stops_of(p), *more)
    open_ = p.ledger.producer.by_handoff
    rest: list[Any] = [] if open_ else [fx.Unpin(id)]
    p.expect("it rests", p.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in jobs)), *quiet, *rest)
    p.expect("its place is for another", p.later(9.0), *[fx.Unpin(id)] * (not rest))
    p.over()


def two_written(rng: random.Random) -> None:
    """A lease that two are written from is released when both have come to rest."""
    p = P(rng)
    p.join()
    id = p.lease(readers=2)
    jobs: list[list[Any]] = []
    for attempt in (1, 2):
        p.hear(p.claim(attempt=attempt))
        before = set(p.ledger.desk.owners)
        p.hear(m.Offer(id, attempt, ReservationId(attempt), 0, p.packed, DIGEST))
        jobs.append([job for job in p.ledger.desk.owners if job not in before])
    p.expect("over", p.tell(ev.CacheReplaced()), *stops_of(p), *stops_of(p))
    for number in rng.sample((0, 1), 2):
        found = p.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in jobs[number]))
        quiet = p.say(m.Quiesced(ReservationId(number + 1), _R.UNKNOWN_LEASE))
        p.expect("one rests", found, quiet, *[fx.Unpin(id)] * (not p.ledger.desk.owners))
    p.over()


def full(rng: random.Random) -> None:
    """P begins no write while too much of what it wrote has not come to rest; nor over a plane that takes none."""
    p = P(rng, quarantine_blocks_max=3)
    p.join()
    id = p.lease(1)
    p.hear(p.claim(1))
    p.hear(m.Offer(id, 1, ReservationId(1), 0, p.packed, DIGEST))
    p.tell(ev.CacheReplaced())
    p.lease(2)
    p.hear(p.claim(2))
    offer = m.Offer(LeaseId(2), 1, ReservationId(2), 0, p.packed, DIGEST)
    p.expect("no room", p.hear(offer), p.say(m.Quiesced(ReservationId(2), _R.QUARANTINE_FULL)))
    p.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in list(p.ledger.desk.owners)))
    offer = msgspec.structs.replace(offer, reservation=ReservationId(3))
    p.expect("there is", p.hear(offer), p.say(m.Accepted(ReservationId(3))), *writes(p))
    lender = P(rng, "tcp", quarantine_blocks_max=3)
    lender.join()
    lender.lease(1)
    lender.hear(lender.claim(1))
    lender.tell(ev.CacheReplaced())
    lender.lease(2)
    lender.hear(lender.claim(2))
    accepted = lender.say(m.Accepted(ReservationId(2)))
    offer = m.Offer(LeaseId(2), 1, ReservationId(2), 0, lender.packed, DIGEST)
    lender.expect("what is only lent is not written", lender.hear(offer), accepted, *writes(lender))
    q = P(rng, "cma")
    q.join()
    q.lease()
    q.hear(q.claim())
    offer = m.Offer(LeaseId(1), 1, ReservationId(1), 0, q.packed, DIGEST)
    q.expect("a plane that takes none", q.hear(offer), q.say(m.Quiesced(ReservationId(1), _R.NO_TRANSPORT)))


def restless_loans(rng: random.Random) -> None:
    """What was lent and may still be read from keeps its blocks; growing, only what is new is lent."""
    p = P(rng, "tcp")
    p.join()
    id = p.lease(whole_=False)
    p.hear(p.claim())
    epochs = tuple(tuple(0 for _ in ids) for ids in p.blocks)
    p.tell(ev.LeaseExtended(id, p.blocks, epochs))
    done = 0
    for count in (1, 3):
        ready = whole([count for _ in p.blocks])
        found = p.tell(*(ev.LeaseProgressed(id, rank, ready) for rank in range(p.shape.ranks)))
        fresh = tuple(ids[done:count] for ids in p.blocks)
        lent = [("lend", rank, "tcp", p.other, READ, fresh) for rank in range(p.shape.ranks)]
        start = (0 if done == 0 else 3,) * len(p.blocks)
        packed = p.packed if done == 0 else tuple(b"" for _ in p.blocks)
        p.expect("what is new", found, *lent, p.say(m.Ready(id, 1, start, packed, ready, False)))
        done = count
    jobs = list(p.ledger.desk.owners)
    stops = [("stop", rank, "tcp") for _ in range(2) for rank in range(p.shape.ranks)]
    p.expect("it leaves", p.hear(m.Abandon(handoff(1), 1, "")), *stops)
    p.expect("it may be reading", p.tell(*(ev.CopyEnded(job, at_rest=False) for job in jobs)))
    p.expect("it is not", p.tell(*(ev.CopyRested(job) for job in jobs)), fx.Unpin(id))
    ahead = tuple(GroupProgress(0, 2, 1) for _ in p.blocks)
    id = p.lease(2, whole_=False)
    p.hear(p.claim(2))
    p.tell(ev.LeaseExtended(id, p.blocks, epochs))
    found = p.tell(*(ev.LeaseProgressed(id, rank, ahead) for rank in range(p.shape.ranks)))
    fresh = tuple(ids[:2] for ids in p.blocks)
    same(
        "a block that streams by layers is lent",
        [each[5] for each in found if each[0] == "lend"],
        [fresh] * p.shape.ranks,
    )


def two_wanted(rng: random.Random) -> None:
    """All that wait for a link go on when it is up, and all end when it is lost."""
    d = D(rng)
    d.expect("one", d.tell(d.want(1)), d.hello())
    d.expect("another", d.tell(d.want(2)))
    d.expect("and one given up before", d.tell(d.want(3)) + d.tell(ev.GaveUp(RequestId("r3"))), failed(_R.ABORTED, 3))
    d.expect("and another", d.tell(d.want(4)) + d.tell(ev.GaveUp(RequestId("r4"))), failed(_R.ABORTED, 4))
    d.joined()
    found = d.hear(m.Linked())
    d.expect("linked", found, d.claims(3, 5), d.claims(4, 6), d.claims(1, 1), d.claims(2, 2))
    d.expect("the third was granted", d.hear(d.grant(3, 5)), d.abandons(_R.ABORTED, 3, 5))
    gone = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("link", d.nonce))
    d.expect("lost", d.hear(m.Goodbye()), failed(_R.PEER_GONE, 1), failed(_R.PEER_GONE, 2), gone)


def two_offered(rng: random.Random) -> None:
    """All that one P wrote into are free when it is shut out."""
    d = Offering(rng)
    d.offered()
    d.expect("another", d.tell(d.want(2, push=True, deferred=True)), d.claims(2, 2, True))
    d.hear(d.grant(2, 2))
    offer = d.say(m.Offer(d.lease, 2, ReservationId(2), 0, d.packed, DIGEST))
    d.expect("offered too", d.tell(ev.Allocated(RequestId("r2"), d.blocks, 0)), offer, *d.lent())
    found, stops = d.hear(m.Goodbye()), 2 * d.stops()
    d.expect("gone", found, report(_R.PEER_GONE, 1), report(_R.PEER_GONE, 2), *stops, *d.fences(), d.gone())
    ranks = range(d.shape.ranks)
    found = d.tell(*(ev.RankFenced(rank, rank_peer(d.other, remote)) for rank in ranks for remote in ranks))
    d.expect("shut out", found)
    d.expect("at rest", d.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in d.jobs())), drop(1), drop(2))
    d.over()


def given_back(rng: random.Random) -> None:
    """Tickets that wait for their source to be greeted are bounded, and said once."""
    d = D(rng)
    tickets = [ev.Disowned(handoff(n), WorkerId("p0"), "ticket", DIGEST, False, _R.BUSY) for n in (1, 2, 3)]
    with lowered(disowned, "WAITING_MAX", 2):
        d.expect("one", d.tell(tickets[0]), d.hello())
        d.expect("it again, and another, and one too many", d.tell(tickets[0], *tickets[1:]))
    d.joined()
    d.expect("linked", d.hear(m.Linked()), d.claims(1, 1), d.claims(2, 2))
    d.expect("what was too many can be said later", d.tell(tickets[2]), d.claims(3, 3))
    d.expect("granted", d.hear(d.grant(2, 2)), d.abandons(_R.BUSY, 2, 2))


def sources(rng: random.Random) -> None:
    """Of several sources none that is in use makes room for another."""
    d = D(rng, sessions_max=2)
    d.expect("one", d.tell(d.want(1)), d.hello())
    d.expect("two", d.tell(d.want(2, "p1")), d.hello(source="p1"))
    d.expect("three", d.tell(d.want(3, "p2")), failed(_R.BUSY, 3))
    d.tell(ev.GaveUp(RequestId("r1")))
    d.expect("one is left", d.tell(d.want(4, "p2")), d.hello(source="p2"))
    d.expect("and the other goes on", d.tell(d.want(5, "p1")))


def worn(rng: random.Random) -> None:
    """A plane that is found shut in use is given up when the last commit is answered; one that P passed over is tried
    again in a while."""
    d = D(rng, "shm", "tcp")
    d.tell(d.want())
    d.nonce, d.session, d.plane = 1, 3, "shm"
    card = d.card(transports=("shm", "tcp"))
    d.hear(m.Welcome(1, card, "shm", d.ends, 0))
    d.tell(*(ev.CopyEnded(job) for job in d.jobs()))
    d.hear(m.Linked())
    d.tell(d.want(2))
    d.to_blocks(1)
    d.tell(*(ev.CopyEnded(job) for job in d.jobs()))
    d.hear(d.grant(2, 2))
    d.tell(ev.Allocated(RequestId("r2"), d.blocks, 0))
    jobs = d.jobs()
    gone = fx.Disconnect(d.other, "shm", d.shape.ranks, ("link", 1))
    d.tell(*(ev.CopyEnded(job, _R.UNREACHABLE) for job in jobs))
    same("a commit is waited for", WorkerId("p0") in d.ledger.consumer.links.by_worker, True)
    found = d.hear(m.Committed(d.lease, 1))
    d.expect("answered", found, report(None), drop(), gone, ("given up", "p0", "shm"))
    d.expect("the next", d.tell(d.want(3)), d.hello(("tcp",)))


def passed_over(rng: random.Random) -> None:
    """A better plane that P did not take has failed there: it is tried again in a while, when nothing is under way."""
    d = D(rng, "shm", "tcp")
    d.expect("wanted", d.tell(d.want()), d.hello())
    d.plane, d.session = "tcp", 3
    d.hear(m.Welcome(1, d.card(transports=("shm", "tcp")), "tcp", d.ends, 0))
    d.hear(m.Linked())
    d.hear(m.ClaimRefused(handoff(1), 1, "busy", ""))
    d.expect("too soon", d.tell(d.want(2)), d.claims(2, 2))
    d.hear(m.ClaimRefused(handoff(2), 2, "busy", ""))
    d.later(2.01)
    gone = fx.Disconnect(d.other, "tcp", d.shape.ranks, ("link", 1))
    d.expect("in a while", d.tell(d.want(3)), d.say(m.Goodbye()), gone, d.hello())


def paired(rng: random.Random) -> None:
    """A P that says it is linked to us in no session, or another, is done with the one that it had; nobody else is."""
    d = D(rng)
    second = PeerId(WorkerId("p1"), Incarnation(5))
    numbers = {}
    for who in (d.other, second):
        found = d.hear(m.Hello(8, d.card()), who=who, to=Incarnation(0), session=0, version=1)
        numbers[who] = int(found[0][3])
        d.hear(m.Joined(d.ends), who=who, session=numbers[who])
    d.expect("wanted", d.tell(d.want()), d.hello())
    d.session = 3
    linked = rng.choice((0, numbers[d.other]))
    welcome = m.Welcome(d.nonce, d.card(), d.plane, d.ends, linked)
    found = d.hear(welcome)
    ended = [each for each in found if isinstance(each, fx.Disconnect)]
    ours = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("session", numbers[d.other]))
    same("what it is done with", ended, [ours] if linked == 0 else [])
    kept = set(numbers.values()) if linked else {numbers[second]}
    same("sessions that go on", set(d.ledger.sessions.by_number), kept)


def held_up(rng: random.Random) -> None:
    """A Welcome that may be older than the session that its sender has confirmed since is asked for again."""
    d = D(rng)
    d.expect("wanted", d.tell(d.want()), d.hello())
    found = d.hear(m.Hello(8, d.card()), to=Incarnation(0), session=0, version=1)
    number = int(found[0][3])
    d.hear(m.Joined(d.ends), session=number)
    d.session = 3
    d.expect("a word of before", d.hear(m.Welcome(1, d.card(), d.plane, d.ends, 0)), d.hello())
    connect = fx.Connect(d.other, d.plane, d.shape.ranks, d.ends, ("link", d.nonce))
    d.expect("a word of now", d.hear(m.Welcome(d.nonce, d.card(), d.plane, d.ends, number)), connect, d.confirms())


def leaves(rng: random.Random) -> None:
    """Who leaves gives everything back, and says so."""
    d = D(rng)
    d.up()
    d.to_blocks()
    d.tell(ev.TurnedAway(RequestId("r7"), _R.TICKET_FORGED, "words", "t", handoff(7)))
    keys = [mark.key for mark in d.ledger.take_marks() if mark.step is Step.ASKED]
    same("each attempt has its own record", len(keys), len(set(keys)))
    gone = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("link", d.nonce))
    d.ledger.leave(d.now)
    d.expect("leaves", d._told(), report(_R.ABORTED), d.abandons(_R.ABORTED), *d.stops(), d.say(m.Goodbye()), gone)
    same("is idle", d.ledger.is_idle(), False)
    d.expect("all is at rest", d.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in d.jobs())), drop())
    same("is idle then", d.ledger.is_idle(), True)


def source_leaves(rng: random.Random) -> None:
    """A P that leaves waits for nobody whom it lent to: its data planes go with it."""
    p = P(rng, "tcp")
    p.join()
    id = p.lease()
    p.hear(p.claim())
    stops = [("stop", rank, "tcp") for rank in range(p.shape.ranks)]
    p.ledger.leave(p.now)
    gone = fx.Disconnect(p.other, "tcp", p.shape.ranks, ("session", p.session))
    p.expect("leaves", p._told(), *stops, fx.Unpin(id), p.say(m.Goodbye()), gone)


BANK: list[Question] = [
    leaves, given_back, source_leaves, sources, readers, two_written, names, untold, growing, stopping, full,
    restless_loans, two_wanted, two_offered, worn, passed_over, paired, held_up,
]  # fmt: skip
