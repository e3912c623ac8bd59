"""P that writes, asked by a D that knows every answer."""

from __future__ import annotations

import random
from typing import Any

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import LeaseId, ReservationId, rank_peer
from kvbaton_proof.sim.questions.exam import Question
from kvbaton_proof.sim.questions.interview import DIGEST, ev, fx, m
from kvbaton_proof.sim.questions.interview_p import WRITE, P

_R = Reason


def pushes(rng: random.Random) -> None:
    """P writes into what it was offered, says so until it is heard, and never touches it again."""
    p = P(rng)
    p.join()
    id = p.lease()
    p.hear(p.claim())
    offer = m.Offer(id, 1, ReservationId(1), 0, p.packed, DIGEST)
    for what, bad, reason in (
        ("an offer of nobody", m.Offer(id, 2, ReservationId(11), 0, p.packed, DIGEST), _R.UNKNOWN_LEASE),
        ("of no lease", m.Offer(LeaseId(9), 1, ReservationId(12), 0, p.packed, DIGEST), _R.UNKNOWN_LEASE),
        ("another prompt", m.Offer(id, 1, ReservationId(13), 0, p.packed, b"other"), _R.CONTENT_MISMATCH),
        ("other groups", m.Offer(id, 1, ReservationId(14), 0, (*p.packed, b""), DIGEST), _R.BAD_SPAN),
    ):
        said = p.say(m.Quiesced(bad.reservation, reason))
        p.expect(what, p.hear(bad), said)
        p.expect("it again", p.hear(bad), p.say(m.Quiesced(bad.reservation, None)))
    copies = writes(p)
    accepted = p.say(m.Accepted(ReservationId(1)))
    p.expect("an offer", p.hear(offer), accepted, *copies)
    p.expect("it again", p.hear(offer), accepted)
    twice = m.Offer(id, 1, ReservationId(2), 0, p.packed, DIGEST)
    p.expect("another of the same reader", p.hear(twice), p.say(m.Quiesced(ReservationId(2), _R.DUPLICATE)))
    jobs = list(p.ledger.desk.owners)
    for job in jobs[:-1]:
        p.expect("some is written", p.tell(ev.CopyEnded(job)))
    written = p.say(m.Written(id, 1, ReservationId(1), DIGEST))
    p.expect("all is written", p.tell(ev.CopyEnded(jobs[-1])), written)
    p.expect("a copy that ended before", p.tell(ev.CopyEnded(jobs[-1]), ev.CopyRested(jobs[-1])))
    p.expect("not heard yet", p.later(0.51), written)
    p.expect("how much was done", p.hear(m.Renew(id, 1, (), True)), p.say(m.Renewed(id, 1, 3.0, len(jobs))))
    ack = m.Ack(id, 1, ReservationId(1))
    p.expect("it is heard", p.hear(ack), fx.Unpin(id))
    p.expect("it is again", p.hear(ack))
    p.expect("and offered again", p.hear(offer), p.say(m.Quiesced(ReservationId(1), None)))
    p.expect("nothing is left to say", p.later(20.0))
    p.over()


def writes(p: P) -> list[Any]:
    """One for each rank and group: both sides have the same ranks."""
    ranks = [rank for _ in p.blocks for rank in range(p.shape.ranks)]
    return [("copy", rank, p.plane, rank_peer(p.other, rank), WRITE) for rank in ranks]


def stops_of(p: P) -> list[Any]:
    return [("stop", rank, p.plane) for _ in p.blocks for rank in range(p.shape.ranks)]


def revokes(rng: random.Random) -> None:
    """What is revoked comes to rest, is said to have, and is never written again."""
    p = P(rng)
    p.join()
    early = m.Revoke(LeaseId(1), 1, ReservationId(1), "aborted")
    p.expect("a Revoke of what is not known", p.hear(early), p.say(m.Quiesced(ReservationId(1), None)))
    id = p.lease(readers=3)
    p.hear(p.claim())
    offer = m.Offer(id, 1, ReservationId(1), 0, p.packed, DIGEST)
    p.expect("its offer comes after it", p.hear(offer), p.say(m.Quiesced(ReservationId(1), None)))
    offer = m.Offer(id, 1, ReservationId(2), 0, p.packed, DIGEST)
    p.hear(offer)
    jobs = list(p.ledger.desk.owners)
    revoke = m.Revoke(id, 1, ReservationId(2), "aborted")
    stops = stops_of(p)
    p.expect("a Revoke", p.hear(revoke), *stops)
    p.expect("it again, not at rest", p.hear(revoke))
    p.expect("an offer, not at rest", p.hear(offer))
    for job in jobs[:-1]:
        p.expect("a copy stops", p.tell(ev.CopyEnded(job, _R.CANCELLED)))
    p.expect("the last stops, and may still land", p.tell(ev.CopyEnded(jobs[-1], _R.CANCELLED, at_rest=False)))
    quiet = p.say(m.Quiesced(ReservationId(2), None))
    p.expect("nothing can land", p.tell(ev.CopyRested(jobs[-1])), quiet)
    p.expect("it again, at rest", p.hear(revoke), quiet)
    p.expect("an offer of it", p.hear(offer), quiet)
    p.expect("a renewal of who left", p.hear(m.Renew(id, 1, (), True)), p.say(m.RenewRefused(id, 1, _R.UNKNOWN_LEASE)))
    p.hear(p.claim(attempt=2))
    p.hear(m.Offer(id, 2, ReservationId(3), 0, p.packed, DIGEST))
    jobs = list(p.ledger.desk.owners)
    failed = p.tell(ev.CopyEnded(jobs[0], _R.TRANSFER_FAILED), *(ev.CopyEnded(job, _R.CANCELLED) for job in jobs[1:]))
    p.expect("a write that fails", failed, *stops[1:], p.say(m.Quiesced(ReservationId(3), _R.TRANSFER_FAILED)))
    p.hear(p.claim(attempt=3))
    p.hear(m.Offer(id, 3, ReservationId(4), 0, p.packed, DIGEST))
    p.epochs[p.blocks[0][0]] = 1
    jobs = list(p.ledger.desk.owners)
    found = p.tell(*(ev.CopyEnded(job) for job in jobs))
    p.expect("what was reused is not vouched for", found, p.say(m.Quiesced(ReservationId(4), _R.STALE)), fx.Unpin(id))


def slow_writes(rng: random.Random) -> None:
    """Writes that make no progress are stopped; one that does not stop costs the session."""
    p = P(rng)
    p.join()
    id = p.lease()
    p.hear(p.claim())
    p.hear(m.Offer(id, 1, ReservationId(1), 0, p.packed, DIGEST))
    for _ in range(4):
        p.later(1.0)
        p.hear(m.Renew(id, 1, (), True))
    stops = stops_of(p)
    p.expect("writes that stall", p.later(1.01), *stops)
    p.hear(m.Renew(id, 1, (), True))
    found = []
    for _ in range(3):
        found += p.later(2.2)
        p.hear(m.Renew(id, 1, (), True))
    p.expect(
        "they do not stop, and D is shut out",
        found,
        *[fx.Disconnect(p.other, p.plane, p.shape.ranks, ("session", p.session))],
    )
    p.expect("who speaks in that session", p.hear(m.Commit(id, 1)), p.say(m.Reset(p.me.incarnation)))
    jobs = list(p.ledger.desk.owners)
    p.expect("they rest, and nobody is told", p.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in jobs)), fx.Unpin(id))


BANK: list[Question] = [pushes, revokes, slow_writes]
