"""Mutants, each until a world or a unit test of its module objects: what the proof is worth is what it catches.

A fresh hunt tries seeds 0, 1, 2, …, then the tests. It is remembered who caught a mutant (`kept`), and asked first the
next time; where that fails, the others are. The figure that measures the simulator is kept apart: caught by worlds
alone. Laws: a mutant that a test caught counts as one that no world sees, until a fresh hunt shows otherwise. A seed to
which the clean tree objects as well proves nothing about a mutant: it is passed over, and named. So does a test that
fails on the clean tree.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import cache

import msgspec

from kvbaton_proof.sim.campaign import Told, pool
from kvbaton_proof.sim.looking import Seen, look
from kvbaton_proof.sim.mutants import kept, mutating, under_test
from kvbaton_proof.sim.mutants.handwritten import MUTANTS
from kvbaton_proof.sim.mutants.mutation import Mutant

SHARE_MIN = 0.97
BATCH = 8
"""Mutants that are hunted by one process, one after the other."""
WORLDS, TESTS, NOBODY, NOT_ASKED = "worlds", "tests", "nobody", "not asked"


class Catch(msgspec.Struct, frozen=True):
    """How a mutant fared."""

    name: str
    rule: str
    story: str
    by: str = NOBODY  # or worlds, tests; not asked: tests are known to catch it, and there are none here
    promise: str = ""
    seeds_needed: int = 0
    what: str = ""
    where: str = ""
    seed: int | None = None
    test: str = ""
    passed_over: dict[int, str] = {}  # seeds to which the clean tree objects as well, and what it says

    @property
    def caught(self) -> bool:
        """By the simulator."""
        return self.by == WORLDS

    @property
    def catcher(self) -> str:
        """As it is remembered."""
        return self.test if self.seed is None else str(self.seed)


class MutantsSummary(msgspec.Struct):
    """How all mutants fared, and the clean tree over the seeds that caught them."""

    mutants: int
    handwritten: int
    generated: int
    by_worlds: int
    share_by_worlds: float  # that worlds alone catch: what the simulator is worth
    by_tests: int  # of those that no world catches
    share: float  # that worlds or unit tests catch
    survive: int
    checkout: bool  # without one there are no unit tests to ask
    seeds_max: int
    fresh: bool
    seeds_needed: dict[str, int]
    clean_seeds: int
    clean_alarms: int
    wall_s: float
    catches: list[Catch]
    clean_broken: list[dict[str, str | int]]

    @property
    def holds(self) -> bool:
        enough = self.share >= SHARE_MIN if self.checkout else True
        return enough and not self.survive and not self.clean_alarms


def run_mutants(names: Sequence[str], seeds_max: int, jobs: int, tell: Told, fresh: bool = False) -> MutantsSummary:
    """Each mutant until it is caught; those of one seed in one process, which looks at its clean world once."""
    started = time.monotonic()
    catches: dict[str, Catch] = {}
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(kept.FIRST if fresh else kept.catcher_of(name), []).append(name)
    groups = [group[at : at + BATCH] for group in alike.values() for at in range(0, len(group), BATCH)]
    with pool(jobs) as processes:
        waiting = {processes.submit(hunt_all, group, seeds_max, fresh) for group in groups}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for catch in (each for future in done for each in future.result()):
                catches[catch.name] = catch
                tell(f"{len(catches)} of {len(names)} {catch.name}: {how(catch)}")
    return _summary([catches[name] for name in names], seeds_max, fresh, started)


def _summary(catches: list[Catch], seeds_max: int, fresh: bool, started: float) -> MutantsSummary:
    alarms = {seed: what for catch in catches for seed, what in catch.passed_over.items()}
    looked_at = {catch.seed for catch in catches if catch.seed is not None} | alarms.keys()
    handwritten = {each.name for each in MUTANTS}
    by_worlds = sum(each.caught for each in catches)
    by_tests = sum(each.by == TESTS for each in catches)
    count = max(len(catches), 1)
    return MutantsSummary(
        mutants=len(catches),
        handwritten=sum(each.name in handwritten for each in catches),
        generated=sum(each.name not in handwritten for each in catches),
        by_worlds=by_worlds,
        share_by_worlds=round(by_worlds / count, 4),
        by_tests=by_tests,
        share=round((by_worlds + by_tests) / count, 4),
        survive=sum(each.by == NOBODY for each in catches),
        checkout=under_test.is_checkout(),
        seeds_max=seeds_max,
        fresh=fresh,
        seeds_needed=_spread([each.seeds_needed for each in catches if each.caught]),
        clean_seeds=len(looked_at),
        clean_alarms=len(alarms),
        wall_s=round(time.monotonic() - started, 2),
        catches=catches,
        clean_broken=[
            {"seed": seed, "what": what, "replay": f"kvbaton sim --replay {seed}"} for seed, what in alarms.items()
        ],
    )


def hunt_all(names: Sequence[str], seeds_max: int, fresh: bool) -> list[Catch]:
    return [hunt(name, seeds_max, fresh) for name in names]


def hunt(name: str, seeds_max: int, fresh: bool = False) -> Catch:
    """One mutant: who caught it last, then seeds 0, 1, 2, … and the unit tests of its module until one objects."""
    mutant = kept.find(name)
    catch = Catch(name, mutant.rule, mutant.story, where=_where(name))
    known = kept.FIRST if fresh else kept.catcher_of(name)
    if not known.isdigit():
        if not under_test.is_checkout():
            return msgspec.structs.replace(catch, by=NOT_ASKED, test=known)
        if under_test.judged(name, [known]).caught:
            return msgspec.structs.replace(catch, by=TESTS, test=known)
        known = kept.FIRST
    first = int(known)
    catch = _seen_in_worlds(catch, mutant, dict.fromkeys((first, *range(seeds_max))))
    if catch.caught or not under_test.is_checkout():
        return catch
    tests = under_test.tests_of(mutant.switch.modules)
    if not tests:
        return catch
    verdict = under_test.judged(name, tests)
    return msgspec.structs.replace(catch, by=TESTS, test=verdict.test) if verdict.caught else catch


def _where(name: str) -> str:
    line = next((each for each in kept.read() if each.name == name), None)
    return "" if line is None else mutating.place_of(name, line.what).where


def _seen_in_worlds(catch: Catch, mutant: Mutant, seeds: Iterable[int]) -> Catch:
    passed_over: dict[int, str] = {}
    left = iter(seeds)
    while (first := _first(mutant, left)) is not None:
        seed, seen = first
        alarm = _unharmed(seed)
        if alarm is None:
            seen_so = {"promise": seen.promise, "what": seen.what, "seed": seed, "seeds_needed": seed + 1}
            return msgspec.structs.replace(catch, by=WORLDS, passed_over=passed_over, **seen_so)
        passed_over[seed] = f"{alarm.promise}: {alarm.what}"
    return msgspec.structs.replace(catch, passed_over=passed_over)


def _first(mutant: Mutant, seeds: Iterator[int]) -> tuple[int, Seen] | None:
    """The next seed that objects while the mutant is on."""
    with mutant.switch():
        for seed in seeds:
            seen = look(seed)
            if seen is not None:
                return seed, seen
    return None


@cache
def _unharmed(seed: int) -> Seen | None:
    """What the clean tree objects to: looked at once, in each process, for all mutants that the seed catches."""
    return look(seed)


def how(catch: Catch) -> str:
    """One line's worth."""
    if catch.caught:
        return f"{catch.promise}, seed {catch.seed}"
    if catch.by == NOT_ASKED:
        return f"by unit tests, which need a checkout: {catch.test}"
    return f"by unit tests: {catch.test}" if catch.by == TESTS else "NOT CAUGHT"


def _spread(needed: list[int]) -> dict[str, int]:
    """Of the caught: how many needed up to so many seeds."""
    return {f"up_to_{limit}": sum(each <= limit for each in needed) for limit in (1, 3, 10, 30, 100, 300, 1000)}
