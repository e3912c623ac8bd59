"""Turns of conversations in memory that all processes of a router share: the next turn may reach any of them.

A turn has one of `WAYS` places, by its name. There, a word with half of the name says that it may be it, and a record
tells the rest, the sum over which is keyed. Laws: nothing is locked, and nobody waits. Whoever writes where another
writes spoils that record, and a process that dies in between too: its sum is wrong, and it is nobody's. Two processes
that take a turn at the same moment both offer it, and D's lease has one seat. So each race costs a prompt computed, as
without turns. What a process that ended had noted stays: D keeps it all the same.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from hashlib import blake2b

from kvbaton.protocol.ids import HandoffId, PeerId, TransferId, handoff_id
from kvbaton.router.turns.turn_book import TURNS_MAX, KnownTurn, TurnTable

WAYS = 8
_MARK_BYTES = 8
_BUCKET_BYTES = WAYS * _MARK_BYTES  # of marks
_FREE = bytes(_MARK_BYTES)
_RECORD = struct.Struct("<16s16s16sQQQd")  # name, name of the whole prompt, transfer; length, worker, tokens; until
_SUM_BYTES = 8
_BYTES = _RECORD.size + _SUM_BYTES
_UNTIL = struct.Struct("<d")
_UNTIL_AT = _RECORD.size - _UNTIL.size
_HALF = struct.Struct("<Q")
_SUFFIX = ".0"


def turns_bytes(turn_s: float) -> int:
    """Of the table; none where turns are not kept."""
    return TURNS_MAX * (_MARK_BYTES + _BYTES) if turn_s else 0


class SharedTurns(TurnTable):
    """One process's view of the table. All must have the same key."""

    def __init__(self, memory: memoryview, key: bytes) -> None:
        super().__init__(blake2b(key, digest_size=32, person=b"kvbaton turns").digest())
        self._buckets = len(memory) // (_MARK_BYTES + _BYTES) // WAYS
        size = _BUCKET_BYTES * self._buckets
        self._marks, self._records = memory[:size], memory[size:]
        self._peers: dict[int, PeerId] = {}
        self._numbers: dict[PeerId, int] = {}

    def __len__(self) -> int:
        return sum(mark != _FREE for first in range(self._buckets) for mark in self._marked(WAYS * first))

    def know(self, numbers: Mapping[PeerId, int]) -> None:
        """The workers that there are; of others nothing is found, or noted."""
        self._numbers = dict(numbers)
        self._peers = {number: peer for peer, number in numbers.items()}

    def put(self, key: bytes, turn: KnownTurn, now: float) -> int:
        number, transfer = self._numbers.get(turn.peer), _transfer(turn.handoff)
        if not self._buckets or number is None or transfer is None:
            return 0
        first, mark = self._first(key), key[:_MARK_BYTES]
        marks = self._marked(first)
        if mark in marks:
            slot, forgotten = first + marks.index(mark), 0
        elif _FREE in marks:
            slot, forgotten = first + marks.index(_FREE), 0
        else:
            slot, forgotten = min(range(first, first + WAYS), key=self._until), 1
        record = _RECORD.pack(key, turn.whole, transfer, turn.length, number, turn.tokens, turn.until)
        self._records[_BYTES * slot : _BYTES * (slot + 1)] = record + self._sum(record)
        self._mark(slot, mark)
        return forgotten

    def get(self, key: bytes) -> KnownTurn | None:
        if not self._buckets:
            return None
        # Written out: a prompt has a name for each 256 bytes, of which hardly one is here, so the miss is to be cheap
        at = _BUCKET_BYTES * (_HALF.unpack_from(key, _MARK_BYTES)[0] % self._buckets)
        if key[:_MARK_BYTES] not in self._marks[at : at + _BUCKET_BYTES].tobytes():
            return None
        found = self._found(key)
        if found is None:
            return None
        _, (_, whole, transfer, length, number, tokens, until) = found
        peer = self._peers.get(number)
        if peer is None:
            return None
        return KnownTurn(peer, handoff_id(TransferId(transfer.hex())), tokens, until, whole, length)

    def drop(self, key: bytes) -> None:
        found = self._found(key)
        if found is not None:
            self._mark(found[0], _FREE)

    def _found(self, key: bytes) -> tuple[int, tuple[bytes, bytes, bytes, int, int, int, float]] | None:
        """Where it is, and its record."""
        if not self._buckets:
            return None
        first = self._first(key)
        marks = self._marked(first)
        if key[:_MARK_BYTES] not in marks:
            return None
        slot = first + marks.index(key[:_MARK_BYTES])
        said = bytes(self._records[_BYTES * slot : _BYTES * (slot + 1)])
        record = said[:-_SUM_BYTES]
        if self._sum(record) != said[-_SUM_BYTES:]:
            return None
        fields = _RECORD.unpack(record)
        return (slot, fields) if fields[0] == key else None

    def _first(self, key: bytes) -> int:
        """Of the places where a turn of this name can be; by the half of the name that is not its mark."""
        return WAYS * int(_HALF.unpack_from(key, _MARK_BYTES)[0] % self._buckets)

    def _marked(self, first: int) -> list[bytes]:
        at = _MARK_BYTES * first
        marks = self._marks[at : at + _BUCKET_BYTES].tobytes()
        return [marks[each : each + _MARK_BYTES] for each in range(0, len(marks), _MARK_BYTES)]

    def _mark(self, slot: int, mark: bytes) -> None:
        self._marks[_MARK_BYTES * slot : _MARK_BYTES * (slot + 1)] = mark

    def _until(self, slot: int) -> float:
        found: float = _UNTIL.unpack_from(self._records, _BYTES * slot + _UNTIL_AT)[0]
        return found

    def _sum(self, record: bytes) -> bytes:
        return blake2b(record, key=self.secret, digest_size=_SUM_BYTES).digest()


def _transfer(handoff: HandoffId) -> bytes | None:
    """The random part of an id that this router has made; None of any other."""
    try:
        found = bytes.fromhex(handoff.removesuffix(_SUFFIX))
    except ValueError:
        return None
    return found if len(found) == 16 and handoff.endswith(_SUFFIX) else None
