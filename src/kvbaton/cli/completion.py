"""`kvbaton completion`: a completion script for kvbaton's commands, flags and values in bash, zsh or fish.

Law: the script is generated from the parsers, so it knows exactly what they know; and it is static text, so that
pressing the tab key starts no Python.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

import shtab

from kvbaton.cli.arguments import planes_choice
from kvbaton.observe.codes.code_catalogue import CATALOGUE
from kvbaton.processes.operator_errors import CommandError
from kvbaton.transports import catalogue

SHELLS = ("bash", "zsh", "fish")
_INSTALL = (
    "To load it in every new shell, run one of:",
    "  kvbaton completion bash > ~/.local/share/bash-completion/completions/kvbaton",
    "  kvbaton completion zsh > ~/.zfunc/_kvbaton      # fpath+=~/.zfunc before compinit",
    "  kvbaton completion fish > ~/.config/fish/completions/kvbaton.fish",
)
_CODE_METAVAR = "WORD"  # of kvbaton explain
_PATHS = {"DIR": shtab.DIRECTORY, "FILE": shtab.FILE, "PATH": shtab.FILE}
_UNLISTED = {"debug": "log more, and show tracebacks", "color": "colours"}
"""Flags that each command has and that its --help leaves to `kvbaton --help`."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))
    parser.epilog = "\n".join(_INSTALL)


def run(args: argparse.Namespace) -> int:
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """All commands and flags of the parsers; a command that this build lacks has its name only."""
    main = importlib.import_module("kvbaton.cli.main")
    modules = {}
    for name in main.COMMANDS:
        try:
            modules[name] = main.module_of(name)
        except CommandError:
            continue
    parser = main.parser_of(modules)
    for action in _actions(parser):
        _add_values(action)
    return shtab.complete(parser, shell)


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Those of a parser and of its subparsers."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for subparser in action.choices.values():
                yield from _actions(subparser)
        else:
            yield action


def _add_values(action: argparse.Action) -> None:
    """Tells shtab the values that only kvbaton knows; the parsers are made for this script and parse nothing."""
    if action.help is argparse.SUPPRESS:
        action.help = _UNLISTED.get(action.dest, argparse.SUPPRESS)
    if action.type is planes_choice:  # accepts also several with commas
        action.choices = (catalogue.AUTO, *catalogue.names())
    elif action.metavar == _CODE_METAVAR:
        action.choices = tuple(dict.fromkeys(entry.code for entries in CATALOGUE.values() for entry in entries))
    elif action.metavar in _PATHS:
        action.complete = _PATHS[str(action.metavar)]  # type: ignore[attr-defined]
