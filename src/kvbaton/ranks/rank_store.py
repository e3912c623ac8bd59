"""One rank's access to the store, in the process that has the rank's memory. Implements `RankStoreInterface`.

Laws: `RankValues` defines a block's value, and no other memory is touched; only the store's own copies touch it, and
none after the end of the order (`store.interface`, law 3). An invalid order (a block that does not exist) ends as
failed, it does not raise. The caller pins: the pins of the store below are only counted, to prove that none is left.

One rank's part of a block as a value of the store: which bytes, in which order, under which keys. Pure.

Law: two ranks, of one engine or of two, have the same `Space` only if their values are interchangeable byte by byte. It
is named by what the bytes are (layers, heads, tokens, order of the cells), not by a rank's number: ranks that hold the
same heads share values (MLA, more ranks than heads), and so do engines with different memory layouts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.geometry.layout import EngineLayout, Group, GroupKind, Share, cell_axes
from kvbaton.ranks.store_trust import RankStoreTrust
from kvbaton.store.interface import (
    VALUE_BYTES_MAX,
    Backend,
    Get,
    Lookup,
    Order,
    OrderEnded,
    OrderId,
    Pieces,
    Pins,
    Put,
    Space,
    Store,
    StoreSettings,
    keys,
    prefix,
)
from kvbaton.store.threaded_store import KeptStore
from kvbaton.store.value_header import StoreTrust

CELLS_MAX = 1 << 20  # of one page: sorted once, when an engine starts
PIECES_MAX = 4096  # of one value

_WHY = {
    GroupKind.SLIDING: "its blocks leave the window as the prompt grows, so no prefix of them is complete",
    GroupKind.CHUNKED: "its blocks leave the window as the prompt grows, so no prefix of them is complete",
    GroupKind.STATE: "a state is updated in place, so it represents one position, not a block of tokens",
}


class NotStorable(ValueError):
    """This engine's KV cannot go into the shared store; the message names the group and the reason."""


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Contiguous bytes: `bytes` at `offset + block * block_stride` of a region."""

    region: int
    offset: int
    block_stride: int
    bytes: int


class RankValues(msgspec.Struct, frozen=True):
    """How one rank's blocks become values."""

    space: Space
    block_count: int
    runs: tuple[Run, ...]

    def pieces(self, regions: Sequence[memoryview], block: int) -> Pieces:
        """A block's value in the rank's memory; ValueError when there is no such block."""
        if not 0 <= block < self.block_count:
            raise ValueError(f"block {block} is outside 0..{self.block_count - 1}")
        found = []
        for run in self.runs:
            at = run.offset + block * run.block_stride
            found.append(regions[run.region][at : at + run.bytes])
        return tuple(found)


def rank_values(layout: EngineLayout, rank: int, compat: str) -> RankValues:
    """Of one rank of a layout that `validate` has passed. `compat`: the digest of the engine's key."""
    group = _storable(layout)
    share = layout.ranks[rank].shares[0]
    if not share.places:
        raise NotStorable(f"group {group.name!r}: rank {rank} has none of its layers, which the store requires")
    pages, order = _page(group, share, layout.page_tokens(0))
    places = sorted(share.places, key=lambda place: place.layer)
    runs: list[Run] = []
    for place in places:
        for at, size in pages:
            _join(runs, Run(place.region, place.offset + at, place.block_stride, size))
    if len(runs) > PIECES_MAX:
        raise NotStorable(f"group {group.name!r}: a block is in {len(runs)} pieces, at most {PIECES_MAX} can be moved")
    value_bytes = sum(run.bytes for run in runs)
    if value_bytes > VALUE_BYTES_MAX:
        raise NotStorable(f"group {group.name!r}: a block has {value_bytes} bytes, at most {VALUE_BYTES_MAX}")
    coordinates = layout.ranks[rank]
    facts = (
        str(group.kind),
        group.dtype,
        (share.head_start, share.head_count, group.heads),
        tuple((cell.name, cell.bytes, str(cell.per)) for cell in group.cells),
        tuple(group.layers[place.layer] for place in places),
        order,
        (coordinates.dcp, layout.dcp, layout.dcp_interleave) if layout.dcp > 1 else (),
    )
    space = Space(
        compat=compat,
        block_tokens=group.block_tokens,
        value_bytes=value_bytes,
        group=group.name,
        layer_start=places[0].layer,
        layer_stop=places[-1].layer + 1,
        part=share.head_start,
        layout=msgspec.msgpack.encode(facts).hex(),
    )
    return RankValues(space, share.block_count, tuple(runs))


def _storable(layout: EngineLayout) -> Group:
    """The one group; the store keeps a value for each block of a prefix, so each must be complete by itself."""
    for group in layout.groups:
        if group.kind in _WHY:
            raise NotStorable(f"group {group.name!r} is {group.kind}: {_WHY[group.kind]}; run without the store")
    if len(layout.groups) > 1:
        names = ", ".join(repr(group.name) for group in layout.groups)
        raise NotStorable(f"groups {names}: the store keeps the blocks of one group; run without it")
    return layout.groups[0]


