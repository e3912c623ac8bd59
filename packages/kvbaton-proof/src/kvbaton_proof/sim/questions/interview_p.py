"""P, asked by a D that knows every answer."""

from __future__ import annotations

import random
from typing import Any

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import Incarnation, JobId, LeaseId, PeerId, PutId, WorkerId
from kvbaton.protocol.privileges import Role
from kvbaton_proof.sim.questions.exam import Question, same
from kvbaton_proof.sim.questions.interview import DIGEST, KEY, TOKENS, Booth, ev, fx, handoff, m

_R = Reason
READ, WRITE = fx.Direction.READ, fx.Direction.WRITE


class P(Booth):
    """A prefiller; `other` is D, with as many ranks."""

    def __init__(self, rng: random.Random, plane: str = "rdma", **settings: Any) -> None:
        super().__init__(rng, "p0", "d0", (plane,), **settings)
        self.plane = plane
        self.lends = plane == "tcp"
        self.nonce = 0

    @property
    def pairs(self) -> int:
        return self.shape.ranks**2

    def join(self, who: PeerId | None = None) -> int:
        """Greet, be welcomed, confirm, be linked."""
        who = who or self.other
        self.nonce += 1
        found = self.hear(m.Hello(self.nonce, self.card()), who=who, to=Incarnation(0), session=0, version=1)
        session = int(found[0][3]) if found else 0
        held = ("session", session)
        welcome = m.Welcome(self.nonce, self.identity.card(), self.plane, (), 0)
        invited = fx.Invitation(who, self.plane, self.shape.ranks, held)
        self.expect("a greeting is answered", found, self.say(welcome, invited, who=who, session=session))
        ends = tuple(f"{n}".encode() for n in range(self.pairs))
        connect = fx.Connect(who, self.plane, self.shape.ranks, ends, held)
        linked = self.say(m.Linked(), who=who, session=session)
        self.expect("a session is confirmed", self.hear(m.Joined(ends), who=who, session=session), connect, linked)
        self.expect("it is again", self.hear(m.Joined(ends), who=who, session=session), linked)
        if who is self.other:
            self.session = session
        return session

    def lease(
        self, number: int = 1, readers: int = 1, deferred: bool = False, whole_: bool = True, **more: Any
    ) -> LeaseId:
        id = LeaseId(number)
        begun = ev.LeaseBegun(id, handoff(number), DIGEST, TOKENS, len(self.blocks), readers, deferred=deferred, **more)
        found = self.tell(begun)
        if whole_:
            found += self.grow(id)
        self.expect("a lease without readers", found)
        return id

    def grow(self, id: LeaseId, done: bool = True) -> list[Any]:
        epochs = tuple(tuple(self.epochs.get(each, 0) for each in ids) for ids in self.blocks)
        events: list[Any] = [ev.LeaseExtended(id, self.blocks, epochs)]
        events += [ev.LeaseProgressed(id, rank, self.all_of) for rank in range(self.shape.ranks)]
        return self.tell(*events, *[ev.LeaseCompleted(id)] * done)

    @property
    def all_of(self) -> tuple[GroupProgress, ...]:
        return whole([len(ids) for ids in self.blocks])

    def claim(self, number: int = 1, attempt: int = 1, **fields: Any) -> m.Claim:
        ticket = fields.pop("ticket", None) or self.ticket(number, lease=number)
        given = {"handoff": handoff(number), "digest": DIGEST, "deferred": False, **fields}
        return m.Claim(attempt=attempt, ticket=ticket, **given)

    def granted(self, number: int = 1, attempt: int = 1, ttl_s: float = 3.0, **how: Any) -> Any:
        message = m.Granted(handoff(number), attempt, LeaseId(number), ttl_s, TOKENS, self.packed, self.all_of, True)
        return self.say(message, **how)

    def lent(self, who: PeerId | None = None) -> list[Any]:
        if not self.lends:
            return []
        return [("lend", rank, self.plane, who or self.other, READ, self.blocks) for rank in range(self.shape.ranks)]

    def refuses(self, what: str, claim: m.Claim, reason: Reason, *more: Any, **how: Any) -> None:
        refusal = m.ClaimRefused(claim.handoff, claim.attempt, reason, "")
        self.expect(what, self.hear(claim, **how), self.say(refusal, **how), *more)


