"""Turns, as an engine keeps and takes them: within a share of the cache, the oldest first to go, no request held up."""

from __future__ import annotations

import msgspec
import pytest

from kvbaton.node import turn_keeping
from kvbaton.node.doorway import Doorway
from kvbaton.node.pin_budget import ROOM_SHARE, PinBudget
from kvbaton.node.turn_keeping import TurnKeeper, TurnSettings, TurnTaker
from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import HandoffId, LeaseId, PutId, RequestId, WorkerId
from kvbaton.protocol.numbers import TERM_S_MAX
from kvbaton.protocol.wire.ticket import Ticket, seal
from tests.node.test_doorway import DIGEST, KEY, NOW_S, R, door, events

BLOCKS = 64  # of which the share is 16, and 8 are kept free
ON = TurnSettings(turn_s=30.0, turn_percent=25.0)


def name(number: int) -> HandoffId:
    return HandoffId(f"{number:032x}.0")


def ticket(number: int = 1, **changes: object) -> str:
    made = Ticket(name(number), WorkerId("d"), NOW_S + 60)
    return seal(msgspec.structs.replace(made, **changes), KEY)


def keep(keeper: TurnKeeper, number: int, blocks: int) -> bool:
    ids = tuple(range(1, blocks + 1))
    return keeper.keep(ticket(number), DIGEST, 5, (ids,), R) == ids


def let_go(engine: Doorway) -> list[HandoffId]:
    return [each.handoff for each in events(engine) if isinstance(each, ev.Discarded)]


