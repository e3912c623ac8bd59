"""Estimates the detection of unanticipated bugs: generated mutants, drawn at random, against simulated worlds.

A mutant is tried on the worlds that reach its statement, in the order of their seeds, until one raises an alarm; where
no world reaches it, none can see it. Survivors can be given to the unit tests of their module and its part of the tree.
So there are three figures: caught by worlds alone, by worlds or unit tests, and by none. Each estimates what would
become of any other mutants.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import as_completed

import msgspec

from kvbaton_proof.sim.campaign import Told, pool
from kvbaton_proof.sim.looking import look
from kvbaton_proof.sim.mutants import kept, mutating, under_test
from kvbaton_proof.sim.mutants.mutating import Place
from kvbaton_proof.sim.reach import Lines, reached_by, together

REACH_BATCH = 25


class Fate(msgspec.Struct, frozen=True):
    """What became of one generated mutant."""

    name: str
    where: str
    what: str
    caught: bool  # by the simulator
    seed: int | None = None
    tried: int = 0  # worlds, until it was caught
    promise: str = ""
    seen: str = ""
    reached: int = 0  # by so many worlds
    test: str = ""  # that caught what no world did


class Survey(msgspec.Struct):
    """What became of all that were drawn."""

    drawn: int
    draw: int
    seeds: int
    caught: int
    share: float  # that worlds alone catch
    share_with_tests: float | None  # that worlds or unit tests catch
    unreached: int
    only_tests: int | None  # None: tests were not asked
    survive: int  # what was asked
    clean_alarms: int
    wall_s: float
    fates: list[Fate]

    @property
    def holds(self) -> bool:
        return not self.clean_alarms


def draw(modules: Sequence[str], count: int, seed: int) -> list[Place]:
    """Mutants, spread evenly over modules and operators, without those that are known to change nothing."""
    there = [each for each in kept.equivalent().items() if each[0].split(":")[0] in modules]
    known = {mutating.place_of(*each).name for each in there}
    rng = random.Random(f"kvbaton-survey-{seed}")
    kinds: dict[tuple[str, str], list[Place]] = defaultdict(list)
    for module in modules:
        for place in mutating.places(module):
            kinds[module, place.operator].append(place)
    for places in kinds.values():
        rng.shuffle(places)
    drawn: list[Place] = []
    while len(drawn) < count and any(kinds.values()):
        round_of = [kind for kind in sorted(kinds) if kinds[kind]]
        rng.shuffle(round_of)
        for kind in round_of:
            place = kinds[kind].pop()
            if len(drawn) < count and place.name not in known and not mutating.is_equivalent(place.name):
                drawn.append(place)
    return drawn


def seeds_for(place: Place, reached: Lines) -> list[int]:
    """The worlds that come by."""
    if not place.lines:
        return sorted({seed for lines in reached.values() for seeds in lines.values() for seed in seeds})
    of_module = reached.get(place.module, {})
    return sorted({seed for line in place.lines for seed in of_module.get(line, ())})


def tried(place: Place, seeds: Sequence[int]) -> Fate:
    """Switch a mutant on and run worlds until one objects."""
    fate = Fate(place.name, place.where, place.what, False, reached=len(seeds))
    count = 0
    with mutating.switched(place.name, place.what):
        for seed in seeds:
            count += 1
            seen = look(seed)
            if seen is not None:
                found = {"seed": seed, "tried": count, "promise": seen.promise, "seen": seen.what}
                return msgspec.structs.replace(fate, caught=True, **found)
    return msgspec.structs.replace(fate, tried=count)


def survey(
    modules: Sequence[str], count: int, number: int, seeds: range, jobs: int, tell: Told, tests: bool = False
) -> Survey:
    """Draw, try, and sum up; `number` says which of all possible draws."""
    started = time.monotonic()
    places = draw(modules, count, number)
    fates: dict[str, Fate] = {}
    with pool(jobs) as processes:
        batches = [seeds[at : at + REACH_BATCH] for at in range(0, len(seeds), REACH_BATCH)]
        tell(f"which of {len(seeds)} worlds reach which lines")
        reached = together(
            each.result() for each in [processes.submit(reached_by, modules, batch) for batch in batches]
        )
        by = {place.name: seeds_for(place, reached) for place in places}
        waiting = [processes.submit(tried, place, by[place.name]) for place in places]
        for future in as_completed(waiting):
            fate = future.result()
            fates[fate.name] = fate
            tell(f"{len(fates)} of {len(places)} {fate.name}: {_how(fate)}")
        used = sorted({fate.seed for fate in fates.values() if fate.seed is not None})
        alarms = sum(each is not None for each in processes.map(look, used, chunksize=5))
        if tests:
            left = [fate for fate in fates.values() if not fate.caught]
            for future in as_completed([processes.submit(tested, fate) for fate in left]):
                fate = future.result()
                fates[fate.name] = fate
                tell(f"{fate.name}: {f'tests alone, {fate.test}' if fate.test else 'SURVIVES BOTH'}")
    listed = [fates[place.name] for place in places]
    return _summed(listed, number, len(seeds), alarms, started, tests)


def tested(fate: Fate) -> Fate:
    """Give a survivor to the unit tests."""
    module = fate.name.partition(":")[0]
    return msgspec.structs.replace(fate, test=under_test.judged(fate.name, under_test.tests_of([module])).test)


def _summed(fates: list[Fate], number: int, seeds: int, alarms: int, started: float, tests: bool) -> Survey:
    caught = sum(fate.caught for fate in fates)
    only_tests = sum(bool(fate.test) for fate in fates)
    return Survey(
        drawn=len(fates),
        draw=number,
        seeds=seeds,
        caught=caught,
        share=round(caught / max(len(fates), 1), 4),
        share_with_tests=round((caught + only_tests) / max(len(fates), 1), 4) if tests else None,
        unreached=sum(not fate.reached for fate in fates),
        only_tests=only_tests if tests else None,
        survive=len(fates) - caught - only_tests,
        clean_alarms=alarms,
        wall_s=round(time.monotonic() - started, 2),
        fates=fates,
    )


def _how(fate: Fate) -> str:
    if fate.caught:
        return f"{fate.promise}, seed {fate.seed}"
    return f"survives {fate.tried} worlds" if fate.reached else "survives, no world reaches it"