def pulls(rng: random.Random) -> None:
    """A prompt is claimed, renewed, read and committed; whoever asks again is answered the same."""
    p = P(rng)
    id = p.lease(readers=2)
    p.join()
    second = PeerId(WorkerId("d1"), Incarnation(5))
    other = p.join(second)
    more = ev.LeaseExtended(id, p.blocks, p.blocks)
    p.expect("more blocks than all", p.tell(more, ev.LeaseCompleted(id)))
    p.expect("a claim", p.hear(p.claim()), p.granted())
    p.expect("it again", p.hear(p.claim()), p.granted())
    p.refuses("another of a third", p.claim(ticket="x"), _R.TICKET_FORGED)
    p.later(1.0)
    p.expect("a renewal", p.hear(m.Renew(id, 1, (3,), True)), p.say(m.Renewed(id, 1, 3.0, 0)))
    have = tuple(rng.randint(0, 3) for _ in p.blocks)
    rest = tuple(packed[4 * n :] for packed, n in zip(p.packed, have, strict=True))
    ready = m.Ready(id, 1, have, rest, p.all_of, True)
    p.expect("who lacks some", p.hear(m.Renew(id, 1, have, False)), p.say(m.Renewed(id, 1, 3.0, 0)), p.say(ready))
    p.expect("who counts other groups", p.hear(m.Renew(id, 1, (1, 1, 1), False)), p.say(m.Renewed(id, 1, 3.0, 0)))
    for lease, attempt in ((id, 9), (LeaseId(9), 1)):
        refused = m.RenewRefused(lease, attempt, _R.UNKNOWN_LEASE)
        p.expect("a renewal of nothing", p.hear(m.Renew(lease, attempt, (), True)), p.say(refused))
        stale = m.Stale(lease, attempt, (), _R.UNKNOWN_LEASE)
        p.expect("a commit of nothing", p.hear(m.Commit(lease, attempt)), p.say(stale))
    p.expect(
        "a claim of the second", p.hear(p.claim(), who=second, session=other), p.granted(who=second, session=other)
    )
    p.refuses("a claim of a third", p.claim(attempt=3), _R.TICKET_SPENT)
    for _ in range(2):
        p.expect("a commit", p.hear(m.Commit(id, 1)), p.say(m.Committed(id, 1)))
    p.expect("a claim after it", p.hear(p.claim()))
    p.epochs[p.blocks[-1][1]] = 1
    good = (*(len(ids) for ids in p.blocks[:-1]), 1)
    late = p.say(m.Stale(id, 1, good, _R.TICKET_SPENT), who=second, session=other)
    p.expect("a commit of what was reused", p.hear(m.Commit(id, 1), who=second, session=other), late, fx.Unpin(id))
    p.expect("it again", p.hear(m.Commit(id, 1), who=second, session=other), late)
    p.expect("the first again", p.hear(m.Commit(id, 1)), p.say(m.Committed(id, 1)))
    over = m.RenewRefused(id, 1, _R.TICKET_SPENT)
    p.expect("a renewal of what is over", p.hear(m.Renew(id, 1, (), True)), p.say(over))
    p.refuses("a claim of what is over", p.claim(attempt=4), _R.TICKET_SPENT)
    p.over()


