"""Memory that a store shares with its backend, in slots of one call each. A backend never sees engines' memory.

Law: a slot has at most one owner. A slot whose call was abandoned stays with that call until it returns: a library that
cannot cancel may read and write it for as long as it likes, without harm. The price is one more copy in each direction
(about 8 GB/s at 16 KiB pieces); it also makes one contiguous object of a block's many pieces, which Mooncake moves
three times as fast.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

from kvbaton.store.interface import Pieces
from kvbaton.store.value_header import FRAME_BYTES


class Staging:
    """`slots` slots with room for `frames` frames of at most `value_bytes_max` each."""

    def __init__(self, slots: int, frames: int, value_bytes_max: int) -> None:
        self.frames = frames
        self.value_bytes_max = value_bytes_max
        self._pitch = -(-(FRAME_BYTES + value_bytes_max) // FRAME_BYTES) * FRAME_BYTES
        self._map = mmap.mmap(-1, max(1, slots * frames * self._pitch))
        self.memory = memoryview(self._map)
        self._free = list(range(slots))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A slot, or None when all are in use or held by calls that have not returned."""
        return self._free.pop() if self._free else None

    def give_back(self, slot: int) -> None:
        if slot in self._free:
            raise ValueError(f"slot {slot} is free already")
        self._free.append(slot)

    def frame(self, slot: int, index: int, value_bytes: int) -> memoryview:
        """The `index`th frame of a slot, sized for such a value; ValueError when it has no room."""
        if not 0 < value_bytes <= self.value_bytes_max or not 0 <= index < self.frames:
            raise ValueError(f"a value of {value_bytes} bytes; 1..{self.value_bytes_max}")
        at = (slot * self.frames + index) * self._pitch
        return self.memory[at : at + FRAME_BYTES + value_bytes]


def size_of(pieces: Pieces) -> int:
    """The size of a value; ValueError unless its pieces are contiguous bytes."""
    if any(piece.format != "B" or not piece.c_contiguous for piece in pieces):
        raise ValueError("a piece is not a contiguous memoryview of bytes")
    return sum(piece.nbytes for piece in pieces)


def gather(pieces: Sequence[memoryview], frame: memoryview) -> None:
    """Copy an engine's pieces after the header of a frame."""
    at = FRAME_BYTES
    for piece in pieces:
        frame[at : at + piece.nbytes] = piece
        at += piece.nbytes


def scatter(frame: memoryview, pieces: Sequence[memoryview]) -> None:
    """Copy a frame's value into an engine's pieces."""
    at = FRAME_BYTES
    for piece in pieces:
        piece[:] = frame[at : at + piece.nbytes]
        at += piece.nbytes
