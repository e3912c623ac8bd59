"""Argument parsing, and errors as one line with the next step.

Law: nothing here imports a command or a transport, so that `--help` and typing mistakes are answered at once.
"""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from kvbaton.cli import screen

if TYPE_CHECKING:
    from kvbaton.control.registry.allowed_networks import Networks

BAD_USAGE = 2
CLOSE_WORD, CLOSE_FLAG = 0.6, 0.75  # for difflib: `benhc` is bench, `fly` is nothing; flags resemble each other
_CHOICES_SHOWN_MAX = 12
_OPTIONS_IN_USAGE_MAX = 4
_HELP_WIDTH_MAX = 100


class Parser(argparse.ArgumentParser):
    """Reports a usage error in one line, and exits with 2."""

    _given: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self._given = () if args is None else list(args)
        parsed, unknown = super().parse_known_args(args, namespace)
        is_leaf = not any(isinstance(action, argparse._SubParsersAction) for action in self._actions)
        if unknown and is_leaf:  # argparse would report it from the top parser, which knows no close match
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        said = f"invalid choice: {value!r}{meant(str(value), choices)}"
        if isinstance(action, argparse._SubParsersAction):
            kind = "command" if action.dest == "command" else "choice"
            said = f"unknown {kind} {value!r}{meant(str(value), choices)}"
            raise argparse.ArgumentError(None, said if len(choices) > _CHOICES_SHOWN_MAX else _of(said, choices))
        raise argparse.ArgumentError(action, _of(said, choices))

    def _print_message(self, message: str, file: Any = None) -> None:
        (sys.stdout if file is None else file).write(message)  # argparse would hide a full disk

    def error(self, message: str) -> NoReturn:
        unknown = self._unknown(message)
        if unknown is not None:
            known = [option for action in self._actions for option in action.option_strings]
            kind = "flag" if unknown.startswith("-") else "argument"
            message = f"unknown {kind} {unknown}{meant(unknown, known, CLOSE_FLAG)}"
        message = message.replace("ignored explicit argument", "takes no value, got")
        complain(self.prog, f"{message}; see: {self.prog} --help")
        raise SystemExit(BAD_USAGE)

    def _unknown(self, message: str) -> str | None:
        """The flag at fault, also where argparse first reports an argument that is missing because of it."""
        known = {option for action in self._actions for option in action.option_strings}
        if message.startswith("unrecognized arguments: "):
            words = message.split(": ", 1)[1].split()
            return next((word.split("=")[0] for word in words if word.startswith("-")), repr(words[0]))
        if message.startswith("the following arguments are required"):
            words = [word for word in self._given if word.split("=")[0] not in known]
            return next((word.split("=")[0] for word in words if word.startswith("-")), None)
        return None


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """As wide as the terminal up to a limit, defaults shown, and a usage line that does not list every flag again."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30, width=min(screen.stdout().width(), _HELP_WIDTH_MAX))

    def start_section(self, heading: str | None) -> None:
        super().start_section(None if heading is None else screen.stdout().style(heading, "bold"))

    def add_usage(self, usage: str | None, actions: Iterable[Any], groups: Iterable[Any], prefix: Any = None) -> None:
        listed = list(actions)
        free = [action for action in listed if action.option_strings and not action.required]
        if usage is None and len(free) > _OPTIONS_IN_USAGE_MAX:
            kept = [action for action in listed if action not in free]
            said = self._format_usage(None, kept, [], "").strip()
            words = " ".join([self._prog, "[OPTIONS]", *said.removeprefix(self._prog).split()]).replace("%", "%%")
            indent = " " * len("usage: ")
            usage = f"\n{indent}".join(textwrap.wrap(words, self._width - len(indent), break_on_hyphens=False))
        super().add_usage(usage, listed, groups, prefix)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Paragraphs are filled; a line that starts with two spaces is a command to copy and is kept as it is."""
        lines = []
        for line in text.splitlines():
            whole_line = line.startswith("  ")
            lines += [line] if whole_line else textwrap.wrap(line, width, initial_indent=indent, break_on_hyphens=False)
        return "\n".join(lines)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if isinstance(action.default, float) and "default" not in (action.help or ""):
            return f"{action.help} (default: {action.default:g})"
        return action.help if action.default in (None, False, [], "") else super()._get_help_string(action)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Options that every command takes, also after its name; documented in `kvbaton --help`."""
    add = parser.add_argument
    add("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--color", choices=screen.COLORS, default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def complain(who: str, message: str) -> None:
    """One line on stderr, whatever the message contains; stderr may be closed."""
    try:
        print(f"{screen.stderr().style(f'{who}:', 'bad')} {' '.join(message.split())}", file=sys.stderr, flush=True)
    except (OSError, ValueError):
        return


def meant(given: str, known: Iterable[str], close_enough: float = CLOSE_WORD) -> str:
    """`, did you mean X?` where one of the known words is close."""
    close = difflib.get_close_matches(given, list(known), 1, close_enough)
    return f", did you mean {close[0]}?" if close else ""


def _of(said: str, choices: Sequence[str]) -> str:
    shown = ", ".join(choices[:_CHOICES_SHOWN_MAX]) + (", …" if len(choices) > _CHOICES_SHOWN_MAX else "")
    return f"{said} (choose from {shown})"


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
    """An argument type: a duration above 0, in seconds."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected seconds") from None
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected seconds above 0")
    return value


def seconds_or_off(text: str) -> float:
    """An argument type: a duration in seconds, or 0 for off."""
    return 0.0 if text.strip() in ("0", "0.0") else seconds(text)


def minutes(text: str) -> float:
    """An argument type: a duration above 0, given in minutes."""
    try:
        return seconds(text)
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected minutes above 0") from None


def port(text: str) -> int:
    """An argument type: a port, 0 for a free one."""
    return whole(0, 65535)(text)


def host_port(text: str) -> str:
    """An argument type: an address to listen at, host:port or [v6]:port."""
    host, colon, number = text.rpartition(":")
    is_host = bool(host) and (":" not in host or (host.startswith("[") and host.endswith("]")))
    if not (colon and is_host and number.isascii() and number.isdigit() and int(number) <= 65535):
        raise argparse.ArgumentTypeError(f"got {text!r}, expected host:port, or [v6]:port")
    return text


def endpoint(text: str) -> str:
    """An argument type: the address of a registry."""
    from kvbaton.control.addressing import check_endpoint

    try:
        return check_endpoint(text, names=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}; give an endpoint such as tcp://127.0.0.1:7700") from None


def registries(text: str) -> str:
    """An argument type: where registries listen, with commas."""
    from kvbaton.control.addressing import registry_places

    try:
        registry_places(text)
    except ValueError as error:
        said = f"{error}; give endpoints such as tcp://127.0.0.1:7700, or NAME@tcp://127.0.0.1:7700"
        raise argparse.ArgumentTypeError(said) from None
    return text


def networks(text: str) -> Networks:
    """An argument type: where workers may be."""
    from kvbaton.control.registry.allowed_networks import Networks

    try:
        return Networks.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def url(text: str) -> str:
    """An argument type: an HTTP base URL, without a trailing slash."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
        well = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        well = False
    if not well:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected http://host:port")
    return text.rstrip("/")


def planes_choice(text: str) -> str:
    """An argument type: `auto`, or transports separated by commas."""
    from kvbaton.transports import catalogue  # imports arrays and sockets, a quarter of a second

    try:
        catalogue.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text
