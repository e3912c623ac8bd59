"""The faults of false members: one of the product's own processes works as it should, but for one lie.

Laws: a false worker has a key of its own, which is minted for it and removed at the end, as `kvbaton keys remove` does
it. What it was asked to compute is its word: only bait is asked of a P that gives false KV, and only after its removal
is an answer to bait judged. A prompt that reaches a thief is stolen, whatever becomes of it.

The fault `liar`: a process with one valid key is sent among the members, and a lie that is believed is a problem.

Laws: the conductor holds the liar's time: what does not end by itself is killed. The liar's key is minted for it alone;
of the store it borrows the key. What was done for it, though it has no right to it, breaks the verdict by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
import zlib
from collections.abc import AsyncIterator

import msgspec

from kvbaton.api.params import Mode
from kvbaton.control import key_room, keyring
from kvbaton.control.keyring import LOOK_S
from kvbaton.processes.child_process import Child, Program, end, free_ports, start
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton_proof.chaos import fleet, members
from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.chaos_scene import Scene
from kvbaton_proof.chaos.judged_request import Board, Prompt, Way, ask
from kvbaton_proof.chaos.liars import lies
from kvbaton_proof.chaos.liars.false_worker import BAIT
from kvbaton_proof.chaos.liars.liar_http import Door
from kvbaton_proof.chaos.liars.liar_main import SLACK_S
from kvbaton_proof.chaos.liars.liar_post import Errand, Member
from kvbaton_proof.chaos.liars.lies import LIAR, OPERATORS_KEY, Guise
from kvbaton_proof.chaos.members import FALSE_REGISTRY, ROUTER, STORE, Ports, Spec

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


SERVES_S = 60.0
BAITS = 6
BAIT_TRIES = 60
REMOVED_S = 2 * LOOK_S
"""Every process looks at the key directory that often; twice it, on a busy machine."""


async def lie_in_lists(scene: Scene, step: Step) -> str:
    """One of two registries lies to everybody for a while, and a thief waits where it sends them."""
    key = keyring.load(scene.fleet.around.keys, ROUTER).ticket_keys[0]
    me = PeerId(WorkerId("ghost"), Incarnation(1))
    thief = Door(scene.network.address("client"), me, key, random.Random(step.at_s))
    with contextlib.closing(thief):
        thief.answer = "steal"
        scene.fleet.tell(FALSE_REGISTRY, f"{step.detail} {thief.address}")
        try:
            await asyncio.sleep(step.seconds)
        finally:
            scene.fleet.tell(FALSE_REGISTRY, "")
        await asyncio.sleep(1.0)  # requests that are under way
        stolen = thief.prompts
    scene.lies.stolen += stolen
    return f"{stolen} prompts reached the thief"


async def lie_of_writes(scene: Scene, step: Step) -> str:
    """A P says Written of what it did not write, of whatever it is asked for."""
    async with _traitor(scene, step.detail) as name:
        await asyncio.sleep(step.seconds)
        told = await scene.fleet.ask(ROUTER, "/workers")
    return f"{name} was listed" if told is not None else name


async def lie_of_kv(scene: Scene, step: Step) -> str:
    """A P gives false KV, also to the store; its key is removed; then other clients ask the same."""
    async with _traitor(scene, "false-kv") as name:
        spoilt = await _baited(scene, name)
    asked = await scene.ask_all(spoilt)
    return f"{len(spoilt)} answers were of its KV; after its removal {asked}"


async def _baited(scene: Scene, name: str) -> list[tuple[Prompt, Way]]:
    """What was asked through the liar, and is to be asked again."""
    found: list[tuple[Prompt, Way]] = []
    for number in range(BAIT_TRIES):
        prompt, _ = scene.load.prompt(scene.rng)
        mode = list(Mode)[number % len(Mode)]
        way = scene.way(ROUTER, mode, salt=f"{BAIT}{next(scene.numbers)}")
        if name in (await ask(scene.session, Board(), prompt, way)).pair:
            found.append((prompt, way))
        if len(found) == BAITS:
            break
    if not found:
        raise RuntimeError(f"{name} was asked nothing in {BAIT_TRIES} requests")
    return found


@contextlib.asynccontextmanager
async def _traitor(scene: Scene, lie: str) -> AsyncIterator[str]:
    """A prefill worker that tells this lie, while the context lasts; afterwards it is no member, and knows it."""
    name, keys = f"{LIAR}-{next(scene.numbers)}", scene.fleet.around.keys
    keyring.add(keys, f"{name}:prefill")
    child: Child | None = None
    try:
        child = await _start(scene, name, lie)
        await _until(scene, name, listed=True)
        yield name
    finally:
        key_room.remove(keys, name)
        await end([child] if child is not None else [])
    await _until(scene, name, listed=False)
    await asyncio.sleep(REMOVED_S)


async def _start(scene: Scene, name: str, lie: str) -> Child:
    host = scene.network.address(LIAR)
    spec = Spec(name, "prefill", host, Ports(*free_ports(2, host, scene.rng)))
    options = msgspec.json.encode(members.options_of(spec, scene.fleet.specs, scene.fleet.around)).decode()
    words = [sys.executable, "-m", "kvbaton_proof.chaos.liars.false_worker", lie, options]
    program = Program(name, LIAR, scene.network.command(LIAR, words), stop=signal.SIGKILL)
    log = scene.fleet.lives[STORE].log.with_name(LOG)
    return await start(program, log, preexec_fn=fleet.die_with_conductor)


async def _until(scene: Scene, name: str, *, listed: bool) -> None:
    until = scene.now() + SERVES_S
    while True:
        told = await scene.fleet.ask(ROUTER, "/workers")
        if told is not None and any(each["name"] == name for each in told["workers"]) is listed:
            return
        if scene.now() > until:
            raise RuntimeError(f"{name} is {'not ' if listed else ''}listed after {SERVES_S:g} s")
        await asyncio.sleep(0.1)
