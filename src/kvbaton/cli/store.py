"""`kvbaton store`: caches KV blocks in memory, and optionally on disk, for all engines of a cluster.

Laws: only members with a key in the cluster's directory may put and get; other peers cannot read or write a byte.
Memory and disk are bounded, the least recently used values go first. SIGUSR1 prints one line of figures, SIGTERM and
SIGINT end it; the contents of memory are lost then, unless there is a disk. `--health` adds `/health` and `/metrics`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from kvbaton.cli.arguments import host_port, port
from kvbaton.cli.flags import log as log_flags
from kvbaton.control.keyring import Keyring, load
from kvbaton.control.zmq import ZmqControl
from kvbaton.observe.metrics.exposition import Family
from kvbaton.observe.metrics.process_metrics import store_families
from kvbaton.processes.child_process import raise_file_limit
from kvbaton.processes.operator_errors import CommandError
from kvbaton.protocol.legality import Act, may
from kvbaton.ranks.store_trust import STORE_NAME, bytes_of, trust_of
from kvbaton.store.disk_tier import DiskError, DiskTier
from kvbaton.store.value_header import writers_of

if TYPE_CHECKING:
    from kvbaton.store.memory_backend import MemoryBackend

log = logging.getLogger(__name__)


def size(text: str) -> int:
    """An argument type: bytes, such as 4GiB."""
    try:
        found = bytes_of(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if found < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a size above 0")
    return found


CLOSE_S = 5.0
FLUSH_S = 120.0
"""With a disk, memory is written to it before exit, for at most this long."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--keys", required=True, metavar="DIR", default=argparse.SUPPRESS, help="key directory (kvbaton keys new)")
    add("--name", default=STORE_NAME, help="its name in the key directory; add it with kvbaton keys add")
    add("--host", default="127.0.0.1", help="listening address; engines must reach it")
    add("--port", type=port, default=7710, help="listening port, 0 for a free one")
    add("--bytes", type=size, default="4GiB", metavar="SIZE", help="memory for values; evicts the least recently used")
    add("--disk", default=None, metavar="DIR", help="spill to this directory; one process per directory")
    add("--disk-bytes", type=size, default="64GiB", metavar="SIZE", help="disk for values")
    add("--value-bytes-max", type=size, default="64MiB", metavar="SIZE", help="larger values are refused")
    add("--health", type=host_port, metavar="HOST:PORT", help="serve /health and /metrics there (default: off)")
    add("--json", action="store_true", help="print JSON lines: at start, at exit and at each SIGUSR1")
    add("--stop-on-eof", action="store_true", help=argparse.SUPPRESS)
    log_flags.add_arguments(parser, serves_http=False)


def refuse(args: argparse.Namespace) -> None:
    """Any settings of this command go together."""


def run(args: argparse.Namespace) -> int:
    from kvbaton.store.memory_backend import MemoryBackend  # with NumPy: flags are known without it
    from kvbaton.store.tcp_server_side import LineServer, StoreServer

    raise_file_limit()
    keyring = load(args.keys, args.name)
    disk = _disk(args)
    memory = MemoryBackend(args.bytes, disk)
    host = f"[{args.host}]" if ":" in args.host else args.host
    control = ZmqControl(keyring, f"tcp://{host}:{args.port}")
    lines = LineServer(memory, args.host, value_bytes_max=args.value_bytes_max)
    roles = [keyring]
    sweeper = Sweeper(memory)
    sweeper.sweep(keyring)

    def take(fresh: Keyring) -> None:
        roles[0] = fresh
        sweeper.sweep(fresh)

    control.on_keys = take
    server = StoreServer(control, memory, lines, may_ask=lambda member: may(roles[0].role_of(member), Act.KEEP))
    try:
        first = {"name": args.name, "endpoint": control.endpoint, "pid": os.getpid(), "bytes_max": args.bytes}
        figures = lambda: _figures(server.counters + lines.counters, memory, disk)  # noqa: E731

        def families() -> list[Family]:
            counts = {**(server.counters + lines.counters), "lines_open": lines.open_lines}
            tiers = {"memory": (len(memory), memory.bytes_used, args.bytes, memory.counters["evicted"])}
            if disk is not None:
                tiers["disk"] = (len(disk), disk.bytes_used, args.disk_bytes, disk.counters["evicted"])
            return store_families(args.name, tiers, memory.counters, counts, control.counters)

        asyncio.run(_until_told(args, first, figures, families))
    finally:
        server.close(FLUSH_S if args.disk else CLOSE_S)
        log.info("[stopping] stopped")
    return 0