def streams(rng: random.Random) -> None:
    """A claim waits for its lease; what becomes ready is told at once."""
    p = P(rng)
    p.join()
    ticket = p.ticket(1, lease=0)
    asks = p.claim(ticket=ticket, deferred=True)
    p.expect("a claim that is early", p.hear(asks))
    p.expect("it again", p.hear(asks))
    p.refuses("not deferred", p.claim(2, ticket=p.ticket(2, lease=0)), _R.UNKNOWN_LEASE)
    p.refuses("of a lease that is not", p.claim(2, deferred=True), _R.UNKNOWN_LEASE)
    p.later(1.0)
    id, none = LeaseId(1), tuple(b"" for _ in p.blocks)
    nothing = tuple(GroupProgress() for _ in p.blocks)
    begun = ev.LeaseBegun(id, handoff(1), DIGEST, TOKENS, len(p.blocks), deferred=True)
    granted = m.Granted(handoff(1), 1, id, 3.0, TOKENS, none, nothing, False)
    p.expect("its lease begins", p.tell(begun), p.say(granted))
    zeros = (0,) * len(p.blocks)
    found = p.grow(id, done=False)
    ready = m.Ready(id, 1, zeros, p.packed, p.all_of, False)
    p.expect("all is computed, and not yet said to be all", found, p.say(ready))
    p.expect("a renewal tells how much was done", p.hear(m.Renew(id, 1, (), True)), p.say(m.Renewed(id, 1, 3.0, 1)))
    all_ = m.Ready(id, 1, tuple(len(ids) for ids in p.blocks), none, p.all_of, True)
    p.expect("it is all", p.tell(ev.LeaseCompleted(id)), p.say(all_))
    p.expect("news of the past", p.tell(ev.LeaseProgressed(id, 0, nothing)))
    p.expect("a source that ends after all", p.tell(ev.SourceEnded(id, _R.SOURCE_ABORTED)))
    reason = rng.choice(("", "aborted"))
    p.expect("the reader leaves", p.hear(m.Abandon(handoff(1), 1, reason)), fx.Unpin(id))
    _told_once(p)
    p.expect("a source that ends after that", p.tell(ev.SourceEnded(id, _R.SOURCE_ABORTED)))
    p.refuses("a claim of it", p.claim(attempt=7), _R.TICKET_SPENT)
    p.expect("another waits", p.hear(p.claim(3, ticket=p.ticket(3, lease=0), deferred=True)))
    p.later(6.9)
    refusal = m.ClaimRefused(handoff(3), 1, _R.DEFER_TIMEOUT, "")
    p.expect("until it is too long", p.later(0.2), p.say(refusal))
    p.hear(p.claim(4, ticket=p.ticket(4, lease=0), deferred=True))
    p.expect("one that is taken back", p.hear(m.Abandon(handoff(4), 1, "aborted")))
    p.expect("is waited for by nobody", p.later(8.0))
    p.over()


def _told_once(p: P) -> None:
    """A reader that comes while a prompt is listed is told the rest, not what its grant has said."""
    id, zeros = LeaseId(21), (0,) * len(p.blocks)
    p.tell(ev.LeaseBegun(id, handoff(21), DIGEST, TOKENS, len(p.blocks), deferred=True))
    p.tell(ev.LeaseExtended(id, tuple(ids[:2] for ids in p.blocks), tuple((0, 0) for _ in p.blocks)))
    listed = tuple(packed[:8] for packed in p.packed)
    none = tuple(GroupProgress() for _ in p.blocks)
    granted = m.Granted(handoff(21), 9, id, 3.0, TOKENS, listed, none, False)
    p.expect("a claim of what is half listed", p.hear(p.claim(21, 9)), p.say(granted))
    half = whole([1] * len(p.blocks))
    found = p.tell(*(ev.LeaseProgressed(id, rank, half) for rank in range(p.shape.ranks)))
    twos = tuple(2 for _ in zeros)
    p.expect("some is ready", found, p.say(m.Ready(id, 9, twos, tuple(b"" for _ in zeros), half, False)))
    rest = tuple(ids[2:] for ids in p.blocks)
    p.tell(ev.LeaseExtended(id, rest, tuple((0,) * len(ids) for ids in rest)))
    found = p.tell(*(ev.LeaseProgressed(id, rank, p.all_of) for rank in range(p.shape.ranks)))
    fresh = tuple(packed[8:] for packed in p.packed)
    p.expect("all is ready", found, p.say(m.Ready(id, 9, twos, fresh, p.all_of, False)))
    p.expect("its reader leaves", p.hear(m.Abandon(handoff(21), 9, "")), fx.Unpin(id))


