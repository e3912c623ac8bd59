"""D, answered by a P that knows every question."""

from __future__ import annotations

import random
from typing import Any

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PeerId, RequestId, ReservationId, WorkerId, rank_peer
from kvbaton.protocol.machines import consumer
from kvbaton.protocol.privileges import Role
from kvbaton_proof.sim.questions.exam import Question, lowered, same
from kvbaton_proof.sim.questions.interview import DIGEST, TOKENS, Booth, ev, fx, handoff, m

_R = Reason
READ = fx.Direction.READ


class D(Booth):
    """A decoder; `other` is P, with as many ranks."""

    def __init__(self, rng: random.Random, *planes: str, **settings: Any) -> None:
        super().__init__(rng, "d0", "p0", planes or ("rdma",), **settings)
        self.plane = self.planes[0]
        self.nonce = 0
        self.lease = LeaseId(5)
        self.ends = tuple(b"%d" % n for n in range(self.shape.ranks**2))

    def want(self, number: int = 1, source: str = "p0", **fields: Any) -> ev.Wanted:
        return ev.Wanted(RequestId(f"r{number}"), handoff(number), WorkerId(source), "ticket", DIGEST, TOKENS, **fields)

    def hello(self, planes: tuple[str, ...] = (), source: str = "p0") -> Any:
        self.nonce += 1
        card = self.identity.card(planes or None)
        nobody = PeerId(WorkerId(source), Incarnation(0))
        return self.say(m.Hello(self.nonce, card), who=nobody, session=0, version=1)

    def joined(self, session: int = 3) -> None:
        """P welcomes, and D confirms."""
        self.session = session
        welcome = m.Welcome(self.nonce, self.card(), self.plane, self.ends, 0)
        connect = fx.Connect(self.other, self.plane, self.shape.ranks, self.ends, ("link", self.nonce))
        self.expect("a welcome", self.hear(welcome), connect, self.confirms())
        self.expect("it again", self.hear(welcome))

    def confirms(self) -> Any:
        invited = fx.Invitation(self.other, self.plane, self.shape.ranks, ("link", self.nonce))
        return self.say(m.Joined(()), invited)

    def claims(self, number: int = 1, attempt: int = 1, deferred: bool = False, **how: Any) -> Any:
        return self.say(m.Claim(handoff(number), attempt, "ticket", DIGEST, deferred), **how)

    def up(self, number: int = 1, **fields: Any) -> None:
        """All the way to a claim."""
        self.expect("a prompt is wanted", self.tell(self.want(number, **fields)), self.hello())
        self.joined()
        self.expect("linked", self.hear(m.Linked()), self.claims(number, deferred=fields.get("deferred", False)))
        self.expect("linked again", self.hear(m.Linked()))

    @property
    def all_of(self) -> tuple[GroupProgress, ...]:
        return whole([len(ids) for ids in self.blocks])

    def grant(self, number: int = 1, attempt: int = 1, **fields: Any) -> m.Granted:
        message = m.Granted(handoff(number), attempt, self.lease, 3.0, TOKENS, self.packed, self.all_of, True)
        return msgspec.structs.replace(message, **fields)

    def reads(self) -> list[Any]:
        ranks = [rank for _ in self.blocks for rank in range(self.shape.ranks)]
        return [("copy", rank, self.plane, rank_peer(self.other, rank), READ) for rank in ranks]

    def stops(self) -> list[Any]:
        return [("stop", rank, self.plane) for _ in self.blocks for rank in range(self.shape.ranks)]

    def to_blocks(self, number: int = 1, **fields: Any) -> list[Any]:
        self.hear(self.grant(number, **fields))
        return self.tell(ev.Allocated(RequestId(f"r{number}"), self.blocks, 0))

    def jobs(self) -> list[Any]:
        return list(self.ledger.desk.owners)

    def abandons(self, reason: Reason, number: int = 1, attempt: int = 1) -> Any:
        return self.say(m.Abandon(handoff(number), attempt, reason))


def failed(reason: Reason, number: int = 1) -> Any:
    return "MatchFailed", f"r{number}", reason, 0


def report(reason: Reason | None, number: int = 1, good: int = 0) -> Any:
    return "Report", f"r{number}", reason, good


def drop(number: int = 1) -> Any:
    return fx.DropHold(RequestId(f"r{number}"), handoff(number))


