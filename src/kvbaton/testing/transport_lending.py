"""Cases about what is lent: an admitted peer reaches that, and nothing else, for as long as it is lent."""

from __future__ import annotations

from array import array
from typing import cast

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.spans import Area
from kvbaton.protocol.ids import JobId
from kvbaton.testing.transport_case import LARGE_BYTES, READ, SMALL_BYTES, WRITE, Cases, copy, directions, fill
from kvbaton.testing.transport_harness import Log, Pair, TransportHarness
from kvbaton.transports.core.loans import EVERYTHING
from kvbaton.transports.core.transport import Direction, LendingTransport, Loan

CASES = Cases()
LOAN = {READ: EVERYTHING, WRITE: EVERYTHING + 1}
"""What `lend_everything` has lent to the one peer there is."""


def _take_back(harness: TransportHarness, pair: Pair, *ways: Direction) -> None:
    """The far side lends the near one nothing any more in these directions."""
    for way in ways:
        pair.far.transport.cancel(JobId(LOAN[way]))
        assert Log(harness, pair.far).end(LOAN[way]).at_rest


@CASES.add("lends")
def what_is_not_lent_is_refused_and_nothing_moves(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    near, far = fill(pair.near.memory, 1), fill(pair.far.memory, 2)
    _take_back(harness, pair, READ, WRITE)
    for job, direction in enumerate(directions(harness), 1):
        assert pair.near.transport.submit(copy(job, pair.far, direction, [(0, 0, 4096), (8192, 8192, 1)]))
        end = Log(harness, pair.near).end(job)
        assert (end.reason, end.at_rest) == (Reason.LEASE_EXPIRED, True), end
    assert bytes(pair.near.memory) == near and bytes(pair.far.memory) == far


@CASES.add("lends", "write")
def what_is_lent_to_read_cannot_be_written_nor_the_other_way_round(harness: TransportHarness) -> None:
    for lent, other in ((READ, WRITE), (WRITE, READ)):
        pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
        near, far = fill(pair.near.memory, 1), fill(pair.far.memory, 2)
        _take_back(harness, pair, other)
        assert pair.near.transport.submit(copy(1, pair.far, other, [(0, 0, 4096)]))
        assert Log(harness, pair.near).end(1).reason is Reason.LEASE_EXPIRED
        assert bytes(pair.near.memory) == near and bytes(pair.far.memory) == far
        assert pair.near.transport.submit(copy(2, pair.far, lent, [(0, 0, 4096)]))
        assert Log(harness, pair.near).end(2).reason is None


@CASES.add("lends")
def what_was_lent_twice_is_lent_until_both_are_taken_back(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    cast(LendingTransport, pair.far.transport).lend(Loan(JobId(7), pair.near.peer, READ, ((0,),)))
    _take_back(harness, pair, READ)
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 4096)]))
    assert Log(harness, pair.near).end(1).reason is None
    pair.far.transport.cancel(JobId(7))
    assert Log(harness, pair.far).end(7).at_rest
    assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, 4096)]))
    assert Log(harness, pair.near).end(2).reason is Reason.LEASE_EXPIRED


@CASES.add("lends")
def blocks_that_do_not_exist_lend_nothing(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    _take_back(harness, pair, READ)
    cast(LendingTransport, pair.far.transport).lend(Loan(JobId(7), pair.near.peer, READ, ((-1, 1, 1 << 30), (0,))))
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 4096)]))
    assert Log(harness, pair.near).end(1).reason is Reason.LEASE_EXPIRED


