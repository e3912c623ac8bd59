"""The generated mutants that are kept: one line each, by name, so that each run tries the same ones.

`proof/sim/mutants/mutants_generated.txt` has, between double bars: the name, the seed that caught it when all were
last hunted
afresh, the rule that it breaks, and what it changes. A line whose seed is `tests` is one that the simulator cannot
see; it goes on with the test that does, and why no world can. What changes nothing that anybody could see is not kept.
`proof/sim/mutants/mutants_seeds.txt` has the same seeds of those that are written by hand, where these were many.

Law: a line whose place has gone from the code, or now reads otherwise, is an error: it is hunted again by hand
(`kvbaton sim --survey`) or taken out, never passed over.
"""

from __future__ import annotations

from importlib import resources

import msgspec

from kvbaton_proof.sim.mutants import mutating
from kvbaton_proof.sim.mutants.mutation import Mutant

FILE, EQUIVALENT, SEEDS = "mutants_generated.txt", "mutants_equivalent.txt", "mutants_seeds.txt"
FIELDS, BAR = 4, " || "
BY_TESTS = "tests"
SEEDS_HEADER = "# Written by tools/kept_mutants.py: a mutant that is written by hand || the seed that caught it"
HEADER = "# Written by tools/kept_mutants.py: name || seed (or tests) || rule || what [|| test || why no world sees it]"


class Kept(msgspec.Struct, frozen=True):
    """One line of the file."""

    name: str
    rule: str
    what: str
    seed: int | None  # that caught it in the last fresh hunt; None: no world can
    test: str = ""  # that catches it
    reason: str = ""  # why no world can


def read(text: str | None = None) -> list[Kept]:
    """Every line, in the order of the file."""
    return [_line(line) for line in _lines(_text(FILE) if text is None else text)]


def handwritten_seeds(text: str | None = None) -> dict[str, int]:
    """The seed that caught a mutant written by hand when it was last hunted afresh."""
    lines = [line.split(BAR) for line in _lines(_text(SEEDS) if text is None else text)]
    return {name.strip(): int(seed) for name, seed in lines}


def written_seeds(seeds: dict[str, int]) -> str:
    return "\n".join([SEEDS_HEADER, *(f"{name}{BAR}{seed}" for name, seed in sorted(seeds.items()))]) + "\n"


def equivalent() -> dict[str, str]:
    """What changes nothing that a promise is about: the change by its name, which a survey leaves out."""
    lines = [line.split(BAR) for line in _lines(_text(EQUIVALENT))]
    return {name.strip(): what.strip() for name, what, _ in lines}


def _text(file: str) -> str:
    return resources.files("kvbaton_proof.sim.mutants").joinpath(file).read_text()


def _lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def _line(line: str) -> Kept:
    parts = [part.strip() for part in line.split(BAR)]
    if len(parts) < FIELDS:
        raise ValueError(f"{FILE}: {line!r} has {len(parts)} of {FIELDS} fields (name || seed || rule || what)")
    name, seed, rule, what = parts[:FIELDS]
    if seed != BY_TESTS:
        return Kept(name, rule, what, int(seed))
    if len(parts) != FIELDS + 2:
        raise ValueError(f"{FILE}: {name} is for tests, and does not say which and why (… || test || reason)")
    return Kept(name, rule, what, None, parts[FIELDS], parts[FIELDS + 1])


def written(kept: list[Kept]) -> str:
    """The file's text, sorted by name."""
    lines = [HEADER]
    for each in sorted(kept, key=lambda one: one.name):
        fields = [each.name, BY_TESTS if each.seed is None else str(each.seed), each.rule, each.what]
        lines.append(BAR.join(fields + ([each.test, each.reason] if each.seed is None else [])))
    return "\n".join(lines) + "\n"


def mutant(kept: Kept) -> Mutant:
    """As the hand-written ones are."""
    return Mutant(kept.name, kept.rule, kept.what, lambda: mutating.switched(kept.name, kept.what))


def generated(name: str) -> Mutant:
    """Any generated mutant by its name, kept or not."""
    place = mutating.place_of(name)
    return Mutant(name, "", place.what, lambda: mutating.switched(name, place.what))
