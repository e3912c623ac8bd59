"""A worker that drains, as the registry's list and its own side of it see it, on virtual time."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from kvbaton.control.registry import HeldReport, Registration, RegistrySettings
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_roster import RegistryRoster, Standing
from kvbaton.control.registry.statements import Member, MemberState
from kvbaton.protocol.ids import Incarnation, WorkerId

P0, LIFE = WorkerId("p0"), Incarnation(1)
ME = Registration(P0, LIFE, "prefill", "127.0.0.1:80", "tcp://127.0.0.1:5000")
DRAINING = msgspec.structs.replace(ME, draining=True)


@pytest.fixture
def roster() -> RegistryRoster:
    """A registry that is not young any more, with one worker."""
    made = RegistryRoster(RegistrySettings(settle_s=0.0), 1, 100.0)
    assert made.register(ME, "key", 100.0) is Standing.LISTED
    return made


def is_draining(roster: RegistryRoster) -> bool:
    (entry,) = roster.entries()
    return entry.draining


class TestRoster:
    def test_a_worker_that_says_it_drains_stays_listed_and_its_peers_hear_nothing(self, roster: RegistryRoster) -> None:
        seen, revision = roster.seen, roster.revision
        assert roster.register(DRAINING, "key", 101.0) is Standing.LISTED
        assert is_draining(roster) and roster.is_draining(P0)
        assert roster.revision == revision + 1, "the router hears of it"
        assert roster.seen == seen and roster.directory().gone == ()
        assert roster.order(P0) is None, "it knows"

    def test_an_operators_word_counts_at_once_and_is_repeated_until_the_worker_says_the_same(
        self, roster: RegistryRoster
    ) -> None:
        revision = roster.revision
        assert roster.drain(P0, 0) == m.DrainState(P0, "draining", LIFE)
        assert is_draining(roster) and roster.revision == revision + 1
        assert roster.order(P0) == m.DrainWorker(P0, LIFE)
        roster.register(ME, "key", 101.0)
        assert is_draining(roster) and roster.order(P0) == m.DrainWorker(P0, LIFE), "an earlier word of its own"
        roster.register(DRAINING, "key", 102.0)
        assert is_draining(roster) and roster.order(P0) is None

    def test_asking_again_changes_nothing_and_tells_what_is_held(self, roster: RegistryRoster) -> None:
        roster.drain(P0, 0)
        revision = roster.revision
        roster.ping(P0, LIFE, 101.0, "2 leases")
        assert roster.drain(P0, LIFE) == m.DrainState(P0, "draining", LIFE, "2 leases")
        assert roster.revision == revision

    def test_a_look_changes_nothing_and_tells_who_is_ready_in_that_role(self, roster: RegistryRoster) -> None:
        def here(name: str, role: str, **more: bool) -> None:
            roster.register(replace(ME, worker=WorkerId(name), role=role, **more), f"key of {name}", 100.0)

        revision = roster.revision
        assert roster.look(P0) == m.DrainState(P0, "ready", LIFE, role="prefill")
        assert roster.revision == revision and roster.order(P0) is None
        here("p1", "prefill", draining=True)
        here("d0", "decode")
        assert roster.look(P0).workers == (), "neither can take its place"
        here("b0", "both")
        assert roster.look(P0).workers == ("b0",) and roster.look(WorkerId("d0")).workers == ("b0",)
        assert roster.look(WorkerId("b0")).workers == ("d0", "p0"), "together they can"
        roster.drain(P0, LIFE)
        assert (roster.look(P0).state, roster.look(P0).role) == ("draining", "prefill")
        assert roster.look(WorkerId("b0")).workers == (), "only one half of what it does is left"
        assert roster.look(WorkerId("p9")).state == "unknown"

    def test_a_young_registry_says_that_it_may_not_know_the_others(self) -> None:
        young = RegistryRoster(RegistrySettings(settle_s=5.0), 1, 100.0)
        young.register(ME, "key", 100.0)
        assert young.look(P0).held == "the registry has restarted and waits for its workers"
        young.on_time(105.0)
        assert young.look(P0) == m.DrainState(P0, "ready", LIFE, role="prefill")

    def test_one_that_stays_is_idle_once_it_has_said_that_it_drains_and_holds_nothing(
        self, roster: RegistryRoster
    ) -> None:
        stays = msgspec.structs.replace(ME, stays=True)
        roster.register(stays, "key", 101.0)
        roster.ping(P0, LIFE, 101.0, m.NOTHING)
        assert roster.drain(P0, 0).state == "draining", "it may not have heard yet"
        roster.register(msgspec.structs.replace(stays, draining=True), "key", 102.0)
        roster.ping(P0, LIFE, 102.0, "1 lease")
        assert roster.drain(P0, LIFE).state == "draining"
        roster.ping(P0, LIFE, 103.0, m.NOTHING)
        assert roster.drain(P0, LIFE) == m.DrainState(P0, "idle", LIFE, m.NOTHING)

    def test_one_that_goes_by_itself_is_never_idle(self, roster: RegistryRoster) -> None:
        roster.register(DRAINING, "key", 101.0)
        roster.ping(P0, LIFE, 102.0, m.NOTHING)
        assert roster.drain(P0, LIFE).state == "draining"

    def test_a_later_life_is_not_told_to_drain(self, roster: RegistryRoster) -> None:
        roster.drain(P0, 0)
        roster.register(msgspec.structs.replace(ME, incarnation=Incarnation(2)), "key", 101.0)
        assert roster.drain(P0, LIFE) == m.DrainState(P0, "gone", LIFE)
        assert not is_draining(roster) and roster.order(P0) is None

    def test_one_that_left_is_gone(self, roster: RegistryRoster) -> None:
        roster.drain(P0, 0)
        roster.deregister(P0, LIFE)
        assert roster.drain(P0, LIFE) == m.DrainState(P0, "gone", LIFE)
        assert roster.order(P0) is None and not roster.is_draining(P0)

    def test_a_name_that_nobody_has_is_unknown_and_the_names_are_told(self, roster: RegistryRoster) -> None:
        assert roster.drain(WorkerId("p9"), 0) == m.DrainState(WorkerId("p9"), "unknown", workers=("p0",))

    def test_a_young_registry_does_not_say_gone_of_a_worker_it_has_not_heard(self) -> None:
        young = RegistryRoster(RegistrySettings(settle_s=8.0), 1, 100.0)
        assert young.drain(P0, LIFE).state == "draining"
        young.register(ME, "key", 101.0)
        assert young.drain(P0, LIFE).state == "draining" and young.order(P0) == m.DrainWorker(P0, LIFE)
        young.deregister(P0, LIFE)
        assert young.drain(P0, LIFE).state == "gone", "it has heard it leave"
        young.on_time(108.0)
        assert young.drain(P0, 7).state == "gone", "by now all have registered again"


def test_what_is_held_is_told_in_words() -> None:
    assert str(HeldReport()) == m.NOTHING and HeldReport().nothing
    assert str(HeldReport(1, 2, 0, 1)) == "1 request, 2 leases, 1 claim"
    assert not any(HeldReport(**{name: 1}).nothing for name in HeldReport.__struct_fields__)


class TestMember:
    @pytest.fixture
    def listed(self) -> Member:
        member = Member(ME, RegistrySettings(), 0.0)
        member.on_time(0.0)
        member.on_message(m.RegisteredReply(LIFE), 0.0)
        member.present(DRAINING, 0.5)
        return member

    def test_it_presents_itself_anew_at_once_in_the_same_life(self, listed: Member) -> None:
        assert listed.on_time(0.5) == m.Register(DRAINING)
        assert not listed.is_known_to_drain

    def test_the_answer_to_an_earlier_ping_confirms_nothing(self, listed: Member) -> None:
        listed.on_time(0.5)
        listed.on_message(m.RegisteredReply(LIFE), 0.6)
        assert not listed.is_known_to_drain and listed.on_time(1.5) == m.Register(DRAINING)
        listed.on_message(m.RegisteredReply(LIFE, draining=True), 1.6)
        assert listed.is_known_to_drain and listed.state is MemberState.LISTED

    def test_what_is_held_goes_with_its_pings(self, listed: Member) -> None:
        listed.on_message(m.RegisteredReply(LIFE, draining=True), 0.6)
        listed.held = "1 lease"
        assert listed.on_time(1.5) == m.Ping(LIFE, m.SeenWorkers(), "1 lease")

    def test_a_registry_that_came_back_is_told_that_it_drains(self, listed: Member) -> None:
        listed.on_message(m.RegisteredReply(LIFE, draining=True), 0.6)
        listed.on_message(m.Unknown(LIFE), 0.7)
        assert listed.on_time(0.7) == m.Register(DRAINING)
