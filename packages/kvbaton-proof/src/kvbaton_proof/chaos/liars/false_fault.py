"""The faults of false members: one of the product's own processes works as it should, but for one lie.

Laws: a false worker has a key of its own, which is minted for it and removed at the end, as `kvbaton keys remove` does
it. What it was asked to compute is its word: only bait is asked of a P that gives false KV, and only after its removal
is an answer to bait judged. A prompt that reaches a thief is stolen, whatever becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator

import msgspec

from kvbaton.api.params import Mode
from kvbaton.control import key_room, keyring
from kvbaton.control.keyring import LOOK_S
from kvbaton.processes.child_process import Child, Program, end, free_ports, start
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton_proof.chaos import fleet, members
from kvbaton_proof.chaos.board import Board
from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.chaos_scene import Scene
from kvbaton_proof.chaos.judged_request import Prompt, Way, ask
from kvbaton_proof.chaos.liars.false_worker import BAIT
from kvbaton_proof.chaos.liars.liar_fault import LOG
from kvbaton_proof.chaos.liars.liar_http import Door
from kvbaton_proof.chaos.liars.lies import LIAR
from kvbaton_proof.chaos.members import FALSE_REGISTRY, ROUTER, STORE, Ports, Spec

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
