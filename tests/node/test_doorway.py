"""The door of an engine: every hold and pin comes back exactly once, and nothing that a client sent raises."""

from __future__ import annotations

from itertools import count
from typing import Any

import msgspec
import pytest

from kvbaton.node.doorway import Doorway, DoorwayConfig, DropBlocks, LoadReport, MatchState, UnpinBlocks
from kvbaton.node.epochs import EpochTable
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import HandoffId, Incarnation, LeaseId, PeerId, PutId, RequestId, TransferId, WorkerId
from kvbaton.protocol.wire.ticket import Ticket, seal

KEY, DIGEST, NOW_S = b"key of the cluster", b"digest", 1000.0
R = RequestId("r")
HANDOFF = HandoffId("0" * 32 + ".0")


def door(name: str = "d", ranks: int = 2, groups: int = 1) -> Doorway:
    numbers = count(1)
    config = DoorwayConfig(
        me=PeerId(WorkerId(name), Incarnation(7)),
        ranks=ranks,
        groups=groups,
        ticket_keys=(KEY,),
        ticket_ttl_s=60.0,
        mint=lambda: TransferId(f"{next(numbers):032x}"),
        wall=lambda: NOW_S,
    )
    return Doorway(config, EpochTable(16))


def ticket(**changes: object) -> str:
    made = Ticket(HANDOFF, WorkerId("p"), NOW_S + 60, Incarnation(5), LeaseId(3), digest=DIGEST)
    return seal(msgspec.structs.replace(made, **changes), KEY)


def events(engine: Doorway) -> list[Any]:
    return list(engine.take_events())


class TestPrefill:
    """P: what is pinned is unpinned once (promise 3)."""

    def test_a_grant_pins_and_mints_a_ticket_for_the_finished_prompt(self) -> None:
        p = door("p")
        text, pinned = p.grant(DIGEST, 5, ((1, 2, 3),), max_readers=2)
        assert pinned == (1, 2, 3) and p.pinned_blocks == 3 and p.is_leased(LeaseId(1))
        opened = p.open_ticket(text)
        assert (opened.source, opened.lease, opened.digest, opened.max_readers) == ("p", 1, DIGEST, 2)
        assert opened.expires_unix_s == NOW_S + 60 and opened.incarnation == 7
        begun, extended, *progressed, completed = events(p)
        assert begun == ev.LeaseBegun(LeaseId(1), opened.handoff, DIGEST, 5, 1, 2)
        assert extended == ev.LeaseExtended(LeaseId(1), ((1, 2, 3),), ((0, 0, 0),))
        assert [(event.rank, event.progress) for event in progressed] == [(0, whole([3])), (1, whole([3]))]
        assert completed == ev.LeaseCompleted(LeaseId(1))

    def test_epochs_are_noted_when_blocks_are_pinned(self) -> None:
        p = door("p")
        p.epochs.raise_epoch(2)
        p.grant(DIGEST, 5, ((1, 2, 3),))
        p.epochs.raise_epoch(2)
        assert events(p)[1].epochs == ((0, 1, 0),)

    def test_places_without_a_block_are_listed_but_not_pinned(self) -> None:
        p = door("p", groups=2)
        lease = p.begin(HANDOFF, DIGEST, 5)
        assert p.pin(lease, ((1, 2), (NO_BLOCK, 3))) == (1, 2, 3)
        assert events(p)[1] == ev.LeaseExtended(lease, ((1, 2), (NO_BLOCK, 3)), ((0, 0), (0, 0)))

    def test_a_stream_grows_chunk_by_chunk(self) -> None:
        p = door("p")
        lease = p.begin(HANDOFF, DIGEST, 5, target=WorkerId("d"))
        p.pin(lease, ((1,),))
        p.progressed(lease, whole([1]), rank=1)
        p.pin(lease, ((2,),))
        p.source_ended(lease, Reason.SOURCE_PREEMPTED)
        begun, _, progressed, _, ended = events(p)
        assert begun.deferred and begun.target == "d"
        assert progressed == ev.LeaseProgressed(lease, 1, whole([1]))
        assert ended == ev.SourceEnded(lease, Reason.SOURCE_PREEMPTED)
        assert p.pinned_blocks == 2

    def test_an_unpin_returns_every_block_once(self) -> None:
        p = door("p")
        p.grant(DIGEST, 5, ((1, 2, 3),))
        p.hand_in(fx.Unpin(LeaseId(1)))
        p.hand_in(fx.Unpin(LeaseId(1)))
        assert p.duties() == [UnpinBlocks((1, 2, 3))]
        assert p.duties() == [] and p.pinned_blocks == 0 and not p.busy

    def test_a_lease_that_is_over_pins_nothing_more(self) -> None:
        """The engine must not touch blocks that nobody will drop."""
        p = door("p")
        lease = p.begin(HANDOFF, DIGEST, 5)
        p.hand_in(fx.Unpin(lease))
        assert p.duties() == [UnpinBlocks(())]
        events(p)
        assert p.pin(lease, ((1,),)) == () and events(p) == []
        assert not p.is_leased(lease)

    def test_blocks_pinned_before_the_engine_hears_of_the_end_come_back_with_it(self) -> None:
        p = door("p")
        lease = p.begin(HANDOFF, DIGEST, 5)
        p.pin(lease, ((1,),))
        p.hand_in(fx.Unpin(lease))
        p.pin(lease, ((2,),))
        assert p.duties() == [UnpinBlocks((1, 2))]

    def test_a_put_has_a_pin_of_its_own(self) -> None:
        p = door("p", groups=2)
        p.grant(DIGEST, 5, ((1,), (2,)))
        assert p.put(((1,), (NO_BLOCK, 2)), (b"key",)) == (1, 2)
        assert events(p)[-1] == ev.PutWanted(PutId(2), ((1,), (NO_BLOCK, 2)), (b"key",))
        assert p.pinned_blocks == 4
        p.hand_in(fx.UnpinPut(PutId(2)))
        p.hand_in(fx.UnpinPut(PutId(2)))
        assert p.duties() == [UnpinBlocks((1, 2))]
        assert p.is_leased(LeaseId(1))

    def test_numbers_of_leases_and_puts_never_repeat(self) -> None:
        p = door("p")
        p.put(((1,),), ())
        assert p.begin(HANDOFF, DIGEST, 5) == 2
        p.put(((1,),), ())
        assert p.begin(HANDOFF, DIGEST, 5) == 4


