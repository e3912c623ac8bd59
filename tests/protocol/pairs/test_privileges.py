"""Rule 29, the table of privileges, cell by cell: whoever has not the privilege is not heard, and whoever has it is."""

from __future__ import annotations

from typing import get_args

import pytest
from pair import Make, Pair

from kvbaton.protocol import effects as fx
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.progress import nothing
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PeerId, ReservationId, WorkerId
from kvbaton.protocol.legality import MAY, SAYS, Act, Role, may, may_say, role_by_name
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.codec import encode

MEMBER = PeerId(WorkerId("member"), Incarnation(77))
HANDOFF = HandoffId("0" * 32 + ".0")

EXPECTED = {
    Role.PREFILL: {"register", "grant", "write", "keep", "report"},
    Role.DECODE: {"register", "hello", "claim", "offer", "read", "keep", "report"},
    Role.BOTH: {"register", "hello", "claim", "offer", "read", "grant", "write", "keep", "report"},
    Role.ROUTER: {"watch"},
    Role.OPERATOR: {"drain"},
    Role.STORE: set(),
    Role.REGISTRY: set(),
}


def sample(kind: type[m.Message], pair: Pair) -> m.Message:
    """A well-formed message of each kind."""
    card = pair.parties["p"].ledger.desk.identity.card()
    lease, reservation = LeaseId(1), ReservationId(1)
    made: dict[type, m.Message] = {
        m.Hello: m.Hello(1, card), m.Welcome: m.Welcome(1, card, "tcp", (), 0),
        m.HelloRefused: m.HelloRefused(1, "busy", ""), m.Joined: m.Joined(()), m.Linked: m.Linked(),
        m.Reset: m.Reset(1), m.Goodbye: m.Goodbye(), m.Claim: m.Claim(HANDOFF, 1, "t", b"", False),
        m.Granted: m.Granted(HANDOFF, 1, lease, 15.0, 4, (b"",), nothing(1), False),
        m.GrantedFrom: m.GrantedFrom(HANDOFF, 1, lease, 15.0, 4, (b"",), nothing(1), False, ("d0 key",)),
        m.ClaimRefused: m.ClaimRefused(HANDOFF, 1, "busy", ""), m.Renew: m.Renew(lease, 1, (0,), False),
        m.Renewed: m.Renewed(lease, 1, 15.0, 1), m.RenewRefused: m.RenewRefused(lease, 1, "busy"),
        m.Ready: m.Ready(lease, 1, (0,), (b"",), nothing(1), False), m.Commit: m.Commit(lease, 1),
        m.Committed: m.Committed(lease, 1), m.Stale: m.Stale(lease, 1, (0,)), m.Abandon: m.Abandon(HANDOFF, 1),
        m.SourceLost: m.SourceLost(lease, 1, "busy"), m.Offer: m.Offer(lease, 1, reservation, 0, (b"",), b""),
        m.Accepted: m.Accepted(reservation), m.Written: m.Written(lease, 1, reservation, b""),
        m.Ack: m.Ack(lease, 1, reservation), m.Revoke: m.Revoke(lease, 1, reservation),
        m.Quiesced: m.Quiesced(reservation, None),
    }  # fmt: skip
    return made[kind]


@pytest.mark.parametrize("role", Role)
@pytest.mark.parametrize("act", Act)
def test_the_table_says_what_the_page_says(role: Role, act: Act) -> None:
    assert may(role, act) is (act.value in EXPECTED[role])


def test_every_role_and_every_message_is_decided() -> None:
    assert set(MAY) == set(Role)
    assert set(SAYS) == set(get_args(m.Message))
    assert all(acts for acts in SAYS.values())


@pytest.mark.parametrize("kind", get_args(m.Message), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("role", Role)
def test_a_message_is_heard_from_who_may_say_it_and_from_nobody_else(
    make_pair: Make, role: Role, kind: type[m.Message]
) -> None:
    pair = make_pair("p")
    p, message = pair.parties["p"], sample(kind, pair)
    p.ledger.desk.identity.role_of = lambda worker: role
    p.ledger.on_frame(
        MEMBER.worker, encode(MEMBER, p.me.incarnation, 1, message, p.ledger.desk.identity.versions.newest), 0.0
    )
    forbidden = sum(count for name, count in p.counts.items() if name.startswith("forbidden."))
    effects = p.ledger.take_effects()
    assert forbidden == (0 if may_say(role, kind) else 1)
    if forbidden and kind is m.Hello:
        (told,) = effects
        assert isinstance(told, fx.Send) and isinstance(told.message, m.HelloRefused)
        assert told.message.reason == Reason.FORBIDDEN and role in told.message.detail
    elif forbidden:
        assert effects == []


def test_one_who_greets_in_vain_ever_again_is_told_only_so_often(make_pair: Make) -> None:
    pair = make_pair("p")
    p = pair.parties["p"]
    p.ledger.desk.identity.role_of = lambda worker: Role.ROUTER
    frame = encode(MEMBER, p.me.incarnation, 0, sample(m.Hello, pair), p.ledger.desk.identity.versions.newest)
    for _ in range(2000):
        p.ledger.on_frame(MEMBER.worker, frame, 0.0)
    assert len(p.ledger.take_effects()) <= 500 and p.counts["forbidden.hello"] == 2000


def test_nothing_is_asked_of_a_source_whose_key_is_not_for_that(make_pair: Make) -> None:
    pair = make_pair("p", "d")
    p, d = pair.parties["p"], pair.parties["d"]
    d.ledger.desk.identity.role_of = lambda worker: Role.DECODE
    load = d.want("r", p.grant(1))
    pair.settle()
    assert load.failed is not None and load.failed.reason is Reason.FORBIDDEN and "decode" in load.failed.detail
    p.leave()


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("operator", Role.OPERATOR), ("operator-alice", Role.OPERATOR), ("operators", Role.BOTH),
        ("router", Role.ROUTER), ("router-2", Role.ROUTER), ("store", Role.STORE), ("store-a", Role.STORE),
        ("p0", Role.BOTH), ("an-operator", Role.BOTH), ("storehouse", Role.BOTH),
    ],
)  # fmt: skip
def test_a_key_that_says_no_role_has_one_by_its_name(name: str, role: Role) -> None:
    assert role_by_name(name) is role
