"""Command lines: what may be said, and what an operator is told when it cannot be done: one line with the next step."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from kvbaton.transports import planes

BAD_USAGE = 2


class CommandError(Exception):
    """The operator must act; the message is the whole line."""


class StoppedError(Exception):
    """The operator ended the command before it was done."""


class Parser(argparse.ArgumentParser):
    """Says in one line what is wrong with the command line, and exits with 2."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = () if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        is_leaf = not any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if unknown and is_leaf:  # argparse would let the topmost parser complain, which knows no close match
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        unknown = self._unknown(message)
        if unknown is not None:
            known = [option for action in self._actions for option in action.option_strings]
            close = difflib.get_close_matches(unknown, known, 1, 0.75)
            message = f"unknown flag {unknown}" + (f", is {close[0]} meant?" if close else "")
        print(f"{self.prog}: {message}; see: {self.prog} --help", file=sys.stderr)
        raise SystemExit(BAD_USAGE)

    def _unknown(self, message: str) -> str | None:
        """The flag that is the reason, also where argparse complains first of what is missing because of it."""
        if message.startswith("unrecognized arguments: "):
            words: Sequence[str] = message.split(": ", 1)[1].split()
        elif message.startswith("the following arguments are required"):
            known = {option for action in self._actions for option in action.option_strings}
            words = [word for word in self._given if word.split("=")[0] not in known]
        else:
            return None
        return next((word.split("=")[0] for word in words if word.startswith("-")), None)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """One screen: wide lines, defaults in place."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=116)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, False, []) else super()._get_help_string(action)


def whole(low: int, high: int) -> Callable[[str], int]:
    """An argument type: a whole number within bounds."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"got {value}, expected {low} to {high}")
        return value

    return parse


def seconds(text: str) -> float:
    """An argument type: a duration above 0."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds above 0")
    return value


def port(text: str) -> int:
    """An argument type: a port, 0 for a free one."""
    return whole(0, 65535)(text)


def planes_choice(text: str) -> str:
    """An argument type: `auto`, or data planes with commas."""
    try:
        planes.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
