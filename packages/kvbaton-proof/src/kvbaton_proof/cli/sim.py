"""`kvbaton sim`: kills, partitions and pauses simulated clusters, and checks every promise at every step."""

from __future__ import annotations

import argparse
import re
from typing import Any

import msgspec

from kvbaton.cli import progress
from kvbaton.cli.arguments import whole
from kvbaton.processes.operator_errors import CommandError
from kvbaton_proof.sim import kept_seeds
from kvbaton_proof.sim.campaign import Summary, default_jobs, run_seeds
from kvbaton_proof.sim.cover import Coverage
from kvbaton_proof.sim.kept_seeds import KeptReport
from kvbaton_proof.sim.mutants import hunting, kept, mutating
from kvbaton_proof.sim.mutants.hunting import MutantsSummary, how
from kvbaton_proof.sim.mutants.survey import Fate, Survey
from kvbaton_proof.sim.run import run_seed


def as_json(value: Any, holds: bool) -> str:
    return msgspec.json.encode({"holds": holds, **msgspec.to_builtins(value)}).decode()


def mutants(summary: MutantsSummary) -> str:
    lines = [f"{catch.name:32} rule {catch.rule:8} {how(catch)}" for catch in summary.catches]
    needed = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in summary.seeds_needed.items())
    either = summary.by_worlds + summary.by_tests
    lines += [
        f"{summary.mutants} mutants, {summary.handwritten} written by hand, {summary.generated} generated",
        f"caught by worlds alone: {summary.by_worlds} ({summary.share_by_worlds:.1%}); by worlds or unit tests: "
        f"{f'{either} ({summary.share:.1%})' if summary.checkout else 'not asked, unit tests need a checkout'}; "
        f"by nobody: {summary.survive}",
        f"seeds needed: {needed}",
        f"the clean tree raised {summary.clean_alarms} alarms over the {summary.clean_seeds} seeds that caught them; "
        f"{summary.wall_s:.0f} s",
    ]
    return "\n".join(lines)


def kept_text(found: KeptReport) -> str:
    lines = [f"BROKEN seed {seed} ({what})\n  kvbaton sim --replay {seed}" for seed, what in found.broken.items()]
    lines += [f"NOT CAUGHT by any of its seeds: {name}" for name in found.unseen]
    held, caught = found.seeds - len(found.broken), found.mutants - len(found.unseen)
    lines.append(f"{held} of {found.seeds} kept seeds hold; {caught} of {found.mutants} of their mutants are caught")
    return "\n".join(lines)


def surveyed(found: Survey) -> str:
    lines = [f"{fate.name}  {fate.what}\n    {_fate(fate)}" for fate in found.fates]
    both, none = "not asked (--tests)", "unknown"
    if found.only_tests is not None:
        both, none = f"{found.caught + found.only_tests} ({found.share_with_tests:.1%})", str(found.survive)
    lines.append(
        f"{found.drawn} mutants, draw {found.draw}, {found.seeds} worlds; caught by worlds alone: {found.caught} "
        f"({found.share:.1%}); by worlds or unit tests: {both}; by none: {none}; "
        f"{found.unreached} are not reached by any world; "
        f"the clean tree raised {found.clean_alarms} alarms over the same seeds; {found.wall_s:.0f} s"
    )
    return "\n".join(lines)


def _fate(fate: Fate) -> str:
    if fate.caught:
        return f"caught by seed {fate.seed}, number {fate.tried} tried: {fate.promise}: {fate.seen}"
    where = f"reached by {fate.reached} worlds" if fate.reached else "reached by no world"
    return f"only by tests: {fate.test}; {where}" if fate.test else f"SURVIVES, {where}"


def coverage(found: Coverage) -> str:
    lines = [f"{each.module:28} {each.reached:5} of {each.lines:5}  {each.share:6.1%}" for each in found.modules]
    for each in found.missed:
        numbers = ", ".join(str(line) for line in each.lines)
        lines.append(f"not reached: {each.function} (lines {numbers}): {each.reason or 'NO REASON GIVEN'}")
    lines += [f"excluded: {name}: {why}" for name, why in found.left_out.items()]
    lines += [f"stale reason: {name} is reached, or no longer exists" for name in found.stale_reasons]
    lines.append(
        f"{found.reached} of {found.lines} lines reached ({found.share:.2%}; within functions "
        f"{found.share_in_functions:.2%}) by {found.seeds} seeds; {found.wall_s:.0f} s"
    )
    return "\n".join(lines)


HELP = "run simulated clusters under faults and check every promise"
SEED_MAX = (1 << 63) - 1
SEEDS, MUTANT_SEEDS, SURVEY_SEEDS = range(200), 100, 150
MODULES = {"core": mutating.core, "ranks": mutating.ranks}
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


