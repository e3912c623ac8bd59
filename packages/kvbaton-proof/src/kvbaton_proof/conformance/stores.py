"""A shared store for the suite: a kvbaton store in this process, and a hand on what engines ask of it.

Law: only the edge is touched, the calls of the engines' client; a tap that is closed leaves nothing behind.

Faults between the engines, put in from outside: copies that wait or fail, control frames that are lost.

Law: only the edges are touched (the data planes' `submit`, the control plane's `send`), and a tap that is closed leaves
nothing behind; everything between the edges is what runs in production.
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
from kvbaton.ranks.rank_messages import ENGINE
from kvbaton.ranks.rank_store_link import RemoteRankStore
from kvbaton.ranks.rank_store_messages import RankStoreNews
from kvbaton.ranks.store_trust import STORE_NAME
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.tcp_backend import LinedBackend
from kvbaton.store.tcp_server_side import LineServer, StoreServer
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import TcpTransport

_PLANES: tuple[Any, ...] = (TcpTransport, ShmTransport)


class Copies:
    """The hand on the tap: `decide` is asked for each copy and says "go", "wait" or "fail"."""

    def __init__(self) -> None:
        self.decide: Callable[[Any], str] = lambda copy: "go"
        self.seen = 0
        self.begun = 0
        self.waiting = 0
        self.jobs: set[int] = set()  # of copies that were asked for
        self._wakers: list[Callable[[], None]] = []

    def hold(self) -> None:
        self.decide = lambda copy: "wait"

    def fail(self) -> None:
        self.decide = lambda copy: "fail"
        self.wake()

    def release(self) -> None:
        self.decide = lambda copy: "go"
        self.wake()

    def let(self, count: int) -> None:
        """Let `count` more copies through, then hold."""
        upto = self.begun + count
        self.decide = lambda copy: "go" if self.begun < upto else "wait"
        self.wake()

    def wake(self) -> None:
        """Have the nodes offer again what had to wait."""
        wakers, self._wakers = self._wakers, []
        for waker in wakers:
            waker()

    def ask(self, plane: Any, copy: Any) -> str:
        self.seen += 1
        self.jobs.add(copy.job)
        verdict = self.decide(copy)
        if verdict == "wait":
            self.waiting += 1
            waker = plane._jobs._waker
            if waker is not None and waker not in self._wakers:
                self._wakers.append(waker)
        elif verdict == "go":
            self.begun += 1
        return verdict


@contextlib.contextmanager
def copies() -> Iterator[Copies]:
    """A tap on every data plane of this process."""
    tap = Copies()
    genuine = {plane: plane.submit for plane in _PLANES}

    def tapped(submit: Callable[..., bool]) -> Callable[..., bool]:
        def ask_first(self: Any, copy: Any) -> bool:
            verdict = tap.ask(self, copy)
            if verdict == "fail":
                raise OSError("the tap let this copy fail")
            return verdict == "go" and submit(self, copy)

        return ask_first

    try:
        for plane, submit in genuine.items():
            plane.submit = tapped(submit)
        yield tap
    finally:
        for plane, submit in genuine.items():
            plane.submit = submit
        tap.release()


class Frames:
    """`loses` is asked for each control frame: (from whose control, to whom)."""

    def __init__(self) -> None:
        self.loses: Callable[[Any, str], bool] = lambda control, worker: False
        self.lost = 0


@contextlib.contextmanager
def frames() -> Iterator[Frames]:
    """A tap on every control plane between engines; what ranks tell their own engine does not leave the machine."""
    tap, genuine = Frames(), ZmqControl.send

    def send(self: Any, worker: Any, frame: bytes) -> bool:
        if worker != ENGINE and tap.loses(self, worker):
            tap.lost += 1
            return True
        return genuine(self, worker, frame)

    try:
        ZmqControl.send = send  # type: ignore[method-assign]
        yield tap
    finally:
        ZmqControl.send = genuine  # type: ignore[method-assign]


@contextlib.contextmanager
def failing_once(owner: Any, name: str, call: int = 1) -> Iterator[list[int]]:
    """The `call`-th call of `owner.name` raises, behind its guard where it has one; the list counts the calls."""
    genuine, calls = owner.__dict__[name], [0]
    plain = genuine.__func__ if isinstance(genuine, staticmethod | classmethod) else genuine
    guarded = getattr(plain, "__wrapped__", None)
    inner = guarded or plain

    def fails(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            raise RuntimeError(f"put in by the conformance suite: {name} fails")
        return inner(*args, **kwargs)

    if guarded is not None:
        fails.__name__ = name
        [cell] = [each for each in plain.__closure__ or () if each.cell_contents is guarded]
        put, put_back = partial(setattr, cell, "cell_contents", fails), partial(setattr, cell, "cell_contents", guarded)
    else:
        wrapped: Any = type(genuine)(fails) if plain is not genuine else fails
        put, put_back = partial(setattr, owner, name, wrapped), partial(setattr, owner, name, genuine)
    put()
    try:
        yield calls
    finally:
        put_back()


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
