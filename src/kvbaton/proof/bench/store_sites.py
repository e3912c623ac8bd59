"""Stores to measure, each in processes of its own: a `kvbaton store`, or a `mooncake_master` and an owner of memory.

    python -m kvbaton.proof.bench.store_sites MASTER BYTES      lends memory to a Mooncake master until its input ends

Laws: what was started is gone after the context, by its own handle, and children end with their input. Every wait has
a deadline. A store that is not installed is told by name, with the next step.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec

from kvbaton.control import keyring as keys
from kvbaton.control.key_room import key_room
from kvbaton.ranks.store_address import opener, store_place
from kvbaton.store.interface import Backend
from kvbaton.store.mooncake_backend import MooncakeBackend, MooncakeSettings

KVBATON, MOONCAKE = "kvbaton", "mooncake"
BACKENDS = (KVBATON, MOONCAKE)
CLIENTS = ("p0", "d0")
START_S, END_S = 30.0, 10.0
PORTS = (12_000, 32_000)


class SiteError(Exception):
    """A store could not be started; the message names the next step."""


class Site(msgspec.Struct, frozen=True):
    """A store that serves: what engines are told, and what makes a way in for each of two clients."""

    name: str
    place: str
    keys: str  # of the cluster that both clients are of
    clients: Callable[[str], Backend]


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
    words = ["-m", "kvbaton.cli.main", "store", "--keys", str(directory), "--port", "0", "--json", "--stop-on-eof"]
    with _child([sys.executable, *words, "--bytes", str(bytes_max)]) as child:
        yield str(json.loads(_line(child, "kvbaton store"))["endpoint"])


@contextlib.contextmanager
def _mooncake(bytes_max: int) -> Iterator[str]:
    binary = Path(sys.executable).with_name("mooncake_master")
    if not binary.exists():
        raise SiteError(f"{binary} is missing; install mooncake-transfer-engine, or its -non-cuda build, beside it")
    port, metrics = _free_ports(2)
    words = [f"--rpc_port={port}", "--rpc_address=127.0.0.1", f"--metrics_port={metrics}"]
    with _child([str(binary), *words, "--enable_metric_reporting=false"]) as master:
        _answers(master, port)
        with _child([sys.executable, "-m", __name__, f"127.0.0.1:{port}", str(bytes_max)]) as owner:
            _line(owner, "the owner of memory")
            yield f"mooncake://127.0.0.1:{port}?lend=0"


@contextlib.contextmanager
def _child(words: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    quiet = {**os.environ, "GLOG_minloglevel": "3", "MC_LOG_LEVEL": "error"}
    child = subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=quiet, bufsize=0
    )
    try:
        yield child
    finally:
        child.terminate()
        try:
            child.wait(END_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait(END_S)
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                pipe.close()


def _line(child: subprocess.Popen[bytes], what: str) -> bytes:
    assert child.stdout is not None
    ready, _, _ = select.select([child.stdout], [], [], START_S)
    said = child.stdout.readline() if ready else b""
    if not said:
        raise SiteError(f"{what} did not start within {START_S:.0f} s; run it by hand to see why")
    return bytes(said)


def _answers(child: subprocess.Popen[bytes], port: int) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and child.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.02)
    raise SiteError(f"mooncake_master did not serve within {START_S:.0f} s; run it by hand to see why")


def _free_ports(count: int) -> list[int]:
    found: list[int] = []
    while len(found) < count:
        port = random.randrange(*PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found += [] if port in found else [port]
    return found


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