def without(found: list[Any], *kinds: str) -> list[Any]:
    return [each for each in found if not (isinstance(each, tuple) and each[0] in kinds)]


def pulls(rng: random.Random) -> None:
    """Wanted, claimed, granted, read, committed, delivered; whatever is not answered is asked again."""
    d = D(rng)
    hello = d.hello()
    d.expect("a prompt is wanted", d.tell(d.want()), hello)
    d.expect("nobody answers yet", d.later(0.49))
    d.expect("nobody answers", d.later(0.02), hello)
    d.joined()
    d.expect("no answer to that", d.later(0.51), d.confirms())
    d.expect("linked", d.hear(m.Linked()), d.claims())
    for count in range(2, 7):
        d.expect("a claim is not answered", d.later(0.51), d.claims(version=1 if count % 4 == 0 else 2))
    d.expect("granted", d.hear(d.grant()), fx.MatchFound(RequestId("r1")))
    d.expect("granted again", d.hear(d.grant()))
    have = tuple(len(ids) for ids in d.blocks)
    renew = d.say(m.Renew(d.lease, 1, have, True))
    d.expect("before a third of the term", d.later(0.99))
    d.expect("after a third of the term", d.later(0.02), renew)
    d.hear(m.Renewed(d.lease, 1, 1.5, 0))
    d.expect("the term that was under way", d.later(1.01), renew)
    d.expect("a shorter term", d.later(0.51), renew)
    d.expect("blocks", d.tell(ev.Allocated(RequestId("r1"), d.blocks, 0)), *d.reads())
    for job in d.jobs()[:-1]:
        d.expect("some is read", d.tell(ev.CopyEnded(job)))
    commit = d.say(m.Commit(d.lease, 1))
    d.expect("all is read", d.tell(ev.CopyEnded(d.jobs()[-1])), commit)
    d.expect("a commit is not answered", d.later(0.51), commit)
    end = rng.random()
    if end < 0.4:
        d.expect("committed", d.hear(m.Committed(d.lease, 1)), report(None), drop())
        d.expect("committed again", d.hear(m.Committed(d.lease, 1)))
    elif end < 0.8:
        good, groups = rng.randint(0, 3), len(d.blocks)
        kept = min(2 * good, TOKENS) if groups == 1 else 0
        stale = m.Stale(d.lease, 1, (good,) * groups, "lease_expired")
        d.expect("stale", d.hear(stale), report(_R.STALE, good=kept), drop())
        d.expect("stale again", d.hear(stale))
    else:
        for _ in range(6):
            d.expect("no answer", d.later(0.51), commit)
        d.expect(
            "no answer in time", d.later(0.51), report(_R.TRANSFER_TIMEOUT), drop(), d.abandons(_R.TRANSFER_TIMEOUT)
        )
    d.expect("nothing is left", d.later(30.0))


