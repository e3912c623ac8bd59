"""P's writing for push (rules 13 to 16): one writer, visible before Written, quiet before Quiesced, pinned till then.

Where a copy is left moving (`habits.copies` off), the test ends it.
"""

from __future__ import annotations

import msgspec
import pytest
from pair import Make, Pair
from party import Load, Source, delivered, why

from kvbaton.protocol import events as ev
from kvbaton.protocol.effects import CancelCopy, Direction, Disconnect, StartCopy, Unpin
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import LeaseId, ReservationId, WorkerId
from kvbaton.protocol.machines.push_writer import OutletState, Revocations
from kvbaton.protocol.settings import Settings
from kvbaton.protocol.wire.codec import pack_blocks
from kvbaton.protocol.wire.messages import (
    Accepted,
    Ack,
    Commit,
    Goodbye,
    Offer,
    Quiesced,
    Renew,
    Revoke,
    Written,
)
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.sim_transport import SHM


def offered(pair: Pair, number: int = 1, request: str = "r") -> tuple[Load, Source]:
    """A push whose writes are under way and stay so until the test says otherwise."""
    pair.p.habits.copies = False
    load = pair.d.want(request, pair.router_ticket(number), number, push=True)
    source = pair.p.stream(number)
    pair.settle()
    assert pair.p.copies
    return load, source


def offer(pair: Pair, **changes: object) -> Offer:
    return msgspec.structs.replace(pair.said(Offer)[0], **changes)


def quiet(pair: Pair) -> list[tuple[int, Reason | None]]:
    return [(message.reservation, message.reason) for message in pair.said(Quiesced)]


