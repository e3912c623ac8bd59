"""Settings of a serving command from four places: flag, environment, file, default; the first that has one decides.

`--registry-port 7700`, `KVBATON_ROUTER__REGISTRY_PORT=7700`, and `registry_port: 7700` below `router:` in the file that
`--config` names are one setting. Keys and variables are made of the parser's own flags: there is no second list.

Laws: a value is judged by its flag's own type, wherever it stands, also where a flag outranks it. A key that does not
exist is refused, in the file as in the environment. A list replaces the list of a lower place, never adds to it. What
the environment sets is for the process that reads it: `taken` removes it, so that a cluster's workers, which are told
by flags, never read it a second time. Two underscores keep these names apart from those that Kubernetes sets in every
pod for a service called kvbaton-router (KVBATON_ROUTER_PORT).
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import msgspec

from kvbaton.cli.arguments import Parser, meant
from kvbaton.cli.progress import note
from kvbaton.cli.settings.file import FileSetting, Problem, SettingsFile, read
from kvbaton.processes.operator_errors import CommandError

CONFIGURED = ("up", "router", "registry", "worker", "store")
CONFIG = "config"
SECRET = frozenset({"api_key"})
VALUE_CHARS_MAX = 64 << 10
_PREFIX = "KVBATON_"
_BETWEEN = "__"
_NOT_KEYS = frozenset({"help", "debug", "color", CONFIG, "check"})
_SERVICE_LINKS = ("tcp://", "udp://", "sctp://")
_SWITCH = {"true": True, "false": False}


class GivenSetting(msgspec.Struct, frozen=True):
    """A setting's value and the place that it was read from."""

    key: str
    dest: str
    value: Any
    place: str  # FILE:LINE, or the variable's name
    source: str  # "file" or "environment"


class SettingLayers(msgspec.Struct, frozen=True):
    """All that file and environment say about one command."""

    given: Mapping[str, GivenSetting]
    problems: tuple[Problem, ...] = ()


def add_arguments(parser: argparse.ArgumentParser, command: str) -> None:
    """`--config`, and for each switch the flag that turns it off again."""
    parser.add_argument(
        f"--{CONFIG}",
        metavar="FILE",
        default=None,
        help=f"settings: the section {command}: of this file; flags and {variable_of(command, 'KEY')} go first",
    )
    known = {word for action in parser._actions for word in action.option_strings}
    for action in list(parser._actions):
        if isinstance(action, argparse._StoreTrueAction) and action.help != argparse.SUPPRESS:
            word = action.option_strings[0].removeprefix("--")
            off = f"--{word.removeprefix('no-')}" if word.startswith("no-") else f"--no-{word}"
            if off not in known:
                parser.add_argument(
                    off, dest=action.dest, action="store_false", default=argparse.SUPPRESS, help=argparse.SUPPRESS
                )


def keys_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Every setting of a command by its key."""
    found = {}
    for action in parser._actions:
        if action.option_strings and action.help != argparse.SUPPRESS and action.dest not in _NOT_KEYS:
            found[key_of(action)] = action
    return found


def key_of(action: argparse.Action) -> str:
    return action.option_strings[0].removeprefix("--").replace("-", "_")


def variable_of(command: str, key: str) -> str:
    return f"{_PREFIX}{command.upper()}{_BETWEEN}{key.upper()}"


def taken(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Every setting in the environment, which from now on has none. An empty variable is no setting."""
    starts = tuple(f"{_PREFIX}{command.upper()}{_BETWEEN}" for command in CONFIGURED)
    found = {name: environ[name] for name in list(environ) if name.startswith(starts)}
    for name in found:
        del environ[name]
    return {name: value for name, value in found.items() if value}


def overlooked(command: str, keys: Iterable[str], environ: Mapping[str, str]) -> Iterator[str]:
    """Variables with one underscore too few, which would otherwise be without effect and without a word."""
    for key in keys:
        name = variable_of(command, key).replace(_BETWEEN, "_", 1)
        if environ.get(name) and not environ[name].startswith(_SERVICE_LINKS):
            yield f"{name} is not read; the variable of this setting is {variable_of(command, key)}"


def parse(
    parser: Parser, command: str | None, words: Sequence[str], environ: MutableMapping[str, str]
) -> argparse.Namespace:
    """The command line; of a command that serves with the other three places behind it. Its `given` says where a value
    came from."""
    if command not in CONFIGURED:
        if command != CONFIG:
            taken(environ)
        return parser.parse_args(words)
    variables = taken(environ)
    one = below(parser, command)
    actions = keys_of(one)
    defaults = {action.dest: action.default for action in actions.values()}
    needed = {action.dest: key for key, action in actions.items() if action.required}
    for action in actions.values():
        action.default, action.required = argparse.SUPPRESS, False
    args = parser.parse_args(words)
    path = args.config or variables.get(variable_of(command, CONFIG))
    gathered = gather(one, command, read(path) if path else None, variables)
    if gathered.problems:
        raise CommandError(_refusal(path or "", gathered.problems))
    flagged = set(vars(args))
    given = {dest: each for dest, each in gathered.given.items() if dest not in flagged}
    for dest, each in given.items():
        setattr(args, dest, each.value)
    for action in actions.values():
        if not hasattr(args, action.dest) and defaults[action.dest] is not argparse.SUPPRESS:
            setattr(args, action.dest, _default(one, action, defaults[action.dest]))
    missing = [key for dest, key in needed.items() if not hasattr(args, dest)]
    if missing:
        flags = ", ".join(f"--{key.replace('_', '-')}" for key in missing)
        elsewhere = ", ".join(variable_of(command, key) for key in missing)
        one.error(
            f"the following arguments are required: {flags} (or {elsewhere}, or below {command}: in a --config file)"
        )
    args.given = given
    for said in overlooked(command, actions, environ):
        note(command, said)
    return args