def refusals(rng: random.Random) -> None:
    """What P says that cannot be is the end of the handoff, and P is told; what is not for it is passed over."""
    d = D(rng)
    d.up()
    d.expect("another attempt is refused", d.hear(m.ClaimRefused(handoff(1), 7, "busy", "")))
    d.expect("another handoff is granted", d.hear(d.grant(2)))
    stray = d.grant(1, 9)
    d.expect("what nobody asked for is granted", d.hear(stray), d.abandons(_R.ABORTED, 1, 9))
    stranger = PeerId(d.other.worker, Incarnation(12))
    d.expect("by another life", d.hear(m.ClaimRefused(handoff(1), 1, "busy", ""), who=stranger))
    d.expect("in another session", d.hear(m.ClaimRefused(handoff(1), 1, "busy", ""), session=8))
    d.expect("to another life", d.hear(m.ClaimRefused(handoff(1), 1, "busy", ""), to=Incarnation(1)))
    reason = rng.choice(("busy", "ticket_spent", "something that is not known yet"))
    known = Reason(reason) if reason in set(Reason) else None
    found = d.hear(m.ClaimRefused(handoff(1), 1, reason, ""))
    same("how it ends", [each[0] for each in found if each[0] == "MatchFailed"], ["MatchFailed"])
    if known is not None:
        d.expect("refused", found, failed(known), d.abandons(known))
    d.expect("refused again", d.hear(m.ClaimRefused(handoff(1), 1, reason, "")))
    longer = tuple(packed + b"\1\0\0\0" for packed in d.packed)
    less = tuple(packed[:-4] for packed in d.packed)
    fewer = whole([len(ids) - 1 for ids in d.blocks])
    ahead = tuple(GroupProgress(0, len(ids) + 1, 1) for ids in d.blocks)
    lies: list[tuple[dict[str, Any], Reason]] = [
        ({"tokens": TOKENS + 1}, _R.CONTENT_MISMATCH),
        ({"blocks": longer}, _R.BAD_MESSAGE), ({"blocks": less}, _R.BAD_MESSAGE),
        ({"progress": fewer}, _R.BAD_MESSAGE), ({"progress": (*d.all_of, GroupProgress())}, _R.BAD_MESSAGE),
        ({"progress": ahead, "final": False}, _R.BAD_MESSAGE), ({"blocks": (*d.packed, b"")}, _R.BAD_MESSAGE),
        ({"blocks": (d.packed[0] + b"\0", *d.packed[1:])}, _R.BAD_MESSAGE),
        ({"blocks": (*d.packed[:-1], longer[-1])}, _R.BAD_MESSAGE),
        ({"progress": (*d.all_of[:-1], fewer[-1])}, _R.BAD_MESSAGE),
        ({"progress": (*d.all_of[:-1], ahead[-1]), "final": False}, _R.BAD_MESSAGE),
    ]  # fmt: skip
    for number, (fields, why) in enumerate(lies, 2):
        d.expect("another is wanted", d.tell(d.want(number)), d.claims(number, number))
        found = d.hear(d.grant(number, number, **fields))
        d.expect(f"a grant with {fields}", found, failed(why, number), d.abandons(why, number, number))
    d.expect("a request that is not needed", d.tell(ev.NotNeeded(RequestId("r1"))))


def streams(rng: random.Random) -> None:
    """D reads behind what is ready, in the order in which it became so."""
    d = D(rng)
    d.up(deferred=True)
    none, nothing = tuple(b"" for _ in d.blocks), tuple(GroupProgress() for _ in d.blocks)
    d.expect("granted", d.hear(d.grant(blocks=none, progress=nothing, final=False)), fx.MatchFound(RequestId("r1")))
    zeros, ones = (0,) * len(d.blocks), (1,) * len(d.blocks)
    renew = d.say(m.Renew(d.lease, 1, zeros, False))
    d.expect("there may be news", d.later(0.51), renew)
    d.expect("blocks, and nothing to read", d.tell(ev.Allocated(RequestId("r1"), d.blocks, 0)))
    first, rest = tuple(packed[:4] for packed in d.packed), tuple(packed[4:] for packed in d.packed)
    gap = m.Ready(d.lease, 1, ones, rest, d.all_of, True)
    d.expect("news after what was lost", d.hear(gap))
    for bad in (
        m.Ready(LeaseId(9), 1, zeros, first, whole(ones), False),
        m.Ready(d.lease, 9, zeros, first, whole(ones), False),
    ):
        d.expect("news of another", d.hear(bad))
    some = m.Ready(d.lease, 1, zeros, first, whole(ones), False)
    d.expect("some is ready", d.hear(some), *d.reads())
    d.expect("it is again", d.hear(some))
    d.expect("there may be more", d.later(0.51), d.say(m.Renew(d.lease, 1, ones, False)))
    d.expect("it is read", d.tell(*(ev.CopyEnded(job) for job in d.jobs())))
    d.expect("all is ready", d.hear(msgspec.structs.replace(gap, final=False)), *d.reads())
    d.expect("it is all", d.hear(gap))
    d.expect("news of the past", d.hear(some))
    d.expect(
        "nothing else to hear", d.later(0.51), d.say(m.Renew(d.lease, 1, tuple(len(ids) for ids in d.blocks), True))
    )
    if rng.random() < 0.5:
        found = d.tell(*(ev.CopyEnded(job) for job in d.jobs()))
        d.expect("it is read", found, d.say(m.Commit(d.lease, 1)))
        d.hear(m.Committed(d.lease, 1))
        return
    bad = m.Ready(d.lease, 1, zeros, (*d.packed, b""), d.all_of, True)
    d.expect("news that cannot be", d.hear(bad), report(_R.BAD_MESSAGE), d.abandons(_R.BAD_MESSAGE), *d.stops())
    d.expect("bytes may still land", d.tell(*(ev.CopyEnded(job, _R.CANCELLED, at_rest=False) for job in d.jobs())))
    d.expect("none can", d.tell(*(ev.CopyRested(job) for job in d.jobs())), drop())


