"""From whom KV came, asked of a D that takes and a P that grants: no world removes a member."""

from __future__ import annotations

import random

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import RequestId
from kvbaton.protocol.machines.origins import ANYBODY
from kvbaton.protocol.wire.messages import ORIGINS_MAX, Feature
from kvbaton_proof.sim.questions.exam import Question, same
from kvbaton_proof.sim.questions.interview import ev, fx, m
from kvbaton_proof.sim.questions.interview_d import D, failed
from kvbaton_proof.sim.questions.interview_p import P

_R = Reason


def _granted_from(d: D, *names: str, number: int = 1, attempt: int = 1) -> m.GrantedFrom:
    return _from(d.grant(number, attempt), names)


def _from(granted: m.Granted, names: tuple[str, ...]) -> m.GrantedFrom:
    return m.GrantedFrom(**{**msgspec.structs.asdict(granted), "origins": names})


def forgets(rng: random.Random) -> None:
    """Once an origin is gone, the cache is forgotten once; what names it is not taken before or after."""
    d = D(rng)
    far = f"p{rng.randint(1, 9)}"
    gone: set[str] = set()
    d.identity.is_gone = lambda origin: origin in gone
    d.up()
    d.expect("a member that gave nothing is gone", d.tell(ev.MembersGone()))
    d.expect("granted", d.hear(_granted_from(d, far, d.me.worker)), fx.MatchFound(RequestId("r1")))
    same("origins", d.ledger.desk.origins.names, (d.other.worker, far))
    gone |= {"p10", d.me.worker}
    d.expect("others are gone", d.tell(ev.MembersGone()))
    gone.add(rng.choice((far, d.other.worker)))
    left = tuple(each for each in (d.other.worker, far) if each in gone)
    d.expect("an origin is gone", d.tell(ev.MembersGone()), fx.ForgetCache(left))
    d.expect("again, while the cache is being forgotten", d.tell(ev.MembersGone()))
    aborted = d.tell(ev.CacheReplaced())
    d.expect("replaced, and blocks may be found", aborted, failed(_R.ABORTED), d.abandons(_R.ABORTED))
    same("origins of what may be found", d.ledger.desk.origins.names, (d.other.worker, far))
    d.tell(ev.CacheReplaced(forgotten=True))
    same("origins of nothing", d.ledger.desk.origins.names, ())
    d.expect("gone before", d.tell(ev.MembersGone()))
    d.expect("wanted", d.tell(d.want(2)), d.claims(2, 2))
    refused = d.hear(_granted_from(d, *left, number=2, attempt=2))
    d.expect("an origin that is gone", refused, failed(_R.ORIGIN_GONE, 2), d.abandons(_R.ORIGIN_GONE, 2, 2))
    same("origins of what was not taken", d.ledger.desk.origins.names, ())


def names_them(rng: random.Random) -> None:
    """A grant names every origin of its source, to peers that know the word; beyond the bound, anybody."""
    p = P(rng)
    knows = rng.random() < 0.7
    p.features |= Feature.ORIGINS if knows else 0
    p.join()
    many = rng.random() < 0.3
    names = tuple(f"d{n}" for n in range(1, ORIGINS_MAX + 2 if many else rng.randint(2, 4)))
    p.ledger.desk.origins.note(names)
    p.lease()
    plain = p.granted()
    if knows:
        told = (ANYBODY,) if many else names
        plain = p.say(_from(plain[5], told))
    p.expect("a claim", p.hear(p.claim()), plain)
    p.expect("it again", p.hear(p.claim()), plain)
    first = (ANYBODY,) if many else ()
    p.expect("somebody is gone", p.tell(ev.MembersGone()), *([fx.ForgetCache(first)] if many else []))


BANK: list[Question] = [forgets, names_them]
