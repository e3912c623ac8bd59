"""From whom an engine's cached KV came, and what happens when such a member is gone (rule 36, decision 0023)."""

from __future__ import annotations

import pytest
from pair import Make, Pair
from party import Load, Party

from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.machines.context import ANYBODY, MARK_BYTES, Origins, mark_of, marked
from kvbaton.protocol.wire import messages as m
from kvbaton.protocol.wire.messages import ORIGINS_MAX


def forgets(pair: Pair, party: Party) -> list[tuple[str, ...]]:
    """What its engine was told to forget, so far."""
    found = [entry[1] for entry in pair.log if isinstance(entry, tuple) and entry[0] is party]
    return [each.origins for each in found if isinstance(each, fx.ForgetCache)]


def taken(pair: Pair, target: str, source: str, number: int) -> Load:
    load = pair.parties[target].want(f"r{number}", pair.parties[source].grant(number), number, source=source)
    pair.settle()
    return load


def remove(party: Party, *names: str) -> None:
    party.ledger.desk.identity.is_gone = lambda origin: origin in names
    party.tell(ev.MembersGone())


class TestTaking:
    @pytest.mark.parametrize("push", [False, True])
    def test_what_was_taken_from_a_member_that_is_removed_is_forgotten_once(self, pair: Pair, push: bool) -> None:
        load = pair.d.want("r", pair.router_ticket(), push=push)
        pair.p.stream()
        pair.settle()
        assert load.end is not None and load.end.delivered
        remove(pair.d, "p")
        remove(pair.d, "p")
        assert forgets(pair, pair.d) == [("p",)] and pair.d.counts["cache_resets"] == 1
        pair.d.tell(ev.CacheReplaced(forgotten=True))
        remove(pair.d, "p")
        assert forgets(pair, pair.d) == [("p",)] and pair.d.ledger.desk.origins.names == ()

    def test_a_member_from_whom_nothing_came_costs_nothing(self, pair: Pair) -> None:
        taken(pair, "d", "p", 1)
        remove(pair.d, "other")
        assert not forgets(pair, pair.d) and not pair.d.counts["cache_resets"]

    def test_a_replaced_cache_that_may_still_be_found_keeps_its_origins(self, pair: Pair) -> None:
        taken(pair, "d", "p", 1)
        pair.d.tell(ev.CacheReplaced())
        remove(pair.d, "p")
        assert forgets(pair, pair.d) == [("p",)]

    def test_a_handoff_that_is_granted_counts_before_its_first_byte(self, pair: Pair) -> None:
        pair.d.habits.copies = False
        taken(pair, "d", "p", 1)
        remove(pair.d, "p")
        assert forgets(pair, pair.d) == [("p",)]
        pair.d.habits.copies = True

    def test_what_is_on_its_way_ends_when_the_cache_is_forgotten(self, pair: Pair) -> None:
        pair.d.habits.copies = False
        load = taken(pair, "d", "p", 1)
        remove(pair.d, "p")
        pair.d.tell(ev.CacheReplaced(forgotten=True))
        pair.d.habits.copies = True
        pair.settle()
        assert load.end is not None and load.end.reason is Reason.ABORTED

    def test_what_is_asked_for_while_the_cache_is_still_to_be_forgotten_goes_on(self, pair: Pair) -> None:
        """An engine that sleeps forgets its cache with the step that its next request brings."""
        taken(pair, "d", "p", 1)
        pair.d.ledger.desk.origins.note(["x"])
        remove(pair.d, "x")
        load = pair.d.want("r2", pair.p.grant(2), 2)
        pair.d.tell(ev.CacheReplaced(forgotten=True))
        pair.settle()
        assert load.end is not None and load.end.delivered
        assert pair.d.ledger.desk.origins.names == ("p",)


class TestChains:
    def test_a_grant_names_from_whom_its_source_took(self, make_pair: Make) -> None:
        pair = make_pair("liar", "p", "d")
        taken(pair, "p", "liar", 1)
        taken(pair, "d", "p", 2)
        [granted] = pair.said(m.GrantedFrom)
        assert granted.origins == ("liar",) and pair.said(m.Granted)
        assert pair.parties["d"].ledger.desk.origins.names == ("p", "liar")
        remove(pair.parties["d"], "liar")
        assert forgets(pair, pair.parties["d"]) == [("liar",)]

    def test_a_source_that_has_not_reset_yet_is_refused(self, make_pair: Make) -> None:
        pair = make_pair("liar", "p", "d")
        taken(pair, "p", "liar", 1)
        remove(pair.parties["d"], "liar")
        load = taken(pair, "d", "p", 2)
        assert load.failed is not None and load.failed.reason is Reason.ORIGIN_GONE
        assert "liar" in load.failed.detail and not forgets(pair, pair.parties["d"])

    def test_an_engine_is_no_origin_of_its_own(self, make_pair: Make) -> None:
        pair = make_pair("p", "d")
        taken(pair, "d", "p", 1)
        taken(pair, "p", "d", 2)
        taken(pair, "d", "p", 3)
        assert pair.d.ledger.desk.origins.names == ("p",)

    def test_a_peer_that_knows_no_origins_is_told_none(self, make_pair: Make) -> None:
        pair = make_pair("liar", "p")
        pair.add("d", optional=7)
        taken(pair, "p", "liar", 1)
        load = taken(pair, "d", "p", 2)
        assert load.end is not None and load.end.delivered and not pair.said(m.GrantedFrom)


class TestBound:
    def test_beyond_the_bound_any_removal_counts(self) -> None:
        origins = Origins()
        origins.note(f"w{number}" for number in range(ORIGINS_MAX))
        assert len(origins.names) == ORIGINS_MAX and not origins.gone(lambda origin: False)
        origins.note(["one more"])
        origins.note(f"v{number}" for number in range(10_000))
        assert origins.names == (ANYBODY,) and origins.gone(lambda origin: False) == (ANYBODY,)

    def test_whoever_takes_from_such_a_source_depends_on_anybody_too(self) -> None:
        origins = Origins()
        origins.note(["p", ANYBODY])
        assert origins.gone(lambda origin: False) == (ANYBODY,)
        assert origins.gone(lambda origin: True) == ()  # it is being forgotten already
        origins.forgotten()
        assert origins.names == () and origins.gone(lambda origin: True) == ()


def test_a_value_names_an_origin_by_a_mark_that_stays_the_same() -> None:
    mark = mark_of("p")
    assert len(mark) == MARK_BYTES and mark == mark_of("p key") != mark_of("q")
    assert mark_of(marked(mark)) == mark
