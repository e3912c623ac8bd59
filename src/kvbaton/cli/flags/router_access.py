"""Flags of `kvbaton router` about who may ask it and how: API keys, TLS, web pages of other origins."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from kvbaton.api.http.tls_server import TlsError
from kvbaton.cli.flags.router_way import OPERATOR_KEY_VARIABLE
from kvbaton.processes.operator_errors import CommandError
from kvbaton.router.front_access import (
    ANY,
    KeyFileError,
    is_header_name,
    is_method,
    read_key_file,
    read_keys,
)
from kvbaton.router.front_secrets import FrontSecrets
from kvbaton.router.router_settings import is_origin

KEY_VARIABLE = "KVBATON_API_KEY"
WORKER_KEY_VARIABLE = "KVBATON_WORKER_API_KEY"


def add_arguments(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--api-key-file",
        metavar="FILE",
        default="",
        help=f"API keys that clients must show, one a line; read again when it changes (or {KEY_VARIABLE})",
    )
    add(
        "--api-key",
        metavar="KEY",
        nargs="+",
        action="extend",
        default=[],
        help="an API key; other users of this machine can see it, so prefer --api-key-file",
    )
    add(
        "--operator-key-file",
        metavar="FILE",
        default="",
        help=f"keys that open operators' pages from elsewhere, and no prompt; one a line (or {OPERATOR_KEY_VARIABLE})",
    )
    add("--pass-authorization", action="store_true", help="send clients' API keys on to workers, which check them too")
    add(
        "--worker-api-key-file",
        metavar="FILE",
        default="",
        help=f"the key that workers want (vLLM's --api-key); clients' are not sent on (or {WORKER_KEY_VARIABLE})",
    )
    add(
        "--tls-cert",
        "--ssl-certfile",
        metavar="FILE",
        default="",
        help="serve https with this certificate and its chain (PEM); read again when it changes",
    )
    add("--tls-key", "--ssl-keyfile", metavar="FILE", default="", help="its key (PEM, without a passphrase)")
    add(
        "--allow-origin",
        "--allowed-origins",
        type=_origins,
        action="extend",
        default=[],
        metavar="ORIGIN",
        help="let web pages of this origin ask and read answers (CORS), such as https://chat.example; * is any",
    )
    add(
        "--allow-method",
        "--allowed-methods",
        type=_methods,
        action="extend",
        default=[],
        metavar="METHOD",
        help="methods that such pages may use; without it those that a path has",
    )
    add(
        "--allow-header",
        "--allowed-headers",
        type=_headers,
        action="extend",
        default=[],
        metavar="HEADER",
        help="headers that such pages may send; without it any",
    )
    add("--allow-credentials", action="store_true", help="let such pages send credentials that the browser keeps")


def cors_of(args: argparse.Namespace) -> dict[str, Any]:
    """The settings' fields."""
    if args.allow_credentials and ANY in args.allow_origin:
        raise CommandError("argument --allow-credentials: not with --allow-origin *; name the origins")
    return {
        "origins_allowed": tuple(args.allow_origin),
        "cors_methods": tuple(args.allow_method),
        "cors_headers": tuple(args.allow_header),
        "cors_credentials": args.allow_credentials,
        "passes_authorization": args.pass_authorization,
    }


def secrets_of(args: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> FrontSecrets:
    """What is read from files and the environment; `CommandError` names the flag."""
    if bool(args.tls_cert) != bool(args.tls_key):
        lacking = "--tls-key" if args.tls_cert else "--tls-cert"
        raise CommandError(f"argument {lacking}: needed too, for https; or give neither")
    flag = "--api-key-file"
    try:
        keys = [*_given(KEY_VARIABLE, environment)]
        keys += read_keys("\n".join(args.api_key), "--api-key") if args.api_key else ()
        found = FrontSecrets(keys=tuple(keys), key_file=args.api_key_file)
        found.client_keys()
        flag = "--operator-key-file"
        operators = _given(OPERATOR_KEY_VARIABLE, environment)
        found = msgspec.structs.replace(found, operator_keys=operators, operator_key_file=args.operator_key_file)
        found.check()
        flag = "--worker-api-key-file"
        worker = _worker_key(args.worker_api_key_file, environment.get(WORKER_KEY_VARIABLE, ""))
        flag = "--tls-cert"
        tls = (args.tls_cert, args.tls_key) if args.tls_cert else None
        found = msgspec.structs.replace(found, worker_key=worker, tls=tls)
        found.tls_files()
    except (KeyFileError, TlsError) as error:
        raise CommandError(f"argument {flag}: {error}") from None
    if args.pass_authorization and worker:
        raise CommandError("argument --pass-authorization: workers get the key of --worker-api-key-file; give one")
    return found


def _given(variable: str, environment: Mapping[str, str]) -> tuple[str, ...]:
    given = environment.get(variable, "")
    return read_keys(given, variable) if given.strip() else ()


def _worker_key(file: str, given: str) -> str:
    keys: Sequence[str] = ()
    if file:
        keys = read_key_file(file)
    elif given.strip():
        keys = read_keys(given, WORKER_KEY_VARIABLE)
    if len(keys) > 1:
        raise KeyFileError(f"{file or WORKER_KEY_VARIABLE}: {len(keys)} keys, expected one, which all workers take")
    return keys[0] if keys else ""


def _words(text: str) -> list[str]:
    """One word, or several as vLLM takes them: a JSON list."""
    if not text.startswith("["):
        return [text]
    try:
        return msgspec.json.decode(text.encode(), type=list[str])
    except msgspec.DecodeError as error:
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}, expected a JSON list of texts ({error})") from None


def _origins(text: str) -> list[str]:
    """An argument type."""
    found = [word.lower() for word in _words(text)]
    for word in found:
        if word != ANY and not is_origin(word):
            said = f"got {word[:80]!r}, expected as https://host or http://host:port, or {ANY}"
            raise argparse.ArgumentTypeError(said)
    return found


def _methods(text: str) -> list[str]:
    """An argument type."""
    found = [word.upper() for word in _words(text) if word != ANY]
    if not all(map(is_method, found)):
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}, expected a method such as POST")
    return found


def _headers(text: str) -> list[str]:
    """An argument type."""
    found = [word for word in _words(text) if word != ANY]
    if not all(map(is_header_name, found)):
        raise argparse.ArgumentTypeError(f"got {text[:80]!r}, expected the name of a header")
    return found
