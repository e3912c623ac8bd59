"""An engine's progress reports: a chunk with its step's output, a layer by the event behind it (rule 30)."""

from __future__ import annotations

import functools
from collections.abc import Callable

from kvbaton.node.doorway import Doorway
from kvbaton.protocol.geometry.progress import GroupProgress, Progress, whole
from kvbaton.protocol.ids import LeaseId
from kvbaton_proof.sim.world.sim_device import Step, Work
from kvbaton_proof.sim.world.sim_memory import Shape
from kvbaton_proof.sim.world.world import World

LATE_EVENT, LATE_EVENT_S = 0.3, 0.02
"""Some events are noticed late: after the step's output, or after the request's end."""


class Announcer:
    """Of one engine."""

    def __init__(self, world: World, shape: Shape, doorway: Doorway) -> None:
        self.world = world
        self.shape = shape
        self.doorway = doorway
        self.announce: Callable[[LeaseId, Progress, int], None] = doorway.progressed  # by the rank whose device it is
        self.layerwise = False
        self.by_rank = False  # chunks are announced as layers are, by each rank for itself
        self.lists_early = False  # that a prompt is all listed is said with its last chunk's issue, not with its output

    def chunk_done(self, work: Work) -> None:
        """Every rank has computed the chunk: its output is here."""
        lease = work.request.lease
        if lease is not None:
            ended = work.stop == work.request.tokens
            groups = range(len(self.shape.group_layers))
            counts = [int(ended) if group in self.shape.states else work.has for group in groups]
            for rank in range(self.shape.ranks) if self.by_rank else ():
                self.announce(lease, whole(counts), rank)
            if not self.by_rank:
                self.doorway.progressed(lease, whole(counts))
            if ended and not self.lists_early:
                self.doorway.completed(lease)

    def layer_done(self, step: Step, rank: int, layer: int) -> None:
        """The event behind a layer has come to pass on one rank; whoever waits for events says so, sooner or later."""
        if not self.layerwise:
            return
        for work in step.works:
            if work.has > work.had and self.world.chance(0.5):
                late_s = self.world.rng.uniform(0, LATE_EVENT_S) if self.world.chance(LATE_EVENT) else 0.0
                self._announce_layer(
                    work, rank, layer, late_s if not self.by_rank else 0.0
                )  # who speaks twice, in order

    def _announce_layer(self, work: Work, rank: int, layer: int, late_s: float) -> None:
        assert work.lease is not None
        own = self.shape.own_layers[rank]
        done = self.shape.layers if layer == own[-1] else layer + 1  # a rank counts other stages' layers as ready
        say = functools.partial(self.announce, work.lease, self._ahead(work, done), rank)
        if late_s:
            self.world.after(late_s, say)
        else:
            say()

    def _ahead(self, work: Work, layers: int) -> Progress:
        """What is ready when `layers` layers (through all groups) of the chunk are done."""
        found = []
        for group, count in enumerate(self.shape.group_layers):
            if group in self.shape.states:
                found.append(GroupProgress())  # ready with its step, not before
                continue
            done = max(0, min(count, layers - self.shape.first_layer(group)))
            found.append(GroupProgress(work.has) if done == count else GroupProgress(work.had, work.has, done))
        return tuple(found)
