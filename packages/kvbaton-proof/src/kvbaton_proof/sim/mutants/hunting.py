"""Mutants, each until a world objects: what the checkers are worth is what they catch.

A mutant is hunted over seeds 0, 1, 2, …: `seeds_needed` is how many that took, so a lucky one shows. Where the last
fresh hunt needed many, its seed is tried first and `seeds_needed` is what that hunt found; `fresh` hunts all again.
A seed to which the clean tree objects as well proves nothing about a mutant: it is passed over, and told.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from functools import cache

import msgspec

from kvbaton_proof.sim.campaign import Told, pool
from kvbaton_proof.sim.looking import Seen, look
from kvbaton_proof.sim.mutants import kept
from kvbaton_proof.sim.mutants.handwritten import MUTANTS
from kvbaton_proof.sim.mutants.mutating import place_of
from kvbaton_proof.sim.mutants.mutation import Mutant

HINT_FROM = 1
"""A remembered seed below this would be the first one anyway."""
UNSEEN_SEEDS = 5
"""How many worlds try what is known to be seen by tests alone."""
SHARE_MIN = 0.95
CLEAN_BATCH = 10


class Catch(msgspec.Struct, frozen=True):
    """How a mutant fared."""

    name: str
    rule: str
    story: str
    caught: bool  # by the simulator
    promise: str = ""
    seeds_needed: int = 0
    what: str = ""
    where: str = ""
    seed: int | None = None
    by: str = "nobody"  # sim, tests
    test: str = ""  # that sees what no world does
    reason: str = ""  # why no world does
    passed_over: list[int] = []  # seeds to which the clean tree objects as well


class MutantsSummary(msgspec.Struct):
    """How all mutants fared, and the clean tree over the seeds that caught them."""

    mutants: int
    handwritten: int
    generated: int
    caught: int
    share: float
    only_tests: int
    survive: int
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
        return self.share >= SHARE_MIN and not self.survive and not self.clean_alarms


def every() -> list[str]:
    """The names of all mutants that a run tries: those written by hand, then those kept of the generated ones."""
    return [*(each.name for each in MUTANTS), *(each.name for each in kept.read())]


def find(name: str) -> Mutant:
    """A mutant by name: by hand, kept, or any that can be generated."""
    for each in MUTANTS:
        if each.name == name:
            return each
    return next((kept.mutant(each) for each in kept.read() if each.name == name), None) or kept.generated(name)


def run_mutants(names: Sequence[str], seeds_max: int, jobs: int, tell: Told, fresh: bool = False) -> MutantsSummary:
    """Each mutant until it is caught, then the clean tree over the seeds that caught one."""
    started = time.monotonic()
    catches: dict[str, Catch] = {}
    with pool(jobs) as processes:
        waiting = {processes.submit(hunt, name, seeds_max, fresh) for name in names}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                catch = future.result()
                catches[catch.name] = catch
                tell(f"{len(catches)} of {len(names)} {catch.name}: {_how(catch, seeds_max)}")
        used = [seed for catch in catches.values() for seed in (catch.seed, *catch.passed_over)]
        seeds = sorted({seed for seed in used if seed is not None})
        parts = [processes.submit(clean, seeds[at : at + CLEAN_BATCH]) for at in range(0, len(seeds), CLEAN_BATCH)]
        broken = [each for part in parts for each in part.result()]
    return _summary([catches[name] for name in names], seeds_max, fresh, len(seeds), broken, started)


def _summary(
    catches: list[Catch], seeds_max: int, fresh: bool, seeds: int, broken: list[dict[str, str | int]], started: float
) -> MutantsSummary:
    handwritten = {each.name for each in MUTANTS}
    caught = sum(each.caught for each in catches)
    only_tests = sum(each.by == "tests" for each in catches)
    return MutantsSummary(
        mutants=len(catches),
        handwritten=sum(each.name in handwritten for each in catches),
        generated=sum(each.name not in handwritten for each in catches),
        caught=caught,
        share=round(caught / max(len(catches), 1), 4),
        only_tests=only_tests,
        survive=len(catches) - caught - only_tests,
        seeds_max=seeds_max,
        fresh=fresh,
        seeds_needed=_spread([each.seeds_needed for each in catches if each.caught]),
        clean_seeds=seeds,
        clean_alarms=len(broken),
        wall_s=round(time.monotonic() - started, 2),
        catches=catches,
        clean_broken=broken,
    )


def hunt(name: str, seeds_max: int, fresh: bool = False) -> Catch:
    """Run one mutant over seeds 0, 1, 2, … until a checker objects."""
    mutant = find(name)
    line = next((each for each in kept.read() if each.name == name), None)
    catch = Catch(name, mutant.rule, mutant.story, caught=False)
    if line is not None:
        catch = msgspec.structs.replace(catch, where=place_of(name, line.what).where)
    unseen = line if line is not None and line.seed is None else None
    hint = line.seed if line is not None else kept.handwritten_seeds().get(name)
    passed_over: list[int] = []
    seeds = _order(None if fresh else hint, seeds_max if unseen is None else UNSEEN_SEEDS)
    while (first := _first(mutant, seeds)) is not None:
        seed, seen = first
        if _unharmed(seed) is None:
            found = {"promise": seen.promise, "what": seen.what, "seed": seed, "seeds_needed": seed + 1}
            return msgspec.structs.replace(catch, caught=True, by="sim", passed_over=passed_over, **found)
        passed_over.append(seed)
    catch = msgspec.structs.replace(catch, passed_over=passed_over)
    if unseen is None:
        return catch
    return msgspec.structs.replace(catch, by="tests", test=unseen.test, reason=unseen.reason)


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


def _order(hint: int | None, seeds_max: int) -> Iterator[int]:
    if hint is not None and hint >= HINT_FROM:
        yield hint
    yield from (seed for seed in range(seeds_max) if seed != hint or seed < HINT_FROM)


def clean(seeds: Sequence[int]) -> list[dict[str, str | int]]:
    """What the clean tree objects to over these seeds: nothing, or the catches there prove nothing."""
    found = [(seed, _unharmed(seed)) for seed in seeds]
    return [
        {"seed": seed, "promise": seen.promise, "what": seen.what, "replay": f"kvbaton sim --replay {seed}"}
        for seed, seen in found
        if seen is not None
    ]


def _how(catch: Catch, seeds_max: int) -> str:
    if catch.caught:
        return f"{catch.promise}, seed {catch.seed}"
    return f"seen by tests alone ({catch.test})" if catch.by == "tests" else f"NOT CAUGHT in {seeds_max} seeds"


def _spread(needed: list[int]) -> dict[str, int]:
    """Of the caught: how many needed up to so many seeds."""
    return {f"up_to_{limit}": sum(each <= limit for each in needed) for limit in (1, 3, 10, 30, 100, 300, 1000)}