def source_ends(rng: random.Random) -> None:
    """P's request ends early, its term is over, its cache is replaced, the router takes it back: each ends a lease."""
    p = P(rng)
    p.join()
    id = p.lease(1, whole_=False)
    p.hear(p.claim(1))
    lost = p.say(m.SourceLost(id, 1, _R.SOURCE_PREEMPTED))
    p.expect("a source that ends", p.tell(ev.SourceEnded(id, _R.SOURCE_PREEMPTED)), lost, fx.Unpin(id))
    p.refuses("a claim of it", p.claim(1, 2), _R.SOURCE_PREEMPTED)
    stale = m.Stale(id, 1, (0,) * len(p.blocks), _R.SOURCE_PREEMPTED)
    p.expect("a commit of it", p.hear(m.Commit(id, 1)), p.say(stale))
    for number, term_s, deferred in ((2, 3.0, False), (3, 7.0, True)):
        id = p.lease(number, deferred=deferred)
        p.expect("before its term is over", p.later(term_s - 0.01))
        p.expect("when its term is over", p.later(0.02), fx.Unpin(id))
        p.refuses("a claim of it", p.claim(number), _R.LEASE_EXPIRED)
    id = p.lease(4)
    for _ in range(7):
        p.hear(p.claim(4))
        p.expect("a lease that is renewed", p.later(2.9), *[fx.Unpin(id)] * (_ == 6))
    id = p.lease(5)
    p.expect("a cache that is replaced", p.tell(ev.CacheReplaced()), fx.Unpin(id))
    p.refuses("a claim of it", p.claim(5), _R.UNKNOWN_LEASE)
    p.expect("a commit of it", p.hear(m.Commit(id, 1)), p.say(m.Stale(id, 1, (), _R.UNKNOWN_LEASE)))
    id = p.lease(6)
    p.expect("a ticket that is taken back", p.tell(ev.Discarded(handoff(6))), fx.Unpin(id))
    p.refuses("a claim of it", p.claim(6), _R.DISCARDED)
    p.expect("before it begins", p.tell(ev.Discarded(handoff(7))))
    begun = ev.LeaseBegun(LeaseId(7), handoff(7), DIGEST, TOKENS, len(p.blocks))
    p.expect("what was taken back does not begin", p.tell(begun), fx.Unpin(LeaseId(7)))
    id = p.lease(8, 2)
    p.hear(p.claim(8))
    p.expect("one that is read", p.tell(ev.Discarded(handoff(8))))
    p.refuses("nobody else comes", p.claim(8, 2), _R.TICKET_SPENT)
    p.expect("ends with its reader", p.hear(m.Commit(id, 1)), p.say(m.Committed(id, 1)), fx.Unpin(id))
    p.hear(p.claim(9, ticket=p.ticket(9, lease=0), deferred=True))
    refusal = p.say(m.ClaimRefused(handoff(9), 1, _R.DISCARDED, ""))
    p.expect("a claim that waits for what is taken back", p.tell(ev.Discarded(handoff(9))), refusal)
    p.tell(ev.DrainStarted())
    p.refuses("a claim at one that drains", p.claim(10, ticket=p.ticket(10, lease=0), deferred=True), _R.DRAINING)