def mutant(text: str) -> str:
    """A mutant by name: one of the list, or any that can be generated."""
    try:
        return kept.find(text).name
    except mutating.Vanished as error:
        raise argparse.ArgumentTypeError(f"{error}; `kvbaton sim --mutants --json` lists the names") from None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seeds", type=seeds, default=None, metavar="A..B", help="seeds of the worlds (default: 0..199)")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--mutants", action="store_true", help="run every mutant until a world or a unit test catches it")
    what.add_argument("--replay", type=whole(0, SEED_MAX), metavar="SEED", help="run one world and print its trace")
    what.add_argument("--kept", action="store_true", help="replay every seed that alarmed once, and their mutants")
    what.add_argument("--survey", type=positive, metavar="N", help="draw N generated mutants and count those caught")
    what.add_argument("--coverage", action="store_true", help="lines of the product that the worlds of --seeds reach")
    add("--mutant", type=mutant, metavar="NAME", help="with --replay: apply this mutant")
    add("--mutant-seeds", type=positive, default=None, metavar="N", help="leave a mutant to unit tests after N seeds")
    add(
        "--fresh",
        action="store_true",
        help="with --mutants: start at seed 0, whoever caught it last",
    )
    add("--draw", type=whole(0, SEED_MAX), default=0, metavar="S", help="with --survey: seed of the draw")
    add("--of", choices=(*MODULES, "all"), default="all", help="with --survey, --coverage: modules to use")
    add("--tests", action="store_true", help="with --survey: run the tests on survivors (in a checkout)")
    add("--jobs", type=positive, default=default_jobs(), metavar="N", help="processes (default: cores)")
    add("--json", action="store_true", help="print one object with the figures")


def run(args: argparse.Namespace) -> int:
    if args.seeds is not None and (args.mutants or args.kept or args.survey or args.replay is not None):
        raise CommandError("--seeds goes with --coverage or alone; mutants are tried on seeds 0 to --mutant-seeds")
    if args.replay is not None:
        return _replay(args.replay, args.mutant, args.json)
    if args.mutants:
        return _mutants(args)
    if args.kept:
        return _kept(args)
    if args.survey is not None or args.coverage:
        return _reached(args)
    chosen = args.seeds or SEEDS
    with progress.shown(f"seeds {chosen[0]}..{chosen[-1]}", quiet=args.json) as tell:
        total = run_seeds(chosen, args.jobs, tell)
    print(as_json(total, total.holds) if args.json else _text(total))
    return 0 if total.holds else 1


def _mutants(args: argparse.Namespace) -> int:
    names, most = kept.every(), args.mutant_seeds or MUTANT_SEEDS
    with progress.shown("mutants", quiet=args.json) as tell:
        found = hunting.run_mutants(names, most, args.jobs, tell, args.fresh)
    print(as_json(found, found.holds) if args.json else mutants(found))
    return 0 if found.holds else 1


def _kept(args: argparse.Namespace) -> int:
    with progress.shown("kept seeds", quiet=args.json) as tell:
        found = kept_seeds.replay(kept_seeds.read(), tell)
    print(as_json(found, found.holds) if args.json else kept_text(found))
    return 0 if found.holds else 1


def _reached(args: argparse.Namespace) -> int:
    """Commands that trace lines."""
    from kvbaton_proof.sim.cover import run_coverage
    from kvbaton_proof.sim.mutants.survey import survey
    from kvbaton_proof.sim.reach import NoCoverage, tool

    try:
        tool()
    except NoCoverage as error:
        raise CommandError(str(error)) from None
    modules = [name for kind, names in MODULES.items() if args.of in (kind, "all") for name in names()]
    if args.coverage:
        with progress.shown("coverage", quiet=args.json) as tell:
            lines = run_coverage(modules, args.seeds or SEEDS, args.jobs, tell)
        print(as_json(lines, lines.holds) if args.json else coverage(lines))
        return 0 if lines.holds else 1
    worlds = range(args.mutant_seeds or SURVEY_SEEDS)
    with progress.shown("survey", quiet=args.json) as tell:
        found = survey(modules, args.survey, args.draw, worlds, args.jobs, tell, args.tests)
    print(as_json(found, found.holds) if args.json else surveyed(found))
    return 0 if found.holds else 1


def _replay(seed: int, name: str | None, as_json: bool) -> int:
    if name is None:
        result = run_seed(seed)
    else:
        with kept.find(name).switch():
            result = run_seed(seed)
    if as_json:
        print(msgspec.json.encode(result).decode())
    else:
        print("\n".join(result.story))
        verdict = "every promise holds" if result.holds else f"BROKEN, {result.promise}: {result.what}"
        print(f"seed {seed} ({result.profile}), {result.handoffs} handoffs, trace {result.trace_hash}: {verdict}")
    return 0 if result.holds else 1


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