def _page(group: Group, share: Share, tokens: int) -> tuple[list[tuple[int, int]], bytes]:
    """(offset, bytes) of a page's contents, in memory order, and the name of that order."""
    cells: list[tuple[int, int, int, int, int]] = []
    for index, (plane, cell) in enumerate(zip(share.planes, group.cells, strict=True)):
        size, heads, run = cell_axes(cell, share.head_count, tokens)
        if len(cells) + heads * run > CELLS_MAX:
            raise NotStorable(f"group {group.name!r}: a page has more than {CELLS_MAX} cells")
        cells += [
            (plane.offset + head * plane.head_stride + token * plane.token_stride, size, index, head, token)
            for head in range(heads)
            for token in range(run)
        ]
    cells.sort()
    found: list[tuple[int, int]] = []
    for at, size, *_ in cells:
        if found and at < sum(found[-1]):
            raise NotStorable(f"group {group.name!r}: two planes of a page overlap at byte {at}")
        if found and at == sum(found[-1]):
            found[-1] = found[-1][0], found[-1][1] + size
        else:
            found.append((at, size))
    order = array("I", [number for cell in cells for number in cell[2:]])
    return found, hashlib.blake2b(order.tobytes(), digest_size=8).digest()


def _join(runs: list[Run], run: Run) -> None:
    """Append, or extend the last where both are contiguous in every block."""
    last = runs[-1] if runs else Run(-1, 0, 0, 0)
    if (last.region, last.block_stride) == (run.region, run.block_stride) and last.offset + last.bytes == run.offset:
        runs[-1] = Run(last.region, last.offset, last.block_stride, last.bytes + run.bytes)
    else:
        runs.append(run)


SLOT_BYTES_MAX = 64 << 20
"""What one call moves at most; a store has ten such slots of address space, and uses two unless calls get stuck."""
CLOSE_S = 1.0


class KeepingStore(Store, Protocol):
    @property
    def stuck(self) -> int:
        """Abandoned calls that have not returned."""

    def set_trust(self, trust: StoreTrust) -> None: ...


Keep = Callable[[Backend, Pins, StoreSettings], KeepingStore]
"""Makes the store that a store puts its orders to: `KeptStore`, or what stands in for its threads in a simulation."""


def rank_store_settings(value_bytes: int) -> StoreSettings:
    """The bounds of one rank's store, for values of this size."""
    per_call = max(1, min(64, SLOT_BYTES_MAX // value_bytes))
    return StoreSettings(value_bytes_max=value_bytes, values_per_call_max=per_call, close_s=CLOSE_S)


class PinCount:
    """The pins of a store whose caller holds the real ones. `held` is blocks by order."""

    def __init__(self) -> None:
        self.held: dict[OrderId, int] = {}

    def pin(self, order: OrderId, blocks: Sequence[int]) -> None:
        self.held[order] = len(blocks)

    def unpin(self, order: OrderId) -> None:
        del self.held[order]

    @property
    def blocks(self) -> int:
        return sum(list(self.held.values()))


class LocalRankStore:
    """Values of one rank, through any `Backend`. `owned`: the backend belongs to this rank, and is closed with it.

    Ranks of one process may share a backend: construct all of them before the first order, and close it after them.
    """

    def __init__(
        self,
        backend: Backend,
        values: RankValues,
        regions: Sequence[memoryview],
        settings: StoreSettings | None = None,
        *,
        owned: bool = False,
        keep: Keep | None = None,
    ) -> None:
        self._values = values
        self._regions = regions
        self._front = prefix(values.space)
        self._pins = PinCount()
        settings = settings or rank_store_settings(values.space.value_bytes)
        self._store = (keep or partial(KeptStore, owned=owned))(backend, self._pins, settings)
        self._refused: deque[OrderEnded] = deque()
        self._waker: Callable[[], None] = lambda: None

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters of the store; `pins`: blocks that it reads now; `stuck`: abandoned calls that have not returned."""
        return {**self._store.counters, "pins": self._pins.blocks, "stuck": self._store.stuck}

    def lookup(self, order: OrderId, hashes: Sequence[bytes], timeout_s: float) -> bool:
        return self._submit(order, lambda: Lookup(order, keys(self._front, hashes), timeout_s))

    def get(self, order: OrderId, hashes: Sequence[bytes], blocks: Sequence[int], timeout_s: float) -> bool:
        return self._submit(order, lambda: Get(order, keys(self._front, hashes), self._pieces(blocks), timeout_s))

    def set_trust(self, trust: RankStoreTrust) -> None:
        self._store.set_trust(trust.trust)

    def put(
        self,
        order: OrderId,
        hashes: Sequence[bytes],
        blocks: Sequence[int],
        timeout_s: float,
        origins: tuple[bytes, ...] = (),
    ) -> bool:
        def made() -> Put:
            return Put(order, keys(self._front, hashes), self._pieces(blocks), tuple(blocks), timeout_s, origins)

        return self._submit(order, made)

    def cancel(self, order: OrderId) -> None:
        self._store.cancel(order)

    def drain(self) -> Sequence[OrderEnded]:
        refused = [self._refused.popleft() for _ in range(len(self._refused))]
        return [*refused, *self._store.drain()]

    def set_waker(self, waker: Callable[[], None]) -> None:
        self._waker = waker
        self._store.set_waker(waker)

    def close(self) -> None:
        """End all orders; bounded in time even if the backend hangs. Ends can still be drained."""
        self._store.close()

    def _pieces(self, blocks: Sequence[int]) -> tuple[Pieces, ...]:
        return tuple(self._values.pieces(self._regions, block) for block in blocks)

    def _submit(self, order: OrderId, make: Callable[[], Order]) -> bool:
        try:
            return self._store.submit(make())
        except ValueError as error:
            self._refused.append(OrderEnded(order, 0, Reason.BAD_SPAN, str(error)))
            self._waker()
            return True