def gather(
    one: argparse.ArgumentParser, command: str, file: SettingsFile | None, variables: Mapping[str, str]
) -> SettingLayers:
    """What file and environment say, the environment first; with every mistake of both."""
    actions = keys_of(one)
    problems = [] if file is None else [*file.problems, *_sections(file)]
    given: dict[str, GivenSetting] = {}
    for source, place, entry in (*_of_file(command, file), *_of_environment(command, variables)):
        action = actions.get(entry.key)
        if action is None:
            message = f"unknown key{meant(entry.key, actions)}"
            problems.append(Problem(entry.line, command, entry.key if entry.line else place, message))
            continue
        try:
            value = _value(one, action, entry)
        except argparse.ArgumentError as error:
            problems.append(Problem(entry.line, command, entry.key if entry.line else place, error.message))
            continue
        given[action.dest] = GivenSetting(entry.key, action.dest, value, place, source)
    return SettingLayers(given, tuple(sorted(problems, key=lambda each: each.line)))


def shown(path: str, problem: Problem) -> str:
    """One mistake in one line: where it is and what was expected."""
    if not problem.line:
        return f"{problem.key}: {problem.message}"
    key = ".".join(filter(None, (problem.section, problem.key)))
    return f"{path}:{problem.line}: {f'{key}: ' if key else ''}{problem.message}"


def placed(message: str, args: argparse.Namespace) -> str:
    """A refusal that names a flag, with the place where its value was given."""
    for given in getattr(args, "given", {}).values():
        flag = f"argument --{given.key.replace('_', '-')}:"
        if message.startswith(flag):
            return f"{given.place}: {given.key}:{message.removeprefix(flag)}"
    return message


def below(parser: argparse.ArgumentParser, command: str) -> Parser:
    """The parser of one command."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found: Parser = action.choices[command]
            return found
    raise LookupError(command)


def _refusal(path: str, problems: Sequence[Problem]) -> str:
    more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
    see = f"kvbaton config --check {path}" if path else "kvbaton config --list"
    return f"{shown(path, problems[0])}{more}; see: {see}"


def _sections(file: SettingsFile) -> Iterator[Problem]:
    for line, name in file.sections:
        if name not in CONFIGURED:
            said = f"unknown section{meant(name, CONFIGURED)}; expected one of {', '.join(CONFIGURED)}"
            yield Problem(line, name, "", said)


def _of_file(command: str, file: SettingsFile | None) -> Iterator[tuple[str, str, FileSetting]]:
    for entry in () if file is None else file.entries:
        if entry.section == command:
            yield "file", f"{file.path}:{entry.line}", entry  # type: ignore[union-attr]


def _of_environment(command: str, variables: Mapping[str, str]) -> Iterator[tuple[str, str, FileSetting]]:
    start = variable_of(command, "")
    for name, text in sorted(variables.items()):
        if name.startswith(start) and name != variable_of(command, CONFIG):
            key = name.removeprefix(start).lower()
            yield "environment", name, FileSetting(0, command, key, (text,))


def _value(one: argparse.ArgumentParser, action: argparse.Action, entry: FileSetting) -> Any:
    """By the flag's own rules: type, choices, and how several become a list."""
    if any(len(text) > VALUE_CHARS_MAX for text in entry.texts):
        raise argparse.ArgumentError(None, f"longer than {VALUE_CHARS_MAX} characters")
    texts = entry.texts
    if action.nargs == 0:
        if entry.is_list or texts[0].lower() not in _SWITCH:
            raise argparse.ArgumentError(None, f"got {_list(texts)}, expected true or false")
        is_on = _SWITCH[texts[0].lower()]
        return is_on if isinstance(action, argparse._StoreTrueAction) else not is_on
    takes_several = action.nargs in ("+", "*") or isinstance(action, argparse._AppendAction)
    if not takes_several and len(texts) != 1:
        raise argparse.ArgumentError(None, f"got a list of {len(texts)}, expected one value")
    if takes_several and not entry.is_list and not texts[0].startswith("["):
        texts = tuple(filter(None, map(str.strip, texts[0].split(","))))
    scratch = argparse.Namespace(**({action.dest: []} if takes_several else {}))
    for text in texts:
        try:
            value = one._get_value(action, text)
            one._check_value(action, value)
        except argparse.ArgumentError as error:
            raise argparse.ArgumentError(None, error.message) from None
        action(one, scratch, [value] if action.nargs in ("+", "*") else value, action.option_strings[0])
    return getattr(scratch, action.dest)


def _default(one: argparse.ArgumentParser, action: argparse.Action, default: Any) -> Any:
    return one._get_value(action, default) if isinstance(default, str) else default


def _list(texts: Sequence[str]) -> str:
    return ", ".join(map(repr, texts[:3]))
