"""`kvbaton sim`: kills, partitions and pauses simulated clusters, and checks every promise at every step."""

from __future__ import annotations

import argparse
import re
import sys

import msgspec

from kvbaton.cli.arguments import whole
from kvbaton.sim.campaign import MutantsSummary, Summary, default_jobs, run_mutants, run_seeds
from kvbaton.sim.mutants import MUTANTS
from kvbaton.sim.run import run_seed

HELP = "run simulated clusters under faults and check every promise"
SEED_MAX = (1 << 63) - 1
_RANGE = re.compile(r"(\d+)(?:\.\.(\d+))?")


def seeds(text: str) -> range:
    """`7` is one seed, `0..1999` two thousand."""
    match = _RANGE.fullmatch(text)
    if match is None or (match[2] is not None and int(match[2]) < int(match[1])):
        raise argparse.ArgumentTypeError(f"{text!r} is not a seed or a range such as 0..1999")
    first = int(match[1])
    return range(first, int(match[2] or first) + 1)


def positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    names = [mutant.name for mutant in MUTANTS]
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--seeds", type=seeds, default=range(200), metavar="A..B", help="which worlds (default 0..199)")
    what.add_argument("--mutants", action="store_true", help="run every mutant until it is caught")
    what.add_argument("--replay", type=whole(0, SEED_MAX), metavar="SEED", help="run one world and tell its story")
    parser.add_argument("--mutant", choices=names, metavar="NAME", help="with --replay: switch this mutant on")
    parser.add_argument("--mutant-seeds", type=positive, default=600, metavar="N", help="give up on a mutant after N")
    parser.add_argument("--jobs", type=positive, default=default_jobs(), metavar="N", help="processes (default: cores)")
    parser.add_argument("--json", action="store_true", help="print one object with the figures")


def run(args: argparse.Namespace) -> int:
    if args.replay is not None:
        return _replay(args.replay, args.mutant, args.json)
    if args.mutants:
        _tell(
            f"mutants: {len(MUTANTS)}, each over seeds 0..{args.mutant_seeds - 1} until caught, {args.jobs} processes"
        )
        found = run_mutants(MUTANTS, args.mutant_seeds, args.jobs, _tell)
        print(_json(found, found.holds) if args.json else _mutants_text(found))
        return 0 if found.holds else 1
    first, last = args.seeds[0], args.seeds[-1]
    _tell(f"seeds: {first}..{last}, {args.jobs} processes")
    total = run_seeds(args.seeds, args.jobs, _tell)
    print(_json(total, total.holds) if args.json else _text(total))
    return 0 if total.holds else 1


def _replay(seed: int, mutant: str | None, as_json: bool) -> int:
    _tell(f"seed: {seed}" + (f", mutant {mutant}" if mutant else ""))
    if mutant is None:
        result = run_seed(seed)
    else:
        with next(each for each in MUTANTS if each.name == mutant).switch():
            result = run_seed(seed)
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(result.story))
        verdict = "every promise holds" if result.holds else f"BROKEN, {result.promise}: {result.what}"
        print(f"seed {seed} ({result.profile}), {result.handoffs} handoffs, trace {result.trace_hash}: {verdict}")
    return 0 if result.holds else 1


def _json(value: Summary | MutantsSummary, holds: bool) -> str:
    fields = msgspec.to_builtins(value)
    return msgspec.json.encode({"holds": holds, **fields}).decode()


def _text(total: Summary) -> str:
    lines = [
        f"{total.hold} of {total.seeds} seeds hold; {total.handoffs} handoffs, {total.delivered} delivered, "
        f"{total.sim_seconds:.0f} simulated seconds in {total.wall_s:.1f} s ({total.handoffs_per_s:.0f} handoffs/s)",
        "faults: " + ", ".join(f"{count} {name}" for name, count in total.faults.items()),
        "ends: " + ", ".join(f"{count} {name}" for name, count in total.ends.items()),
        f"trace hash {total.trace_hash}",
    ]
    for broken in total.broken:
        lines.append(f"BROKEN seed {broken['seed']} ({broken['promise']}): {broken['what']}\n  {broken['replay']}")
    return "\n".join(lines)


def _mutants_text(found: MutantsSummary) -> str:
    lines = []
    for catch in found.catches:
        how = f"{catch.promise}, seed {catch.seeds_needed - 1}" if catch.caught else "NOT CAUGHT"
        lines.append(f"{catch.name:32} rule {catch.rule:8} {how}")
    lines.append(
        f"{found.caught} of {found.mutants} caught; the clean tree raised {found.clean_alarms} alarms "
        f"over {found.clean_seeds} seeds; {found.wall_s:.0f} s"
    )
    return "\n".join(lines)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
