"""One function per fault: what is done, and what is undone.

Laws: a function returns when its fault is over, however it ends; it leaves the members started, the wires healed and
the disk with room. What it asks for itself is judged like any other request. What it cannot do it raises.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from kvbaton.control import keyring
from kvbaton.store.disk_tier import SUFFIX
from kvbaton_proof.chaos import client_injuries, strangers
from kvbaton_proof.chaos.chaos_plan import Step
from kvbaton_proof.chaos.chaos_scene import Scene
from kvbaton_proof.chaos.fleet import FleetError
from kvbaton_proof.chaos.liars import false_fault
from kvbaton_proof.chaos.members import ROUTER
from kvbaton_proof.chaos.strangers import listening

DELAY_S = 0.15
LOSS = 0.2
CLOCK_OFF_S = 2 * 3600.0
UNDER_WAY_S = 0.3
"""For a value that was being written when the disk became full."""
WITH = "with "
"""Before the name of who is killed at the same time, in a step's detail."""
DRAIN_S_MAX = 10.0
"""However long the streams are: they go on elsewhere, but for the short ones that cannot."""
AT_ONCE = 24
"""Strangers at a time."""

CHANGES: Mapping[str, Mapping[str, Any]] = {
    "other weights": {"seed": 8},  # must be refused: its KV is of another model
    "tp 2": {"tp": 2},
    "blocks of 8": {"block_tokens": 8, "blocks": 512},
}
"""What a member is started with after a change of its configuration."""


class Done(msgspec.Struct, frozen=True):
    """When it was over, who must serve again (of a link: both ends together), and what there is to say of it."""

    ended_at: float
    who: str = ""
    note: str = ""


Injury = Callable[[Scene, Step], Awaitable[Done]]


async def kill(scene: Scene, step: Step) -> Done:
    also = step.detail.removeprefix(WITH) if step.detail.startswith(WITH) else ""
    await scene.flowing(step.target)
    async with scene.at(step) as note:
        cut = await scene.cut(step.target)
        await asyncio.gather(*(scene.fleet.kill(name) for name in (step.target, also) if name))
    await asyncio.sleep(step.seconds)
    if also:
        await scene.fleet.start(also)
    done = await _back(scene, step.target, ", ".join(filter(None, (note, cut))))
    if also:
        await scene.fleet.wait_listed(also)
    return done


async def kill_router(scene: Scene, step: Step) -> Done:
    return msgspec.structs.replace(await kill(scene, step), who="")  # it is in every answer


async def stop(scene: Scene, step: Step) -> Done:
    await scene.flowing(step.target)
    async with scene.at(step) as note:
        cut = await scene.cut(step.target)
        scene.fleet.stop(step.target)
    try:
        await asyncio.sleep(step.seconds)
    finally:
        scene.fleet.go_on(step.target)
    note = ", ".join(filter(None, (note, cut)))
    return Done(scene.now(), "" if step.target == ROUTER else step.target, note)


async def drain(scene: Scene, step: Step) -> Done:
    note = await _drained(scene, step.target)
    return await _back(scene, step.target, note)


async def roll(scene: Scene, step: Step) -> Done:
    """Each D in turn, also with a P that is killed meanwhile: `detail` says which."""
    also = step.detail.removeprefix(WITH) if step.detail.startswith(WITH) else ""
    notes = []
    for name in [each for each in scene.fleet.engines if scene.fleet.specs[each].role == "decode"]:
        async with scene.locks[step.target or name]:
            ending = asyncio.create_task(_drained(scene, name))
            if also:
                await scene.fleet.kill(also)
                await scene.fleet.start(also)
            notes.append(await ending)
            await _back(scene, name)
            if also:
                await scene.fleet.wait_listed(also)
    return Done(scene.now(), note="; ".join(notes))


async def _drained(scene: Scene, name: str) -> str:
    await scene.flowing(name)
    cut = await scene.cut(name)
    try:
        seconds = await scene.fleet.drain(name, DRAIN_S_MAX)
    except FleetError as error:  # it is gone all the same, and the plan goes on
        scene.problems.append(str(error))
        return f"{name} was killed after {DRAIN_S_MAX:g} s of draining, {cut}"
    return f"{name} drained in {seconds:.1f} s" + (f", {cut}" if cut else "")


async def reconfigure(scene: Scene, step: Step) -> Done:
    await scene.fleet.kill(step.target)
    await scene.fleet.start(step.target, CHANGES[step.detail])
    await scene.fleet.wait_listed(step.target)
    await asyncio.sleep(step.seconds)
    await scene.fleet.kill(step.target)
    return await _back(scene, step.target, "and back again")


