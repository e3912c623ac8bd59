"""`kvbaton completion`: a completion script for kvbaton's commands, flags and values in bash, zsh or fish.

Law: the script is generated from the parsers, so it knows exactly what they know; and it is static text, so that
pressing the tab key starts no Python.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType

from kvbaton.cli.arguments import planes_choice
from kvbaton.cli.completion_bash import bash
from kvbaton.cli.completion_others import fish, zsh
from kvbaton.cli.completion_words import Taker, Takes, WordNode
from kvbaton.observe.codes.code_catalogue import CATALOGUE
from kvbaton.processes.operator_errors import CommandError
from kvbaton.transports import catalogue

SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
_INSTALL = (
    "To load it in every new shell, run one of:",
    "  kvbaton completion bash > ~/.local/share/bash-completion/completions/kvbaton",
    "  kvbaton completion zsh > ~/.zfunc/_kvbaton      # fpath+=~/.zfunc before compinit",
    "  kvbaton completion fish > ~/.config/fish/completions/kvbaton.fish",
)
CODE_METAVAR = "WORD"  # of kvbaton explain
_PATHS: dict[str, Takes] = {"DIR": "dir", "FILE": "file", "PATH": "file"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=tuple(SHELLS), help=", ".join(SHELLS))
    parser.epilog = "\n".join(_INSTALL)


def run(args: argparse.Namespace) -> int:
    print(SHELLS[args.shell](tree()), end="")
    return 0


def tree() -> WordNode:
    """All commands and flags of the parsers; a command that this build lacks has its name only."""
    main = importlib.import_module("kvbaton.cli.main")
    modules = {name: module for name in main.COMMANDS if (module := _importable(name)) is not None}
    return node_of(main.parser_of(modules), "kvbaton", "")


def node_of(parser: argparse.ArgumentParser, name: str, about: str) -> WordNode:
    """One parser and its subparsers."""
    flags, places = [], []
    below: tuple[WordNode, ...] = ()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            said = {each.dest: each.help or "" for each in action._choices_actions}
            below = tuple(node_of(one, word, said.get(word, "")) for word, one in action.choices.items())
        elif action.option_strings:
            if action.help is not argparse.SUPPRESS or action.dest in ("debug", "color"):
                flags.append(taker_of(action))
        else:
            places.append(taker_of(action))
    return WordNode(name, about, tuple(flags), tuple(places), below)


def taker_of(action: argparse.Action) -> Taker:
    """A flag or a positional: its words, and the values it accepts."""
    choices = _choices(action)
    takes: Takes = "nothing"
    if action.nargs != 0:
        takes = "choice" if choices else _PATHS.get(str(action.metavar), "text")
    many = action.nargs in ("*", "+") or isinstance(action, argparse._AppendAction)
    label = str(action.metavar or action.dest).lower()
    return Taker(tuple(_long_first(action.option_strings)), label, _said(action), takes, choices, many)


def _choices(action: argparse.Action) -> tuple[str, ...]:
    """The values that the parser accepts, or common ones where it accepts more."""
    if action.type is planes_choice:  # also several with commas
        return (catalogue.AUTO, *catalogue.names())
    if action.metavar == CODE_METAVAR:
        return tuple(dict.fromkeys(entry.code for entries in CATALOGUE.values() for entry in entries))
    return tuple(str(choice) for choice in action.choices or ())


def _long_first(words: Sequence[str]) -> Iterator[str]:
    yield from sorted(words, key=lambda word: not word.startswith("--"))


def _said(action: argparse.Action) -> str:
    if action.help is None or action.help is argparse.SUPPRESS:
        return {"debug": "log more, and show tracebacks", "color": "colours"}.get(action.dest, "")
    return " ".join(action.help.replace("%%", "%").split())


def _importable(name: str) -> ModuleType | None:
    main = importlib.import_module("kvbaton.cli.main")
    try:
        module: ModuleType = main.module_of(name)
    except CommandError:
        return None
    return module
