"""The three standard streams of a command, any of which may be closed at startup or later.

Law: a closed stream is not an error of the command: its output is lost, its exit status is not.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Iterator
from typing import Any


def have_all() -> None:
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
def flushed() -> Iterator[None]:
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


def nobody_reads() -> bool:
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
