"""Logging options of the commands that run for long: level, format, access log; each has an environment variable.

Law: the flag goes before the environment, and the environment before the default; processes that a command starts log
as it does.
"""

from __future__ import annotations

import argparse
import os

import msgspec

from kvbaton.processes import process_logs
from kvbaton.processes.operator_errors import CommandError
from kvbaton.processes.process_logs import (
    ACCESS_LINES,
    ACCESS_VARIABLE,
    FORMAT_VARIABLE,
    FORMATS,
    LEVEL_VARIABLE,
    LEVELS,
    LogSettings,
)


def add_arguments(parser: argparse.ArgumentParser, *, serves_http: bool = True) -> None:
    add = parser.add_argument_group("logs, on stderr").add_argument
    add("--log-level", choices=LEVELS, help=f"least severe lines to log (default: info, or ${LEVEL_VARIABLE})")
    add(
        "--log-format",
        choices=FORMATS,
        help=f"text, or json: one object a line (default: text, or ${FORMAT_VARIABLE})",
    )
    if serves_http:
        add(
            "--access-log",
            choices=ACCESS_LINES,
            help=f"a line for each request, or for those with an error only (default: on, or ${ACCESS_VARIABLE})",
        )


def start(args: argparse.Namespace, debug: bool) -> None:
    """Log as the command line and the environment say. Commands that end by themselves log warnings only."""
    runs_long = hasattr(args, "log_level") and not getattr(args, "check", False)
    try:
        found = process_logs.from_environment(os.environ, LogSettings(level="info" if runs_long else "warning"))
    except ValueError as error:
        raise CommandError(f"{error}; fix or unset it") from None
    said = {name: getattr(args, flag, None) for name, flag in _FLAGS}
    found = msgspec.structs.replace(found, **{name: value for name, value in said.items() if value is not None})
    process_logs.configure(msgspec.structs.replace(found, level="debug") if debug else found)


_FLAGS = (("level", "log_level"), ("format", "log_format"), ("access", "access_log"))