@CASES.add("lends")
def what_is_lent_while_it_is_asked_for_is_had(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    far = fill(pair.far.memory, 2)
    _take_back(harness, pair, READ)
    assert pair.near.transport.submit(copy(1, pair.far, READ, [(0, 0, 4096)]))
    cast(LendingTransport, pair.far.transport).lend(Loan(JobId(7), pair.near.peer, READ, ((0,),)))
    assert Log(harness, pair.near).end(1).reason is None
    assert bytes(pair.near.memory)[:4096] == far[:4096]


@CASES.add("lends", "write")
def after_the_end_of_a_loan_not_one_byte_lands_by_it(harness: TransportHarness) -> None:
    for _ in range(3):
        pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
        fill(pair.near.memory, 1)
        assert pair.near.transport.submit(copy(1, pair.far, WRITE, [(0, 0, LARGE_BYTES)]))
        _take_back(harness, pair, WRITE)
        mark = bytes([0xA5]) * LARGE_BYTES
        pair.far.memory[:] = mark
        assert Log(harness, pair.near).end(1)
        assert pair.near.transport.submit(copy(2, pair.far, READ, [(0, 0, 1)]))  # all that was sent before is through
        Log(harness, pair.near).end(2)
        assert bytes(pair.far.memory) == mark, "bytes landed by a loan that had ended"
        harness.reset()


PAGE_BYTES = 4096
DUE = Area(0, array("q", (0, PAGE_BYTES, 3 * PAGE_BYTES, PAGE_BYTES)), array("q", (0, 8 * PAGE_BYTES)))
"""Of a writer: pages 0, 3, 8 and 11."""
_HALVES = [(page * PAGE_BYTES + half, PAGE_BYTES // 2) for page in (11, 3, 8, 0) for half in (PAGE_BYTES // 2, 0)]


def _written(
    harness: TransportHarness, pair: Pair, loan: int, *requests: list[tuple[int, int]], due: Area = DUE
) -> int | None:
    """Lend for writing, write each of these requests, take back: what the loan says that is missing."""
    cast(LendingTransport, pair.far.transport).lend(Loan(JobId(loan), pair.near.peer, WRITE, ((0,),), (due,)))
    for job, spans in enumerate(requests, 100 * loan):
        listed = [(offset, offset, size) for offset, size in spans]
        assert pair.near.transport.submit(copy(job, pair.far, WRITE, listed))
        assert Log(harness, pair.near).end(job).reason is None
    pair.far.transport.cancel(JobId(loan))
    end = Log(harness, pair.far).end(loan)
    assert end.at_rest
    return end.unwritten


@CASES.add("knows_writes")
def the_end_of_a_loan_says_what_was_not_written(harness: TransportHarness) -> None:
    pair = harness.pair(SMALL_BYTES, SMALL_BYTES)
    pair.far.transport.cancel(JobId(LOAN[WRITE]))
    whole, page = [(page * PAGE_BYTES, PAGE_BYTES) for page in (0, 3, 8, 11)], PAGE_BYTES
    told = {
        "nothing": (_written(harness, pair, 1), 4 * page),
        "everything": (_written(harness, pair, 2, whole), 0),
        "in pieces and in any order": (_written(harness, pair, 3, _HALVES[::2], _HALVES[1::2]), 0),
        "and much besides": (_written(harness, pair, 4, [(0, 12 * page)]), 0),
        "one page too few": (_written(harness, pair, 5, whole[1:]), page),
        "one page, often": (_written(harness, pair, 6, *[whole[:1]] * 4), 3 * page),
        "one byte too few": (_written(harness, pair, 7, whole[:3], [(11 * page, page - 1)]), page),
        "elsewhere": (_written(harness, pair, 8, [(12 * page, 4 * page)]), 4 * page),
        "in another region": (_written(harness, pair, 9, whole, due=Area(1, DUE.rows, DUE.shifts)), 4 * page),
        "for another handoff": (_written(harness, pair, 10), 4 * page),
    }
    assert not {case: it for case, it in told.items() if it[0] != it[1]}, told


@CASES.add("knows_writes")
def a_write_that_did_not_land_whole_does_not_count(harness: TransportHarness) -> None:
    pair = harness.pair(LARGE_BYTES, LARGE_BYTES)
    written = fill(pair.near.memory, 1)
    fill(pair.far.memory, 2)
    pair.far.transport.cancel(JobId(LOAN[WRITE]))
    due = Area(0, array("q", (0, LARGE_BYTES)), array("q", (0,)))
    cast(LendingTransport, pair.far.transport).lend(Loan(JobId(1), pair.near.peer, WRITE, ((0,),), (due,)))
    assert pair.near.transport.submit(copy(2, pair.far, WRITE, [(0, 0, LARGE_BYTES)]))
    pair.near.transport.cancel(JobId(2))
    landed = Log(harness, pair.near).end(2).reason is None
    pair.far.transport.cancel(JobId(1))
    missing = Log(harness, pair.far).end(1).unwritten
    # It may have been quicker than the cancel, or than its own answer: then every byte is there.
    assert missing == LARGE_BYTES or (missing == 0 and bytes(pair.far.memory) == written), missing
    assert missing == 0 or not landed
