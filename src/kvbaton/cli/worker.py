"""`kvbaton worker`: one engine in this process. The flags are the fields of `WorkerOptions`, and the other way round.

Law: `argv_of(options)` parsed again gives `options`; `up` prints it as the command that starts a worker again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import msgspec

from kvbaton.cli import traces
from kvbaton.cli.arguments import planes_choice, port, seconds, whole
from kvbaton.engines.embedded.worker_options import (
    DIALECTS,
    HTTP_ACCESS,
    MODES,
    POLICIES,
    ROLES,
    WorkerOptions,
    flag_of,
)
from kvbaton.processes.open_files import raise_file_limit
from kvbaton.processes.operator_errors import CommandError
from kvbaton.security.sealing import ENCRYPT
from kvbaton.transports.catalogue import CHECKSUMS

_HELP: Mapping[str, str] = {
    "name": "its name in the key directory",
    "role": "what it does: compute prompts, decode, or both",
    "keys": "directory made by kvbaton keys new",
    "registry": "where the router's registry listens, tcp://host:port",
    "registry_name": "the registry's name in the key directory",
    "http_host": "address for HTTP",
    "http_port": "port for HTTP, 0 for a free one",
    "http_access": "who may ask there: on loopback all, elsewhere the router (auto), the router (keys), or all (open)",
    "control_host": "address for control messages; peers must reach it",
    "control_port": "port for control messages, 0 for a free one",
    "announce_to": "discovery address of vllm-router or its like, to tell it in plain text of this worker; empty: none",
    "announce_as": "what that router speaks; it decides who moves the KV",
    "transport": "data planes, best first, with commas; auto: the best that this machine has",
    "checksum": "compare what was copied with its source: not at all, a sample, or all of it",
    "encrypt": "encrypt KV that crosses TCP: between hosts (auto), always, or never; the stricter side of a pair wins",
    "require_enforcement": "offer only data planes on which a peer reaches nothing but what is lent to it (not shm)",
    "modes": "modes it serves, with commas",
    "tp": "ranks that share each layer's heads",
    "policy": "when a handoff fails: recompute the prompt on D, or fail the request",
    "lease_s": "P keeps blocks this long after the last sign of the reader",
    "transfer_timeout": "seconds within which bytes must make progress",
    "defer_timeout": "seconds to wait for the other side to know the request",
    "claim_timeout": "seconds to wait for an answer to a claim",
    "drain_s": "when told to stop, finish what is under way within this",
    "blocks": "KV blocks",
    "block_tokens": "tokens per block",
    "max_num_seqs": "requests that run at once",
    "waiting_max": "requests that wait; more are refused",
    "seed": "of the model's weights; the same on P and D",
    "store": "tcp:// of a kvbaton store, or mooncake://host:port; empty: none",
    "store_name": "that store's name in the key directory",
    "store_timeout": "seconds for a look-up in it; five times that for a get",
    "otlp_endpoint": traces.HELP,
    "flight_dir": "write records of failed handoffs here; SIGUSR2 has all of them written",
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "role": ROLES,
    "checksum": CHECKSUMS,
    "encrypt": ENCRYPT,
    "policy": POLICIES,
    "announce_as": tuple(DIALECTS),
    "http_access": HTTP_ACCESS,
}
_TYPES: Mapping[type, Callable[[str], Any]] = {int: whole(0, 1 << 32), float: seconds, str: str}


_GROUPS: Mapping[str, tuple[str, ...]] = {
    "who it is": ("name", "role", "keys", "registry", "registry_name"),
    "where it listens, and whom it tells": (
        "http_host", "http_port", "http_access", "control_host", "control_port", "announce_to", "announce_as",
    ),
    "how it hands over": (
        "transport", "checksum", "encrypt", "require_enforcement", "modes", "policy", "lease_s", "transfer_timeout",
        "defer_timeout", "claim_timeout", "drain_s",
    ),
    "its engine": ("tp", "blocks", "block_tokens", "max_num_seqs", "waiting_max", "seed"),
    "a shared store": ("store", "store_name", "store_timeout"),
    "what it shows": ("flight_dir", "otlp_endpoint"),
}  # fmt: skip
_METAVARS: Mapping[str, str] = {
    "announce_to": "HOST:PORT", "keys": "DIR", "registry": "ENDPOINT", "store": "WHERE", "otlp_endpoint": "URL",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    place: dict[str, argparse._ArgumentGroup] = {}
    for title, names in _GROUPS.items():
        place |= dict.fromkeys(names, parser.add_argument_group(title))
    for field in msgspec.structs.fields(WorkerOptions):
        more: dict[str, Any] = {"help": _HELP[field.name]}
        if field.required:
            more |= {"required": True, "default": argparse.SUPPRESS}
        else:
            more["default"] = field.default
        if field.name == "modes":
            more |= {"type": _modes, "default": ",".join(MODES), "metavar": "M,M"}
        elif field.name == "transport":
            more |= {"type": planes_choice, "metavar": "NAMES"}
        elif field.type is bool:
            more["action"] = "store_true"
        elif field.name in _CHOICES:
            more["choices"] = _CHOICES[field.name]
        else:
            more |= {"type": port if field.name.endswith("_port") else _TYPES[field.type], "metavar": _metavar(field)}
        place.get(field.name, parser).add_argument(flag_of(field.name), **more)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout when it serves")
    parser.add_argument("--stop-on-eof", action="store_true", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    options = msgspec.structs.replace(options, otlp_endpoint=traces.endpoint_of(options.otlp_endpoint, os.environ))
    raise_file_limit()
    logging.getLogger("kvbaton.node.node").setLevel(logging.INFO)  # which data plane each pair takes
    if args.stop_on_eof:
        threading.Thread(target=_stop_on_eof, name="kvbaton-parent", daemon=True).start()
    engine = importlib.import_module("kvbaton.engines.embedded.embedded_worker")
    with contextlib.redirect_stdout(_ReadyAsJson(options, sys.stdout)) if args.json else contextlib.nullcontext():
        status: int = engine.main(options)
    return status


class _ReadyAsJson(io.TextIOBase):
    """The engine prints one line when it serves, NAME INCARNATION serves URL; this makes it an object."""

    def __init__(self, options: WorkerOptions, out: TextIO) -> None:
        self._options = options
        self._out = out
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._tell(line)
        return len(text)

    def _tell(self, line: str) -> None:
        words = line.split()
        if len(words) < 4 or words[2] != "serves":
            print(line, file=sys.stderr, flush=True)
            return
        facts = {"name": words[0], "role": self._options.role, "url": words[3], "pid": os.getpid()}
        facts |= {"incarnation": words[1], "registry": self._options.registry}
        print(msgspec.json.encode(facts).decode(), file=self._out, flush=True)


def options_of(args: argparse.Namespace) -> WorkerOptions:
    values = {field.name: getattr(args, field.name) for field in msgspec.structs.fields(WorkerOptions)}
    if isinstance(values["modes"], str):
        values["modes"] = _modes(values["modes"])
    try:
        return WorkerOptions(**values)
    except ValueError as error:
        name, _, rest = str(error).partition(":")
        raise CommandError(f"argument {flag_of(name)}:{rest}; see: kvbaton worker --help") from None


def _metavar(field: msgspec.structs.FieldInfo) -> str:
    if field.name in _METAVARS:
        return _METAVARS[field.name]
    return {int: "N", float: "SECONDS"}.get(field.type, field.name.rpartition("_")[2].upper())


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"got {mode!r}, expected some of {', '.join(MODES)}")
    return modes


def _stop_on_eof() -> None:
    """End with the process that started this one, however that one ended: only it holds the other end of stdin."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGHUP)  # at once: with the router gone, nobody waits for anything
