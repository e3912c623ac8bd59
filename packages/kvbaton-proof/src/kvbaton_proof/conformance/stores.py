"""A shared store for the suite: a kvbaton store in this process, and a hand on what engines ask of it.

Law: only the edge is touched, the calls of the engines' client; a tap that is closed leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from kvbaton.control import keyring as keys
from kvbaton.control.zmq import ZmqControl
from kvbaton.ranks.rank_store_link import RemoteRankStore
from kvbaton.ranks.rank_store_messages import RankStoreNews
from kvbaton.ranks.store_address import STORE_NAME
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.store_server import StoreServer
from kvbaton.store.tcp_backend import LinedBackend
from kvbaton.store.tcp_server_side import LineServer

KINDS = ("exists", "get", "put")
_WAIT_S = 30.0


class _Memory(MemoryBackend):
    """Remembers what it was given, in order."""

    def __init__(self, bytes_max: int) -> None:
        super().__init__(bytes_max)
        self.names: dict[str, None] = {}

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[str]:
        self.names.update(dict.fromkeys(keys))
        return super().put(keys, values)

    def adopt(self, key: str, value: bytes | memoryview) -> str:
        self.names[key] = None
        return super().adopt(key, value)


class LabStore:
    """A store that runs until it is closed."""

    def __init__(self, key_directory: Path, bytes_max: int = 8 << 20) -> None:
        self.memory = _Memory(bytes_max)
        control = ZmqControl(keys.load(key_directory, STORE_NAME))
        self.url = control.endpoint
        lines = LineServer(self.memory, "127.0.0.1", value_bytes_max=1 << 20)
        self._server = StoreServer(control, self.memory, lines)

    @property
    def values(self) -> int:
        return len(self.memory)

    def forget(self, count: int | None = None) -> None:
        """Lose values: those that came last, or all."""
        found = list(self.memory.names)
        self.memory.discard(found if count is None else found[-count:])

    def damage(self, index: int) -> None:
        """Change the last byte of a value."""
        name, room = list(self.memory.names)[index], bytearray(1 << 16)
        [size] = self.memory.get([name], [memoryview(room)])
        room[size - 1] ^= 1
        self.memory.put([name], [memoryview(room)[:size]])

    def close(self) -> None:
        self._server.close()


class Calls:
    """`decide` is asked for each call of a client: "go", "wait", "raise", "part" (of a get) or "refuse" (of a put)."""

    def __init__(self) -> None:
        self.decide: Callable[[str], str] = lambda kind: "go"
        self.seen: Counter[str] = Counter()
        self._open = threading.Event()

    def set(self, **verdicts: str) -> None:
        """What becomes of each kind from now on."""
        self.decide = lambda kind: verdicts.get(kind, "go")
        self._open.clear()

    def release(self) -> None:
        self.decide = lambda kind: "go"
        self._open.set()

    def ask(self, kind: str) -> str:
        self.seen[kind] += 1
        verdict = self.decide(kind)
        if verdict == "wait":
            self._open.wait(_WAIT_S)
        elif verdict == "raise":
            raise OSError(f"the tap let this {kind} fail")
        return verdict


class Silence:
    """News of the ranks' shelves that are kept back while `hold`."""

    def __init__(self) -> None:
        self.holds = False
        self.kept: list[Callable[[], None]] = []

    def hold(self) -> None:
        self.holds = True

    def release(self) -> None:
        self.holds = False
        kept, self.kept = self.kept, []
        for tell in kept:
            tell()


@contextlib.contextmanager
def silence() -> Iterator[Silence]:
    """A tap on what the ranks of this process tell their engines of the store."""
    tap, genuine = Silence(), RemoteRankStore.take

    def take(self: RemoteRankStore, news: RankStoreNews) -> None:
        if tap.holds:
            tap.kept.append(partial(genuine, self, news))
        else:
            genuine(self, news)

    try:
        RemoteRankStore.take = take  # type: ignore[method-assign]
        yield tap
    finally:
        RemoteRankStore.take = genuine  # type: ignore[method-assign]
        tap.release()


@contextlib.contextmanager
def calls() -> Iterator[Calls]:
    """A tap on every client of this process."""
    tap = Calls()
    genuine: dict[str, Any] = {kind: getattr(LinedBackend, kind) for kind in KINDS}

    def exists(self: Any, names: Sequence[str]) -> Any:
        tap.ask("exists")
        return genuine["exists"](self, names)

    def get(self: Any, names: Sequence[str], into: Sequence[memoryview]) -> Any:
        sizes = [0] * len(names) if (verdict := tap.ask("get")) == "none" else genuine["get"](self, names, into)
        return [*sizes[:1], *([0] * (len(sizes) - 1))] if verdict == "part" else sizes

    def put(self: Any, names: Sequence[str], values: Sequence[memoryview]) -> Any:
        if tap.ask("put") == "refuse":
            return ["the tap refuses this value"] * len(names)
        return genuine["put"](self, names, values)

    try:
        for kind, tapped in (("exists", exists), ("get", get), ("put", put)):
            setattr(LinedBackend, kind, tapped)
        yield tap
    finally:
        for kind, method in genuine.items():
            setattr(LinedBackend, kind, method)
        tap.release()
