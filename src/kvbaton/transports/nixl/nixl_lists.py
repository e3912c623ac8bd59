"""Prepared descriptor lists: a copy's offsets in NIXL's terms.

Law: a list is prepared once for every slot of a region and used by index from then on, as long as spans of one size lie
on one grid, which KV blocks do; other spans get their own list, released as soon as the request was made. At most
`GRIDS_MAX` lists are kept for one side; the least recently used goes first.

For device memory each descriptor is a copy that the CPU starts (2.5 us with cuda_ipc, however few bytes), so spans that
are adjacent on both sides are joined first (`merged`); for host memory they stay on their grid.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from kvbaton.protocol.numbers import Bytes, Number
from kvbaton.transports.core.span_tables import Rows
from kvbaton.transports.core.transport import Spans
from kvbaton.transports.nixl.nixl_agent import Agent, Indices

GRIDS_MAX = 64
SLOTS_MAX = 1 << 31  # NIXL counts in int32


class NixlPlace(msgspec.Struct, frozen=True, array_like=True):
    """The place of a region in its process. `device`: of its memory; None: the host."""

    address: Number
    size: Bytes
    device: Number | None = None


class Grid(msgspec.Struct, frozen=True):
    """Slots of `size` bytes, one after the other, from `first` on."""

    region: int
    first: int
    size: int
    count: int


@dataclass(frozen=True, slots=True)
class ListChoice:
    """The spans of a copy on one side: indices in a grid, or a table of (address, bytes, device)."""

    place: NixlPlace
    grid: Grid | None
    table: np.ndarray[tuple[int, ...], np.dtype[Any]]


def grid_of(region: int, region_bytes: int, offsets: Rows, sizes: Rows) -> Grid | None:
    """The grid that all spans lie on, or None. No span is empty."""
    size = int(sizes[0])
    first = int(offsets[0]) % size
    count = (region_bytes - first) // size
    if count >= SLOTS_MAX or (sizes != size).any() or ((offsets - first) % size).any():
        return None
    return Grid(region, first, size, count)


def without_empty(spans: Spans) -> Spans:
    """Triples without the empty ones: NIXL accepts no such descriptor."""
    rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    if rows[:, 2].all():
        return spans
    kept = array("q")
    kept.frombytes(rows[rows[:, 2] > 0].tobytes())
    return kept


def merged(spans: Spans) -> Spans:
    """Triples, with those joined that are adjacent on both sides, if that leaves at most half as many."""
    rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    if len(rows) < 2:
        return spans
    follows = (rows[1:, :2] == rows[:-1, :2] + rows[:-1, 2:]).all(axis=1)
    if 2 * np.count_nonzero(follows) < len(rows):
        return spans
    heads = np.flatnonzero(np.concatenate(([True], ~follows)))
    joined = rows[heads].copy()
    joined[:, 2] = np.add.reduceat(rows[:, 2], heads)
    kept = array("q")
    kept.frombytes(joined.tobytes())
    return kept


class Lists:
    """The lists of one side: this process (`remote` empty) or one agent that NIXL knows."""

    def __init__(self, agent: Agent, remote: str, places: dict[int, NixlPlace]) -> None:
        self._agent = agent
        self._remote = remote
        self._places = places
        self._grids: dict[Grid, int] = {}  # the last one used is last

    def choose(self, region: int, offsets: Rows, sizes: Rows) -> ListChoice:
        """How the spans of a copy are named. Once per copy: it costs more than the rest of a small request."""
        place = self._places[region]
        grid = grid_of(region, place.size, offsets, sizes)
        if grid is None:
            devices = np.full_like(sizes, place.device or 0)
            return ListChoice(place, None, np.stack((offsets + place.address, sizes, devices), axis=1))
        return ListChoice(place, grid, ((offsets - grid.first) // grid.size).astype(np.int32))

    @contextlib.contextmanager
    def select(self, choice: ListChoice, low: int, high: int) -> Iterator[tuple[int, Indices]]:
        """A list and the indices in it of spans `low` to `high`, for the time of making a request."""
        if choice.grid is not None:
            yield self._prepared(choice.grid, choice.place), choice.table[low:high]
            return
        handle = self._agent.prepare(self._remote, choice.table[low:high], choice.place.device)
        try:
            yield handle, np.arange(high - low, dtype=np.int32)
        finally:
            self._agent.drop_list(handle)

    def clear(self) -> None:
        """Release every list: before NIXL forgets the memory that they name, or right after."""
        while self._grids:
            self._agent.drop_list(self._grids.popitem()[1])

    def _prepared(self, grid: Grid, place: NixlPlace) -> int:
        handle = self._grids.pop(grid, None)
        if handle is None:
            if len(self._grids) >= GRIDS_MAX:
                self._agent.drop_list(self._grids.pop(next(iter(self._grids))))
            row = (place.address + grid.first, grid.size, place.device or 0, grid.size, grid.count)
            handle = self._agent.prepare(self._remote, np.array([row], np.int64), place.device)
        self._grids[grid] = handle
        return handle