_ENDS = ("lost", "refused", "failed", "given up", "goodbye", "reset", "departed", "replaced", "plane")


def endings(rng: random.Random) -> None:
    """Whatever ends a handoff does so once, for its own reason, and what moves is waited for."""
    for word in rng.sample(_ENDS, 3):
        _ending(rng, word)


def _ending(rng: random.Random, word: str) -> None:
    d = D(rng)
    d.up()
    d.expect("granted and begun", d.to_blocks(), *d.reads())
    gone = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("link", d.nonce))
    jobs = d.jobs()
    match word:
        case "lost":
            found = d.hear(m.SourceLost(d.lease, 1, "source_preempted"))
            expected = [report(_R.SOURCE_PREEMPTED), d.abandons(_R.SOURCE_PREEMPTED), *d.stops()]
        case "refused":
            d.expect("a copy of what is all there goes on", d.hear(m.RenewRefused(d.lease, 1, "lease_expired")))
            found, expected = (
                d.tell(ev.GaveUp(RequestId("r1"))),
                [report(_R.ABORTED), d.abandons(_R.ABORTED), *d.stops()],
            )
        case "failed":
            found = d.tell(ev.CopyEnded(jobs.pop(0), _R.TRANSFER_FAILED))
            expected = [report(_R.TRANSFER_FAILED), d.abandons(_R.TRANSFER_FAILED), *d.stops()[: len(jobs)]]
            found, expected = without(found, "stop"), expected[:2]
            if not jobs:
                expected.append(drop())
        case "given up":
            found, expected = (
                d.tell(ev.GaveUp(RequestId("r1"))),
                [report(_R.ABORTED), d.abandons(_R.ABORTED), *d.stops()],
            )
        case "goodbye":
            found, expected = d.hear(m.Goodbye()), [report(_R.PEER_GONE), *d.stops(), gone]
        case "reset":
            found = d.hear(m.Reset(d.other.incarnation))
            expected = [report(_R.WRONG_INCARNATION), *d.stops(), gone]
        case "departed":
            d.expect("another life has departed", d.tell(ev.Departed(d.other.worker, Incarnation(1))))
            told = ev.Departed(d.other.worker, d.other.incarnation)
            found = d.tell(rng.choice((told, ev.LineRefused(d.other.worker))))
            expected = [report(_R.PEER_GONE), *d.stops(), gone]
        case "replaced":
            found, expected = d.tell(ev.CacheReplaced()), [report(_R.ABORTED), d.abandons(_R.ABORTED), *d.stops()]
        case _:
            other = d.tell(ev.PlaneFailed(d.other, ("link", d.nonce + 1)))
            d.expect("the plane of an earlier link", other)
            found = d.tell(ev.PlaneFailed(d.other, ("link", d.nonce)))
            expected = [report(_R.UNREACHABLE), *d.stops(), gone]
    d.expect(word, found, *expected)
    d.expect("nothing ends twice", d.hear(m.SourceLost(d.lease, 1, "busy")) + d.tell(ev.GaveUp(RequestId("r1"))))
    if jobs:
        found = d.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in jobs))
        d.expect("all is at rest", found, drop())


def refused_renewals(rng: random.Random) -> None:
    """A lease that is over ends what has not begun to read, and what cannot have all."""
    d = D(rng)
    d.up()
    d.hear(d.grant())
    d.expect("another's", d.hear(m.RenewRefused(d.lease, 9, "lease_expired")))
    over = m.RenewRefused(d.lease, 1, "lease_expired")
    d.expect("granted", d.hear(over), failed(_R.LEASE_EXPIRED), d.abandons(_R.LEASE_EXPIRED))
    d.expect("it again", d.hear(over))
    d.tell(d.want(2))
    d.to_blocks(2, attempt=2, final=False)
    d.tell(*(ev.CopyEnded(job) for job in d.jobs()))
    over = m.RenewRefused(d.lease, 2, "unknown_lease")
    d.expect(
        "not all of it is there", d.hear(over), report(_R.UNKNOWN_LEASE, 2), d.abandons(_R.UNKNOWN_LEASE, 2, 2), drop(2)
    )


