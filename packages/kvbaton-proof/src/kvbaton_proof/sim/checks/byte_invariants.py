"""Invariants whenever bytes move, or may move from now on: in which blocks they land, and which they leave.

Laws: bytes land only in blocks that D holds for this very handoff (rule 18).
What P writes from, or serves, somebody holds. What P lends has been computed on the device of that very rank, and of
each block that is all, and nothing of another (rule 28).
"""

from __future__ import annotations

from kvbaton.protocol.effects import Copy, Direction
from kvbaton.protocol.geometry.layout import pages
from kvbaton.protocol.machines.inbound import Intake
from kvbaton.protocol.machines.push_writer import Outlet
from kvbaton.transports.core.transport import Loan
from kvbaton_proof.sim.promises import RULE, WRONG, Broken
from kvbaton_proof.sim.world.life import Life
from kvbaton_proof.sim.world.sim_transport import Fabric, SimTransport


class ByteInvariants:
    """Sees every byte of a cluster."""

    def __init__(self, fabric: Fabric) -> None:
        self.owner: dict[int, Life] = {}  # by transport address
        self.rank: dict[int, int] = {}
        fabric.on_landing = self.landing
        fabric.on_leaving = self.leaving
        fabric.on_lending = self.lending

    def watch(self, life: Life) -> None:
        for rank, planes in enumerate(life.transports):
            self._check_pages(life, rank)
            for transport in planes.values():
                self.owner[transport.address] = life
                self.rank[transport.address] = rank

    def landing(self, transport: SimTransport, driver: SimTransport, copy: Copy, offset: int, size: int) -> None:
        """Bytes are about to land: only in blocks that D holds for this very handoff, never in anybody else's."""
        life, name = self.owner[transport.address], transport.me.worker
        shape = life.character.shape
        blocks = range(shape.block_at(offset), shape.block_at(offset + size - 1) + 1)
        for block in blocks:
            if not life.engine.pool.held[block]:
                raise Broken(WRONG, f"{name}: bytes land in block {block}, which no handoff holds")
        wanted = self._handoff_of(life, driver, copy)
        if wanted is not None and not set(blocks) <= wanted:
            raise Broken(WRONG, f"{name}: bytes of one handoff land in blocks of another")

    def _handoff_of(self, life: Life, driver: SimTransport, copy: Copy) -> set[int] | None:
        """D's blocks of the handoff that a copy belongs to; None when its driver is dead and cannot be asked."""
        author = self.owner[driver.address]
        if not author.alive:
            return None
        parts = author.node.ledger.desk.owners.get(copy.job)
        if parts is None:
            raise Broken(WRONG, f"{author.peer.worker}: bytes of a copy move that its ledger has forgotten")
        if isinstance(parts.owner, Outlet):
            intake = life.node.ledger.consumer.by_reservation.get(parts.owner.reservation)
            if intake is None:
                raise Broken(WRONG, f"{life.peer.worker}: bytes land for a reservation that D has let go")
        else:
            assert isinstance(parts.owner, Intake)
            intake = parts.owner
        return {block for group in intake.target.blocks for block in group} if intake.target is not None else set()

    def leaving(self, transport: SimTransport, offset: int) -> None:
        """P writes from its own blocks, or serves them: they must still be held by somebody."""
        life = self.owner[transport.address]
        block = life.character.shape.block_at(offset)
        if not life.engine.pool.refs[block]:
            raise Broken(WRONG, f"{life.peer.worker}: bytes are sent from block {block}, which nobody holds")

    def lending(self, transport: SimTransport, loan: Loan) -> None:
        """P lends a block for reading: something of it has been computed there, on the device of this very rank."""
        life, rank = self.owner[transport.address], self.rank[transport.address]
        kind, reads = transport.kind, loan.direction is Direction.READ
        if not (kind.lends_reads if reads else kind.lends_writes):
            raise Broken(RULE, f"{life.peer.worker}: lends over {transport.kind.name}, which does not enforce it")
        blank = life.engine.device.blank[rank]
        if loan.direction is Direction.READ and not blank.isdisjoint(block for ids in loan.blocks for block in ids):
            raise Broken(WRONG, f"{life.peer.worker}: rank {rank} lends blocks that it has not computed")

    def _check_pages(self, life: Life, rank: int) -> None:
        """What is lent with a block."""
        shape = life.character.shape
        tables = pages(life.node.ledger.desk.identity.layout, rank)
        for block in (0, 1, shape.blocks - 1):
            lent = {
                shape.bases[table.region] + band.start + block * band.stride + byte
                for table in tables for band in table.bands for byte in range(band.extent)
            }  # fmt: skip
            starts = [shape.page(layer, block) for layer in shape.own_layers[rank]]
            missing = {byte for start in starts for byte in range(start, start + shape.page_bytes)} - lent
            if missing or any(shape.block_at(byte) != block for byte in lent):
                what = "is not lent whole" if missing else "is lent with parts of others"
                raise Broken(WRONG, f"{life.peer.worker}: rank {rank}: block {block} {what}")
