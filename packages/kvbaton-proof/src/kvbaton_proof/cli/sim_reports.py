"""Reports of `kvbaton sim` about mutants and coverage."""

from __future__ import annotations

from typing import Any

import msgspec

from kvbaton_proof.sim.cover import Coverage
from kvbaton_proof.sim.kept_seeds import KeptReport
from kvbaton_proof.sim.mutants.hunting import MutantsSummary, how
from kvbaton_proof.sim.mutants.survey import Fate, Survey


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


def kept(found: KeptReport) -> str:
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
