"""`kvbaton`: one module per command; only the requested command is imported.

Law: whatever an operator can cause ends in one line on stderr with the next step, and status 2; tracebacks need
--debug. Only results go to stdout; a reader that closes the pipe (`| head -1`) ends a command silently. Any of the
three standard streams may be closed at startup or later: its output is lost, the exit status is not. Whatever serves
clients or looks at a cluster runs in a plain installation; `lacking` names what engines and stores need beyond it.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import select
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, get_args

import kvbaton
from kvbaton.cli import screen
from kvbaton.cli.arguments import BAD_USAGE, HelpFormatter, Parser, add_common, complain
from kvbaton.processes.gc_freeze_imports import gc_freeze_imports
from kvbaton.processes.operator_errors import CommandError, StoppedError

GROUPS: Mapping[str, Mapping[str, str]] = {
    "run a cluster": {
        "up": "start workers and a router here; --check verifies answers",
        "router": "serve clients in front of workers that register with it",
        "registry": "keep the list of workers, apart from any router",
        "worker": "serve one engine, and register with a router",
        "store": "cache KV blocks for all engines of a cluster",
        "keys": "create, list, rotate and remove members' keys",
        "drain": "finish a worker's requests and stop it",
        "restart": "drain a worker of kvbaton up, and start it again",
        "config": "check a file of settings; list every setting",
        "completion": "print a shell completion script",
    },
    "observe it": {
        "inspect": "one request's timeline over router, P and D",
        "explain": "what a failure reason or a log code means, and what to do",
        "doctor": "check this machine and a configuration, with each fix",
    },
    "prove and measure it": {
        "sim": "run thousands of simulated clusters under seeded faults",
        "chaos": "inject faults into real processes and check every answer",
        "conformance": "check the vLLM connector against vLLM's own scheduler",
        "bench": "benchmark serving, transfers, the store, the router, vLLM",
        "plan": "how many P and D a trace needs, from measured speeds",
    },
}
PROOF = frozenset(GROUPS["prove and measure it"])
"""Commands of the distribution kvbaton-proof: an engine's host has no simulator, and no code that attacks a cluster."""
COMMANDS: Mapping[str, str] = {name: text for group in GROUPS.values() for name, text in group.items()}
_FAILED = 1
_INTERRUPTED = 130  # 128 + SIGINT, as in a shell
_UNREAD = 141  # 128 + SIGPIPE, as for any other program


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words[:1] == ["help"]:  # kvbaton help up, as in git
        words = [*words[1:], "--help"]
    debug = "--debug" in words
    _open_all_streams()
    screen.choose_color(_color(words))
    command = _command(words)
    who = f"kvbaton {command}" if command in COMMANDS else "kvbaton"
    try:
        with _flushed():
            return _run(words, command, debug, gc_freeze_imports() if argv is None else contextlib.nullcontext())
    except (KeyboardInterrupt, StoppedError):
        return _INTERRUPTED
    except CommandError as error:
        return _end(who, str(error), BAD_USAGE, debug)
    except BrokenPipeError as error:
        if _nobody_reads():
            return _UNREAD
        return _end(who, _bug(error), _FAILED, debug)
    except Exception as error:  # noqa: BLE001 - the last place; the trace is one flag away
        said = _operator_must_act(error)
        if said is not None:
            return _end(who, said, BAD_USAGE, debug)
        return _end(who, _bug(error), _FAILED, debug)


def _run(words: list[str], command: str | None, debug: bool, importing: contextlib.AbstractContextManager[None]) -> int:
    if words and _asks_for_help(words, command):
        print("\n".join(overview()))
        return 0
    with importing:
        from kvbaton.cli.settings import layers  # not for --help

        module = module_of(command) if command in COMMANDS else None
        parser = build_parser(command, module)
    args = layers.parse(parser, command, words, os.environ)
    if module is None:
        raise CommandError("give a command, such as: kvbaton up --check; see: kvbaton --help")
    importlib.import_module("kvbaton.cli.flags.log").start(args, debug)
    try:
        status: int = module.run(args)
    except CommandError as error:
        raise CommandError(layers.placed(str(error), args)) from error
    return status


def overview() -> Iterator[str]:
    """`kvbaton --help`: one screen of a small terminal, 24 lines of 80 columns."""
    style = screen.stdout().style
    yield f"{style('kvbaton COMMAND [OPTIONS]', 'bold')} hands the KV cache of a prompt from the engine that"
    yield "computes it to the one that decodes. Start here: kvbaton up --check"
    width = max(map(len, COMMANDS))
    for heading, commands in GROUPS.items():
        yield style(heading, "bold")
        for name, text in commands.items():
            yield f"  {name:<{width}}  {text}"
    yield "Each takes --help, --json, --debug and --color always|never; kvbaton, --version."


def build_parser(command: str | None, module: ModuleType | None) -> Parser:
    """The parser of `kvbaton`, complete for one command, with one line of help for the others."""
    return parser_of({} if command is None or module is None else {command: module})


