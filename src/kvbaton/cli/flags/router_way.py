"""Flags of commands that ask a router over HTTP: whose certificates they believe, and the operator's key.

Law: a key is read from a file or from the environment, never from a command line, which others of the machine can see.
"""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Mapping

from kvbaton.processes.http_question import Way
from kvbaton.processes.operator_errors import CommandError

OPERATOR_KEY_VARIABLE = "KVBATON_OPERATOR_KEY"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--cacert", metavar="FILE", default="", help="PEM certificates to believe of an https router")
    what = f"the operator's key to show it (or {OPERATOR_KEY_VARIABLE})"
    add("--operator-key-file", metavar="FILE", default="", help=what)


def way_to(router: str, args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> Way:
    """`CommandError` names the flag."""
    from kvbaton.router.front_access import KeyFileError, read_key_file, read_keys  # not for --help

    where = args.operator_key_file or OPERATOR_KEY_VARIABLE
    given = environment.get(OPERATOR_KEY_VARIABLE, "")
    try:
        if args.operator_key_file:
            keys = read_key_file(args.operator_key_file)
        else:
            keys = read_keys(given, where) if given.strip() else ()
        if args.cacert:
            ssl.create_default_context(cafile=args.cacert)
    except KeyFileError as error:
        raise CommandError(f"argument --operator-key-file: {error}") from None
    except OSError as error:  # ssl's own too
        said = error.strerror or error
        raise CommandError(f"argument --cacert: {args.cacert}: {said}; expected PEM certificates") from None
    return Way(cacert=args.cacert, key=keys[0] if keys else "", key_for=router)