async def _back(scene: Scene, name: str, note: str = "") -> Done:
    started_at = scene.now()
    await scene.fleet.start(name)
    await scene.fleet.wait_listed(name)
    return Done(started_at, name, note)


# --- the wires


async def partition(scene: Scene, step: Step) -> Done:
    one, other = step.target.split("-")
    scene.network.cut(one, other)
    scene.network.cut(other, one)
    return await _healed(scene, step)


async def one_way(scene: Scene, step: Step) -> Done:
    scene.network.cut(*step.target.split("-"))
    return await _healed(scene, step)


async def delay(scene: Scene, step: Step) -> Done:
    one, other = step.target.split("-")
    scene.network.slow(one, other, DELAY_S, 0.0)
    scene.network.slow(other, one, DELAY_S, 0.0)
    return await _healed(scene, step)


async def loss(scene: Scene, step: Step) -> Done:
    one, other = step.target.split("-")
    scene.network.slow(one, other, 0.0, LOSS)
    scene.network.slow(other, one, 0.0, LOSS)
    return await _healed(scene, step)


async def _healed(scene: Scene, step: Step) -> Done:
    try:
        await asyncio.sleep(step.seconds)
    finally:
        scene.network.heal()
    return Done(scene.now(), step.target)


# --- the machine


async def full_disk(scene: Scene, step: Step) -> Done:
    try:
        note = scene.fleet.fill_disk()
        await asyncio.sleep(UNDER_WAY_S)
        before = scene.fleet.on_disk()
        await asyncio.sleep(step.seconds)
        new = {name for name in scene.fleet.on_disk() - before if name.endswith(SUFFIX)}
    finally:
        scene.fleet.clear_disk()
    if new:
        raise OSError(f"the disk was not full: {len(new)} values were written meanwhile")
    return Done(scene.now(), note=note)


async def full_shm(scene: Scene, step: Step) -> Done:
    await scene.fleet.kill(step.target)
    started_at = scene.now()
    has_rooms = scene.fleet.around.has_rooms
    await scene.fleet.start(step.target, full_shm=has_rooms)
    await scene.fleet.wait_listed(step.target)
    note = "" if has_rooms else "no mounts are allowed here: it was started again with /dev/shm as it is"
    return Done(started_at, step.target, note)


async def clock_step(scene: Scene, step: Step) -> Done:
    off_s = -CLOCK_OFF_S if step.detail == "back" else CLOCK_OFF_S
    if not scene.breakpoints.step_clock(step.target, off_s):
        raise OSError(f"{step.target} has no line to the conductor; its clock cannot be stepped")
    try:
        await asyncio.sleep(step.seconds)
    finally:
        scene.breakpoints.step_clock(step.target, 0.0)
    return Done(scene.now(), step.target)


async def let_strangers_come(scene: Scene, step: Step) -> Done:
    pids = [scene.fleet.pid(name) for name in scene.fleet.specs]
    places = [place for place in listening(pids) if place[0][:1] not in ("\0", "/")]
    if not places:
        raise OSError("nobody listens anywhere that a stranger could come to")
    rng = random.Random(scene.rng.random())
    known = [keyring.load(scene.fleet.around.keys, name).public for name in scene.fleet.specs]  # anybody may know these
    counts = await strangers.visit(places, step.seconds, rng, public_keys=known, at_once=AT_ONCE)
    if counts[strangers.LET_IN]:
        scene.problems.append(f"strangers: {counts[strangers.LET_IN]} were let in")
    return Done(scene.now(), note=f"{counts['visits']} visits at {len(places)} ports")


# --- clients


def _of_clients(injury: Callable[[Scene, Step], Awaitable[str]]) -> Injury:
    async def run(scene: Scene, step: Step) -> Done:
        note = await injury(scene, step)
        return Done(scene.now(), note=note)

    return run


INJURIES: Mapping[str, Injury] = {
    "kill": kill,
    "kill-router": kill_router,
    "stop": stop,
    "stop-router": stop,
    "drain": drain,
    "roll": roll,
    "reconfigure": reconfigure,
    "partition": partition,
    "one-way": one_way,
    "delay": delay,
    "loss": loss,
    "full-disk": full_disk,
    "full-shm": full_shm,
    "clock-step": clock_step,
    "strangers": let_strangers_come,
    "liar": _of_clients(false_fault.tell_lies),
    "false-registry": _of_clients(false_fault.lie_in_lists),
    "false-writes": _of_clients(false_fault.lie_of_writes),
    "false-kv": _of_clients(false_fault.lie_of_kv),
    **{name: _of_clients(each) for name, each in client_injuries.INJURIES.items()},
}
