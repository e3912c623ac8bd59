"""Every reason is met by some handoff here: none is dead, and none has another name for the same thing."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import inf

import pytest
from pair import Make, Pair
from party import Load, transfer

from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import Incarnation, LeaseId, ReservationId, WorkerId
from kvbaton.protocol.legality import Role
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import pack_blocks
from kvbaton_proof.sim.world.sim_transport import RDMA, TCP

STORY: dict[Reason, Callable[[Make], Load]] = {}


def story(reason: Reason) -> Callable[[Callable[[Make], Load]], Callable[[Make], Load]]:
    def add(tell: Callable[[Make], Load]) -> Callable[[Make], Load]:
        STORY[reason] = tell
        return tell

    return add


def reading(pair: Pair) -> Load:
    """D reads, and stays at it."""
    return pair.pull(copies=False)


def asked(pair: Pair, ticket: str = "", **options: object) -> Load:
    load = pair.d.want("r", ticket or pair.p.grant(), **options)  # type: ignore[arg-type]
    pair.settle()
    return load


@story(Reason.ABORTED)
def _(make: Make) -> Load:
    load = reading(pair := make())
    pair.d.give_up("r")
    return load


@story(Reason.BAD_MESSAGE)
def _(make: Make) -> Load:
    pair = make()
    pair.lose(m.Granted)
    load = asked(pair)
    granted = pair.said(m.Granted)[0]
    pair.inject("p", "d", m.Granted(granted.handoff, 1, granted.lease, 15.0, 5, (), (), True))
    return load


@story(Reason.BAD_SPAN)
def _(make: Make) -> Load:
    pair = make()
    pair.lose(m.Offer, times=inf)
    load = pair.d.want("r", pair.router_ticket(), push=True)
    source = pair.p.stream()
    pair.settle()
    digest = pair.said(m.Offer)[0].digest
    pair.inject("d", "p", m.Offer(source.lease, 1, ReservationId(1), 0, (pack_blocks([99_999] * 3),), digest))
    return load


@story(Reason.BUSY)
def _(make: Make) -> Load:
    pair = make(settings=Settings(intakes_max=1))
    pair.d.want("first", pair.router_ticket(1), 1)
    return pair.d.want("r", pair.router_ticket(2), 2)


@story(Reason.CLAIM_TIMEOUT)
def _(make: Make) -> Load:
    pair = make()
    pair.lose(m.Claim, times=inf)
    load = asked(pair)
    pair.run(11)
    return load


@story(Reason.CONTENT_MISMATCH)
def _(make: Make) -> Load:
    return asked(make(), content=99)


@story(Reason.DEFER_TIMEOUT)
def _(make: Make) -> Load:
    load = asked(pair := make(), pair.router_ticket())
    pair.run(61)
    return load


@story(Reason.DISCARDED)
def _(make: Make) -> Load:
    load = asked(pair := make(), pair.router_ticket())
    pair.p.tell(ev.Discarded(transfer(1)))
    pair.settle()
    return load


@story(Reason.DRAINING)
def _(make: Make) -> Load:
    pair = make()
    pair.p.tell(ev.DrainStarted())
    return asked(pair, pair.router_ticket())


@story(Reason.DUPLICATE)
def _(make: Make) -> Load:
    pair = make()
    pair.d.want("first", pair.router_ticket())
    return pair.d.want("r", pair.router_ticket())


@story(Reason.FORBIDDEN)
def _(make: Make) -> Load:
    pair = make()
    pair.d.ledger.desk.identity.role_of = lambda worker: Role.STORE
    return pair.d.want("r", pair.router_ticket())


@story(Reason.HANDSHAKE_TIMEOUT)
def _(make: Make) -> Load:
    pair = make()
    pair.cut("p")
    load = asked(pair, pair.router_ticket())
    pair.run(11)
    return load


@story(Reason.INCOMPATIBLE)
def _(make: Make) -> Load:
    pair = make("p")
    pair.add("d", compat={"model": "another"})
    return asked(pair)


@story(Reason.LEASE_EXPIRED)
def _(make: Make) -> Load:
    pair = make()
    ticket = pair.p.grant()
    pair.run(16)
    return asked(pair, ticket)


@story(Reason.NO_TRANSPORT)
def _(make: Make) -> Load:
    pair = make("p", transports=(TCP,))
    pair.add("d", transports=(RDMA,))
    return asked(pair)


@story(Reason.OTHER)
def _(make: Make) -> Load:
    """A newer P has a reason that we do not know."""
    pair = make()
    pair.lose(m.Claim, times=inf)
    load = asked(pair)
    pair.inject("p", "d", m.ClaimRefused(pair.p.sources[LeaseId(1)].handoff, 1, "bored", ""))
    return load


@story(Reason.NOT_WRITTEN)
def _(make: Make) -> Load:
    pair = make()
    pair.p.begin(1, 5)
    load = asked(pair, pair.router_ticket(), push=True)
    offer = pair.said(m.Offer)[0]
    pair.inject("p", "d", m.Written(offer.lease, offer.attempt, offer.reservation, offer.digest))
    return load


@story(Reason.ORIGIN_GONE)
def _(make: Make) -> Load:
    pair = make()
    pair.d.ledger.desk.identity.is_gone = lambda origin: origin == "p"
    return asked(pair)


@story(Reason.PEER_GONE)
def _(make: Make) -> Load:
    load = reading(pair := make())
    pair.p.leave()
    pair.settle()
    return load


@story(Reason.PEER_UNKNOWN)
def _(make: Make) -> Load:
    """The node tells so when the control plane knows no such worker."""
    pair = make()
    load = pair.d.want("r", pair.router_ticket(source="q"), source="q")
    pair.d.tell(ev.Departed(WorkerId("q"), reason=Reason.PEER_UNKNOWN))
    return load


@story(Reason.QUARANTINE_FULL)
def _(make: Make) -> Load:
    pair = make(settings=Settings(quarantine_blocks_max=1))
    reading(pair)
    pair.d.finish(reason=Reason.TRANSFER_TIMEOUT, at_rest=False)
    return pair.d.want("s", pair.router_ticket(2), 2)


def copy_ended(reason: Reason, make: Make) -> Load:
    """A data plane says so of a copy; one that cancels on its own is closing."""
    load = reading(pair := make())
    pair.d.finish(reason=reason)
    return load


for reason in (Reason.CANCELLED, Reason.CHECKSUM_MISMATCH, Reason.TRANSFER_FAILED, Reason.UNREACHABLE):
    STORY[reason] = partial(copy_ended, reason)


def source_ended(reason: Reason, make: Make) -> Load:
    source = (pair := make()).p.begin()
    load = asked(pair, pair.router_ticket())
    pair.p.tell(ev.SourceEnded(source.lease, reason))
    pair.settle()
    return load


for reason in (Reason.SOURCE_PREEMPTED, Reason.PINS_FULL, Reason.SOURCE_ABORTED):
    STORY[reason] = partial(source_ended, reason)


@story(Reason.STALE)
def _(make: Make) -> Load:
    load = reading(pair := make())
    pair.lose(m.Renew, times=inf)
    pair.run(16)
    pair.p.reuse(1)
    pair.d.finish()
    pair.settle()
    return load


@story(Reason.TICKET_EXPIRED)
def _(make: Make) -> Load:
    pair = make()
    return asked(pair, pair.router_ticket(expires_unix_s=0.0))


@story(Reason.TICKET_FORGED)
def _(make: Make) -> Load:
    return asked(make(), "forged")


@story(Reason.TICKET_SPENT)
def _(make: Make) -> Load:
    pair = make()
    ticket = pair.p.grant()
    pair.d.want("first", ticket)
    pair.settle()
    return asked(pair, ticket)


@story(Reason.TRANSFER_TIMEOUT)
def _(make: Make) -> Load:
    load = reading(pair := make())
    pair.run(31)
    return load


@story(Reason.UNKNOWN_LEASE)
def _(make: Make) -> Load:
    pair = make()
    return asked(pair, pair.router_ticket(), deferred=False)


@story(Reason.WRONG_INCARNATION)
def _(make: Make) -> Load:
    pair = make()
    source = pair.p.stream(deferred=False)
    return asked(pair, pair.p.ticket(source, incarnation=Incarnation(1)))


@story(Reason.WRONG_VERSION)
def _(make: Make) -> Load:
    pair = make("p", required=1 << 40, optional=1 << 40 | 7)
    pair.add("d", required=0, optional=7)
    return asked(pair)


ELSEWHERE = {Reason.STORE_FAILED: "a put's end, test_puts.py: no handoff fails by it"}


@pytest.mark.parametrize("reason", STORY)
def test_a_handoff_can_fail_as(make_pair: Make, reason: Reason) -> None:
    load = STORY[reason](make_pair)
    end = load.failed or load.end
    assert end is not None and end.reason is reason


def test_every_reason_has_its_story() -> None:
    assert set(STORY) | set(ELSEWHERE) == set(Reason)
    assert not set(STORY) & set(ELSEWHERE)