class TestWriting:
    """Promise 1: Written means that every byte of every rank is there."""

    def test_p_writes_and_d_is_delivered(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        assert delivered(load) and len(pair.done(Unpin)) == 1
        assert {effect.copy.direction for effect in pair.done(StartCopy)} == {Direction.WRITE}
        assert len(pair.said(Written)) == 1 == len(pair.said(Ack))

    def test_chunks_are_written_as_they_are_computed(self, pair: Pair) -> None:
        load = pair.d.want("r", pair.router_ticket(), push=True)
        source = pair.p.begin()
        pair.settle()
        for _ in range(3):
            pair.p.chunk(source, 1)
            pair.settle()
        assert pair.p.counts["copies"] == 3 and not pair.said(Written)
        pair.p.complete(source)
        pair.settle()
        assert delivered(load)

    def test_written_waits_for_the_last_write_of_the_last_rank(self, make_pair: Make) -> None:
        """Rule 15."""
        pair = make_pair(shape=Shape(ranks=2))
        load, _ = offered(pair)
        jobs = list(pair.p.copies)
        assert len(jobs) == 2
        pair.p.finish(jobs[0])
        pair.settle()
        assert not pair.said(Written) and load.end is None
        pair.p.finish(jobs[1])
        pair.settle()
        assert delivered(load)

    def test_blocks_stay_pinned_while_they_are_written_from(self, pair: Pair) -> None:
        load, _ = offered(pair)
        pair.lose(Renew, times=99)
        pair.run(16)
        assert pair.p.counts["leases_expired"] == 1 and not pair.done(Unpin)
        pair.p.finish()
        assert len(pair.done(Unpin)) == 1
        pair.settle()
        assert quiet(pair)[0] == (1, Reason.LEASE_EXPIRED) and why(load) is Reason.LEASE_EXPIRED

    @pytest.mark.parametrize("lost", [Offer, Accepted, Written, Ack])
    def test_whatever_is_lost_is_said_again(self, pair: Pair, lost: type) -> None:
        pair.lose(lost)
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.run(1)
        assert delivered(load) and len(pair.done(Unpin)) == 1
        assert pair.p.counts["copies"] == 1, "written once"

    @pytest.mark.parametrize("doubled", [Offer, Accepted, Written, Ack])
    def test_whatever_comes_twice_counts_once(self, pair: Pair, doubled: type) -> None:
        pair.double(doubled, times=9)
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.run(1)
        assert delivered(load) and pair.p.counts["copies"] == 1

    def test_a_repeated_offer_is_answered_by_where_p_stands(self, pair: Pair) -> None:
        offered(pair)
        pair.inject("d", "p", offer(pair))
        assert len(pair.said(Accepted)) == 2
        pair.lose(Written)
        pair.lose(Ack, times=99)
        pair.p.finish()
        pair.settle()
        pair.inject("d", "p", offer(pair))
        assert len(pair.said(Written)) == 2

    def test_a_repeated_offer_gets_no_answer_while_p_is_stopping(self, pair: Pair) -> None:
        """Neither Accepted, which is no longer true, nor Quiesced, which is not true yet."""
        offered(pair)
        pair.p.finish(reason=Reason.TRANSFER_FAILED, at_rest=False)
        pair.inject("d", "p", offer(pair))
        assert len(pair.said(Accepted)) == 1 and not pair.said(Quiesced)
        pair.p.rest()
        assert quiet(pair) == [(1, Reason.TRANSFER_FAILED)]

    def test_an_acknowledgement_of_what_was_not_written_is_refused(self, pair: Pair) -> None:
        offered(pair)
        pair.inject("d", "p", Ack(LeaseId(1), 1, ReservationId(1)))
        pair.inject("d", "p", Ack(LeaseId(1), 1, ReservationId(9)))
        assert (pair.p.counts["illegal.outlet"], pair.p.counts["late.ack"]) == (1, 2)
        assert pair.p.copies, "still writing"

    def test_written_that_is_never_acknowledged_ends_p_s_side_in_time(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(transfer_timeout=5.0))
        pair.lose(Ack, times=999)
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.run(4.9)
        assert delivered(load) and not pair.done(Unpin) and len(pair.said(Written)) == 10
        pair.run(0.2)
        assert len(pair.done(Unpin)) == 1 and not pair.p.ledger.producer.writer.outlets

    def test_blocks_that_were_reused_while_they_were_written_are_never_called_written(self, pair: Pair) -> None:
        """An engine that breaks its pin costs the handoff, not the answer."""
        load, _ = offered(pair)
        pair.p.epochs[1] += 1
        pair.p.finish()
        pair.settle()
        assert not pair.said(Written) and why(load) is Reason.STALE

    def test_progress_that_comes_while_stopping_writes_no_more(self, pair: Pair) -> None:
        pair.p.habits.copies = False
        load = pair.d.want("r", pair.router_ticket(), push=True)
        source = pair.p.begin()
        pair.p.chunk(source, 1)
        pair.p.chunk(source, 1)
        pair.settle()
        first, *_ = pair.p.copies
        pair.p.chunk(source, 1)
        pair.p.finish(first, Reason.TRANSFER_FAILED)
        started = len(pair.done(StartCopy))
        pair.p.chunk(source, 1)
        assert len(pair.done(StartCopy)) == started
        pair.p.finish()
        pair.settle()
        assert why(load) is Reason.TRANSFER_FAILED

    def test_mixed_groups_and_ranks_are_written_in_full(self, make_pair: Make) -> None:
        pair = make_pair("p", shape=Shape(ranks=4, heads=4, group_layers=(2, 1), block_tokens=2))
        pair.add("d", shape=Shape(ranks=2, heads=4, group_layers=(2, 1), block_tokens=4, blocks_first=True))
        load = pair.d.want("r", pair.router_ticket(), push=True, tokens=7)
        pair.p.stream(tokens=7)
        pair.settle()
        assert delivered(load)  # and every byte was checked


class TestFailing:
    """P ends a write of its own accord: only when it is at rest does D hear so, with the reason."""

    def test_a_failed_write_fails_the_handoff(self, pair: Pair) -> None:
        load, _ = offered(pair)
        pair.p.finish(reason=Reason.TRANSFER_FAILED)
        pair.settle()
        assert why(load) is Reason.TRANSFER_FAILED and len(pair.done(Unpin)) == 1
        assert quiet(pair)[0] == (1, Reason.TRANSFER_FAILED)

    def test_quiet_waits_for_every_rank(self, make_pair: Make) -> None:
        """Rule 17: ended on the first failure, released when all parts are at rest."""
        pair = make_pair(shape=Shape(ranks=2))
        load, _ = offered(pair)
        first, second = pair.p.copies
        pair.p.finish(first, Reason.TRANSFER_FAILED)
        assert pair.done(CancelCopy, "p") and not pair.said(Quiesced)
        pair.p.finish(second, Reason.CANCELLED, at_rest=False)
        pair.settle()
        assert not pair.said(Quiesced) and load.end is None and not pair.done(Unpin)
        pair.p.rest()
        pair.settle()
        assert why(load) is Reason.TRANSFER_FAILED and len(pair.done(Unpin)) == 1

    def test_a_write_without_progress_is_given_up(self, make_pair: Make) -> None:
        pair = make_pair("p", settings=Settings(transfer_timeout=3.0))
        pair.add("d", settings=Settings())
        load, _ = offered(pair)
        pair.run(3.1)
        assert pair.done(CancelCopy, "p") and load.end is None
        pair.run(4)  # stopping has no deadline: rest is a fact
        pair.p.finish()
        pair.settle()
        assert why(load) is Reason.TRANSFER_TIMEOUT

    def test_a_stopped_write_keeps_its_pins_however_long_it_takes(self, make_pair: Make) -> None:
        pair = make_pair("p", settings=Settings(transfer_timeout=3.0))
        pair.add("d", settings=Settings())
        offered(pair)
        pair.p.finish(reason=Reason.TRANSFER_FAILED, at_rest=False)
        pair.run(40)
        assert not pair.done(Unpin)
        pair.p.restless.clear()  # it fails to land at all: D has fenced P long ago
        pair.p.tell(ev.CopyRested(1))
        assert len(pair.done(Unpin)) == 1

    def test_a_write_whose_rest_is_not_proven_ends_the_session_and_d_fences(self, make_pair: Make) -> None:
        """Over an encrypted plane a reset proves nothing; D must not wait for a word that never comes."""
        pair = make_pair("p", settings=Settings(transfer_timeout=3.0))
        pair.add("d", settings=Settings())
        load, _ = offered(pair)
        pair.p.finish(reason=Reason.TRANSFER_FAILED, at_rest=False)
        pair.run(14)
        assert load.end is not None and pair.d.counts["fences"] == 1 and not pair.said(Quiesced)
        assert not pair.p.ledger.sessions.by_number and pair.done(Disconnect, "p")
        pair.p.restless.clear()
        pair.p.tell(ev.CopyRested(1))  # the plane has forgotten D
        pair.settle()
        assert not pair.said(Quiesced) and len(pair.done(Unpin)) == 1

    def test_a_write_that_outlives_its_session_keeps_its_pins_and_ends_nothing_more(self, make_pair: Make) -> None:
        pair = make_pair("p", settings=Settings(transfer_timeout=3.0))
        pair.add("d", settings=Settings())
        offered(pair)
        pair.p.finish(reason=Reason.TRANSFER_FAILED, at_rest=False)
        pair.p.tell(ev.Departed(WorkerId("d")))
        pair.run(14)
        assert not pair.done(Unpin) and not pair.said(Quiesced)
        pair.p.restless.clear()
        pair.p.tell(ev.CopyRested(1))
        assert len(pair.done(Unpin)) == 1

    def test_too_many_writes_that_are_not_at_rest_refuse_new_ones(self, make_pair: Make) -> None:
        """Rule 18 at the source: pins are never dropped early, so there must not be more and more of them."""
        pair = make_pair("p", settings=Settings(quarantine_blocks_max=3))
        pair.add("d", settings=Settings())
        offered(pair)
        pair.give_up()
        pair.p.finish(at_rest=False)
        late = pair.d.want("s", pair.router_ticket(2), 2, push=True)
        pair.p.stream(2)
        pair.settle()
        assert why(late) is Reason.QUARANTINE_FULL
        pair.p.rest()

    @pytest.mark.parametrize(
        ("changes", "reason"),
        [
            ({"lease": LeaseId(9)}, Reason.UNKNOWN_LEASE),
            ({"attempt": 9}, Reason.UNKNOWN_LEASE),
            ({"digest": b"other"}, Reason.CONTENT_MISMATCH),
            ({}, Reason.DUPLICATE),
        ],
    )
    def test_an_offer_that_does_not_fit_is_refused(
        self, pair: Pair, changes: dict[str, object], reason: Reason
    ) -> None:
        offered(pair)
        pair.inject("d", "p", offer(pair, reservation=ReservationId(7), **changes))
        assert quiet(pair) == [(7, reason)]
        assert pair.p.counts[f"offer_refused.{reason}"] == 1
        pair.inject("d", "p", offer(pair, reservation=ReservationId(7)))
        assert quiet(pair) == [(7, reason), (7, None)], "and stays so"

    @pytest.mark.parametrize(
        ("blocks", "reason"),
        [
            ((), Reason.BAD_SPAN),
            ((pack_blocks([1]),), Reason.BAD_SPAN),
            ((pack_blocks([1, 2, 10_000]),), Reason.BAD_SPAN),
            ((b"\0" * 3,), Reason.BAD_MESSAGE),
            ((pack_blocks([-2]),), Reason.BAD_MESSAGE),
        ],
    )
    def test_an_offer_of_blocks_that_are_none_is_refused(
        self, pair: Pair, blocks: tuple[bytes, ...], reason: Reason
    ) -> None:
        """Promise 5: D names only memory that it registered."""
        pair.lose(Offer, times=99)
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        pair.inject("d", "p", offer(pair, blocks=blocks))
        assert quiet(pair)[0] == (1, reason) and why(load) is reason

    def test_an_offer_over_a_data_plane_that_takes_no_writes_is_refused(self, make_pair: Make) -> None:
        """Rule 16: where the sender cannot be fenced, the receiver copies."""
        pair = make_pair(transports=(SHM,))
        pair.d.habits.copies = False
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        assert not pair.said(Offer) and pair.d.copies, "D reads although it was asked to be written to"
        pair.inject("d", "p", Offer(LeaseId(1), 1, ReservationId(1), 0, (pack_blocks([1, 2, 3]),), _digest(pair)))
        assert quiet(pair) == [(1, Reason.NO_TRANSPORT)]
        pair.d.finish()
        pair.settle()
        assert delivered(load)


class TestRevoking:
    """Rules 13 and 14: D takes its blocks back; P stops, drains, and says so."""

    def test_quiet_comes_when_the_writes_are_at_rest(self, pair: Pair) -> None:
        load, _ = offered(pair)
        pair.give_up()
        assert why(load) is Reason.ABORTED and not load.drops and pair.done(CancelCopy, "p")
        pair.run(1)
        assert len(pair.said(Revoke)) == 3 and not pair.said(Quiesced), "repetitions do not hurry it"
        pair.p.finish()
        pair.settle()
        assert quiet(pair) == [(1, None)] and load.drops == 1 and len(pair.done(Unpin)) == 1

    def test_a_written_that_crosses_the_revoke_counts_as_quiet(self, pair: Pair) -> None:
        load, _ = offered(pair)
        pair.hold(Written)
        pair.p.finish()
        pair.settle()
        pair.hold(Revoke)
        pair.d.give_up("r")
        pair.release(Written)
        assert why(load) is Reason.ABORTED and load.drops == 1
        pair.release(Revoke)
        assert quiet(pair) == [(1, None)] and len(pair.done(Unpin)) == 1

    def test_a_revoke_of_what_was_written_is_answered_and_ends_it(self, pair: Pair) -> None:
        load, _ = offered(pair)
        pair.lose(Written, times=99)
        pair.p.finish()
        pair.settle()
        pair.give_up()
        assert quiet(pair) == [(1, None)] and load.drops == 1 and len(pair.done(Unpin)) == 1

    def test_a_revoke_may_overtake_its_offer(self, pair: Pair) -> None:
        pair.hold(Offer, times=99)
        load = pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream()
        pair.settle()
        pair.give_up()
        assert quiet(pair) == [(1, None)] and load.drops == 1
        pair.release(Offer)
        assert not pair.done(StartCopy) and quiet(pair) == [(1, None), (1, None)]

    def test_an_offer_that_comes_again_after_the_revoke_does_not_hurry_it(self, pair: Pair) -> None:
        """The repetition of an Offer, overtaken by the Revoke: P is stopping, not quiet."""
        pair.lose(Accepted)
        load, _ = offered(pair)
        pair.hold(Offer)
        pair.run(0.6)
        pair.give_up()
        pair.release(Offer)
        assert not pair.said(Quiesced) and not load.drops
        pair.p.finish()
        pair.settle()
        assert quiet(pair) == [(1, None)] and load.drops == 1

    def test_the_floor_does_not_cover_what_is_being_written(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(revoked_max=1))
        pair.lose(Accepted)
        load, _ = offered(pair)
        for number in (2, 3, 4):
            pair.d.want(f"r{number}", pair.router_ticket(number), number, push=True)
            pair.p.begin(number)
            pair.settle()
            pair.d.give_up(f"r{number}")
            pair.settle()
        pair.run(0.6)  # the first Offer is repeated
        assert load.end is None and len(pair.p.copies) == 1
        pair.p.finish()
        pair.settle()
        assert delivered(load)

    def test_a_floor_stands_for_revocations_that_were_forgotten(self, make_pair: Make) -> None:
        pair = make_pair(settings=Settings(revoked_max=2))
        pair.hold(Offer, times=99)
        for number in (1, 2, 3, 4):
            pair.d.want(f"r{number}", pair.router_ticket(number), number, push=True)
            pair.p.stream(number)
            pair.settle()
            pair.d.give_up(f"r{number}")
            pair.settle()
        pair.heal()
        pair.release(Offer)
        assert not pair.done(StartCopy)
        late = pair.d.want("r5", pair.router_ticket(5), 5, push=True)
        pair.p.stream(5)
        pair.settle()
        assert delivered(late), "numbers above the floor are written"

    def test_a_revoke_of_a_stranger_s_lease_touches_nobody(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        load, _ = offered(pair)
        pair.e.want("q", pair.p.grant(2), 2)
        pair.settle()
        pair.inject("e", "p", Revoke(LeaseId(1), 1, ReservationId(1)))
        assert quiet(pair) == [(1, None)] and pair.p.copies
        pair.p.finish()
        pair.settle()
        assert delivered(load)

    def test_an_outlet_goes_on_when_d_only_forgets_its_lease_number(self, pair: Pair) -> None:
        """What was written stays written until P's own deadline, even if the Revoke names another lease."""
        offered(pair)
        pair.lose(Written, times=999)
        pair.lose(Revoke, times=999)
        pair.p.finish()
        pair.settle()
        pair.inject("d", "p", Revoke(LeaseId(77), 1, ReservationId(1)))
        assert quiet(pair) == [(1, None)] and len(pair.p.ledger.producer.writer.outlets) == 1

    def test_a_write_that_arrives_while_stopping_does_not_move_the_limit(self, make_pair: Make) -> None:
        """Seed 107321: its time-out was then later, or sooner, than the limit that was kept for it."""
        pair = make_pair(shape=Shape(ranks=2))
        offered(pair)
        pair.give_up()
        (outlet,) = pair.p.ledger.producer.writer.outlets.values()
        limit, (first, _) = outlet.deadline, list(pair.p.copies)
        pair.run(0.1)
        del pair.p.copies[first]
        pair.p.ledger.on_event(ev.CopyEnded(first), pair.now)  # it had arrived before it could be cancelled
        assert outlet.deadline == limit
        pair.p.finish()
        pair.settle()

    def test_who_commits_what_it_offered_blocks_for_is_written_to_no_more(self, pair: Pair) -> None:
        """Seed 108305: only a liar does; its seat was over, and P wrote on."""
        pair.p.habits.copies = False
        pair.d.want("r", pair.router_ticket(max_readers=2), push=True)
        pair.p.stream(1, max_readers=2)
        pair.settle()
        (outlet,) = pair.p.ledger.producer.writer.outlets.values()
        pair.inject("d", "p", Commit(LeaseId(1), outlet.reader.attempt))
        assert outlet.state is OutletState.STOPPING
        pair.p.finish()
        pair.settle()
        assert not pair.p.ledger.producer.writer.outlets

    def test_a_writing_ends_with_the_session_that_it_was_offered_in(self, pair: Pair) -> None:
        """Whatever session its reader had claimed in."""
        offered(pair)
        producer = pair.p.ledger.producer
        (outlet,) = producer.writer.outlets.values()
        (session,) = pair.p.ledger.sessions.by_number.values()
        producer.leases[outlet.lease].seats[outlet.reader].session = session.number + 1
        pair.p.ledger.sessions.end(session, pair.now)
        assert outlet.state is OutletState.STOPPING
        pair.p.finish()
        pair.settle()


class TestRevocations:
    def test_numbers_at_or_below_the_floor_are_covered(self) -> None:
        memory = Revocations(2)
        for number in (5, 9, 7):
            memory.add(ReservationId(number))
        assert [memory.cover(ReservationId(n)) for n in (1, 5, 6, 7, 8, 9, 10)] == [
            True,
            True,
            False,
            True,
            False,
            True,
            False,
        ]

    def test_the_floor_only_rises(self) -> None:
        memory = Revocations(1)
        for number in (9, 2, 3):
            memory.add(ReservationId(number))
        assert memory.cover(ReservationId(8)) and not memory.cover(ReservationId(10))


def test_word_of_a_write_whose_outlet_is_closed_is_late(pair: Pair) -> None:
    offered(pair)
    writer = pair.p.ledger.producer.writer
    (outlet,) = writer.outlets.values()
    pair.p.finish()
    pair.settle()
    writer.on_copy_ended(outlet, ev.CopyEnded(1), 0, pair.p.now)  # type: ignore[arg-type]
    assert pair.p.counts["late.copy"] == 1 and not pair.p.ledger.take_effects()


class TestSessionsAndReaders:
    def test_a_d_that_left_is_written_to_no_more(self, pair: Pair) -> None:
        offered(pair)
        pair.d.leave()
        pair.settle()
        assert pair.done(CancelCopy, "p") and not pair.done(Unpin)
        pair.p.finish()
        assert len(pair.done(Unpin)) == 1
        writer = pair.p.ledger.producer.writer
        assert not writer.outlets and not writer.sessions and not writer.revoked, "nothing of the session is kept"

    def test_what_was_written_for_a_d_that_left_is_over(self, pair: Pair) -> None:
        offered(pair)
        pair.lose(Written, times=99)
        pair.p.finish()
        pair.settle()
        pair.inject("d", "p", Goodbye())
        assert len(pair.done(Unpin)) == 1 and not pair.p.ledger.producer.writer.outlets

    def test_a_reader_that_is_written_to_and_says_commit_is_still_stopped_with_its_session(
        self, make_pair: Make
    ) -> None:
        """A confused D: it commits a reader that P is writing for. Its seat is taken, the writes still end."""
        pair = make_pair("p", "d")
        pair.p.habits.copies = False
        pair.d.want("r", pair.router_ticket(), push=True)
        pair.p.stream(max_readers=2)
        pair.settle()
        pair.inject("d", "p", Commit(LeaseId(1), 1))
        assert pair.p.copies
        pair.inject("d", "p", Goodbye())
        assert pair.done(CancelCopy, "p")
        pair.p.finish()
        pair.run(60)
        assert len(pair.done(Unpin)) == 1

    def test_two_readers_can_be_written_to_at_once(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        loads = [party.want("r", pair.router_ticket(), push=True) for party in (pair.d, pair.e)]
        pair.p.stream(max_readers=2)
        pair.settle()
        assert all(map(delivered, loads)) and len(pair.done(Unpin)) == 1

    @pytest.mark.parametrize("chunks", [0, 1])
    def test_a_lease_that_ends_stops_all_its_writers(self, make_pair: Make, chunks: int) -> None:
        pair = make_pair("p", "d", "e")
        pair.p.habits.copies = False
        loads = [party.want("r", pair.router_ticket(), push=True) for party in (pair.d, pair.e)]
        source = pair.p.begin(max_readers=2)
        pair.p.chunk(source, chunks)
        pair.settle()
        pair.p.tell(ev.SourceEnded(source.lease, Reason.SOURCE_PREEMPTED))
        assert len(pair.done(Unpin)) == (0 if chunks else 1)
        pair.p.finish()
        pair.settle()
        assert [why(load) for load in loads] == [Reason.SOURCE_PREEMPTED] * 2
        assert len(pair.done(Unpin)) == 1

    def test_a_lease_that_ends_closes_what_was_written_and_not_acknowledged(self, make_pair: Make) -> None:
        pair = make_pair("p", "d", "e")
        pair.lose(Written, times=999)
        loads = [party.want("r", pair.router_ticket(), push=True) for party in (pair.d, pair.e)]
        pair.p.stream(max_readers=2)
        pair.settle()
        pair.lose(Renew, times=99)
        pair.run(16)
        assert len(pair.done(Unpin)) == 1 and not pair.p.ledger.producer.writer.outlets
        assert all(load.end is None for load in loads)


def _digest(pair: Pair) -> bytes:
    return pair.p.ledger.producer.leases[LeaseId(1)].digest
