"""What handoffs pin at one engine, held against its limit after every step of the engine.

Laws: blocks that leases pin are never more than the limit, but for one lease that has it to itself; the budget counts
what the door holds, no more and no less; nobody waits for room past its deadline.
"""

from __future__ import annotations

from kvbaton.node.pin_budget import WAITING_MAX
from kvbaton_proof.sim.promises import HANG, LEAK, Broken
from kvbaton_proof.sim.world.life import Life

OVERDUE_S = 5.0
"""An engine may be stopped, or busy, for so long."""


def check_pins(life: Life) -> None:
    name, doorway = life.character.name, life.doorway
    leases = [
        blocks
        for key, blocks in doorway._pins.items()
        if blocks and not isinstance(key, tuple) and key not in doorway._turns
    ]
    pinned = len(set().union(*leases))
    if pinned > life.pins_max and len(leases) > 1:
        raise Broken(LEAK, f"{name}: {len(leases)} leases pin {pinned} blocks, at most {life.pins_max}")
    budget = doorway.budget
    if budget.pinned_blocks != pinned:
        raise Broken(LEAK, f"{name}: leases pin {pinned} blocks, and {budget.pinned_blocks} are counted")
    if len(budget._waiting) > WAITING_MAX:
        raise Broken(LEAK, f"{name}: {len(budget._waiting)} wait for room to pin, at most {WAITING_MAX}")
    overdue = [request for request, (_, until) in budget._waiting.items() if life.world.now > until + OVERDUE_S]
    if overdue and not (life.engine.replacing or life.engine.device.stopped):
        raise Broken(HANG, f"{name}: {overdue[:3]} wait for room to pin past their deadline")
    known = life.engine.requests
    left = [each for each in (*budget._promised, *budget._waiting, *budget._refused) if each not in known]
    if left:
        raise Broken(LEAK, f"{name}: room to pin is kept for requests that are over: {left[:3]}")
    over = [lease for lease in budget._of if lease not in doorway._pins]
    if over:
        raise Broken(LEAK, f"{name}: room to pin is remembered of leases that are over: {over[:3]}")
