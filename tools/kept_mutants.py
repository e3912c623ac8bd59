"""Hunts all mutants and writes the proof's sim/mutants/mutants_generated.txt and mutants_seeds.txt (those
written by hand).

    python tools/kept_mutants.py                    # those whose remembered world or test catches them no longer
    python tools/kept_mutants.py --fresh            # all from seed 0, then by unit tests
    python tools/kept_mutants.py --add survey.json  # and what is caught of a `kvbaton sim --survey N --json`

What nobody sees any more is printed and left as it is: find out whether the world, the test or the mutant is wrong.
What has gone from the code is told and taken out. The rule of a line is the first whose `Where` in
tools/docs/protocol_rules.txt names its function, or the class or module's own, unless the line has one already.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import msgspec

from kvbaton_proof.sim.campaign import default_jobs
from kvbaton_proof.sim.mutants import kept, mutating
from kvbaton_proof.sim.mutants.handwritten import MUTANTS
from kvbaton_proof.sim.mutants.hunting import NOBODY, Catch, run_mutants
from kvbaton_proof.sim.mutants.mutating import Place

RULES = Path(__file__).parent / "docs" / "protocol_rules.txt"
FILE = Path(kept.__file__).with_name(kept.FILE)
SEEDS_MAX = 100
OF_MODULE = {
    "node.doorway": "8", "node.epochs": "7", "node.node": "20", "protocol.bounded": "5",
    "protocol.machines.context": "18", "protocol.content": "2", "protocol.errors": "17",
    "protocol.geometry.layout": "27", "protocol.geometry.plan": "27", "protocol.geometry.progress": "10",
    "protocol.geometry.spans": "31", "protocol.ids": "1", "protocol.machines.claims": "9",
    "protocol.machines.consumer": "17", "protocol.machines.inbound": "17",
    "protocol.machines.consumer_filling": "17", "protocol.machines.lease": "6", "protocol.machines.ledger": "20",
    "protocol.machines.pairing_state": "24",
    "protocol.machines.pairing_target": "3", "protocol.machines.producer": "9",
    "protocol.machines.push_writer": "14", "protocol.machines.puts": "store",
    "protocol.settings": "25", "protocol.legality": "29", "protocol.wire.codec": "25",
    "protocol.wire.messages": "24", "protocol.wire.ticket": "1",
}  # fmt: skip
"""Where no rule names the function."""


def rules() -> dict[str, str]:
    """The first rule that names a place."""
    found: dict[str, str] = {}
    number, where = "", False
    for line in RULES.read_text().splitlines():
        if line.startswith("## "):
            number, where = line.removeprefix("## ").split(".")[0], False
        where = line.startswith("Where:") or (where and bool(line.strip()))
        if where:
            for place in line.removeprefix("Where:").replace(",", " ").split():
                found.setdefault(place, number)
    return found


def rule_of(place: Place, named: dict[str, str]) -> str:
    of_class = f"{place.module}:{place.function.split('.')[0]}"
    return named.get(f"{place.module}:{place.function}") or named.get(of_class) or OF_MODULE.get(place.module, "20")


def resolved(lines: list[kept.Kept]) -> list[kept.Kept]:
    """Under the names that they have now."""
    there = []
    for line in lines:
        try:
            place = mutating.place_of(line.name, line.what)
            there.append(msgspec.structs.replace(line, name=place.name, what=place.what))
        except mutating.Vanished as error:
            tell(f"TAKEN OUT: {error}")
    return there


def refreshed(lines: list[kept.Kept], new: set[str], args: argparse.Namespace) -> None:
    """Write the seeds that catch them now; what is new is kept if it is caught."""
    FILE.write_text(kept.written(lines))  # where the processes that hunt look names up
    names = [*(each.name for each in MUTANTS), *(line.name for line in lines)]
    caught = {catch.name: catch for catch in run_mutants(names, args.seeds, args.jobs, tell, args.fresh).catches}
    fresh = [
        _fresh(line, caught[line.name]) for line in lines if caught[line.name].by != NOBODY or line.name not in new
    ]
    FILE.write_text(kept.written(fresh))
    by_hand = {each.name: caught[each.name] for each in MUTANTS}
    there = {name: catch.catcher for name, catch in by_hand.items() if catch.by != NOBODY}
    catchers = {name: by for name, by in there.items() if by != kept.FIRST}
    FILE.with_name(kept.SEEDS).write_text(kept.written_catchers(catchers))
    for name in sorted(set(by_hand) - set(there)):
        tell(f"NOT CAUGHT: {name}")


def _fresh(line: kept.Kept, catch: Catch) -> kept.Kept:
    if catch.by != NOBODY:
        return msgspec.structs.replace(line, by=catch.catcher)
    tell(f"NOT CAUGHT ANY MORE: {line.name} ({line.what})")
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--add", type=Path, help="what `kvbaton sim --survey N --json` printed")
    parser.add_argument("--seeds", type=int, default=SEEDS_MAX, help="leave a mutant to unit tests after so many")
    parser.add_argument("--jobs", type=int, default=default_jobs())
    parser.add_argument("--fresh", action="store_true", help="from seed 0, whoever caught it last time")
    args = parser.parse_args()
    lines = {line.name: line for line in resolved(kept.read())}
    before = set(lines)
    if args.add is not None:
        named = rules()
        for fate in msgspec.json.decode(args.add.read_bytes())["fates"]:
            try:
                place = mutating.place_of(fate["name"], fate["what"])
            except mutating.Vanished as error:
                tell(f"PASSED OVER: {error}")
                continue
            lines.setdefault(place.name, kept.Kept(place.name, rule_of(place, named), place.what, kept.FIRST))
    refreshed(list(lines.values()), set(lines) - before, args)
    return 0


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
