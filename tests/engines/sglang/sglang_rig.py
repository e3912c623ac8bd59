"""Two fakes of SGLang around kvbaton's real plug-in code, in virtual time, over a data plane that cannot cancel."""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Callable
from itertools import count
from types import SimpleNamespace

from kvbaton.engines.sglang.handoffs import Handoffs
from kvbaton.engines.sglang.manager import how_ended
from kvbaton.engines.sglang.metadata_rows import HostRows, MetadataBuffers
from kvbaton.engines.sglang.sglang_layout import memory_of
from kvbaton.node.doorway import Doorway, DoorwayConfig
from kvbaton.node.epochs import EpochTable
from kvbaton.node.node import Node
from kvbaton.node.pin_budget import budget_of
from kvbaton.protocol.effects import Copy
from kvbaton.protocol.events import CopyEnded, CopyRested
from kvbaton.protocol.ids import Incarnation, PeerId, TransferId, WorkerId, rank_peer
from kvbaton.protocol.machines.context import Identity
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.settings import Settings
from kvbaton.testing.engine_contract import PLANE, TICK_S, TICKET_KEYS, DirectTransport, Fabric, Line, Wire
from tests.engines.sglang.fake_sglang import BUFFERS, SLOTS, FakeDecode, FakePrefill, Memory, Req

REST_S = 400.0
Regions = list[memoryview]


class RegionTransport(DirectTransport):
    """`DirectTransport` with several regions a rank."""

    regions: dict[PeerId, Regions]

    def __init__(self, me: PeerId, fabric: Fabric, regions: dict[PeerId, Regions]) -> None:
        super().__init__(me, fabric)
        self.regions = regions

    def cancel(self, job: object) -> None:
        if job in self._waiting and job not in self._given_up:
            copy = self._waiting[job]
            super().cancel(job)
            self._given_up[job] = bytes(self.regions[copy.peer][copy.remote_region])

    def _move(self, copy: Copy) -> None:
        here, flat = self.regions[self._me][copy.local_region], copy.spans
        is_late = copy.job in self._given_up
        there = self._given_up.pop(copy.job, self.regions[copy.peer][copy.remote_region])
        for local, remote, size in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
            here[local : local + size] = there[remote : remote + size]
        self._news.append(CopyRested(copy.job) if is_late else CopyEnded(copy.job))


class Side:
    """One engine's plug-in with its node."""

    def __init__(
        self, name: str, rig: SglangRig, life: int = 1, buffers: int = BUFFERS, *, latent: bool = False
    ) -> None:
        numbers = count(1)
        self.peer = PeerId(WorkerId(name), Incarnation(life))
        self.memory = Memory(buffers=buffers)
        args = self.memory.kv_args()
        slots = MetadataBuffers(args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens)
        pages = args.kv_data_lens[0] // args.kv_item_lens[0]
        self.rows = HostRows(pages + slots.slots)
        told = memory_of(args, slots.slots, self.rows, latent=latent)
        config = DoorwayConfig(
            me=self.peer, ranks=len(told.layout.ranks), groups=2, ticket_keys=rig.keys.get(name, TICKET_KEYS),
            ticket_ttl_s=120.0, mint=lambda: TransferId(f"{ord(name[0]):02x}{next(numbers):030x}"),
            wall=lambda: rig.now,
        )  # fmt: skip
        self.door = door = Doorway(config, EpochTable(told.blocks))
        door.budget = budget_of(pages, 0.75, 5.0)
        ranks = [rank_peer(self.peer, rank) for rank in range(config.ranks)]
        for rank, storages in zip(ranks, told.storages, strict=True):
            rig.regions[rank] = [_view(each.data_ptr(), each.nbytes()) for each in storages]
            rig.fabric.memory[rank] = memoryview(bytearray())
        rig.wire.inboxes[self.peer.worker] = deque()
        identity = Identity(self.peer, name, {"model": "of the fake"}, told.layout, (PLANE,), config.ticket_keys)
        ledger = Ledger(identity, Settings(), door.epochs.all_judged)
        planes = [{PLANE.name: RegionTransport(rank, rig.fabric, rig.regions)} for rank in ranks]
        self.node = Node(ledger, Line(self.peer.worker, rig.wire), planes, door)
        self.handoffs = Handoffs(door, told, self.rows, slots, how_ended(ledger), lambda: rig.now)
        self.memory.on_free = self.handoffs.freed
        self.manager = SimpleNamespace(
            handoffs=self.handoffs, source_at=lambda address: WorkerId("p") if address == "p" else None
        )

    def counted(self, name: str) -> int:
        return self.node.ledger.desk.counts.get(name, 0)

    @property
    def held(self) -> str:
        pages, slots = len(self.memory.free_pages), len(self.memory.free_slots)
        is_idle = (pages, slots) == (len(self.memory.kv.raw[0]) // self.memory.kv.sizes[0] - 1, SLOTS)
        self.handoffs.do_duties()
        if is_idle and not self.door.busy and not self.door.pinned_blocks and not self.node.ledger.producer.leases:
            return ""
        return f"{self.peer.worker}: {pages} pages and {slots} slots are free, {self.door.pinned_blocks} are held"


def _view(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")


class SglangRig:
    """P and D."""

    def __init__(
        self, keys: dict[str, tuple[bytes, ...]] | None = None, buffers: int = BUFFERS, *, latent: bool = False
    ) -> None:
        self.keys = keys or {}
        self.now = 0.0
        self.wire, self.fabric = Wire(), Fabric()
        self.regions: dict[PeerId, Regions] = {}
        self.p, self.d = (Side(name, self, buffers=buffers, latent=latent) for name in "pd")
        self.prefill = FakePrefill(self.p.manager, self.p.memory)
        self.decode = FakeDecode(self.d.manager, self.d.memory)
        self.dead: set[str] = set()
        self.scribbles = True

    def step(self, seconds: float = TICK_S) -> None:
        self.now += seconds
        for side, queues in ((self.p, self.prefill), (self.d, self.decode)):
            if side.peer.worker in self.dead:
                continue
            if self.scribbles:
                side.memory.scribble()
            queues.step()
            side.node.step(self.now)

    def later(self, seconds: float) -> None:
        for _ in range(round(seconds * 4)):
            self.step(0.25)

    def until(self, what: str, predicate: Callable[[], bool], steps: int = 2000) -> None:
        for _ in range(steps):
            if predicate():
                return
            self.step()
        raise AssertionError(f"{what}: not within {steps} steps; {self.p.held} {self.d.held}")

    def ask(self, pair: tuple[Req, Req]) -> tuple[Req, Req]:
        self.prefill.add(pair[0])
        self.decode.add(pair[1])
        return pair

    def ended(self, *reqs: Req) -> None:
        self.until(f"{[req.rid for req in reqs]} end", lambda: all(req.finished for req in reqs))

    def rest(self) -> None:
        """Let everything end that has a deadline; AssertionError when something is held for good, or a port raised."""
        self.fabric.is_held = self.fabric.is_late_held = self.wire.is_cut = False
        until = self.now + REST_S
        sides = [side for side in (self.p, self.d) if side.peer.worker not in self.dead]
        while (held := " ".join(filter(None, (side.held for side in sides)))) and self.now < until:
            self.step(0.25)
        assert not held, f"held for good: {held}"
        assert not any(side.node.faults for side in sides)