async def _until_told(
    args: argparse.Namespace,
    first: dict[str, Any],
    figures: Callable[[], dict[str, Any]],
    families: Callable[[], list[Family]],
) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()

    def show() -> None:
        _tell(args.json, figures())

    def told(number: signal.Signals) -> None:
        log.info("[stopping] %s", number.name)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        loop.add_signal_handler(number, told, number)
    loop.add_signal_handler(signal.SIGUSR1, show)
    async with _status(args.health, figures, families) as url:
        _tell(args.json, {**first, "health": url})
        if args.stop_on_eof:
            threading.Thread(target=_stop_on_eof, name="kvbaton-parent", daemon=True).start()
        await stop.wait()
    show()


@contextlib.asynccontextmanager
async def _status(
    address: str | None, figures: Callable[[], dict[str, Any]], families: Callable[[], list[Family]]
) -> AsyncIterator[str]:
    if not address:
        yield ""
        return
    from kvbaton.api.http.path_site import status_page

    async with status_page(address, lambda: {"status": "ok", **figures()}, families) as url:
        yield f"{url}/health"


class Sweeper:
    """Drops values of writers that are gone, on a thread of its own: a disk may be slow."""

    def __init__(self, memory: MemoryBackend) -> None:
        self._memory = memory
        self._next: deque[Keyring] = deque(maxlen=1)  # of several only the last matters
        self._turn = threading.Lock()

    def sweep(self, keyring: Keyring) -> None:
        self._next.append(keyring)
        threading.Thread(target=self._run, name="kvbaton-store-sweep", daemon=True).start()

    def _run(self) -> None:
        with self._turn:
            if not self._next:
                return
            trust = trust_of(self._next.pop()).trust
            dropped = self._memory.sweep(lambda head: trust.believes(writers_of(head)))
        if dropped:
            log.warning("[store-swept] dropped %d values: of members that are gone, or that took from such", dropped)


def _disk(args: argparse.Namespace) -> DiskTier | None:
    if args.disk is None:
        return None
    try:
        return DiskTier(Path(args.disk), args.disk_bytes)
    except DiskError as error:
        raise CommandError(f"argument --disk: {error}") from None


def _figures(counters: Counter[str], memory: MemoryBackend, disk: DiskTier | None) -> dict[str, Any]:
    counts = memory.counters
    found = {
        "values": len(memory),
        "bytes": memory.bytes_used,
        "hits": counts["hits"],
        "misses": counts["misses"],
        "evicted": counts["evicted"],
        "dropped": 0,  # half-sent values of an earlier protocol; scripts may read it
        "malformed": counters["malformed"],
        "faults": counters["faults"],
    }
    if disk is not None:
        found |= {"disk_values": len(disk), "disk_bytes": disk.bytes_used, "disk_evicted": disk.counters["evicted"]}
    return found


def _tell(as_json: bool, facts: dict[str, Any]) -> None:
    if as_json:
        said = msgspec.json.encode(facts).decode()
    elif "endpoint" in facts:
        said = f"{facts['name']} serves {facts['endpoint']}, {facts['bytes_max'] >> 20} MiB of memory"
        said += f", health {facts['health']}" if facts["health"] else ""
    else:
        said = ", ".join(f"{name} {value}" for name, value in facts.items())
    print(said, file=sys.stdout, flush=True)


def _stop_on_eof() -> None:
    """Exit with the process that started this one: only it holds the other end of stdin."""
    while os.read(0, 4096):
        pass
    os.kill(os.getpid(), signal.SIGHUP)
