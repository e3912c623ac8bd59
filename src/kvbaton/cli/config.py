"""`kvbaton config`: checks a file of settings before a process depends on it, and lists every setting.

Law: what it accepts, the command of that section accepts: both use the same parsers, and the same checks of how
settings go together. Nothing is opened, bound or connected, and no secret is printed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.cli import main
from kvbaton.cli.arguments import Parser
from kvbaton.cli.screen import stdout
from kvbaton.cli.settings import layers
from kvbaton.cli.settings.file import PROBLEMS_MAX, Problem, SettingsFile, read
from kvbaton.processes.operator_errors import CommandError

HIDDEN = "(not shown)"
_STAND_INS = {
    "name": ("p0",),
    "role": ("prefill", "decode"),
    "keys": ("keys",),
    "registry": ("tcp://127.0.0.1:7700",),
}
"""What a section may leave to flags; with each of these the rest is checked all the same."""
DEFAULT = re.compile(r"\s*\(default: ((?:[^()]|\([^()]*\))*)\)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--check", metavar="FILE", help="check every section of this file, and the environment; exit status 1: mistakes"
    )
    what.add_argument("--list", action="store_true", help="list every setting: section, key, variable, default")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def run(args: argparse.Namespace) -> int:
    if not (args.check or args.list):
        raise CommandError("give --check FILE or --list; see: kvbaton config --help")
    if args.check:
        return _check(args.check, layers.taken(os.environ), args.json)
    print(_listed(_parsers(()), args.json))
    return 0


def _listed(parsers: Mapping[str, Parser], as_json: bool) -> str:
    rows = [
        {"section": name, "key": key, "variable": layers.variable_of(name, key), "flag": action.option_strings[0],
         "default": default_of(action), "about": _about(action)}
        for name, one in parsers.items()
        for key, action in layers.keys_of(one).items()
    ]  # fmt: skip
    if as_json:
        return msgspec.json.encode({"settings": rows}, enc_hook=str).decode()
    cells = [[f"{row['section']}.{row['key']}", str(row["variable"]), _short(row["default"])] for row in rows]
    return "\n".join(stdout().table(["setting", "variable", "default"], cells))


def default_of(action: argparse.Action) -> Any:
    """As its help has it in words, else the value; None for none."""
    told = DEFAULT.search(action.help or "")
    if told:
        return told[1] % vars(action)
    return None if action.default in (None, argparse.SUPPRESS, "", [], ()) else action.default


def _check(path: str, variables: Mapping[str, str], as_json: bool) -> int:
    file = read(path)
    parsers = _parsers([name for _, name in file.sections])
    problems: list[Problem] = []
    settings, needs = [], {}
    for name, one in parsers.items():
        found = layers.gather(one, name, file, variables)
        problems += [each for each in found.problems if each not in problems]
        settings += [(name, each) for each in found.given.values()]
        if name in {section for _, section in file.sections}:
            needs[name] = [key for key, action in layers.keys_of(one).items() if _is_missing(action, found)]
            if not found.problems:
                problems += _in_any_case(name, one, found, needs[name])
    problems = sorted(problems, key=lambda each: each.line)[:PROBLEMS_MAX]
    needs = {name: keys for name, keys in needs.items() if keys}
    if as_json:
        print(_as_json(path, problems, settings, needs))
    else:
        print("\n".join(_told(path, file, problems, settings, needs)))
    return 1 if problems else 0


def _in_any_case(name: str, one: Parser, found: layers.SettingLayers, needs: Sequence[str]) -> Sequence[Problem]:
    """What is wrong whatever the flags bring that are still needed: for a worker mostly its name and role."""
    if not set(needs) <= set(_STAND_INS):
        return ()
    cases = [dict(zip(needs, case, strict=True)) for case in itertools.product(*(_STAND_INS[key] for key in needs))]
    told = [list(_together(name, one, found, case)) for case in cases]
    wrong = told[0] if all(told) else []
    return [each for each in wrong if each.line or not needs]  # flags may bring more than what is needed


def _together(name: str, one: Parser, found: layers.SettingLayers, case: Mapping[str, str]) -> Iterator[Problem]:
    """How the settings of a section go together, as its command would say it."""
    args = argparse.Namespace(command=name, config=None, check=False, debug=False, **case)
    for key, action in layers.keys_of(one).items():
        if key in case:
            continue
        value = one._get_value(action, action.default) if isinstance(action.default, str) else action.default
        setattr(args, action.dest, found.given[action.dest].value if action.dest in found.given else value)
    args.given = found.given
    try:
        main.module_of(name).refuse(args)
    except CommandError as error:
        said = layers.placed(str(error), args)
        at = next((each for each in found.given.values() if said.startswith(f"{each.place}: ")), None)
        if at is None:
            yield Problem(0, name, f"section {name}", said)
        elif at.source == "file":
            said = said.removeprefix(f"{at.place}: {at.key}:").strip()
            yield Problem(int(at.place.rpartition(":")[2]), name, at.key, said)
        else:
            yield Problem(0, name, at.place, said.removeprefix(f"{at.place}: {at.key}:").strip())


def _is_missing(action: argparse.Action, found: layers.SettingLayers) -> bool:
    return action.required and action.dest not in found.given


def _as_json(
    path: str,
    problems: Sequence[Problem],
    settings: Sequence[tuple[str, layers.GivenSetting]],
    needs: Mapping[str, Sequence[str]],
) -> str:
    rows = [
        {"section": name, "key": each.key, "value": _value(each), "from": each.source, "at": each.place}
        for name, each in settings
    ]
    facts = {"ok": not problems, "file": path, "problems": problems, "settings": rows, "needs": needs}
    return msgspec.json.encode(facts, enc_hook=str).decode()


def _told(
    path: str,
    file: SettingsFile,
    problems: Sequence[Problem],
    settings: Sequence[tuple[str, layers.GivenSetting]],
    needs: Mapping[str, Sequence[str]],
) -> Iterator[str]:
    screen = stdout()
    if problems:
        yield from (layers.shown(path, each) for each in problems)
        count = len(problems)
        yield f"{screen.style(f'{count} mistake' + 's' * (count > 1), 'bad')}; every key: kvbaton config --list"
        return
    rows = [[f"{name}.{each.key}", _short(_value(each)), each.place] for name, each in settings]
    yield from screen.table(["setting", "value", "from"], rows) if rows else ()
    for name, keys in needs.items():
        variables = " ".join(layers.variable_of(name, key) for key in keys)
        yield f"{name} also needs {', '.join(keys)}: by flag, or in {variables}"
    sections = ", ".join(name for _, name in file.sections) or "no section"
    yield f"{path}: {screen.style('no mistakes', 'good')} in {sections}"


def _value(given: layers.GivenSetting) -> Any:
    return HIDDEN if given.key in layers.SECRET else given.value


def _short(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _about(action: argparse.Action) -> str:
    return " ".join(DEFAULT.sub("", (action.help or "") % vars(action)).split())


def _parsers(needed: Sequence[str]) -> dict[str, Parser]:
    """The parser of every command that this installation can serve; `CommandError` for a needed one that it cannot."""
    found = {}
    for name in layers.CONFIGURED:
        try:
            module = main.module_of(name)
        except CommandError:
            if name in needed:
                raise
            continue
        found[name] = layers.below(main.parser_of({name: module}), name)
    return found
