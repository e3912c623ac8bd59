"""The mutants that are kept, and who caught each of them when all were last hunted: a world, by its seed, or a test.

`proof/sim/mutants/mutants_generated.txt` has, between double bars: the name of a generated mutant, the seed or the test
that caught it, the rule that it breaks, and what it changes. `proof/sim/mutants/mutants_seeds.txt` has name and catcher
of those that are written by hand, where that is not the first seed. A test is remembered only where no world of the
last fresh hunt saw the mutant. What changes nothing that anybody could see is not kept.

Law: a line whose place has gone from the code, or now reads otherwise, is an error: it is hunted again by hand
(`kvbaton sim --survey`) or taken out, never passed over.
"""

from __future__ import annotations

from importlib import resources

import msgspec

from kvbaton_proof.sim.mutants import mutating
from kvbaton_proof.sim.mutants.handwritten import MUTANTS
from kvbaton_proof.sim.mutants.mutation import Mutant

FILE, EQUIVALENT, SEEDS = "mutants_generated.txt", "mutants_equivalent.txt", "mutants_seeds.txt"
FIELDS, BAR = 4, " || "
FIRST = "0"
SEEDS_HEADER = "# Written by tools/kept_mutants.py: a mutant that is written by hand || the seed or test that caught it"
HEADER = "# Written by tools/kept_mutants.py: name || the seed or test that caught it || rule || what"


class Kept(msgspec.Struct, frozen=True):
    """One line of the file."""

    name: str
    rule: str
    what: str
    by: str  # a seed in figures, or a test as pytest names it


def read(text: str | None = None) -> list[Kept]:
    """Every line, in the order of the file."""
    return [_line(line) for line in _lines(_text(FILE) if text is None else text)]


def catcher_of(name: str) -> str:
    """The seed or test that caught a mutant, written by hand or generated; the first seed where nothing is known."""
    line = next((each for each in read() if each.name == name), None)
    return line.by if line is not None else handwritten_catchers().get(name, FIRST)


def handwritten_catchers(text: str | None = None) -> dict[str, str]:
    """Who caught a mutant that is written by hand, where it was not the first seed."""
    lines = [line.split(BAR) for line in _lines(_text(SEEDS) if text is None else text)]
    return {name.strip(): by.strip() for name, by in lines}


def written_catchers(catchers: dict[str, str]) -> str:
    return "\n".join([SEEDS_HEADER, *(f"{name}{BAR}{by}" for name, by in sorted(catchers.items()))]) + "\n"


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
    if len(parts) != FIELDS:
        raise ValueError(f"{FILE}: {line!r} has {len(parts)} fields, not {FIELDS} (name || by || rule || what)")
    name, by, rule, what = parts
    return Kept(name, rule, what, by)


def written(kept: list[Kept]) -> str:
    """The file's text, sorted by name."""
    ordered = sorted(kept, key=lambda one: one.name)
    return "\n".join([HEADER, *(BAR.join((each.name, each.by, each.rule, each.what)) for each in ordered)]) + "\n"


def every() -> list[str]:
    """The names of all mutants that a run tries: those written by hand, then those kept of the generated ones."""
    return [*(each.name for each in MUTANTS), *(each.name for each in read())]


def find(name: str) -> Mutant:
    """A mutant by name: by hand, kept, or any that can be generated."""
    for each in MUTANTS:
        if each.name == name:
            return each
    return next((mutant(each) for each in read() if each.name == name), None) or generated(name)


def mutant(kept: Kept) -> Mutant:
    """As the hand-written ones are."""
    return Mutant(kept.name, kept.rule, kept.what, mutating.Switched(kept.name, kept.what))


def generated(name: str) -> Mutant:
    """Any generated mutant by its name, kept or not."""
    place = mutating.place_of(name)
    return Mutant(name, "", place.what, mutating.Switched(name, place.what))