def tickets(rng: random.Random) -> None:
    """A ticket is for one P in one life, one handoff, one D, one prompt, and not for long."""
    p = P(rng)
    p.join()
    for number in range(1, 12):
        p.lease(number)
    wall = p.wall
    lies: list[tuple[str, dict[str, Any], Reason]] = [
        ("another key", {"key": b"another key"}, _R.TICKET_FORGED), ("another P", {"source": "p1"}, _R.TICKET_FORGED),
        ("another handoff", {"handoff": handoff(99)}, _R.TICKET_FORGED),
        ("over", {"expires_unix_s": wall - 0.01}, _R.TICKET_EXPIRED),
        ("for years", {"expires_unix_s": wall + 3601.0}, _R.TICKET_FORGED),
        ("another D", {"target": "d1"}, _R.TICKET_FORGED),
        ("another life", {"incarnation": 77}, _R.WRONG_INCARNATION),
        ("another prompt", {"digest": b"other"}, _R.CONTENT_MISMATCH),
    ]  # fmt: skip
    for what, fields, reason in lies:
        key = fields.pop("key", KEY)
        ticket = p.ticket(1, **{"lease": 1, **fields}) if key is KEY else _signed(p, key)
        p.refuses(what, p.claim(1, ticket=ticket), reason)
    p.expect("all this spent nothing", p.hear(p.claim(1)), p.granted(1))
    for number, fields in (
        (2, {"expires_unix_s": wall + 3599.0}),
        (3, {"target": "d0"}),
        (4, {"incarnation": int(p.me.incarnation)}),
        (5, {"digest": b""}),
    ):
        ticket = p.ticket(number, **{"lease": number, **fields})
        p.expect(f"a ticket with {fields}", p.hear(p.claim(number, ticket=ticket)), p.granted(number))
    blank = p.ticket(6, lease=6, digest=b"")
    p.refuses(
        "another prompt than P's", p.claim(6, ticket=blank, digest=b"other"), _R.CONTENT_MISMATCH, fx.Unpin(LeaseId(6))
    )
    p.refuses("it has had its turn", p.claim(6), _R.CONTENT_MISMATCH)
    p.refuses(
        "the ticket's prompt, not the claim's", p.claim(7, digest=b"other"), _R.CONTENT_MISMATCH, fx.Unpin(LeaseId(7))
    )
    p.refuses(
        "a ticket of another prompt spends nothing",
        p.claim(8, ticket=p.ticket(8, lease=8, digest=b"x"), digest=b"x"),
        _R.CONTENT_MISMATCH,
    )
    p.expect("so it is there", p.hear(p.claim(8)), p.granted(8))
    id = LeaseId(20)
    p.tell(ev.LeaseBegun(id, handoff(20), DIGEST, TOKENS, len(p.blocks), target=WorkerId("d1")))
    p.refuses("a lease for another D", p.claim(20), _R.TICKET_FORGED)
    p.expect(
        "and not for its prompt either",
        p.hear(p.claim(20, digest=b"o", ticket=p.ticket(20, digest=b""))),
        p.say(m.ClaimRefused(handoff(20), 1, _R.TICKET_FORGED, "")),
    )
    p.expect("that D is gone", p.tell(ev.Departed(WorkerId("d1"))), fx.Unpin(id))
    for number in (9, 9):
        found = p.tell(ev.LeaseBegun(LeaseId(30), handoff(number), DIGEST, TOKENS, len(p.blocks)))
        p.expect("a name that is in use", found, fx.Unpin(LeaseId(30)))
    same("leases that are held", LeaseId(9) in p.ledger.producer.leases, True)


def _signed(p: P, key: bytes) -> str:
    from kvbaton.protocol.wire.ticket import Ticket, seal

    return seal(Ticket(handoff(1), p.me.worker, p.wall + 60.0, lease=LeaseId(1), digest=DIGEST), key)


def quotas(rng: random.Random) -> None:
    """What one peer may hold, and what all may: met, and passed by one."""
    p = P(rng, parked_max=3, parked_per_peer_max=2, seats_per_peer_max=2, leases_max=4)
    p.join()
    second = PeerId(WorkerId("d1"), Incarnation(5))
    other = p.join(second)
    for number, who, session, fits in ((1, p.other, p.session, True), (2, p.other, p.session, True),
                                       (3, p.other, p.session, False),
                                       (4, second, other, True), (5, second, other, False)):  # fmt: skip
        asks = p.claim(number, number, ticket=p.ticket(number, lease=0), deferred=True)
        if fits:
            p.expect("a claim that may wait", p.hear(asks, who=who, session=session))
        else:
            p.refuses("one that may not", asks, _R.BUSY, who=who, session=session)
    p.hear(m.Abandon(handoff(1), 1, ""))
    p.expect("a place was left", p.hear(p.claim(6, 6, ticket=p.ticket(6, lease=0), deferred=True)))
    for number in (11, 12, 13, 14):
        p.lease(number)
    p.expect(
        "one lease more than may be",
        p.tell(ev.LeaseBegun(LeaseId(15), handoff(15), DIGEST, 1, 1)),
        fx.Unpin(LeaseId(15)),
    )
    for number in (11, 12):
        p.expect("a seat", p.hear(p.claim(number)), p.granted(number))
    p.refuses("a seat more", p.claim(13), _R.BUSY)
    p.expect("another's seat", p.hear(p.claim(13), who=second, session=other), p.granted(13, who=second, session=other))
    p.hear(m.Commit(LeaseId(11), 1))
    p.expect("a seat was left", p.hear(p.claim(14)), p.granted(14))
    prompt = sum(shape_bytes(p))
    for room, fits in ((2 * prompt, True), (2 * prompt - 1, False)):
        p = P(random.Random(rng.random()), bytes_per_peer_max=room)
        p.shape = p.shape
        prompt_here = sum(shape_bytes(p))
        if prompt_here != prompt:
            continue
        p.join()
        p.lease(1)
        p.lease(2)
        p.expect("one alone", p.hear(p.claim(1)), p.granted(1))
        if fits:
            p.expect("as many bytes as may be", p.hear(p.claim(2)), p.granted(2))
        else:
            p.refuses("a byte more", p.claim(2), _R.BUSY)


