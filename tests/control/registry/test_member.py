"""A worker's side of discovery on virtual time."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.control.registry import DirectoryEntry, MemberState, Registration, RegistrySettings
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_union import RegistryView
from kvbaton.control.registry.statements import Member
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId

from ..rig import cluster

KEY = cluster("x")["x"].public
ME = Registration(WorkerId("d0"), Incarnation(1), "decode", "127.0.0.1:80", "tcp://127.0.0.1:5000")


def entry(worker: str, incarnation: int = 1, port: int = 6000) -> DirectoryEntry:
    return DirectoryEntry(WorkerId(worker), Incarnation(incarnation), "prefill", f"tcp://127.0.0.1:{port}", KEY)


def peer(worker: str, incarnation: int = 1) -> PeerId:
    return PeerId(WorkerId(worker), Incarnation(incarnation))


def directory(
    version: int, *entries: DirectoryEntry, complete: bool = True, registry: int = 9, gone: tuple[PeerId, ...] = ()
) -> m.Directory:
    return m.Directory(m.SeenWorkers(registry, version), complete, entries, gone)


@pytest.fixture
def member() -> Member:
    return Member(ME, RegistrySettings(), 0.0)


@pytest.fixture
def listed(member: Member) -> Member:
    member.on_time(0.0)
    member.on_message(m.RegisteredReply(ME.incarnation), 0.0)
    return member


def test_it_registers_until_it_is_answered_and_pings_from_then_on(member: Member) -> None:
    assert [member.on_time(t) for t in (0.0, 0.5, 1.0)] == [m.Register(ME), None, m.Register(ME)]
    member.on_message(m.RegisteredReply(ME.incarnation), 1.2)
    assert member.state is MemberState.LISTED
    assert member.on_time(1.9) is None and member.next_deadline() == 2.0
    assert member.on_time(2.0) == m.Ping(ME.incarnation, m.SeenWorkers())


def test_a_ping_tells_which_directory_it_has(listed: Member) -> None:
    listed.on_message(directory(4, entry("p0")), 0.5)
    assert listed.on_time(1.0) == m.Ping(ME.incarnation, m.SeenWorkers(9, 4))


def test_a_registry_that_does_not_know_it_is_told_at_once(listed: Member) -> None:
    listed.on_message(m.Unknown(ME.incarnation), 0.3)
    assert listed.state is MemberState.JOINING
    assert listed.on_time(0.3) == m.Register(ME)
    assert listed.on_time(0.4) is None


def test_answers_to_an_earlier_life_mean_nothing(listed: Member) -> None:
    for answer in (m.Unknown(Incarnation(5)), m.Superseded(Incarnation(5)), m.RegisteredReply(Incarnation(5))):
        listed.on_message(answer, 0.3)
        assert listed.state is MemberState.LISTED


def test_one_that_was_superseded_does_not_fight_but_returns_when_the_other_is_gone(listed: Member) -> None:
    listed.on_message(m.Superseded(ME.incarnation), 0.3)
    assert listed.state is MemberState.SUPERSEDED
    assert isinstance(listed.on_time(1.0), m.Ping)
    listed.on_message(m.Unknown(ME.incarnation), 1.1)
    assert listed.on_time(1.1) == m.Register(ME)


def test_one_that_was_refused_knows_why_and_tries_again(member: Member) -> None:
    member.on_time(0.0)
    member.on_message(m.RegistryRefused("role: no"), 0.1)
    assert (member.state, member.detail) == (MemberState.REFUSED, "role: no")
    assert member.on_time(0.5) is None and member.on_time(1.0) == m.Register(ME)


def test_a_new_life_is_presented_at_once(listed: Member) -> None:
    reborn = msgspec.structs.replace(ME, incarnation=Incarnation(2))
    listed.present(reborn, 0.3)
    assert listed.on_time(0.3) == m.Register(reborn)
    listed.on_message(m.RegisteredReply(Incarnation(1)), 0.4)
    assert listed.state is MemberState.JOINING


def test_the_last_list_is_kept_without_itself_and_an_older_one_is_passed_over(listed: Member) -> None:
    listed.on_message(directory(2, entry("p1"), entry("d0"), gone=(peer("p2"),)), 0.1)
    listed.on_message(directory(1), 0.2)
    assert listed.view == RegistryView((entry("p1"),), True, frozenset({peer("p2")}))
    listed.on_message(directory(1, complete=False, registry=10), 0.3)
    assert listed.view == RegistryView((), False)


def test_a_registration_that_would_be_refused_is_refused_here() -> None:
    with pytest.raises(m.RegistryFault, match="control_endpoint"):
        Member(msgspec.structs.replace(ME, control_endpoint="tcp://*:1"), RegistrySettings(), 0.0)
