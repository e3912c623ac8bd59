"""Room to pin at a simulated engine that computes a prompt for others: it waits, or is refused, as engines do it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvbaton.node.pin_budget import Room
from kvbaton.protocol.errors import Reason
from kvbaton_proof.sim.promises import HANG, Broken
from kvbaton_proof.sim.world.sim_request import SimRequest

if TYPE_CHECKING:
    from kvbaton_proof.sim.world.sim_engine import SimEngine

LATE_LOOK_S = 0.01


def is_put_off(engine: SimEngine, request: SimRequest) -> bool:
    """Whether a prompt that is computed for others has no room to be pinned, yet or for good."""
    shape, world, budget = engine.shape, engine.world, engine.doorway.budget
    per_group = -(-request.tokens // shape.block_tokens)
    blocks = sum(1 if group in shape.states else per_group for group in range(len(shape.group_layers)))
    waited = budget.waits(request.id, world.now)
    room = budget.ask(request.id, blocks, world.now)
    if room is Room.WAITING:
        world.touch("no_room", *request.handoffs)
        request.put_off_at = world.now if request.put_off_at is None else request.put_off_at
        if world.now > request.put_off_at + budget.wait_s + LATE_LOOK_S:
            raise Broken(HANG, f"{engine.name}: {request.id} waits for room to pin past its deadline")
    if room is Room.WAITING and not waited:
        world.faults["pins_waited"] += 1
        world.after(budget.wait_s + LATE_LOOK_S, engine.on_wake)
    if room is Room.REFUSED:
        world.strike("pins_refused", *request.handoffs)
        if request.handoff:
            engine.begin_lease(request)
            assert request.lease is not None
            engine.doorway.source_ended(request.lease, Reason.PINS_FULL)
            request.lease = None
        engine.finish(request, "failed", str(Reason.PINS_FULL))
    return room is not Room.ADMITTED