def waits(rng: random.Random) -> None:
    """Nobody is waited for longer than the settings say, and the reason is what was waited for."""
    d = D(rng)
    state = rng.choice(("greeting", "claiming", "deferred", "granted", "copying", "offered"))
    if state == "greeting":
        d.tell(d.want(deferred=rng.random() < 0.5))
        for _ in range(7):
            d.later(0.5)
        d.expect("almost", without(d.later(0.49), "say"))
        d.expect("nobody answers", d.later(0.02), failed(_R.HANDSHAKE_TIMEOUT))
        return
    push = state == "offered"
    d.up(deferred=state == "deferred", push=push)
    waited_s, reason = {
        "claiming": (4.0, _R.CLAIM_TIMEOUT), "deferred": (7.0, _R.DEFER_TIMEOUT), "granted": (7.0, _R.DEFER_TIMEOUT),
        "copying": (5.0, _R.TRANSFER_TIMEOUT), "offered": (5.0, _R.TRANSFER_TIMEOUT),
    }[state]  # fmt: skip
    if state == "granted":
        d.hear(d.grant())
    elif state in ("copying", "offered"):
        d.to_blocks()
        if push:
            d.hear(m.Accepted(ReservationId(1)))
        d.later(2.0)
        if push or rng.random() < 0.5:
            d.hear(m.Renewed(d.lease, 1, 3.0, 1))  # P got something done
        else:
            d.tell(ev.CopyEnded(d.jobs()[0]))
            if not d.jobs():
                return
    d.expect("almost", without(d.later(waited_s - 0.01), "say"))
    found = [each for each in without(d.later(0.02), "stop") if each[5:6] != (_renew(d),)]
    if state == "offered":
        revoke = d.say(m.Revoke(d.lease, 1, ReservationId(1), reason))
        d.expect("not written", found, report(reason), revoke)
        return
    end = report(reason) if state == "copying" else failed(reason)
    d.expect(state, found, end, d.abandons(reason))


def _renew(d: D) -> m.Renew:
    return m.Renew(d.lease, 1, tuple(len(ids) for ids in d.blocks), True)


def holds(rng: random.Random) -> None:
    """Blocks are held no longer than `max_hold_s`, whatever progress there is."""
    d = D(rng, max_hold_s=6.0)
    d.up()
    d.to_blocks()
    for work in range(1, 6):
        d.later(1.0)
        d.hear(m.Renewed(d.lease, 1, 3.0, work))
    d.expect("almost", without(d.later(0.98), "say"))
    found = without(d.later(0.04), "say", "stop")
    d.expect("held too long", found, report(_R.TRANSFER_TIMEOUT))


def early_blocks(rng: random.Random) -> None:
    """Blocks that were found before P's answer are filled by it; a handoff that ended meanwhile is reported."""
    d = D(rng)
    d.up()
    d.expect("blocks", d.tell(ev.Allocated(RequestId("r1"), d.blocks, 0)))
    d.expect("granted", d.hear(d.grant()), *d.reads())
    d.tell(d.want(2))
    d.hear(m.ClaimRefused(handoff(2), 2, "busy", ""))
    found = d.tell(ev.Allocated(RequestId("r2"), d.blocks, 0))
    d.expect("blocks for what has ended", found, report(_R.BUSY, 2), drop(2))
    d.tell(d.want(3))
    d.expect("not needed", d.tell(ev.NotNeeded(RequestId("r3"))), failed(_R.ABORTED, 3), d.abandons(_R.ABORTED, 3, 3))
    found = d.tell(ev.Allocated(RequestId("r3"), d.blocks, 0))
    d.expect("blocks for what nobody wants", found, report(_R.ABORTED, 3), fx.DropHold(RequestId("r3"), HandoffId("")))


def again(rng: random.Random) -> None:
    """A P that has restarted is greeted anew while nothing was granted, and not for ever."""
    with lowered(consumer, "GREETINGS_MAX", rng.randint(1, 3)):
        _again(D(rng))


