"""Room to pin at a simulated engine, as the adapters ask for it: before a prompt is computed for somebody else."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.node.pin_budget import Room
from kvbaton.protocol.errors import Reason

if TYPE_CHECKING:
    from kvbaton.proof.sim.world.sim_engine import SimEngine
    from kvbaton.proof.sim.world.sim_request import SimRequest

LATE_LOOK_S = 0.01


def is_put_off(engine: SimEngine, request: SimRequest) -> bool:
    """Whether a prompt that is computed for others has no room to be pinned, yet or for good."""
    per_group = -(-request.tokens // engine.shape.block_tokens)
    groups = range(len(engine.shape.group_layers))
    blocks = sum(1 if group in engine.shape.states else per_group for group in groups)
    budget, now = engine.doorway.budget, engine.world.now
    waited = budget.waits(request.id, now)
    room = budget.ask(request.id, blocks, now)
    if room is Room.WAITING and not waited:
        engine.world.faults["pins_waited"] += 1
        engine.world.after(budget.wait_s + LATE_LOOK_S, engine.on_wake)
    if room is Room.REFUSED:
        engine.world.faults["pins_refused"] += 1
        if request.handoff:
            engine._begin_lease(request)
            assert request.lease is not None
            engine.doorway.source_ended(request.lease, Reason.PINS_FULL)
            request.lease = None
        engine._finish(request, "failed", str(Reason.PINS_FULL))
    return room is not Room.ADMITTED