def shape_bytes(p: Booth) -> list[int]:
    """Of a whole prompt, by group."""
    blocks = -(-TOKENS // p.shape.block_tokens)
    return [count * p.shape.page_bytes * p.shape.ranks * blocks for count in p.shape.group_layers]


def puts(rng: random.Random) -> None:
    """One pin per put, released when the store no longer reads."""
    p = P(rng, puts_max=2)
    for put in (1, 2):
        p.expect(
            "a put", p.tell(ev.PutWanted(PutId(put), p.blocks, (b"k",))), fx.StorePut(PutId(put), p.blocks, (b"k",))
        )
    p.expect("one more than may be", p.tell(ev.PutWanted(PutId(3), p.blocks, (b"k",))), fx.UnpinPut(PutId(3)))
    p.expect("it is stored", p.tell(ev.StoreEnded(PutId(1))), fx.UnpinPut(PutId(1)))
    p.expect("it is again", p.tell(ev.StoreEnded(PutId(1))))
    p.expect("in time", p.later(4.99))
    p.expect("too slow", p.later(0.02), fx.CancelPut(PutId(2)))
    p.expect("it is told once", p.later(9.0))
    p.expect("it has stopped", p.tell(ev.StoreEnded(PutId(2), _R.STORE_FAILED)), fx.UnpinPut(PutId(2)))
    counted = {name: count for name, count in p.ledger.desk.counts.items() if name.startswith("puts.")}
    same("what is counted of puts", counted, {"puts.busy": 1, "puts.stored": 1, "puts.transfer_timeout": 1})


def lending(rng: random.Random) -> None:
    """Where a plane enforces it, what is ready is lent before it is told, and taken back when its reader has gone."""
    p = P(rng, "tcp")
    p.join()
    id = p.lease()
    p.expect("a claim", p.hear(p.claim()), p.granted(), *p.lent())
    jobs = list(p.ledger.desk.owners)
    stops = [("stop", rank, p.plane) for rank in range(p.shape.ranks)]
    p.expect("a commit", p.hear(m.Commit(id, 1)), p.say(m.Committed(id, 1)), *stops)
    for job in jobs[:-1]:
        p.expect("some have been taken back", p.tell(ev.CopyEnded(job)))
    p.expect("all have", p.tell(ev.CopyEnded(JobId(jobs[-1]))), fx.Unpin(id))
    p.lease(2)
    p.identity.role_of = lambda worker: Role.ROUTER
    p.expect("nobody is lent to who may not read", p.hear(p.claim(2)))


def outlives_its_ticket(rng: random.Random) -> None:
    """A claim for another prompt waits, its ticket expires, the lease begins: refused, and its seat is spent."""
    p = P(rng)
    p.join()
    ticket = p.ticket(lease=0, digest=b"", expires_unix_s=p.wall + rng.uniform(1.0, 3.0))
    asks = p.claim(ticket=ticket, deferred=True, digest=b"another prompt's")
    p.expect("a claim before its lease", p.hear(asks))
    p.later(4.0)
    id = LeaseId(1)
    found = p.tell(ev.LeaseBegun(id, handoff(1), DIGEST, TOKENS, len(p.blocks), deferred=True))
    refusal = p.say(m.ClaimRefused(asks.handoff, asks.attempt, _R.CONTENT_MISMATCH, ""))
    p.expect("another prompt, and an old ticket", found, refusal, fx.Unpin(id))


BANK: list[Question] = [pulls, streams, source_ends, tickets, quotas, puts, lending]
