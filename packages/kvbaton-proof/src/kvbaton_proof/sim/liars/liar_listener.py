"""Hears what an honest node decides in a world with a liar, effect by effect, before it is done.

Laws: a copy stays inside what the two cards
say there is, on both sides, whatever a peer has named. D commits, to whomever, only when it has asked for every page
of every block that it will decode on: what it leaves out would be an earlier prompt's.
"""

from __future__ import annotations

from typing import Any

from kvbaton.protocol import effects as fx
from kvbaton.protocol.effects import Direction
from kvbaton.protocol.geometry.layout import EngineLayout
from kvbaton.protocol.ids import PeerId, WorkerId
from kvbaton.protocol.machines.inbound import Intake
from kvbaton.protocol.wire.messages import Commit
from kvbaton_proof.sim.promises import WRONG, Broken
from kvbaton_proof.sim.world.life import Life


class Listener:
    """Of one honest life."""

    def __init__(self, life: Life) -> None:
        self.life = life
        self._asked: dict[int, set[tuple[int, int]]] = {}  # by attempt: (rank, page) of ours that copies fill
        inner = life.node._do

        def done(effect: Any) -> None:
            self._hear(effect)
            inner(effect)

        life.node._do = done  # type: ignore[method-assign]

    def _hear(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.StartCopy):
            self._started(effect)
        elif isinstance(effect, fx.Send) and isinstance(effect.message, Commit):
            self._commits(effect.message)

    def _started(self, effect: fx.StartCopy) -> None:
        copy, rank, shape = effect.copy, effect.rank, self.life.character.shape
        theirs = self._layout(copy.peer, copy.direction)
        there = int(copy.peer.worker.partition("#")[2])
        ours = self.life.node.ledger.desk.identity.layout.ranks[rank].region_bytes[copy.local_region]
        limit = theirs.ranks[there].region_bytes[copy.remote_region] if theirs is not None else 1 << 62
        spans = copy.spans
        parts = self.life.node.ledger.desk.owners.get(copy.job)
        pages: set[tuple[int, int]] = set()
        for at in range(0, len(spans), 3):
            local, remote, size = spans[at : at + 3]
            if not (0 <= local <= ours - size and 0 <= remote <= limit - size):
                raise Broken(WRONG, f"{self.life.peer.worker}: a copy leaves memory, {local} {remote} {size}")
            pages.update(
                (rank, page) for page in range(local // shape.page_bytes, -(-(local + size) // shape.page_bytes))
            )
        if parts is not None and isinstance(parts.owner, Intake):
            self._asked.setdefault(parts.owner.attempt, set()).update(pages)

    def _layout(self, peer: PeerId, direction: Direction) -> EngineLayout | None:
        """What the other side has said of its memory: as P, if we read; as D, if we write."""
        ledger, name = self.life.node.ledger, WorkerId(peer.worker.partition("#")[0])
        if direction is Direction.READ:
            link = ledger.consumer.links.by_worker.get(name)
            return link.plan.source if link is not None and link.plan is not None else None
        own = (s for s in ledger.sessions.by_number.values() if s.peer == PeerId(name, peer.incarnation) and s.joined)
        session = next(own, None)
        return session.plan.target if session is not None else None

    def _commits(self, message: Commit) -> None:
        intake, shape = self.life.node.ledger.consumer.by_attempt.get(message.attempt), self.life.character.shape
        if intake is None or intake.target is None:
            return
        needed = {
            (rank, shape.page(layer, block) // shape.page_bytes)
            for rank in range(shape.ranks)
            for layer in range(shape.layers)
            for block in intake.target.blocks[shape.group_of[layer]]
        }
        left = needed - self._asked.get(message.attempt, set())
        if left:
            what = f"{len(left)} of {len(needed)} pages were never asked for"
            raise Broken(WRONG, f"{self.life.peer.worker}: {intake.wanted.request} is committed, and {what}")
