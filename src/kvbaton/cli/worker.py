"""`kvbaton worker`: one engine in this process. Its flags are exactly the fields of `WorkerOptions`.

Law: `argv_of(options)` parsed again gives `options`; `up` prints it as the command that starts a worker again.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import msgspec

from kvbaton.cli.arguments import planes_choice, port, seconds, seconds_or_off, whole
from kvbaton.cli.flags import log as log_flags
from kvbaton.cli.flags import traces
from kvbaton.engines.embedded.worker_options import (
    DIALECTS,
    HTTP_ACCESS,
    MODES,
    POLICIES,
    ROLES,
    WorkerOptions,
    flag_of,
)
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.gc_freeze_imports import gc_freeze_imports
from kvbaton.processes.operator_errors import CommandError
from kvbaton.security.sealing import ENCRYPT
from kvbaton.transports.catalogue import CHECKSUMS

_HELP: Mapping[str, str] = {
    "name": "its name in the key directory; auto: made of pod or host name and a random tail, with a join token",
    "role": "what it does: compute prompts, decode, or both",
    "keys": "directory made by kvbaton keys new; not with a join token",
    "join_token_file": "file with a token of kvbaton keys token new; or KVBATON_JOIN_TOKEN in the environment",
    "join_at": "where to join, tcp://host:port; default: the registry's address, next port",
    "registry": "where the router's registry listens, tcp://host:port; several, with commas: a@tcp://h1:7700,b@tcp://h2:7700",
    "registry_name": "name in the key directory of registries that are given without one",
    "http_host": "address for HTTP; auto: as for --control-host",
    "http_port": "port for HTTP, 0 for a free one",
    "http_access": "who may ask there: on loopback all, elsewhere the router (auto), the router (keys), or all (open)",
    "control_host": "address for control messages, which peers must reach; auto: POD_IP, VLLM_HOST_IP, or by the route",
    "control_port": "port for control messages, 0 for a free one",
    "announce_to": "discovery address of vllm-router or a similar router, announced to in plain text; empty: none",
    "announce_as": "protocol of that router; it decides which side moves the KV",
    "transport": "transports, best first, separated by commas; auto: the best available here",
    "checksum": "compare copies with their source: not at all, a sample, or all of it",
    "encrypt": "encrypt KV that crosses TCP: between hosts (auto), always, or never; the stricter side of a pair wins",
    "require_enforcement": "offer only transports that confine a peer to the memory leased to it (not shm)",
    "modes": "modes it serves, separated by commas",
    "tp": "tensor parallel ranks",
    "policy": "when a handoff fails: recompute the prompt on D, or fail the request",
    "lease_s": "seconds that P holds blocks after the reader's last message",
    "transfer_timeout": "seconds within which a transfer must progress",
    "defer_timeout": "seconds to wait for the other side to get the request",
    "claim_timeout": "seconds to wait for the answer to a claim",
    "drain_s": "seconds to finish requests in flight when stopped",
    "blocks": "KV blocks",
    "block_tokens": "tokens per block",
    "max_num_seqs": "concurrently running requests",
    "waiting_max": "requests that wait; more are refused",
    "pin_share": "share of P's KV blocks that handoffs may pin, above 0 to 1 (no limit); beyond it requests wait",
    "pin_wait_s": "seconds that a request waits for such room before it is refused with 429",
    "seed": "seed of the model's weights; the same on P and D",
    "store": "tcp:// of a kvbaton store, or mooncake://host:port; empty: none",
    "store_name": "that store's name in the key directory",
    "store_timeout": "seconds for a lookup in it; five times that for a get",
    "copies_percent": "share of the KV blocks that may be on their way to the store at once as copies of answers, "
    "from which another engine goes on if this one dies, in percent; 0: none",
    "turn_s": "seconds that D keeps an ended request's KV for the next turn of its conversation; 0: not at all",
    "turn_percent": "share of D's KV blocks that this may pin, in percent; the oldest go first",
    "otlp_endpoint": traces.HELP,
    "flight_dir": "write records of failed handoffs here; SIGUSR2 writes all records",
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
    "who it is": ("name", "role", "keys", "registry", "registry_name", "join_token_file", "join_at"),
    "where it listens, and whom it tells": (
        "http_host", "http_port", "http_access", "control_host", "control_port", "announce_to", "announce_as",
    ),
    "handoffs": (
        "transport", "checksum", "encrypt", "require_enforcement", "modes", "policy", "lease_s", "transfer_timeout",
        "defer_timeout", "claim_timeout", "drain_s", "pin_share", "pin_wait_s",
    ),
    "its engine": ("tp", "blocks", "block_tokens", "max_num_seqs", "waiting_max", "seed"),
    "turns": ("turn_s", "turn_percent"),
    "shared store": ("store", "store_name", "store_timeout", "copies_percent"),
    "records and traces": ("flight_dir", "otlp_endpoint"),
}  # fmt: skip
_METAVARS: Mapping[str, str] = {
    "announce_to": "HOST:PORT", "keys": "DIR", "registry": "ENDPOINT", "join_at": "ENDPOINT",
    "store": "WHERE", "otlp_endpoint": "URL", "pin_share": "SHARE",
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
        elif field.name == "turn_s":
            more |= {"type": seconds_or_off, "metavar": "S"}
        elif field.name in ("turn_percent", "copies_percent"):
            more |= {"type": float, "metavar": "P"}
        else:
            read = _share if field.name.endswith("_share") else _TYPES[field.type]
            more |= {"type": port if field.name.endswith("_port") else read, "metavar": _metavar(field)}
        place.get(field.name, parser).add_argument(flag_of(field.name), **more)
    log_flags.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout when it serves")
    parser.add_argument("--stop-on-eof", action="store_true", help=argparse.SUPPRESS)


def refuse(args: argparse.Namespace) -> None:
    """`CommandError` for settings that do not go together; opens nothing."""
    options_of(args)


def run(args: argparse.Namespace) -> int:
    options = options_of(args)
    options = msgspec.structs.replace(options, otlp_endpoint=traces.endpoint_of(options.otlp_endpoint, os.environ))
    raise_file_limit()
    if args.stop_on_eof:
        threading.Thread(target=_stop_on_eof, name="kvbaton-parent", daemon=True).start()
    with gc_freeze_imports():
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


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a share above 0, at most 1") from None
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a share above 0, at most 1")
    return value


def _modes(text: str) -> tuple[str, ...]:
    modes = tuple(text.split(","))
    for mode in modes:
        if mode not in MODES:
            raise argparse.ArgumentTypeError(f"got {mode!r}, expected some of {', '.join(MODES)}")
    return modes


def _stop_on_eof() -> None:
    """Exit with the process that started this one, however that one ended: only it holds the other end of stdin."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGHUP)  # at once: with the router gone, no client is waiting
