"""What a world allows must happen in it: each capability has a condition of success, judged by handoff.

Laws: a push is written by P wherever the pair can push, and nowhere else. D reads what it knows to be ready, also while
P computes. A turn that may be kept is kept, and one that is offered is asked for (`sim_turns.py`); that it is then
taken is `causes.py`'s to see, as of every handoff.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvbaton.proof.sim.promises import NEEDLESS, RULE, Broken
from kvbaton.proof.sim.world.life import Life
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.machines.inbound import Intake, IntakeState
from kvbaton.protocol.wire.messages import Feature


def check_pushed(life: Life, lives: Mapping[WorkerId, Life], intake: Intake) -> None:
    """Of a handoff that was delivered."""
    plane, source = intake.link.transport, lives.get(intake.wanted.source)
    if plane is None or source is None:
        return
    writes = source.character.features & Feature.PUSH  # what D can is D's own affair: it asks
    able = bool(intake.wanted.push and writes and plane.can_write and plane.can_fence)
    if able is not bool(intake.reservation):
        does = "is pushed" if intake.reservation else "is not pushed"
        raise Broken(RULE, f"{life.character.name}: {intake.wanted.request} {does} over {plane.name}")


def check_streamed(life: Life) -> None:
    """After a step."""
    for intake in life.node.ledger.consumer.by_handoff.values():
        source = intake.source
        if intake.state is IntakeState.COPYING and source is not None and source.copied != source.progress:
            raise Broken(NEEDLESS, f"{life.character.name}: {intake.wanted.request} does not read what is ready")
