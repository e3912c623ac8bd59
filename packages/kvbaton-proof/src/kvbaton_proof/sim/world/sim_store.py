"""A simulated store: takes time, refuses, raises, and keeps reading for a while after it was told to stop.

Law: what it reads, piece by piece, is this prompt's, in blocks that somebody holds, until it says that it has ended.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import NO_BLOCK, Groups, StoreEnded
from kvbaton.protocol.ids import PutId
from kvbaton_proof.sim.promises import WRONG, Broken
from kvbaton_proof.sim.world.sim_device import Device
from kvbaton_proof.sim.world.sim_pool import Pool
from kvbaton_proof.sim.world.sim_request import SimRequest
from kvbaton_proof.sim.world.world import InjectedFault, World

PIECES_MAX = 3
READ_ON_S = 2.0

OnRead = Callable[[Groups, tuple[bytes, ...]], None]


@dataclass(slots=True)
class Reading:
    """Looks at what a store reads."""

    pool: Pool
    device: Device
    prompts: Mapping[Groups, SimRequest]  # by what is put

    def __call__(self, blocks: Groups, keys: tuple[bytes, ...]) -> None:
        request, shape = self.prompts[blocks], self.device.shape
        for block in (block for ids in blocks for block in ids):
            if block != NO_BLOCK and not self.pool.refs[block]:
                raise Broken(WRONG, f"{self.device.name}: a store reads block {block}, which nobody holds")
        who = f"{request.id} as put"
        self.device.check(request.content, blocks, request.tokens, range(shape.ranks), range(shape.layers), who)


@dataclass(slots=True)
class SimStore:
    """One life's way to the store."""

    world: World
    fails: float
    reads_on: bool = False
    throws: float = 0.0  # share of stops and looks for news that raise
    ended: list[StoreEnded] = field(default_factory=list)
    waker: Callable[[], None] = lambda: None
    on_read: OnRead = lambda blocks, keys: None
    alive: bool = True
    open: dict[PutId, tuple[Groups, tuple[bytes, ...]]] = field(default_factory=dict)

    def put(self, put: PutId, blocks: Groups, keys: tuple[bytes, ...], origins: tuple[str, ...] = ()) -> None:
        rng = self.world.rng
        kind = rng.random()
        if kind < self.fails / 3:
            self.world.faults["store_threw"] += 1
            raise InjectedFault("the simulated store threw")
        self.open[put] = blocks, keys
        if kind < self.fails * 2 / 3:
            self.world.faults["store_stalled"] += 1
            return
        reason = Reason.STORE_FAILED if kind < self.fails else None
        self._read_and_end(put, reason, rng.uniform(0.001, 0.2), rng.randint(1, PIECES_MAX))

    def cancel(self, put: PutId) -> None:
        self._maybe_throw()
        if self.reads_on and put in self.open:
            self.world.faults["store_read_on"] += 1
            self._read_and_end(put, Reason.CANCELLED, self.world.rng.uniform(0.01, READ_ON_S), PIECES_MAX)
        else:
            self._end(put, Reason.CANCELLED)

    def drain(self) -> Sequence[StoreEnded]:
        if self.ended:
            self._maybe_throw()
        ended, self.ended = self.ended, []
        return ended

    def set_waker(self, waker: Callable[[], None]) -> None:
        self.waker = waker

    def _maybe_throw(self) -> None:
        if self.throws and self.world.chance(self.throws):
            self.world.faults["store_threw_late"] += 1
            raise InjectedFault("the simulated store threw when it should have stopped")

    def _read_and_end(self, put: PutId, reason: Reason | None, lasts_s: float, pieces: int) -> None:
        for piece in range(pieces):
            self.world.after(lasts_s * (piece + 1) / pieces, lambda: self._read(put))
        self.world.after(lasts_s, lambda: self._end(put, reason))

    def _read(self, put: PutId) -> None:
        if put in self.open and self.alive:
            self.on_read(*self.open[put])

    def _end(self, put: PutId, reason: Reason | None) -> None:
        if self.open.pop(put, None) is not None:
            self.ended.append(StoreEnded(put, reason))
            self.waker()
