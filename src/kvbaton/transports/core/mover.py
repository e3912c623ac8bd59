"""Moves byte spans: memory to memory, memory to socket, socket to memory. The C extension, or pure Python.

Law: every span is range-checked against the given memory before anything is touched, so no caller and no peer can name
a byte outside. Spans are rows of int64 with an offset first and the number of bytes last: triples (local offset, remote
offset, bytes), or pairs (offset, bytes) as they cross a wire.

Both movers have the same contract and the tests run both. The extension also releases the GIL while it copies, which
lets two threads copy at once (16.8 against 6.7 GB/s at 16 KiB, reference/transports.md 1.3).
"""

from __future__ import annotations

import bisect
import importlib
import itertools
import logging
import socket
from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

import numpy as np

log = logging.getLogger(__name__)

Memory = memoryview | bytearray

Wait = tuple[int, int]
"""The epoll descriptor of a loop, and for how many milliseconds at most it has nothing better to do."""

CONTRACT = 2
"""Which signatures the extension must have; an extension left over from another version is not used."""

NO_WAIT: Wait = (-1, 0)
PIECE_BYTES = 1 << 20
"""How much is copied between two looks at a cancel flag."""

Bands: TypeAlias = "np.ndarray[tuple[int, int], np.dtype[np.int64]]"
"""Rows (start, end, stride, bytes of a block), in order and apart: see `protocol.pages`."""
Counts: TypeAlias = "array[int]"
"""`array('i')`, by block: whether it may be touched (not 0)."""

IOVECS_MAX = 256
SPAN_BAD = "span {} is outside its memory"


class Mover(Protocol):
    """Range-checked moves of spans; raises ValueError, with nothing touched, for a span that lies outside."""

    native: bool

    def check_spans(self, spans: array[int], width: int, local_bytes: int, remote_bytes: int) -> int:
        """Bytes named by all rows together."""

    def check_pages(self, spans: array[int], width: int, tables: Sequence[tuple[Bands, Counts]]) -> bool:
        """Whether every byte of every row lies in a block that may be touched; a row's bytes all in one table's."""

    def copy_spans(
        self,
        target: Memory,
        source: Memory,
        spans: array[int],
        swap: bool,
        start: int,
        count: int,
        cancel: bytearray,
    ) -> int:
        """Copy triples `start..start+count`; with `swap` the remote offset is the target's. Spans done: fewer than
        `count` only when `cancel[0]` was set by another thread."""

    def stream_spans(
        self,
        sock: socket.socket,
        memory: Memory,
        spans: array[int],
        width: int,
        index: int,
        skip: int,
        room: int,
        sending: bool,
        wait: Wait,
    ) -> tuple[int, int, int]:
        """Send or receive from row `index`, byte `skip` on, at most `room` bytes: the new position and the bytes moved.
        BlockingIOError when nothing could move; 0 bytes from a live position means end of stream. It may `wait` for the
        socket, as long as nothing else on the loop is due, but need not."""


