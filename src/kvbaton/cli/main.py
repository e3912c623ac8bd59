"""`kvbaton`: one file per command; only the command that is asked for is imported.

Law: whatever an operator can cause ends in one line on stderr with the next step, and status 2; traces need --debug.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import ModuleType

from kvbaton.cli.arguments import BAD_USAGE, CommandError, HelpFormatter, Parser, StoppedError

COMMANDS: Mapping[str, str] = {
    "up": "start workers and a router on this machine; with --check, prove that their answers are right",
    "router": "serve clients in front of workers that register with it",
    "worker": "serve one engine, and register with a router",
    "drain": "have a worker finish what is under way and stop, and wait until it is gone",
    "doctor": "say which data planes this machine has, which a cluster took, and what stands in the way",
    "store": "keep KV blocks for all engines of a cluster: several P and D share prefixes, and outlive each other",
    "keys": "mint the keys by which a cluster's members know each other",
    "chaos": "hurt real processes by a seeded plan of faults, and hold every answer and every block to the promises",
    "sim": "run thousands of simulated clusters under faults, or the mutants that the checkers must catch",
    "conformance": "hold the vLLM connector to vLLM's own scheduler: every hook, every ending, many interleavings",
    "bench": "measure transfers, the router beside vllm-router, or vLLM with kvbaton beside NIXL and alone",
}
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    command = next((word for word in words if not word.startswith("-")), None)
    try:
        return _run(words, command)
    except (KeyboardInterrupt, StoppedError):
        return _INTERRUPTED
    except _operator_errors() as error:
        return _complain(command, str(error), BAD_USAGE, debug)
    except Exception as error:  # noqa: BLE001 - the last place; the trace is one flag away
        said = f"{type(error).__name__}: {error}".rstrip(": ")
        return _complain(command, f"{said}; this is a bug, run again with --debug to see where", 1, debug)


def _run(words: list[str], command: str | None) -> int:
    module = _module(command) if command in COMMANDS else None
    args = build_parser(command, module).parse_args(words)
    if module is None:
        raise CommandError(f"give a command: {', '.join(COMMANDS)}; see: kvbaton --help")
    status: int = module.run(args)
    return status


def build_parser(command: str | None, module: ModuleType | None) -> Parser:
    """The parser of `kvbaton`, complete for one command, with a line of help for the others."""
    parser = Parser(
        prog="kvbaton",
        allow_abbrev=False,
        formatter_class=HelpFormatter,
        description="Hands the KV cache of a prompt from a prefill engine to a decode engine.",
        epilog="Start here: kvbaton up --check, then kvbaton up. Each command has its own --help.",
    )
    parser.add_argument("--debug", action="store_true", help="log more, and show traces of errors")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, help_text in COMMANDS.items():
        one = commands.add_parser(
            name,
            help=help_text,
            description=help_text[0].upper() + help_text[1:] + ".",
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )
        one.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        if name == command and module is not None:
            module.add_arguments(one)
    return parser


def _module(command: str | None) -> ModuleType:
    name = f"kvbaton.cli.{command}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "aiohttp":
            raise CommandError("this command serves HTTP and needs aiohttp: pip install 'kvbaton[serve]'") from None
        if error.name == name:
            raise CommandError(f"{command} is not part of this build") from None
        raise


def _operator_errors() -> tuple[type[Exception], ...]:
    from kvbaton.api.errors import PortInUseError
    from kvbaton.control.base import ControlError
    from kvbaton.transports.planes import PlaneError

    return CommandError, ControlError, PlaneError, PortInUseError


def _complain(command: str | None, message: str, status: int, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    where = f"kvbaton {command}" if command in COMMANDS else "kvbaton"
    print(f"{where}: {' '.join(message.split())}", file=sys.stderr)
    return status


if __name__ == "__main__":
    sys.exit(main())
