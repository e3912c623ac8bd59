"""Stores to measure, each in processes of its own: a `kvbaton store`, or a `mooncake_master` and an owner of memory.

    python -m kvbaton_proof.bench.store.store_sites MASTER BYTES      lends memory to a Mooncake master until its
    input ends

Laws: what was started is gone after the context, by its own handle, and children end with their input. Every wait has
a deadline. A store that is not installed is told by name, with the next step.
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvbaton.control import keyring as keys
from kvbaton.control.key_room import key_room
from kvbaton.processes.child_process import KVBATON_ARGV, free_ports
from kvbaton.ranks.store_address import opener, store_place
from kvbaton.ranks.store_trust import trust_of
from kvbaton.store.interface import Backend
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings
from kvbaton.store.value_header import StoreTrust
from kvbaton_proof.bench.kit.bench_peers import KVBATON
from kvbaton_proof.bench.kit.piped_children import PipedProgram

CLIENTS = ("p0", "d0")
START_S = 30.0


class SiteError(Exception):
    """A store could not be started; the message names the next step."""


class Site(msgspec.Struct, frozen=True):
    """A store that serves: what engines are told, and what makes a way in for each of two clients."""

    name: str
    place: str
    keys: str  # of the cluster that both clients are of
    clients: Callable[[str], Backend]

    @property
    def trusts(self) -> list[StoreTrust]:
        """What each client signs by, and whom it believes."""
        return [trust_of(keys.load(Path(self.keys), who)).trust for who in CLIENTS]


@contextlib.contextmanager
def site(name: str, bytes_max: int) -> Iterator[Site]:
    """A store with room for `bytes_max` of values."""
    with key_room() as directory:
        keys.mint(directory / "keys", ["store", *CLIENTS])
        with _served(directory / "keys", bytes_max) if name == KVBATON else _mooncake(bytes_max) as place:
            yield Site(name, place, str(directory / "keys"), lambda who: _client(directory / "keys", place, who))


def _client(directory: Path, place: str, who: str) -> Backend:
    make, _ = opener(store_place(place), keys.load(directory, who), timeout_s=20.0)
    return make()


@contextlib.contextmanager
def _served(directory: Path, bytes_max: int) -> Iterator[str]:
    words = ["store", "--keys", str(directory), "--port", "0", "--json", "--stop-on-eof", "--bytes", str(bytes_max)]
    with _started("kvbaton store", [*KVBATON_ARGV, *words]) as child:
        yield str(json.loads(child.line(START_S))["endpoint"])


@contextlib.contextmanager
def _mooncake(bytes_max: int) -> Iterator[str]:
    binary = Path(sys.executable).with_name("mooncake_master")
    if not binary.exists():
        raise SiteError(f"{binary} is missing; install mooncake-transfer-engine, or its -non-cuda build, beside it")
    port, metrics = free_ports(2)
    words = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"]
    with _started("mooncake_master", [str(binary), *words, "--enable_metric_reporting=false"]) as master:
        _answers(master, port)
        lending = [sys.executable, "-m", __name__, f"127.0.0.1:{port}", str(bytes_max)]
        with _started("the owner of memory", lending) as owner:
            owner.line(START_S)
            yield f"mooncake://127.0.0.1:{port}?lend=0"


def _started(what: str, words: Sequence[str]) -> PipedProgram:
    return PipedProgram(what, words, {"GLOG_minloglevel": "3", "MC_LOG_LEVEL": "error"})


def _answers(child: PipedProgram, port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and child.is_alive:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise child.failed(f"did not serve within {START_S:.0f} s")


def _lend(master: str, segment_bytes: int) -> None:
    backend = MooncakeBackend(MooncakeSettings(master=master, segment_bytes=segment_bytes))
    backend.exists(["any"])  # sets the library up, which lends the memory
    print("lent", flush=True)
    sys.stdin.read()


def is_installed(name: str) -> bool:
    """Whether a store of that kind can be started with this Python."""
    return name == KVBATON or Path(sys.executable).with_name("mooncake_master").exists()


if __name__ == "__main__":
    _lend(sys.argv[1], int(sys.argv[2]))
