"""The fault `liar`: a process with one valid key is sent among the members, and a lie that is believed is a problem.

Laws: the conductor holds the liar's time: what does not end by itself is killed. The liar's key is minted for it alone;
of the store it borrows the key. What was done for it, though it has no right to it, breaks the verdict by name.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import zlib

import msgspec

from kvbaton.processes.child_process import Program, end, start
from kvbaton_proof.chaos import fleet
from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.chaos_scene import Scene
from kvbaton_proof.chaos.liars import lies
from kvbaton_proof.chaos.liars.liar_main import SLACK_S
from kvbaton_proof.chaos.liars.liar_post import Errand, Member
from kvbaton_proof.chaos.liars.lies import LIAR, OPERATORS_KEY, Guise
from kvbaton_proof.chaos.members import STORE, Spec

START_S = 30.0
"""Until a Python process has loaded what it needs, on a busy machine."""
LOG = "liar.txt"
KEYS = {Guise.STORE: STORE, Guise.OPERATOR: OPERATORS_KEY}


async def tell_lies(scene: Scene, step: Step) -> str:
    """All lies of a step; what was refused, in words."""
    errand = errand_of(scene, step)
    words = [sys.executable, "-m", "kvbaton_proof.chaos.liars.liar_main", msgspec.json.encode(errand).decode()]
    log = scene.fleet.lives[STORE].log.with_name(LOG)
    program = Program(LIAR, LIAR, scene.network.command(LIAR, words), stop=signal.SIGKILL)
    pipe, nothing = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    liar = await start(program, log, stdin=nothing, stdout=pipe, preexec_fn=fleet.die_with_conductor)
    try:
        async with asyncio.timeout(step.seconds + SLACK_S + START_S):
            told, _ = await liar.process.communicate()
    finally:
        await end([liar])
    if liar.process.returncode:
        raise RuntimeError(f"the liar ended with status {liar.process.returncode}; see {log}")
    tally = lies.decode(told)
    scene.lies.add(tally)
    scene.problems += tally.problems()
    return tally.words()


def errand_of(scene: Scene, step: Step) -> Errand:
    guise = Guise(step.detail)
    return Errand(
        keys=scene.fleet.around.keys,
        name=KEYS.get(guise, LIAR),
        guise=guise,
        address=scene.network.address(LIAR),
        members={name: _member(spec) for name, spec in scene.fleet.specs.items()},
        lies=step.lies,
        seconds=step.seconds,
        seed=zlib.crc32(msgspec.json.encode(step)),  # of the plan alone: a replay tells the same
    )


def _member(spec: Spec) -> Member:
    """A member as a liar has to know it; the one port of a store is for control."""
    port = spec.ports.front if spec.name == STORE else spec.ports.back
    http = "" if spec.name == STORE else f"{spec.host}:{spec.ports.front}"
    return Member(spec.role, f"tcp://{spec.host}:{port}", http)