class PythonMover:
    """The fallback: holds the GIL while it copies."""

    native = False

    def check_spans(self, spans: array[int], width: int, local_bytes: int, remote_bytes: int) -> int:
        return _check(spans, width, local_bytes, remote_bytes, 0)

    def check_pages(self, spans: array[int], width: int, tables: Sequence[tuple[Bands, Counts]]) -> bool:
        rows = _rows(spans, width)
        listed = [([tuple(map(int, row)) for row in bands], counts) for bands, counts in tables]
        return all(
            any(_touchable(int(row[0]), int(row[-1]), bands, counts) for bands, counts in listed)
            for row in rows
            if row[-1]
        )

    def copy_spans(
        self,
        target: Memory,
        source: Memory,
        spans: array[int],
        swap: bool,
        start: int,
        count: int,
        cancel: bytearray,
    ) -> int:
        rows = len(_rows(spans, 3))
        if len(cancel) != 1 or start < 0 or count < 0 or start + count > rows:
            raise ValueError(f"spans {start}+{count} of {rows}, cancel flag of {len(cancel)} bytes")
        part = spans[3 * start : 3 * (start + count)]
        into, out_of = memoryview(target), memoryview(source)
        if into.readonly:
            raise BufferError("the target memory is read-only")
        near, far = (out_of, into) if swap else (into, out_of)
        _check(part, 3, near.nbytes, far.nbytes, start)
        ends = iter(part)
        for done, (local, remote, size) in enumerate(zip(ends, ends, ends, strict=True)):
            to, at = (remote, local) if swap else (local, remote)
            for piece in range(0, size, PIECE_BYTES):
                if cancel[0]:
                    return done
                step = min(PIECE_BYTES, size - piece)
                into[to + piece : to + piece + step] = out_of[at + piece : at + piece + step]
        return count

    def stream_spans(
        self,
        sock: socket.socket,
        memory: Memory,
        spans: array[int],
        width: int,
        index: int,
        skip: int,
        room: int,
        sending: bool,
        wait: Wait,
    ) -> tuple[int, int, int]:
        _rows(spans, width)
        if index < 0 or skip < 0 or room < 0:
            raise ValueError("index, skip and room are not negative")
        places = _gather(memoryview(memory), spans, width, index, skip, room)
        views = list(itertools.islice(places, IOVECS_MAX))
        if not views:
            return _advance(spans, width, index, skip, 0)
        if sending:
            moved = sock.sendmsg(views, (), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        else:
            moved = sock.recvmsg_into(views, 0, socket.MSG_DONTWAIT)[0]
        return _advance(spans, width, index, skip, moved)


class NativeMover:
    """The C extension."""

    native = True

    def __init__(self) -> None:
        _mover = importlib.import_module("kvbaton.transports.core._mover")
        if getattr(_mover, "CONTRACT", None) != CONTRACT:
            raise ImportError("the block mover was built from another version: reinstall the package")
        self.check_spans = _mover.check_spans
        self.check_pages = _mover.check_pages
        self.copy_spans = _mover.copy_spans
        self._stream_spans = _mover.stream_spans

    def stream_spans(
        self,
        sock: socket.socket,
        memory: Memory,
        spans: array[int],
        width: int,
        index: int,
        skip: int,
        room: int,
        sending: bool,
        wait: Wait,
    ) -> tuple[int, int, int]:
        moved: tuple[int, int, int] = self._stream_spans(
            sock.fileno(), memory, spans, width, index, skip, room, sending, *wait
        )
        return moved


def choose_mover(pure_python: bool = False) -> Mover:
    """The extension if it was built, otherwise (or on request) the fallback."""
    if not pure_python:
        try:
            return NativeMover()
        except ImportError as error:
            log.info("moving blocks in pure Python: %s", error)
    return PythonMover()


def _rows(spans: array[int], width: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    if width not in {2, 3}:
        raise ValueError(f"rows have 2 or 3 columns, not {width}")
    if spans.itemsize != 8 or len(spans) % width:
        raise ValueError(f"a span table must be aligned rows of {width} int64, got {len(spans) * spans.itemsize} bytes")
    return np.frombuffer(spans, np.int64).reshape(-1, width)


def _check(spans: array[int], width: int, local_bytes: int, remote_bytes: int, first: int) -> int:
    rows = _rows(spans, width)
    sizes = rows[:, -1]
    good = (sizes >= 0) & (sizes <= local_bytes) & (rows[:, 0] >= 0)
    good &= rows[:, 0] <= local_bytes - np.clip(sizes, 0, local_bytes)
    if width == 3:
        good &= (sizes <= remote_bytes) & (rows[:, 1] >= 0)
        good &= rows[:, 1] <= remote_bytes - np.clip(sizes, 0, remote_bytes)
    if not good.all():
        raise ValueError(SPAN_BAD.format(first + int(np.argmin(good))))
    total = sum(spans[width - 1 :: width])
    if total >= 1 << 63:
        raise ValueError(SPAN_BAD.format(first + len(rows) - 1))
    return total


def _touchable(at: int, size: int, bands: Sequence[tuple[int, ...]], counts: Counts) -> bool:
    end = at + size
    while at < end:
        index = bisect.bisect_right(bands, at, key=lambda band: band[0]) - 1
        if at < 0 or index < 0 or at >= bands[index][1]:
            return False
        start, _, stride, extent = bands[index]
        block, within = divmod(at - start, stride)
        if within >= extent or block >= len(counts) or not counts[block]:
            return False
        at += extent - within
    return True


def _gather(
    memory: memoryview, spans: array[int], width: int, index: int, skip: int, room: int
) -> Iterator[memoryview]:
    for row in range(index, len(spans) // width):
        if not room:
            return
        offset, size = spans[row * width], spans[row * width + width - 1]
        if offset < 0 or size < skip or offset + size > memory.nbytes:
            raise ValueError(SPAN_BAD.format(row))
        step = min(size - skip, room)
        if step:
            yield memory[offset + skip : offset + skip + step]
        room -= step
        skip = 0


def _advance(spans: array[int], width: int, index: int, skip: int, moved: int) -> tuple[int, int, int]:
    left = moved
    while index < len(spans) // width:
        size = spans[index * width + width - 1] - skip
        if left < size:
            return index, skip + left, moved
        left -= size
        index, skip = index + 1, 0
    return index, 0, moved