def _again(d: D) -> None:
    d.up()
    for life in range(consumer.GREETINGS_MAX):
        gone = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("link", d.nonce))
        reset = m.Reset(d.other.incarnation)
        d.expect("a Reset of another session", d.hear(reset, session=77))
        d.expect("a Reset of another life", d.hear(m.Reset(1)))
        d.expect("a Reset", d.hear(reset), d.hello(), gone)
        d.other = PeerId(d.other.worker, Incarnation(1000 + life))
        d.joined(5 + 2 * life)
        d.expect("linked", d.hear(m.Linked()), d.claims(version=1 if life % 4 == 2 else 2))
    gone = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("link", d.nonce))
    d.expect("a Reset too many", d.hear(m.Reset(d.other.incarnation)), failed(_R.WRONG_INCARNATION), gone)
    d.expect("another is wanted", d.tell(d.want(2)), d.hello())
    refused = m.HelloRefused(d.nonce, "incompatible", "")
    d.expect("a refusal of another greeting", d.hear(m.HelloRefused(d.nonce + 1, "busy", "")))
    d.expect("a refusal", d.hear(refused), failed(_R.INCOMPATIBLE, 2))
    lies: list[tuple[str, dict[str, Any], Reason]] = [
        ("another model", {"card": d.card(compat={"model": "x"})}, _R.INCOMPATIBLE),
        ("too few endpoints", {"endpoints": d.ends[1:]}, _R.BAD_MESSAGE),
        ("a plane that D has not", {"transport": "cuda"}, _R.NO_TRANSPORT),
    ]
    for number, (what, fields, reason) in enumerate(lies, 3):
        d.expect("another is wanted", d.tell(d.want(number)), d.hello())
        welcome = msgspec.structs.replace(m.Welcome(d.nonce, d.card(), d.plane, d.ends, 0), **fields)
        d.expect("a welcome to another greeting", d.hear(msgspec.structs.replace(welcome, nonce=99)))
        d.expect(what, d.hear(welcome), failed(reason, number))


def rooms(rng: random.Random) -> None:
    """What there is no room for is refused at once, for its reason, and its P is told."""
    d = D(rng, intakes_max=2, quarantine_blocks_max=3, sessions_max=1)
    d.up()
    d.expect(
        "a name that is in use",
        d.tell(msgspec.structs.replace(d.want(1), request=RequestId("r9"))),
        ("MatchFailed", "r9", _R.DUPLICATE, 0),
    )
    d.expect("another", d.tell(d.want(2)), d.claims(2, 3))
    found = d.tell(d.want(3))
    d.expect("one more than may be", found, failed(_R.BUSY, 3), d.claims(3, 5))
    d.expect("who is granted what it gave up", d.hear(d.grant(3, 5)), d.abandons(_R.BUSY, 3, 5))
    d.expect("it is given up once", d.tell(ev.Disowned(handoff(3), d.other.worker, "ticket", DIGEST, False, _R.BUSY)))
    d.expect("a second source", d.tell(ev.Disowned(handoff(8), WorkerId("p1"), "ticket", DIGEST, False, _R.BUSY)))
    d.hear(m.ClaimRefused(handoff(2), 3, "busy", ""))
    d.to_blocks()
    d.tell(ev.GaveUp(RequestId("r1")))
    found = d.tell(d.want(4))
    d.expect("blocks are not at rest", found, failed(_R.QUARANTINE_FULL, 4), d.claims(4, 7))
    d.tell(*(ev.CopyEnded(job, _R.CANCELLED) for job in d.jobs()))
    d.expect("they are", d.tell(d.want(5)), d.claims(5, 8))
    d.hear(m.ClaimRefused(handoff(5), 8, "busy", ""))
    gone = fx.Disconnect(d.other, d.plane, d.shape.ranks, ("link", d.nonce))
    d.expect("another source takes its place", d.tell(d.want(6, "p1")), d.say(m.Goodbye()), gone, d.hello(source="p1"))
    found = d.tell(d.want(7))
    d.expect("no room for another", found, failed(_R.BUSY, 7))
    d.identity.role_of = lambda worker: Role.DECODE
    d.expect("a key that is not for this", d.tell(d.want(11, "p1")), failed(_R.FORBIDDEN, 11))


BANK: list[Question] = [
    pulls, pulls, refusals, streams, endings, refused_renewals, waits, waits, holds, early_blocks, again, rooms,
]  # fmt: skip
