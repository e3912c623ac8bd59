"""Rule 28: blocks are lent before the other is told of them, taken back when its right ends, and let go after that.
Rule 35: what a P says that it has written is believed when the ranks say so."""

from __future__ import annotations

from array import array

import msgspec
import pytest
from pair import Make, Pair
from party import Load

from kvbaton.protocol import effects as fx
from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import Capabilities
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, Departed
from kvbaton.protocol.geometry.progress import GroupProgress, whole
from kvbaton.protocol.ids import JobId
from kvbaton.protocol.legality import Role
from kvbaton.protocol.machines import context as movement
from kvbaton.protocol.machines.context import Parts
from kvbaton.protocol.wire.messages import Commit, Offer, Written
from kvbaton_proof.sim.world.sim_transport import LENT_TCP, RDMA, TCP


def lending(make_pair: Make) -> Pair:
    return make_pair("p", "d", transports=(LENT_TCP,))


def lent(pair: Pair, name: str) -> list[tuple[str, fx.Direction, tuple[tuple[int, ...], ...]]]:
    return [(loan.peer.worker, loan.direction, loan.blocks) for _, loan in pair.parties[name].loans.values()]


def test_a_reader_is_lent_the_blocks_of_its_lease_and_no_others(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    ticket = p.grant(1)
    other = p.grant(2)
    d.habits.copies = False
    d.want("r", ticket)
    pair.settle()
    (source,) = [s for s in p.sources.values() if s.lease == 1]
    assert lent(pair, "p") == [("d", fx.Direction.READ, tuple(map(tuple, source.blocks)))]
    assert other and not d.loans


def test_after_a_commit_everything_is_taken_back_and_unpinned(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    load = d.want("r", p.grant(1))
    pair.settle()
    assert load.end == fx.End() and not p.loans and not p.pins.total()


def test_blocks_stay_pinned_until_the_data_plane_has_let_go(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    d.want("r", p.grant(1))
    p.habits.loans = False
    pair.settle()
    assert p.pins.total() and not p.sources[1].unpins
    p.habits.loans = True
    pair.settle()
    assert not p.pins.total() and p.sources[1].unpins == 1


def test_each_chunk_of_a_stream_is_lent_once_it_is_computed(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    source = p.begin(1, 5)
    d.want("r", pair.router_ticket(1))
    pair.settle()
    p.chunk(source, 2, ready=False)
    assert not lent(pair, "p"), "what is only pinned still holds somebody else's KV"
    p.progress(source, whole([2]))
    assert [blocks for _, _, blocks in lent(pair, "p")] == [tuple(tuple(ids) for ids in source.blocks)]
    p.chunk(source, 1)
    p.complete(source)
    pair.settle()
    assert d.loads["r"].end == fx.End() and not p.loans


def test_layers_that_go_ahead_take_their_blocks_with_them(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    source = p.begin(1, 5)
    d.want("r", pair.router_ticket(1))
    pair.settle()
    p.chunk(source, 2, ready=False)
    p.progress(source, (GroupProgress(0, 2, 1),))
    assert [blocks for _, _, blocks in lent(pair, "p")] == [tuple(tuple(ids) for ids in source.blocks)]
    p.progress(source, whole([2]))
    assert len(lent(pair, "p")) == 1, "once"
    p.chunk(source, 1)
    p.complete(source)
    pair.settle()
    assert d.loads["r"].end == fx.End()


def test_a_replaced_cache_is_not_given_back_while_somebody_is_sent_to(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    d.habits.copies = p.habits.loans = False
    d.want("r", p.grant(1))
    pair.settle()
    p.tell(ev.CacheReplaced())
    assert not p.sources[1].unpins
    p.habits.loans = True
    pair.settle()
    assert p.sources[1].unpins == 1


def test_a_writer_is_lent_the_reservation_until_it_says_written(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    source = p.begin(1, 5)
    load = d.want("r", pair.router_ticket(1), push=True)
    pair.settle()
    assert lent(pair, "d") == [("p", fx.Direction.WRITE, load.blocks)]
    p.chunk(source, 3)
    p.complete(source)
    pair.settle()
    assert load.end == fx.End() and not d.loans and load.drops == 1


def offered(pair: Pair) -> tuple[Load, Offer]:
    """D has offered its blocks for a prompt that P has only begun."""
    pair.p.begin(1, 5)
    load = pair.d.want("r", pair.router_ticket(1), push=True)
    pair.settle()
    return load, pair.said(Offer)[-1]


def written(pair: Pair, offer: Offer) -> None:
    """P says so, whatever it wrote."""
    pair.inject("p", "d", Written(offer.lease, offer.attempt, offer.reservation, offer.digest))
    pair.settle()


def test_written_is_judged_by_what_the_ranks_say_and_not_before_they_have(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    d.habits.loans = False
    load = d.want("r", pair.router_ticket(1), push=True)
    p.stream(1)
    pair.settle()
    assert load.end is None and not load.drops
    d.habits.loans = True
    pair.settle()
    assert load.end == fx.End() and load.drops == 1


@pytest.mark.parametrize("plane", [LENT_TCP, TCP, RDMA])
def test_a_p_that_says_written_and_wrote_nothing_delivers_nothing(make_pair: Make, plane: Capabilities) -> None:
    """Before, D decoded on what lay in its blocks: `End()` here, whatever had been written."""
    pair = make_pair("p", "d", transports=(plane,))
    load, offer = offered(pair)
    written(pair, offer)
    assert load.end is not None and load.end.reason is Reason.NOT_WRITTEN and load.drops == 1
    assert load.end.detail.startswith("p said") and "bytes due never came" in load.end.detail


def test_a_p_that_writes_less_than_it_had_to_delivers_nothing(make_pair: Make) -> None:
    pair = lending(make_pair)
    d = pair.parties["d"]
    load, offer = offered(pair)
    loans = [(job, loan) for job, (_, loan) in d.loans.items()]
    for job, loan in loans:
        (area,) = loan.due
        first = area.rows[:-2]  # of the last block, nothing
        for shift in area.shifts:
            moved = array("q", [number + (shift if at % 2 == 0 else 0) for at, number in enumerate(first)])
            d.written[job].add(area.region, moved)
    written(pair, offer)
    assert load.end is not None and load.end.reason is Reason.NOT_WRITTEN


def test_what_came_under_one_handoff_counts_for_no_other(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    first = d.want("s", pair.router_ticket(2), 2, push=True)
    p.stream(2)
    pair.settle()
    load, offer = offered(pair)
    written(pair, offer)
    assert first.end == fx.End() and load.end is not None and load.end.reason is Reason.NOT_WRITTEN


def test_a_rank_that_does_not_know_what_was_written_has_proven_nothing(make_pair: Make) -> None:
    pair = lending(make_pair)
    d = pair.parties["d"]
    d.habits.loans = False
    load, offer = offered(pair)
    written(pair, offer)
    for job in list(d.taken_back):
        d.taken_back.remove(job)
        d.tell(CopyEnded(job, Reason.CANCELLED))
    assert load.end is not None and load.end.reason is Reason.NOT_WRITTEN
    assert "unknown" in load.end.detail


def test_ranks_that_never_answer_end_the_wait_by_its_deadline(make_pair: Make) -> None:
    pair = lending(make_pair)
    d = pair.parties["d"]
    d.habits.loans = False
    load = d.want("r", pair.router_ticket(1), push=True)
    pair.parties["p"].stream(1)
    pair.run(40)
    assert load.end is not None and load.end.reason is Reason.TRANSFER_TIMEOUT and not load.drops
    d.habits.loans = True
    pair.settle()
    assert load.drops == 1


def test_a_source_that_leaves_after_written_costs_nothing(make_pair: Make) -> None:
    pair = lending(make_pair)
    d = pair.parties["d"]
    d.habits.loans = False
    load = d.want("r", pair.router_ticket(1), push=True)
    pair.parties["p"].stream(1)
    pair.settle()
    d.tell(Departed(pair.p.name))
    d.habits.loans = True
    pair.settle()
    assert load.end == fx.End()


def test_a_plane_that_does_not_know_what_was_written_is_read_instead(make_pair: Make) -> None:
    """What is not declared is not believed: a transport of somebody else's that can write and fence, and no more."""
    blind = msgspec.structs.replace(TCP, knows_writes=False)
    pair = make_pair("p", "d", transports=(blind,))
    load = pair.d.want("r", pair.router_ticket(1), push=True)
    pair.p.stream(1)
    pair.settle()
    assert load.end == fx.End() and not pair.said(Offer) and pair.said(Commit)


def test_what_was_offered_is_taken_back_when_d_gives_up(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    p.begin(1, 5)
    load = d.want("r", pair.router_ticket(1), push=True)
    pair.settle()
    d.habits.loans = False
    d.give_up("r")
    pair.settle()
    assert not load.drops  # the source has stopped, our own data plane has not said so
    d.habits.loans = True
    pair.settle()
    assert load.drops == 1 and not d.loans


def test_a_lease_that_ends_early_is_lent_no_more(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    source = p.begin(1, 5)
    d.want("r", pair.router_ticket(1))
    p.chunk(source, 2)
    pair.settle()
    p.tell(ev.SourceEnded(source.lease, Reason.SOURCE_ABORTED))
    pair.settle()
    assert not p.loans and source.unpins == 1


def test_a_loan_that_could_not_be_made_costs_its_handoff_alone(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    d.habits.copies = False
    load = d.want("r", p.grant(1))
    pair.settle()
    (job,) = p.loans
    del p.loans[job]
    p.tell(ev.CopyEnded(job, Reason.TRANSFER_FAILED))
    d.habits.copies = True
    pair.settle()
    assert load.end is not None and load.end.reason is not None and p.sources[1].unpins == 1


def test_blocks_that_cannot_hold_the_prompt_are_not_offered(make_pair: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = lending(make_pair)
    pair.p.begin(1, 5)
    monkeypatch.setattr(movement, "SPANS_IN_ALL_MAX", 0)
    load = pair.d.want("r", pair.router_ticket(1), push=True)
    pair.settle()
    assert load.end is not None and load.end.reason is Reason.BAD_SPAN
    assert not pair.said(Offer) and not pair.d.loans


def test_a_loan_that_ends_not_at_rest_keeps_the_pins_until_it_rests(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    d.habits.copies = False
    d.want("r", p.grant(1))
    pair.settle()
    (job,) = p.loans
    p.loans.clear()
    p.tell(ev.CopyEnded(job, Reason.TRANSFER_FAILED, at_rest=False))
    d.give_up("r")
    pair.settle()
    assert not p.sources[1].unpins
    p.tell(ev.CopyRested(JobId(job)))
    assert p.sources[1].unpins == 1


def test_a_node_that_leaves_waits_for_no_reader(make_pair: Make) -> None:
    pair = lending(make_pair)
    p, d = pair.parties["p"], pair.parties["d"]
    d.habits.copies = p.habits.loans = False
    d.want("r", p.grant(1))
    pair.settle()
    p.leave()
    assert p.sources[1].unpins == 1


def test_nothing_is_lent_to_a_key_that_may_not_touch_it(make_pair: Make) -> None:
    pair = lending(make_pair)
    desk = pair.parties["p"].ledger.desk
    parts = Parts(None)
    for role, ways in ((Role.PREFILL, {"write"}), (Role.DECODE, {"read"}), (Role.BOTH, {"read", "write"})):
        desk.identity.role_of = lambda worker, role=role: role  # type: ignore[misc]
        desk.effects.clear()
        for way in fx.Direction:
            desk.lend(parts, LENT_TCP, pair.parties["d"].me, way, ((1,),))
        assert {effect.loan.direction.value for effect in desk.effects if isinstance(effect, fx.Lend)} == ways
    for role in (Role.ROUTER, Role.OPERATOR, Role.STORE):
        desk.identity.role_of = lambda worker, role=role: role  # type: ignore[misc]
        desk.effects.clear()
        for way in fx.Direction:
            desk.lend(parts, LENT_TCP, pair.parties["d"].me, way, ((1,),))
        assert not desk.effects
    desk.effects.clear()
    desk.owners.clear()