class TestKeeping:
    def test_a_turn_is_a_lease_of_its_own_term(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        assert keep(keeper, 1, 3) and keeper.blocks == engine.turn_blocks == 3
        begun = events(engine)[0]
        assert (begun.handoff, begun.keep_s, begun.deferred, begun.max_readers) == (name(1), 30.0, False, 1)
        assert not engine.holding and not engine.busy, "an engine that is idle may sleep"

    @pytest.mark.parametrize(
        "text",
        [None, "forged", ticket(source=WorkerId("p")), ticket(expires_unix_s=NOW_S - 1), ticket(lease=LeaseId(3))],
    )
    def test_a_ticket_that_is_not_for_keeping_keeps_nothing(self, text: object) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        assert keeper.keep(text, DIGEST, 5, ((1, 2),), R) == ()
        assert events(engine) == [] and engine.pinned_blocks == 0 and sum(keeper.counts.values()) == 1

    def test_off_is_off(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, TurnSettings(), BLOCKS)
        assert not keeper.is_on and not keep(keeper, 1, 2)
        assert events(engine) == [] and not keeper.counts, "nobody is told that it was refused"
        assert TurnKeeper(engine, TurnSettings(30.0, 1.0), 100).is_on, "of one block"

    def test_what_has_no_kv_is_not_kept(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        assert keeper.keep(ticket(), DIGEST, 0, ((1,),), R) == () and events(engine) == [] and not keeper.counts
        assert keeper.keep(ticket(), DIGEST, 1, ((1,),), R) == (1,)

    def test_a_lease_is_whole_and_for_whom_the_ticket_says(self) -> None:
        engine = door(groups=2)
        keeper = TurnKeeper(engine, ON, BLOCKS)
        assert keeper.keep(ticket(target=WorkerId("p9")), DIGEST, 5, ((1, 2), (NO_BLOCK, 3, 4)), R) == (1, 2, 3, 4)
        begun, extended, *progressed, completed = events(engine)
        assert (begun.target, begun.request, begun.tokens) == ("p9", R, 5)
        assert extended.blocks == ((1, 2), (NO_BLOCK, 3, 4)) and completed == ev.LeaseCompleted(begun.lease)
        assert [(each.rank, each.progress) for each in progressed] == [(0, whole([2, 3])), (1, whole([2, 3]))]
        assert keeper.blocks == engine.turn_blocks == 4, "of all groups, and none that is not there"

    def test_the_share_is_never_passed_and_the_oldest_make_place(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        assert keep(keeper, 1, 5) and keep(keeper, 2, 5) and let_go(engine) == []
        assert keep(keeper, 3, 5) and let_go(engine) == [name(1)], "a place for the next, before it comes"
        assert not keep(keeper, 4, 5), "15 of 16 are pinned until the first has come to rest"
        assert let_go(engine) == [], "whose place is enough"
        engine.hand_in(fx.Unpin(LeaseId(1)))
        engine.duties()
        assert keep(keeper, 5, 5) and keeper.blocks == 15

    def test_one_that_is_larger_than_the_share_is_not_kept(self) -> None:
        keeper = TurnKeeper(door(), ON, BLOCKS)
        assert not keep(keeper, 1, 17) and keeper.counts["unkept.busy"] == 1

    def test_one_may_take_the_whole_share_and_the_next_makes_it_go(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        assert keep(keeper, 1, 16) and not keep(keeper, 2, 10) and let_go(engine) == [name(1)]

    def test_more_than_so_many_are_not_kept_however_small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(turn_keeping, "TURNS_MAX", 2)
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        assert keep(keeper, 1, 1) and keep(keeper, 2, 1) and let_go(engine) == []
        assert not keep(keeper, 3, 1) and let_go(engine) == [name(1)] and keeper.counts["unkept.busy"] == 1

    def test_all_go_where_an_engine_needs_none(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        for number in (1, 2, 3):
            keep(keeper, number, 2)
        events(engine)
        keeper.let_all_go()
        assert let_go(engine) == [name(1), name(2), name(3)]

    def test_all_that_is_over_is_forgotten_at_once(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        for number in (1, 2, 3):
            keep(keeper, number, 2)
        for number in (2, 3):
            engine.hand_in(fx.Unpin(LeaseId(number)))
        engine.duties()
        keeper.settle()
        assert keeper.blocks == engine.turn_blocks == 2

    def test_what_is_over_is_forgotten(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        keep(keeper, 1, 6)
        engine.hand_in(fx.Unpin(LeaseId(1)))
        engine.duties()
        keeper.settle()
        assert keeper.blocks == engine.turn_blocks == 0


class TestDoor:
    """A turn is a lease like any other, but for who waits for it and what it counts against."""

    def test_an_engine_that_keeps_turns_steps_for_its_leases_alone(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        assert keep(keeper, 1, 3) and keep(keeper, 2, 2) and engine.turn_blocks == 5
        assert not engine.holding and not engine.busy
        engine.grant(DIGEST, 5, ((9,),))
        assert engine.holding and engine.busy
        for lease in (1, 2):
            engine.hand_in(fx.Unpin(LeaseId(lease)))
        engine.duties()
        assert engine.holding and engine.busy and engine.turn_blocks == 0, "the lease is still there"
        engine.hand_in(fx.Unpin(LeaseId(3)))
        assert engine.holding, "there is news"
        engine.duties()
        assert not engine.holding and not engine.busy
        engine.hand_in(fx.MatchFound(R))
        assert engine.holding, "there is news, of whatever kind"
        engine.duties()
        engine.allocated(R, ((4, 5),), 0)
        assert engine.holding, "blocks that are loaded"

    def test_turns_and_puts_count_against_no_budget_of_leases(self) -> None:
        engine = door()
        engine.budget = PinBudget(4)
        keep(TurnKeeper(engine, ON, BLOCKS), 1, 3)
        engine.put(((7, 8),), (b"key",))
        assert engine.budget.pinned_blocks == 0
        engine.hand_in(fx.Unpin(LeaseId(1)))
        engine.hand_in(fx.UnpinPut(PutId(2)))
        assert [duty.blocks for duty in engine.duties()] == [(1, 2, 3), (7, 8)]
        assert engine.budget.pinned_blocks == 0 and engine.pinned_blocks == 0

    def test_a_lease_pins_what_its_request_was_promised(self) -> None:
        engine = door()
        engine.budget = PinBudget(4)
        engine.budget.ask(R, 3, 0.0)
        lease = engine.begin(name(1), DIGEST, 5, request=R)
        engine.pin(lease, ((1, 2),))
        assert (engine.budget.pinned_blocks, engine.budget.promised_blocks) == (2, 1)


class TestPressure:
    def test_the_oldest_go_as_many_as_a_request_needs(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        for number in (1, 2, 3):
            keep(keeper, number, 4)
        events(engine)
        keeper.press(free_blocks=14, needed=6)
        assert let_go(engine) == [], "6 and the reserve of 8 are free"
        keeper.press(free_blocks=14, needed=11)
        assert let_go(engine) == [name(1), name(2)]
        keeper.press(free_blocks=14, needed=11)
        assert let_go(engine) == [], "those are on their way back"
        assert keeper.counts["evicted"] == 2

    def test_what_has_come_back_is_on_its_way_no_more(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        for number in (1, 2, 3):
            keep(keeper, number, 4)
        events(engine)
        keeper.press(free_blocks=6, needed=2)
        engine.hand_in(fx.Unpin(LeaseId(1)))
        engine.duties()
        events(engine)
        keeper.press(free_blocks=6, needed=2)
        assert let_go(engine) == [name(2)], "another has taken the blocks of the first"

    def test_running_requests_find_blocks_to_grow_by(self) -> None:
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        keep(keeper, 1, 4)
        events(engine)
        keeper.press(free_blocks=8)
        assert let_go(engine) == []
        keeper.press(free_blocks=7)
        assert let_go(engine) == [name(1)]

    def test_turns_never_make_an_engine_say_that_it_is_full_for_good(self) -> None:
        """It takes the word back above a share of free blocks, which turns may not take from it."""
        assert 1 / turn_keeping.RESERVE_SHARE > ROOM_SHARE

    def test_what_is_read_for_long_keeps_no_other_turn_from_going(self) -> None:
        """A reader, slow or a liar, keeps what was let go of: requests would wait for blocks beside idle turns."""
        now = [NOW_S]
        engine = door()
        engine.config = msgspec.structs.replace(engine.config, wall=lambda: now[0])
        keeper = TurnKeeper(engine, ON, BLOCKS)
        for number in (1, 2, 3):
            keep(keeper, number, 4)
        events(engine)
        keeper.press(free_blocks=6, needed=2)
        assert let_go(engine) == [name(1)]
        now[0] += turn_keeping.RETURN_S / 2
        keeper.press(free_blocks=6, needed=2)
        assert let_go(engine) == [], "it may be on its way"
        now[0] += turn_keeping.RETURN_S
        keeper.press(free_blocks=6, needed=2)
        assert let_go(engine) == [name(2)]
        now[0] -= 3600.0
        keeper.press(free_blocks=6, needed=2)
        assert let_go(engine) == [name(3)], "a clock that was set back holds up nothing"

    def test_an_engine_with_blocks_to_spare_counts_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Every hook asks, and 4,096 turns may be kept: half a millisecond each time, for nothing."""
        engine = door()
        keeper = TurnKeeper(engine, ON, BLOCKS)
        keep(keeper, 1, 4)
        monkeypatch.setattr(engine, "is_leased", lambda lease: pytest.fail("all turns were looked at"))
        keeper.press(free_blocks=24, needed=16)


class TestTaking:
    def taker(self) -> tuple[Doorway, TurnTaker]:
        engine = door("p")
        return engine, TurnTaker(engine)

    def ask(self, taker: TurnTaker, tokens: int = 41, prompt: int = 60) -> None:
        taker.ask(R, ticket(target=WorkerId("p")), tokens, prompt, lambda upto: b"%d" % upto)

    def test_it_asks_for_all_but_the_last_token_and_does_not_wait_for_a_beginning(self) -> None:
        engine, taker = self.taker()
        self.ask(taker)
        [wanted] = events(engine)
        assert (wanted.source, wanted.tokens, wanted.digest, wanted.deferred) == ("d", 40, b"40", False)
        assert taker.match(R, 16, 16) is None
        engine.hand_in(fx.MatchFound(R))
        engine.duties()
        assert taker.match(R, 16, 16) == 24
        assert taker.awaits(R) and not taker.is_loading(R)
        assert taker.first_token(R, 24) == (16, 40) and taker.is_loading(R) and not taker.awaits(R)
        taker.loaded(R, None)
        assert taker.stats() == {"turn_loads_total": {"taken": 1}, "turn_tokens_total": 24}

    @pytest.mark.parametrize(("tokens", "prompt"), [(1, 60), (0, 60), (62, 60), (61, 60)])
    def test_what_is_no_beginning_of_the_prompt_is_given_back(self, tokens: int, prompt: int) -> None:
        engine, taker = self.taker()
        self.ask(taker, tokens, prompt)
        [disowned] = events(engine)
        assert isinstance(disowned, ev.Disowned) and not taker.awaits(R)
        assert not disowned.deferred, "a D that does not keep it would have it wait among claims that came early"
        assert taker.loads == {"unfit": 1}

    def test_a_turn_of_one_token_is_asked_for(self) -> None:
        engine, taker = self.taker()
        self.ask(taker, tokens=2)
        assert [wanted.tokens for wanted in events(engine)] == [1]

    def test_a_ticket_that_is_none_costs_the_turn(self) -> None:
        engine, taker = self.taker()
        taker.ask(RequestId("other"), ticket(target=WorkerId("p7")), 41, 60, lambda upto: DIGEST)
        taker.ask(RequestId("older"), ticket(digest=b"another"), 41, 60, lambda upto: DIGEST)
        [disowned] = [each for each in events(engine) if isinstance(each, ev.Disowned)]
        assert not disowned.deferred
        taker.ask(R, "forged", 41, 60, lambda upto: DIGEST)
        assert taker.match(R, 0, 16) == 0 and taker.loads == {"ticket_forged": 1} and not taker.awaits(R)

    def test_no_more_than_so_many_are_asked_for_at_a_time(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(turn_keeping, "ASKED_MAX", 1)
        engine, taker = self.taker()
        self.ask(taker)
        taker.ask(RequestId("another"), ticket(2, target=WorkerId("p")), 41, 60, lambda upto: DIGEST)
        assert [type(each) for each in events(engine)] == [ev.Wanted, ev.Disowned]
        assert taker.awaits(R) and not taker.awaits(RequestId("another")) and taker.loads == {"unfit": 1}

    def test_a_turn_of_its_own_is_let_go_of_and_not_claimed(self) -> None:
        """An engine of both roles, whose own answer is the prompt's beginning: its prefix cache has that."""
        engine, taker = self.taker()
        taker.ask(R, ticket(source=WorkerId("p"), target=WorkerId("p")), 41, 60, lambda upto: b"digest")
        assert events(engine) == [ev.Discarded(name(1))] and not taker.awaits(R) and taker.loads == {"known": 1}

    def test_p_that_has_as_much_itself_gives_the_turn_back(self) -> None:
        engine, taker = self.taker()
        self.ask(taker)
        events(engine)
        assert taker.match(R, 32, 16) == 0 and taker.loads == {"known": 1}
        assert events(engine) == [ev.NotNeeded(R)]

    def test_a_d_that_does_not_answer_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        engine, taker = self.taker()
        self.ask(taker)
        events(engine)
        taker.give_up_late()
        assert taker.awaits(R)
        monkeypatch.setattr(turn_keeping, "TAKE_S", -1.0)
        taker.give_up_late()
        assert not taker.awaits(R) and taker.loads == {"late": 1} and events(engine) == [ev.NotNeeded(R)]
        self.ask(taker)
        assert taker.match(R, 0, 16) == 0 and taker.loads == {"late": 2}

    def test_a_turn_is_worth_a_load_of_a_block_and_no_less(self) -> None:
        engine, taker = self.taker()
        self.ask(taker)
        events(engine)
        assert taker.match(R, 24, 16) is None, "which is worth waiting for"
        engine.hand_in(fx.MatchFound(R))
        engine.duties()
        assert taker.match(R, 24, 16) == 16
        assert taker.match(R, 25, 16) == 0 and taker.loads == {"known": 1}
        assert events(engine) == [ev.NotNeeded(R)], "P has found more of it meanwhile, and D may let go"

    def test_one_token_that_is_loaded_is_a_load(self) -> None:
        _, taker = self.taker()
        self.ask(taker)
        taker.first_token(R, 1)
        assert taker.is_loading(R) and not taker.awaits(R)

    def test_all_that_are_late_are_given_up_and_nobody_else(self) -> None:
        now, names = [NOW_S], [RequestId(each) for each in ("late", "too", "found", "loads")]
        engine, taker = self.taker()
        engine.config = msgspec.structs.replace(engine.config, wall=lambda: now[0])
        for number, each in enumerate(names):
            taker.ask(each, ticket(number + 1, target=WorkerId("p")), 41, 60, lambda upto: DIGEST)
        engine.hand_in(fx.MatchFound(names[2]))
        engine.duties()
        taker.first_token(names[3], 40)
        now[0] += 1.5
        taker.give_up_late()
        assert taker.match(names[0], 0, 16) is None, "D has two seconds"
        now[0] += 1.0
        events(engine)
        taker.give_up_late()
        assert events(engine) == [ev.NotNeeded(names[0]), ev.NotNeeded(names[1])] and taker.loads == {"late": 2}
        assert taker.awaits(names[2]) and taker.is_loading(names[3])

    def test_what_p_will_not_compute_is_given_back_unless_it_is_loaded(self) -> None:
        engine, taker = self.taker()
        taker.give_up(R, Reason.PINS_FULL)
        assert events(engine) == [] and not taker.loads
        self.ask(taker)
        events(engine)
        taker.drop(R)
        assert taker.awaits(R), "only a load can fail to begin"
        taker.give_up(R, Reason.PINS_FULL)
        assert events(engine) == [ev.NotNeeded(R)] and taker.loads == {"pins_full": 1} and not taker.awaits(R)
        self.ask(taker)
        taker.first_token(R, 40)
        events(engine)
        taker.give_up(R, Reason.PINS_FULL)
        assert events(engine) == [] and taker.is_loading(R)

    def test_a_refusal_is_counted_by_its_reason_and_computed(self) -> None:
        engine, taker = self.taker()
        self.ask(taker)
        engine.hand_in(fx.MatchFailed(R, fx.End(Reason.UNKNOWN_LEASE)))
        engine.duties()
        assert taker.match(R, 0, 16) == 0 and taker.loads == {"unknown_lease": 1} and not taker.awaits(R)

    def test_a_load_outlives_its_request_until_its_report(self) -> None:
        engine, taker = self.taker()
        self.ask(taker)
        taker.first_token(R, 40)
        engine.allocated(R, ((1, 2, 3),), 0)
        taker.forget(R)
        assert taker.is_loading(R)
        taker.loaded(R, Reason.ABORTED)
        taker.forget(RequestId("another"))
        assert not taker.is_loading(R) and taker.loads == {"aborted": 1}

    def test_a_load_that_did_not_begin_is_not_waited_for(self) -> None:
        engine, taker = self.taker()
        self.ask(taker)
        taker.first_token(R, 40)
        engine.allocated(R, ((1, 2, 3),), 0)
        taker.drop(R)
        assert taker.is_loading(R), "whose report is still to come"
        engine.hand_in(fx.DropHold(R, name(1)))
        engine.duties()
        taker.drop(R)
        assert not taker.is_loading(R) and taker.loads == {"aborted": 1}

    def test_a_load_whose_report_was_lost_is_forgotten_with_its_request(self) -> None:
        _, taker = self.taker()
        self.ask(taker)
        taker.first_token(R, 40)
        taker.forget(R)
        assert not taker.is_loading(R), "no block is held for it"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"turn_s": -1.0}, "turn_s: got -1.0, expected 0 .off. to"),
        ({"turn_s": float("nan")}, "turn_s"),
        ({"turn_percent": 0.0}, "turn_percent: got 0.0"),
        ({"turn_percent": 101.0}, "turn_percent"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_by_name(changes: dict[str, float], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        TurnSettings(**changes)


@pytest.mark.parametrize("settings", [(TERM_S_MAX, 100.0), (0.0, 0.5)])
def test_settings_may_be_as_large_and_as_small_as_they_say(settings: tuple[float, float]) -> None:
    assert TurnSettings(*settings).turn_percent == settings[1]