class TestWanting:
    """D: a claim is asked about at every step, and its failure is told once."""

    def test_a_good_ticket_becomes_a_want(self) -> None:
        d = door()
        d.want(R, ticket(), DIGEST, 5, push=True)
        assert d.match(R).state is MatchState.NOT_YET and d.busy
        (wanted,) = events(d)
        assert (wanted.request, wanted.handoff, wanted.source) == (R, HANDOFF, "p")
        assert wanted.push and not wanted.deferred

    def test_a_ticket_of_the_router_says_that_p_may_be_later(self) -> None:
        d = door()
        d.want(R, ticket(lease=LeaseId(0), incarnation=Incarnation(0), digest=b""), DIGEST, 5)
        assert events(d)[0].deferred

    @pytest.mark.parametrize(
        ("text", "reason"),
        [
            ("", Reason.TICKET_FORGED),
            ("forged", Reason.TICKET_FORGED),
            ("ümlaut", Reason.TICKET_FORGED),
            (None, Reason.TICKET_FORGED),
            ({"ticket": 1}, Reason.TICKET_FORGED),
            (ticket()[:-2], Reason.TICKET_FORGED),
            (ticket(expires_unix_s=NOW_S - 1), Reason.TICKET_EXPIRED),
            (ticket(digest=b"another"), Reason.CONTENT_MISMATCH),
            (ticket(target=WorkerId("e")), Reason.TICKET_FORGED),
        ],
    )
    def test_a_bad_ticket_is_a_failed_match_and_raises_nothing(self, text: Any, reason: Reason) -> None:
        """Promise 4 and 5: whatever a client sends, its request alone fails."""
        d = door()
        d.want(R, text, DIGEST, 5)
        told, *disowned = events(d)
        assert isinstance(told, ev.TurnedAway) and (told.request, told.reason) == (R, reason), "nobody is asked"
        mine = ev.Disowned(HANDOFF, WorkerId("p"), text, b"another", False, reason)
        assert disowned == ([mine] if reason is Reason.CONTENT_MISMATCH else []), "P waits for us with no other ticket"
        legible = reason is Reason.CONTENT_MISMATCH or (isinstance(text, str) and text == ticket(target=WorkerId("e")))
        assert bool(told.handoff) == legible
        found = d.match(R)
        assert found.state is MatchState.FAILED and found.end is not None and found.end.reason is reason
        assert d.match(R).state is MatchState.UNKNOWN and not d.busy

    def test_a_ticket_for_this_worker_is_good(self) -> None:
        d = door()
        d.want(R, ticket(target=WorkerId("d")), DIGEST, 5)
        assert d.match(R).state is MatchState.NOT_YET

    def test_a_match_that_was_found_stays_so_until_blocks_are_there(self) -> None:
        d = door()
        d.want(R, ticket(), DIGEST, 5)
        d.hand_in(fx.MatchFound(R))
        assert d.duties() == []
        assert [d.match(R).state for _ in range(3)] == [MatchState.FOUND] * 3

    def test_a_failed_match_is_told_once_and_the_node_hears_that_it_was_seen(self) -> None:
        d = door()
        d.want(R, ticket(), DIGEST, 5)
        events(d)
        d.hand_in(fx.MatchFailed(R, fx.End(Reason.STALE)))
        d.duties()
        assert d.match(R).state is MatchState.FAILED
        assert d.match(R).state is MatchState.UNKNOWN
        assert events(d) == [ev.NotNeeded(R)]

    def test_a_failure_after_the_match_was_found_is_told_too(self) -> None:
        d = door()
        d.want(R, ticket(), DIGEST, 5)
        d.hand_in(fx.MatchFound(R))
        d.hand_in(fx.MatchFailed(R, fx.End(Reason.LEASE_EXPIRED)))
        d.duties()
        assert d.match(R).state is MatchState.FAILED

    def test_answers_for_a_request_that_was_given_up_are_dropped(self) -> None:
        d = door()
        d.want(R, ticket(), DIGEST, 5)
        d.gave_up(R)
        d.hand_in(fx.MatchFound(R))
        d.hand_in(fx.MatchFailed(R, fx.End(Reason.ABORTED)))
        assert d.duties() == [] and d.match(R).state is MatchState.UNKNOWN and not d.busy

    @pytest.mark.parametrize(("say", "event"), [("not_needed", ev.NotNeeded(R)), ("gave_up", ev.GaveUp(R))])
    def test_a_want_is_taken_back_once(self, say: str, event: ev.Event) -> None:
        d = door()
        d.want(R, ticket(), DIGEST, 5)
        events(d)
        getattr(d, say)(R)
        getattr(d, say)(R)
        assert events(d) == [event]


