"""The book of loans, and the check that it makes: in C and in Python alike."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import numpy as np
import pytest

from kvbaton.protocol.effects import Direction, Loan
from kvbaton.protocol.events import CopyEnded
from kvbaton.protocol.geometry.layout import Band, PageTable
from kvbaton.protocol.ids import Incarnation, JobId, PeerId, WorkerId, owner_of, rank_peer
from kvbaton.transports.core import loans
from kvbaton.transports.core.loans import Loans
from kvbaton.transports.core.mover import Mover, NativeMover, PythonMover

READ, WRITE = Direction.READ, Direction.WRITE
D, E = (PeerId(WorkerId(name), Incarnation(1)) for name in ("d", "e"))
D0, E0 = rank_peer(D, 0), rank_peer(E, 0)
PAGE, BLOCKS, LAYERS = 16, 8, 3
TABLE = PageTable(0, 0, BLOCKS, tuple(Band(layer * BLOCKS * PAGE, PAGE, PAGE) for layer in range(LAYERS)))


class Book:
    """Loans, what was told of their ends, and who was cut off."""

    def __init__(self, mover: Mover) -> None:
        self.ends: list[CopyEnded] = []
        self.graces: list[Callable[[], None]] = []
        self.cuts = 0
        self.loans = Loans(mover, self.ends.append, self.graces.append)
        self.loans.lay_out([TABLE])

    def begin(self, peer: PeerId, *spans: int, way: Direction = READ):  # type: ignore[no-untyped-def]
        return self.loans.begin(peer, way, 0, array("q", spans), self._cut)

    def may(self, peer: PeerId, *spans: int, way: Direction = READ) -> bool:
        flight = self.begin(peer, *spans, way=way)
        if flight is not None:
            self.loans.end(flight)
        return flight is not None

    def _cut(self) -> None:
        self.cuts += 1


@pytest.fixture(params=[NativeMover, PythonMover])
def book(request: pytest.FixtureRequest) -> Book:
    return Book(request.param())


def lend(book: Book, job: int, *blocks: int, peer: PeerId = D, way: Direction = READ) -> None:
    book.loans.lend(Loan(JobId(job), peer, way, (blocks,)))


def test_the_blocks_lent_and_no_byte_beside_them(book: Book) -> None:
    lend(book, 1, 2, 3, 6)
    for layer in range(LAYERS):
        at = layer * BLOCKS * PAGE
        assert (
            book.may(D0, at + 2 * PAGE, PAGE)
            and book.may(D0, at + 2 * PAGE, 2 * PAGE)
            and book.may(D0, at + 2 * PAGE + 3, 1)
        )
        for start, size in (
            (1, 1),
            (2 * PAGE - 1, 1),
            (2 * PAGE - 1, 2),
            (2 * PAGE, 2 * PAGE + 1),
            (6 * PAGE, PAGE + 1),
            (0, BLOCKS * PAGE),
        ):
            assert not book.may(D0, at + start, size)
    assert not book.may(D0, 2 * PAGE, PAGE, 4 * PAGE, 1)  # one that is not lent spoils the request
    assert not book.may(D0, 2 * PAGE, LAYERS * BLOCKS * PAGE)
    assert book.may(D0, 0, 0)  # nothing of it


def test_to_all_ranks_of_that_engine_and_to_nobody_else(book: Book) -> None:
    lend(book, 1, 2)
    assert book.may(D0, 2 * PAGE, 1) and book.may(rank_peer(D, 7), 2 * PAGE, 1)
    assert not book.may(E0, 2 * PAGE, 1)
    assert not book.may(rank_peer(PeerId(D.worker, Incarnation(2)), 0), 2 * PAGE, 1)  # another life
    assert owner_of(D0) == D == owner_of(D)


def test_in_that_direction_only(book: Book) -> None:
    lend(book, 1, 2)
    lend(book, 2, 3, way=WRITE)
    assert book.may(D0, 2 * PAGE, 1) and not book.may(D0, 2 * PAGE, 1, way=WRITE)
    assert book.may(D0, 3 * PAGE, 1, way=WRITE) and not book.may(D0, 3 * PAGE, 1)


def test_another_region_or_group_is_not_lent_with_it(book: Book) -> None:
    lend(book, 1, 2)
    assert book.loans.begin(D0, READ, 1, array("q", (0, 1)), lambda: None) is None
    book.loans.lend(Loan(JobId(2), D, READ, ((), (4,))))  # of a group that has no table here
    assert not book.may(D0, 4 * PAGE, 1)


def test_what_was_lent_twice_is_lent_until_both_are_back_and_each_ends_once(book: Book) -> None:
    lend(book, 1, 2, 3)
    lend(book, 2, 3)
    assert book.loans.take_back(JobId(1))
    assert not book.may(D0, 2 * PAGE, 1) and book.may(D0, 3 * PAGE, 1)
    assert book.loans.take_back(JobId(2)) and not book.may(D0, 3 * PAGE, 1)
    assert [end.job for end in book.ends] == [1, 2] and all(end.at_rest for end in book.ends)
    assert not book.loans.take_back(JobId(2)) and not book.loans.take_back(JobId(9))


def test_a_loan_ends_when_the_last_that_was_under_way_by_it_has(book: Book) -> None:
    lend(book, 1, 2, 3)
    lend(book, 2, 3)
    first, second, other = book.begin(D0, 2 * PAGE, 1), book.begin(D0, 2 * PAGE, PAGE), book.begin(D0, 3 * PAGE, 1)
    book.loans.take_back(JobId(1))
    assert book.ends == [] and not book.may(D0, 2 * PAGE, 1)
    assert book.loans.take_back(JobId(1))  # asked once more: it is still on its way
    book.loans.end(first)
    book.loans.end(first)
    assert book.ends == []
    book.loans.end(second)
    assert [end.job for end in book.ends] == [1]
    book.loans.end(other)
    assert [end.job for end in book.ends] == [1]


def test_a_loan_does_not_wait_for_what_is_under_way_in_other_blocks(book: Book) -> None:
    """A handoff that was given up may have a write that is stuck: the next ones of the same pair are not held up."""
    lend(book, 1, 1, 2, way=WRITE)
    stuck = book.begin(D0, PAGE, 2 * PAGE, way=WRITE)
    book.loans.take_back(JobId(1))
    lend(book, 2, 2, 3, way=WRITE)  # one block of them again
    lend(book, 3, 5, way=WRITE)
    book.loans.take_back(JobId(3))
    assert [end.job for end in book.ends] == [3]
    book.loans.take_back(JobId(2))
    assert [end.job for end in book.ends] == [3]
    book.loans.end(stuck)
    assert sorted(end.job for end in book.ends) == [1, 2, 3]


def test_who_takes_too_long_is_cut_off(book: Book) -> None:
    lend(book, 1, 2)
    slow = book.begin(D0, 2 * PAGE, 1)
    book.loans.take_back(JobId(1))
    (grace,) = book.graces
    grace()
    assert book.cuts == 1 and book.ends == []
    book.loans.end(slow)
    assert [end.job for end in book.ends] == [1]
    grace()
    assert book.cuts == 1


def test_closing_ends_every_loan_once_and_lends_nothing_more(book: Book) -> None:
    lend(book, 1, 2)
    lend(book, 2, 3)
    flight = book.begin(D0, 2 * PAGE, 1)
    book.loans.take_back(JobId(1))
    book.loans.close()
    assert sorted(end.job for end in book.ends) == [1, 2]
    book.loans.end(flight)
    lend(book, 3, 4)
    assert [end.job for end in book.ends][-1] == 3 and len(book.ends) == 3 and not book.may(D0, 4 * PAGE, 1)


def test_a_peer_that_is_disconnected_leaves_no_counts_behind(book: Book) -> None:
    lend(book, 1, 2)
    book.loans.forget(D0)
    assert book.may(D0, 2 * PAGE, 1)  # the ledger takes it back by itself
    book.loans.take_back(JobId(1))
    book.loans.forget(D0)
    assert not book.loans._counts


def test_what_one_engine_has_under_way_is_bounded(book: Book, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loans, "ROWS_MAX", 3)
    lend(book, 1, 2)
    lend(book, 2, 2, peer=E)
    first = book.begin(D0, 2 * PAGE, 1, 2 * PAGE, 1)
    assert not book.may(rank_peer(D, 1), 2 * PAGE, 1, 2 * PAGE, 1) and book.may(D0, 2 * PAGE, 1)
    assert book.may(E0, 2 * PAGE, 1, 2 * PAGE, 1)
    book.loans.end(first)
    assert book.may(D0, 2 * PAGE, 1, 2 * PAGE, 1)


def test_a_number_that_is_in_use_is_refused_and_changes_nothing(book: Book) -> None:
    lend(book, 1, 2)
    lend(book, 1, 3)
    assert [end.job for end in book.ends] == [1] and book.may(D0, 2 * PAGE, 1) and not book.may(D0, 3 * PAGE, 1)


def test_blocks_that_there_are_not_lend_nothing(book: Book) -> None:
    lend(book, 1, -1, BLOCKS, 1 << 40)
    assert not any(book.may(D0, block * PAGE, 1) for block in range(BLOCKS))
    book.loans.take_back(JobId(1))
    assert len(book.ends) == 1


def test_a_region_that_was_not_laid_out_is_one_block(book: Book) -> None:
    book.loans.add_region(5, 100)
    lend(book, 1, 0)
    assert book.loans.begin(D0, READ, 5, array("q", (0, 100)), lambda: None) is not None
    assert book.loans.begin(D0, READ, 5, array("q", (0, 101)), lambda: None) is None


def test_both_movers_agree_on_random_tables() -> None:
    native, python, rng = NativeMover(), PythonMover(), random.Random(1)
    said = {True: 0, False: 0}
    for _ in range(200):
        tables = []
        for _ in range(rng.randint(0, 3)):
            rows, at, blocks = [], rng.randint(0, 20), rng.randint(1, 8)
            for _ in range(rng.randint(1, 4)):
                stride = rng.randint(1, 16)
                extent = rng.choice((stride, rng.randint(1, stride)))
                rows.append((at, at + (blocks - 1) * stride + extent, stride, extent))
                at = rows[-1][1] + rng.choice((0, 0, 5))
            counts = array("i", [rng.choice((0, 1, 1, 2)) for _ in range(blocks)])
            tables.append((np.array(rows, np.int64), counts))
        for _ in range(40):
            spans = array("q", [n for _ in range(rng.randint(0, 3)) for n in (rng.randint(0, 150), rng.randint(0, 30))])
            answer = native.check_pages(spans, 2, tables)
            assert answer is python.check_pages(spans, 2, tables)
            said[answer] += 1
    assert min(said.values()) > 500


def test_the_extension_refuses_tables_that_are_none() -> None:
    mover, spans, counts = NativeMover(), array("q", (0, 1)), array("i", [1])
    for bands in (np.zeros((0, 4), np.int64), np.array([(0, 1, 0, 1)], np.int64), np.array([(-1, 1, 1, 1)], np.int64)):
        with pytest.raises(ValueError, match="bands"):
            mover.check_pages(spans, 2, [(bands, counts)])
    with pytest.raises(TypeError):
        mover.check_pages(spans, 2, [counts])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="columns"):
        mover.check_pages(spans, 4, [])
