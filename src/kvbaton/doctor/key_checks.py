"""Key directories: whether an engine can use its own, and whether two engines have keys of the same cluster.

Law: no secret is shown; the report is `control.key_room`'s, grouped here by what the operator must do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from kvbaton.control.addressing import ControlError
from kvbaton.control.key_files import openings
from kvbaton.control.key_room import KeyReport, report
from kvbaton.doctor.config_reading import Finding, finding

HALF_ROTATED = "is still the old one of a rotation"


def examine(directory: str, where: str, name: str = "", others: Iterable[str] = ()) -> list[Finding]:
    """A directory, and in it `name` (with its secret) and `others` (by their public files), as `where` needs them."""
    try:
        told = report(directory)
    except (ControlError, OSError) as error:
        fix = f"kvbaton keys new {directory} router p0 d0, or copy the directory from where it was minted"
        return [finding("keys-missing", where, str(error), fix)]
    found, engine, where = list(_modes(Path(directory), f"keys {directory}")), where, f"keys {directory}"
    blamed = [each.found.partition(" ")[0] for each in found]
    tickets = Path(directory) / "tickets.json"
    if not tickets.exists():
        blamed.append(str(tickets))
        found.append(
            finding("keys-missing", where, f"{tickets} is missing", "copy tickets.json from where the keys were minted")
        )
    found += _names(told, engine, name, others)
    found += _problems(told, where, blamed)
    return [*found, *_rotations(told, where)]


def compare(p: str, d: str, where: str, names: Iterable[str]) -> list[Finding]:
    """Two directories that must belong to one cluster; no finding where one cannot be read, which is reported
    already."""
    if Path(p).resolve() == Path(d).resolve():
        return []
    try:
        ours, theirs = report(p), report(d)
    except (ControlError, OSError):
        return []
    fix = "copy public/ and tickets.json of one directory to both hosts"
    tickets = [[key.fingerprint for key in each.ticket_keys] for each in (ours, theirs)]
    if all(tickets) and (tickets[0][0] not in tickets[1] or tickets[1][0] not in tickets[0]):
        found = f"tickets.json: {p} signs with {tickets[0][0]}, {d} with {tickets[1][0]}, and neither has both"
        return [finding("keys-cluster", where, found, fix)]
    return [
        finding("keys-cluster", where, f"public/{name}.json: {p} and {d} have different keys for {name}", fix)
        for name in dict.fromkeys(names)
        if _differ(_prints(ours, name), _prints(theirs, name))
    ]


def _differ(ours: set[str], theirs: set[str]) -> bool:
    return bool(ours and theirs) and not ours & theirs


def _prints(told: KeyReport, name: str) -> set[str]:
    return {key for one in told.identities if one.name == name for key in (one.fingerprint, *one.also)}


def _modes(base: Path, where: str) -> Iterator[Finding]:
    for each in openings(base):
        yield finding("keys-open", where, each.found, each.fix)


def _names(told: KeyReport, where: str, name: str, others: Iterable[str]) -> Iterator[Finding]:
    here = {one.name: one for one in told.identities}
    listed = ", ".join(sorted(here)) or "nobody"
    for each in dict.fromkeys(filter(None, (name, *others))):
        if each not in here:
            found = f"{each} is not in {told.directory}, which has {listed}"
            yield finding("keys-name", where, found, f"kvbaton keys add {told.directory} {each}, or fix the name")
        elif each == name and not here[each].secret_here:
            found = f"{told.directory}/secret/{each}.json is not here, so nothing can run as {each} on this host"
            yield finding("keys-name", where, found, "copy it from where the keys were minted, with mode 600")


def _problems(told: KeyReport, where: str, blamed: list[str]) -> Iterator[Finding]:
    for problem in told.problems:
        if any(problem.startswith((f"{path} ", f"{path}: ")) for path in blamed):
            continue
        found, _, fix = problem.rpartition("; ")
        code = "keys-rotating" if HALF_ROTATED in problem else "keys-broken"
        yield finding(code, where, found or problem, fix if found else "restore the file from where it was minted")


def _rotations(told: KeyReport, where: str) -> Iterator[Finding]:
    for one in told.identities:
        if one.also:
            found = f"{one.name}: its key from before the rotation is still accepted"
            fix = f"once {one.name} runs with the new one: kvbaton keys rotate {told.directory} {one.name} --finish"
            yield finding("keys-rotating", where, found, fix)
    uses = [key.use for key in told.ticket_keys]
    if "next" in uses:
        found = "tickets.json: a new key is waiting to be used for signing"
        fix = f"copy tickets.json to every host; then: kvbaton keys rotate {told.directory} --tickets"
        yield finding("keys-rotating", where, found, fix)
    elif "verifies" in uses:
        found = f"tickets.json: {uses.count('verifies')} old keys still verify"
        fix = f"kvbaton keys rotate {told.directory} --tickets --finish"
        yield finding("keys-rotating", where, found, fix)