class TestLoading:
    """One report per rank and load, also after an abort; one drop, when nothing can land any more."""

    def loading(self) -> Doorway:
        d = door(groups=2)
        d.want(R, ticket(), DIGEST, 5)
        d.hand_in(fx.MatchFound(R))
        d.duties()
        assert d.allocated(R, ((1, 2), (NO_BLOCK, 3)), 4) == (1, 2, 3)
        assert events(d)[-1] == ev.Allocated(R, ((1, 2), (NO_BLOCK, 3)), 4)
        return d

    def test_a_load_is_reported_once_per_rank_and_dropped_once(self) -> None:
        """Rule 20: each is the death of an engine otherwise."""
        d = self.loading()
        assert d.pinned_blocks == 3 and d.busy and d.match(R).state is MatchState.UNKNOWN
        d.hand_in(fx.Report(R, fx.End()))
        d.hand_in(fx.DropHold(R, HANDOFF))
        d.hand_in(fx.DropHold(R, HANDOFF))
        assert d.duties() == [LoadReport(R, 0, fx.End()), LoadReport(R, 1, fx.End()), DropBlocks(R, (1, 2, 3))]
        assert d.duties() == [] and not d.busy

    def test_a_quarantined_load_is_reported_at_once_and_dropped_later(self) -> None:
        d = self.loading()
        end = fx.End(Reason.TRANSFER_TIMEOUT)
        d.hand_in(fx.Report(R, end))
        assert d.duties() == [LoadReport(R, 0, end), LoadReport(R, 1, end)]
        assert d.pinned_blocks == 3 and d.busy
        d.hand_in(fx.DropHold(R, HANDOFF))
        assert d.duties() == [DropBlocks(R, (1, 2, 3))]

    def test_an_abort_while_loading_is_passed_on_and_the_report_still_comes(self) -> None:
        d = self.loading()
        d.gave_up(R)
        assert events(d) == [ev.GaveUp(R)]
        d.hand_in(fx.Report(R, fx.End(Reason.ABORTED)))
        assert len(d.duties()) == 2

    def test_a_request_whose_blocks_are_not_at_rest_cannot_be_tried_again_under_its_name(self) -> None:
        """Its second hold would replace the first, and the first drop would free the second load's blocks."""
        d = self.loading()
        d.want(R, ticket(), DIGEST, 5)
        found = d.match(R)
        assert found.state is MatchState.FAILED and found.end is not None and found.end.reason is Reason.DUPLICATE
        assert d.pinned_blocks == 3
        d.hand_in(fx.DropHold(R, HANDOFF))
        d.duties()
        d.want(R, ticket(), DIGEST, 5)
        assert d.match(R).state is MatchState.NOT_YET

    def test_a_request_that_nobody_knows_is_not_passed_on(self) -> None:
        d = door()
        d.gave_up(RequestId("unknown"))
        d.not_needed(RequestId("unknown"))
        assert events(d) == []


def test_each_side_wakes_the_other() -> None:
    d = door()
    woken: list[str] = []
    d.wake_node, d.wake_engine = lambda: woken.append("node"), lambda: woken.append("engine")
    d.want(R, ticket(), DIGEST, 5)
    d.hand_in(fx.MatchFound(R))
    assert woken == ["node", "engine"]


def test_the_engine_is_kept_stepping_while_anything_is_owed() -> None:
    """Rule 19: an idle engine that holds pins would never drop them."""
    p = door("p")
    assert not p.busy
    p.grant(DIGEST, 5, ((1,),))
    assert p.busy
    p.hand_in(fx.Unpin(LeaseId(1)))
    p.duties()
    assert not p.busy
    p.hand_in(fx.Unpin(LeaseId(9)))
    assert p.busy, "somebody must look"


def test_events_are_taken_once_and_in_order() -> None:
    p = door("p")
    for number in range(3):
        p.completed(LeaseId(number))
    assert events(p) == [ev.LeaseCompleted(LeaseId(number)) for number in range(3)]
    assert events(p) == []
