"""Turns in memory that a router's processes share: noted by one, used once by any, and never worse than none."""

from __future__ import annotations

from hashlib import blake2b

import msgspec
import pytest

from kvbaton.protocol.ids import Incarnation, PeerId, TransferId, WorkerId, handoff_id
from kvbaton.router.processes.shared_counts import SharedCounts
from kvbaton.router.processes.shared_turns import WAYS, SharedTurns, turns_bytes
from kvbaton.router.turns.turn_book import TURNS_MAX, KnownTurn

A, B = (PeerId(WorkerId(name), Incarnation(1)) for name in "ab")
KEY = b"of one router..."
TURN = KnownTurn(A, handoff_id(TransferId("ab" * 16)), 120, 50.0, b"w" * 16, 300)
SLOT_BYTES = turns_bytes(1.0) // TURNS_MAX


def name(number: int) -> bytes:
    return blake2b(b"%d" % number, digest_size=16).digest()


def views(slots: int = 2 * WAYS, count: int = 2) -> list[SharedTurns]:
    memory = memoryview(bytearray(slots * SLOT_BYTES))
    found = [SharedTurns(memory, KEY) for _ in range(count)]
    for each in found:
        each.know({A: 1, B: 2})
    return found


def test_what_one_process_notes_another_finds_once() -> None:
    mine, other = views()
    assert mine.secret == other.secret, "names are the same in all"
    assert mine.put(name(1), TURN, 0.0) == 0
    assert other.get(name(1)) == TURN == mine.get(name(1)) and other.get(name(2)) is None
    other.drop(name(1))
    assert mine.get(name(1)) is None and len(mine) == 0
    other.drop(name(1))


def test_a_conversations_newest_turn_takes_the_place_of_the_one_before() -> None:
    mine, other = views()
    for tokens in (100, 200):
        mine.put(name(1), msgspec.structs.replace(TURN, tokens=tokens, peer=B), 0.0)
    found = other.get(name(1))
    assert found is not None and (found.tokens, found.peer) == (200, B) and len(mine) == 1


def test_the_table_is_bounded_and_the_oldest_goes_first() -> None:
    mine, other = views(WAYS)
    forgotten = [mine.put(name(n), msgspec.structs.replace(TURN, until=float(n)), 0.0) for n in range(WAYS + 3)]
    assert sum(forgotten) == 3 and len(other) == WAYS
    assert [n for n in range(WAYS + 3) if other.get(name(n)) is None] == [0, 1, 2]


def test_of_a_worker_that_left_nothing_is_found_or_noted() -> None:
    mine, other = views()
    mine.put(name(1), TURN, 0.0)
    other.know({B: 2})
    assert other.get(name(1)) is None
    other.put(name(2), TURN, 0.0)
    assert mine.get(name(2)) is None and mine.get(name(1)) == TURN


@pytest.mark.parametrize("at", [0, 20, 40, 55, 63, 71, 79, SLOT_BYTES - 9])
def test_a_record_that_was_spoilt_is_nobodys(at: int) -> None:
    """Of two that wrote at once, or one that died in between."""
    memory = memoryview(bytearray(WAYS * SLOT_BYTES))
    mine = SharedTurns(memory, KEY)
    mine.know({A: 1})
    mine.put(name(1), TURN, 0.0)
    assert mine.get(name(1)) == TURN
    memory[8 * WAYS + at] ^= 1
    assert mine.get(name(1)) is None
    mine.put(name(1), TURN, 0.0)
    assert mine.get(name(1)) == TURN, "and its place can be used again"


def test_an_entry_of_another_name_in_the_same_place_is_not_taken_for_it() -> None:
    mine, _ = views(WAYS)
    mine.put(name(1), TURN, 0.0)
    alike = name(1)[:8] + bytes(8)
    assert mine.get(alike) is None
    mine.drop(alike)
    assert mine.get(name(1)) == TURN


def test_an_id_that_this_router_did_not_make_is_not_noted() -> None:
    mine, _ = views()
    for odd in ("x.0", "ab" * 16 + ".1", "ab" * 8 + ".0"):
        mine.put(name(1), msgspec.structs.replace(TURN, handoff=odd), 0.0)
    assert len(mine) == 0


def test_where_turns_are_off_there_is_no_table() -> None:
    assert turns_bytes(0.0) == 0
    counts = SharedCounts.made(1, 4)
    off = SharedTurns(counts.turns, KEY)
    off.know({A: 1})
    assert off.put(name(1), TURN, 0.0) == 0 and off.get(name(1)) is None
    off.drop(name(1))
    counts.close()


def test_a_table_is_of_its_size_and_apart_from_what_else_is_shared() -> None:
    counts = SharedCounts.made(1, 4, turns_bytes(30.0))
    mine = SharedTurns(counts.turns, KEY)
    mine.know({A: 1})
    before = bytes(counts.row(0)), bytes(counts.pieces)
    for n in range(64):
        mine.put(name(n), TURN, 0.0)
    assert sum(mine.get(name(n)) == TURN for n in range(64)) == 64 and len(counts.turns) <= 2 << 20
    assert (bytes(counts.row(0)), bytes(counts.pieces)) == before
    counts.close()
