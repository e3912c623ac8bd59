"""How much of what nobody thought of is seen: generated mutants, drawn by chance, against simulated worlds.

A mutant is tried on the worlds that reach its line, in the order of their seeds, until one raises an alarm; where no
world reaches the line, none can see it. What raises out of product code, or never returns, is seen too: the clean tree
does neither. The share that is caught estimates what would be caught of any other mutants.
"""

from __future__ import annotations

import contextlib
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType

import msgspec

from kvbaton.sim import mutating
from kvbaton.sim.mutating import Place
from kvbaton.sim.promises import DEATH, HANG
from kvbaton.sim.reach import Lines
from kvbaton.sim.run import run_seed

SEED_CPU_S = 10.0
"""A world takes a tenth of a second; one that takes so long does not come to its end."""


class Seen(msgspec.Struct, frozen=True):
    """What a world made of a mutant."""

    promise: str
    what: str


class Fate(msgspec.Struct, frozen=True):
    """What became of one generated mutant."""

    name: str
    where: str
    what: str
    caught: bool
    seed: int = -1
    tried: int = 0  # worlds, until it was caught
    promise: str = ""
    seen: str = ""
    reached: int = 0  # by so many worlds


class _Endless(BaseException):
    """The world used up its time. Not an `Exception`: no `except` of the product may swallow it."""


def draw(modules: Sequence[str], count: int, seed: int) -> list[Place]:
    """Mutants, spread evenly over modules and operators, none of which compiles to the code that is there."""
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
            if len(drawn) < count and not mutating.is_equivalent(place.name):
                drawn.append(place)
    return drawn


def seeds_for(place: Place, reached: Lines) -> list[int]:
    """The worlds that come by."""
    lines = reached.get(place.module, {})
    return sorted({seed for line in place.lines for seed in lines.get(line, ())})


def tried(place: Place, seeds: Iterable[int], reached: int) -> Fate:
    """Switch a mutant on and run worlds until one objects."""
    count = 0
    with mutating.switched(place.name, place.what):
        for seed in seeds:
            count += 1
            seen = look(seed)
            if seen is not None:
                return Fate(place.name, place.where, place.what, True, seed, count, seen.promise, seen.what, reached)
    return Fate(place.name, place.where, place.what, False, tried=count, reached=reached)


def look(seed: int) -> Seen | None:
    """Run one world; what it objects to, if anything."""
    try:
        with _limited(SEED_CPU_S):
            result = run_seed(seed)
    except _Endless:
        return Seen(HANG, "the world did not come to its end")
    except Exception as error:  # noqa: BLE001 - product code that is called by the world itself
        return Seen(DEATH, f"{type(error).__name__}: {error}"[:200])
    if result.holds:
        return None
    said = result.what.strip().splitlines()
    return Seen(result.promise, (said[-1] if said else "")[:200])


@contextlib.contextmanager
def _limited(cpu_s: float) -> Iterator[None]:
    """Break off what uses more processor time than this (main thread only, as signals are)."""

    def over(number: int, frame: FrameType | None) -> None:
        raise _Endless

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, cpu_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def survey(
    places: Iterable[Place], reached: Lines, seeds_max: int, tell: Callable[[Fate], None]
) -> list[Fate]:
    """Each mutant on the worlds that reach it, at most so many."""
    fates = []
    for place in places:
        seeds = seeds_for(place, reached)
        fates.append(tried(place, seeds[:seeds_max], len(seeds)))
        tell(fates[-1])
    return fates
