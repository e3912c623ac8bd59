"""Seeds that alarmed once, replayed; and the mutants that put their mistakes back, each caught by one of its seeds.

`kept_seeds.txt` has one line a seed. A seed is the same world only as long as worlds are drawn alike: where a mistake
can be put back by a mutant, that mutant says whether its seeds still show it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources

import msgspec

from kvbaton_proof.sim.looking import Seen, look
from kvbaton_proof.sim.mutants.kept import find

FILE, BAR = "kept_seeds.txt", " || "
NO_MUTANT = ("-", "check")


Look = Callable[[int], Seen | None]


class KeptSeed(msgspec.Struct, frozen=True):
    """One line of the list."""

    seed: int
    showed: str
    mutant: str = ""


class KeptReport(msgspec.Struct):
    """What came of the list."""

    seeds: int = 0
    mutants: int = 0
    broken: dict[int, str] = {}
    unseen: list[str] = []  # mutants that none of their seeds catches

    @property
    def holds(self) -> bool:
        return not self.broken and not self.unseen


def read(text: str | None = None) -> list[KeptSeed]:
    """Every line, in the order of the file."""
    if text is None:
        text = resources.files("kvbaton_proof.sim").joinpath(FILE).read_text()
    found = []
    for line in (line for line in text.splitlines() if line.strip() and not line.startswith("#")):
        parts = [part.strip() for part in line.split(BAR)]
        if len(parts) != len(KeptSeed.__struct_fields__) or not parts[0].isdigit():
            raise ValueError(f"{FILE}: {line!r} is not: seed || what it showed || mutant, check or -")
        found.append(KeptSeed(int(parts[0]), parts[1], "" if parts[2] in NO_MUTANT else parts[2]))
    return found


def replay(lines: list[KeptSeed], tell: Callable[[str], None], look_at: Look = look) -> KeptReport:
    """Every seed on the tree as it is, then every mutant on its own seeds."""
    report = KeptReport(seeds=len(lines))
    for number, line in enumerate(lines):
        seen = look_at(line.seed)
        if seen is not None:
            report.broken[line.seed] = f"{seen.promise}: {seen.what}"
        tell(f"{number + 1} of {len(lines)} seeds")
    names = list(dict.fromkeys(line.mutant for line in lines if line.mutant))
    report.mutants = len(names)
    for name in names:
        with find(name).switch():
            if not any(look_at(line.seed) for line in lines if line.mutant == name):
                report.unseen.append(name)
    return report