def parser_of(modules: Mapping[str, ModuleType]) -> Parser:
    """The parser of `kvbaton`, complete for these commands."""
    from kvbaton.cli.settings import layers

    parser = Parser(prog="kvbaton", allow_abbrev=False, formatter_class=HelpFormatter)
    add_common(parser)
    version = f"kvbaton {kvbaton.__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    for name, text in COMMANDS.items():
        said = text[0].upper() + text[1:] + "."
        one = commands.add_parser(
            name, help=text, description=said, allow_abbrev=False, formatter_class=HelpFormatter
        )  # fmt: skip
        add_common(one)
        if name in modules:
            modules[name].add_arguments(one)
            if name in layers.CONFIGURED:
                layers.add_arguments(one, name)
    return parser


def module_of(command: str | None) -> ModuleType:
    name = f"kvbaton_proof.cli.{command}" if command in PROOF else f"kvbaton.cli.{command}"
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == "kvbaton_proof":
            get = f"pip install kvbaton-proof=={kvbaton.__version__}"
            raise CommandError(f"kvbaton {command} is part of the distribution kvbaton-proof: {get}") from None
        if said := lacking(error):
            raise CommandError(said) from None
        if error.name == name:
            raise CommandError(f"{command} is not part of this build") from None
        raise


# --- before the parser: also applies to its own errors


def _command(words: Sequence[str]) -> str | None:
    """The first word that is neither a flag nor the value of --color."""
    before = ""
    for word in words:
        if not word.startswith("-") and before != "--color":
            return word
        before = word
    return None


def _asks_for_help(words: Sequence[str], command: str | None) -> bool:
    return command is None and any(word in ("-h", "--help") for word in words) and "--version" not in words


def _color(words: Sequence[str]) -> screen.Color:
    said = ""
    for before, word in zip(["", *words], words, strict=False):
        said = word if before == "--color" else word.removeprefix("--color=") if word.startswith("--color=") else said
    known: tuple[screen.Color, ...] = get_args(screen.Color)
    return next((color for color in known if color == said), "auto")


# --- exit


def _end(who: str, message: str, status: int, debug: bool) -> int:
    if debug:
        with contextlib.suppress(OSError, ValueError):
            traceback.print_exc()
    complain(who, message)
    return status


def _bug(error: Exception) -> str:
    said = f"{type(error).__name__}: {error}".rstrip(": ")
    return f"{said}; this is a bug, run again with --debug for a traceback"


def _operator_must_act(error: Exception) -> str | None:
    """The line, if the operator can change something; None for a bug."""
    if said := lacking(error):
        return said
    from kvbaton.api.api_errors import PortInUseError
    from kvbaton.control.addressing import ControlError
    from kvbaton.transports.catalogue import PlaneError

    if isinstance(error, PortInUseError):
        return str(error) if ";" in str(error) else f"{error}; give an address of this machine"
    if isinstance(error, ControlError | PlaneError):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None and not error.filename2:
        return f"{error.filename}: {error.strerror}; give a usable path"
    if isinstance(error, OSError) and _is_output_full(error):
        return f"the results cannot be written: {error.strerror}; free some space, or redirect the output"
    return None


def _is_output_full(error: OSError) -> bool:
    import errno

    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def _open_all_streams() -> None:
    """Opens /dev/null for a stream closed by the parent, so that no socket takes its number and gets our output."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115
    _print_anything(sys.stdout)


def _print_anything(stream: Any) -> None:
    """A path of odd bytes, or a µ where the terminal has none, must not lose a result."""
    if getattr(stream, "errors", None) == "strict" and hasattr(stream, "reconfigure"):
        stream.reconfigure(errors="surrogateescape" if stream.encoding.lower() == "utf-8" else "replace")


@contextlib.contextmanager
def _flushed() -> Iterator[None]:
    """Output is flushed before the exit status is decided; argparse's exit after --help has one too."""
    try:
        yield
    except SystemExit:
        _flush(sys.stdout)
        raise
    _flush(sys.stdout)


def _flush(stream: Any) -> None:
    if stream is not None and not stream.closed:
        stream.flush()


def _nobody_reads() -> bool:
    """Whether stdout or stderr is a pipe without a reader; if so, both go to /dev/null from here on."""
    found = False
    for stream in (sys.stdout, sys.stderr):
        try:
            number = stream.fileno()
        except (OSError, ValueError, AttributeError):
            continue
        poll = select.poll()
        poll.register(number, 0)
        if any(event & select.POLLERR for _, event in poll.poll(0)):
            found = True
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)
    return found


GET = "pip install 'kvbaton[serve]'"
LIBRARIES = frozenset({"numpy", "httptools", "uvloop", "xxhash", "yaml", "shtab"})
"""The first comes with the extra. Where another is missing, packages were left out, and the extra brings that too."""


def lacking(error: BaseException) -> str | None:
    """What to install, if a library is missing; None for another error."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    return f"this needs {name}: {GET}" if name in LIBRARIES else None


def need(name: str) -> None:
    """`ModuleNotFoundError` now, before processes are started that would end with it."""
    if importlib.util.find_spec(name) is None:
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)


if __name__ == "__main__":
    sys.exit(main())
