"""A backend that calls a `StoreServer` over lines: one line per call in flight.

Laws: a call returns within `timeout_s`, with an answer or `ServerSilent`. Only the calling thread writes into its
buffers, and none after it returned: a late line is closed. Invitations to lines come over the control plane, so an
unauthenticated peer gets none. An idle line that the server has closed is replaced once, in the same call.

The client's side of invitations: requests a line from a `StoreServer`, over the authenticated control plane.

Laws: a call returns within its timeout, with an invitation or `ServerSilent`; a lost frame causes nothing else. One
thread touches the port.

Invitations: the messages that give a member of the cluster a line (`tcp_connection`) to a store's server.

They cross an authenticated and encrypted control plane. Law: external data becomes one of these types when received,
within bounds, or is dropped and counted.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Annotated, Protocol, TypeVar

import msgspec

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.numbers import Number, Port
from kvbaton.security import sealing
from kvbaton.security.sealing import Encrypt
from kvbaton.store.tcp_connection import SIZE, Item, LineError, Op, StoreConnection, greet


class _StoreMessage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    id: Number  # of a request; its response has the same


class Dial(_StoreMessage, frozen=True):
    """Invite me to a line. (client)"""


class Invited(_StoreMessage, frozen=True):
    """Where lines are served, and the secret to open one with. (server)"""

    port: Port
    number: Number
    secret: Annotated[bytes, msgspec.Meta(max_length=64)]


encode = msgspec.msgpack.Encoder().encode
_dial = msgspec.msgpack.Decoder(Dial)
_invited = msgspec.msgpack.Decoder(Invited)
_MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


class FramePort(Protocol):
    """The control plane as the store uses it: `ZmqControl` is one. Touched by one thread, except `wake`."""

    def send(self, worker: WorkerId, frame: bytes) -> bool: ...
    def receive(self) -> Sequence[tuple[WorkerId, bytes]]: ...
    def wait(self, timeout_s: float | None) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


def request(frame: bytes) -> Dial | None:
    """A client's message; None when it is not one within bounds."""
    try:
        return _dial.decode(frame)
    except _MALFORMED:
        return None


def reply(frame: bytes) -> Invited | None:
    """The server's message; None when it is not one within bounds."""
    try:
        return _invited.decode(frame)
    except _MALFORMED:
        return None


log = logging.getLogger(__name__)

_CLOSE_S = 4.0


class ServerSilent(Exception):
    """The server did not respond in time; the message names the next step."""


class InvitationClient:
    """Owns the port. Any thread may ask."""

    def __init__(self, port: FramePort, server: WorkerId) -> None:
        self.counters: Counter[str] = Counter()
        self._port = port
        self._server = server
        self._ids = itertools.count(1)
        self._waiting: dict[int, SimpleQueue[Invited]] = {}
        self._out: deque[Dial] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-store-client", daemon=True)
        self._thread.start()

    def invitation(self, timeout_s: float) -> Invited:
        asked = Dial(next(self._ids))
        came: SimpleQueue[Invited] = SimpleQueue()
        self._waiting[asked.id] = came
        try:
            self._out.append(asked)
            self._port.wake()
            return came.get(timeout=max(0.0, timeout_s))
        except Empty:
            self.counters["silent"] += 1
            raise ServerSilent(f"store {self._server} did not answer in {timeout_s:.1f} s; is it running?") from None
        finally:
            del self._waiting[asked.id]

    def close(self) -> None:
        self._stopping.set()
        self._port.wake()
        self._thread.join(_CLOSE_S)

    # --- the port's thread

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self._turn()
            except Exception:
                log.exception("[store-fault] the store's client failed once; continuing")
                self._stopping.wait(0.05)
        self._port.close()

    def _turn(self) -> None:
        while self._out:
            if not self._port.send(self._server, encode(self._out.popleft())):
                self.counters["unknown_server"] += 1
        for worker, frame in self._port.receive():
            said = reply(frame) if worker == self._server else None
            if said is None:
                self.counters["malformed"] += 1
            elif (waiting := self._waiting.get(said.id)) is not None:
                waiting.put(said)
        self._port.wait(None)


LINES_IDLE_MAX = 16

T = TypeVar("T")


class LinedBackend:
    """Implements `Backend`; owns `control`, which delivers its invitations. `host` is the address of the server's
    lines."""

    lands_late = False

    def __init__(
        self, control: InvitationClient, host: str, *, timeout_s: float = 4.0, encrypt: Encrypt = "auto"
    ) -> None:
        self._encrypt: Encrypt = encrypt
        self.counters: Counter[str] = Counter()
        self._control = control
        self._host = host
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._idle: list[StoreConnection] = []
        self._closed = False

    def register(self, memory: memoryview) -> None:
        pass

    def exists(self, keys: Sequence[str]) -> list[bool]:
        def talk(line: StoreConnection) -> list[bool]:
            line.ask(Op.EXISTS, [(key, 0) for key in keys])
            return [each == 1 for each in line.read(len(keys))]

        return self._call(talk)

    def put(self, keys: Sequence[str], values: Sequence[memoryview]) -> list[str]:
        items: list[Item] = [(key, value.nbytes) for key, value in zip(keys, values, strict=True)]

        def talk(line: StoreConnection) -> list[str]:
            line.ask(Op.PUT, items)
            line.send(*values)
            return list(line.told())

        return self._call(talk)

    def get(self, keys: Sequence[str], into: Sequence[memoryview]) -> list[int]:
        items: list[Item] = [(key, to.nbytes) for key, to in zip(keys, into, strict=True)]

        def talk(line: StoreConnection) -> list[int]:
            line.ask(Op.GET, items)
            sizes = []
            for to in into:
                [size] = SIZE.unpack(line.read(SIZE.size))
                if size > to.nbytes:
                    raise LineError("larger than the buffer")
                line.read_into(to[:size])
                sizes.append(size)
            return sizes

        return self._call(talk)

    def discard(self, keys: Sequence[str]) -> None:
        def talk(line: StoreConnection) -> bytes:
            line.ask(Op.DISCARD, [(key, 0) for key in keys])
            return line.read(1)

        self._call(talk)

    def close(self) -> None:
        with self._lock:
            self._closed, idle, self._idle = True, self._idle, []
        for line in idle:
            line.close()
        self._control.close()

    def _call(self, talk: Callable[[StoreConnection], T]) -> T:
        until = time.monotonic() + self._timeout_s
        with self._lock:
            line = self._idle.pop() if self._idle else None
        if line is not None:
            try:
                return self._talk(line, until, talk)
            except (LineError, OSError):
                self.counters["renewed"] += 1  # the server may have restarted
        try:
            return self._talk(self._dial(until), until, talk)
        except (LineError, OSError) as error:
            self.counters["silent"] += 1
            raise ServerSilent(f"store at {self._host}: {error}; is it running?") from None

    def _talk(self, line: StoreConnection, until: float, talk: Callable[[StoreConnection], T]) -> T:
        line.until = until
        try:
            said = talk(line)
        except BaseException:
            line.close()
            raise
        with self._lock:
            keep = not self._closed and len(self._idle) < LINES_IDLE_MAX
            if keep:
                self._idle.append(line)
        if not keep:
            line.close()
        return said

    def _dial(self, until: float) -> StoreConnection:
        invited = self._control.invitation(until - time.monotonic())
        line = StoreConnection(
            socket.create_connection((self._host, invited.port), max(0.001, until - time.monotonic()))
        )
        line.until = until
        try:
            sealed = sealing.is_required_on(self._encrypt, line.socket)
            if sealed and not sealing.can_seal():
                raise LineError(sealing.MISSING)
            greet(line, invited.number, invited.secret, sealed)
        except BaseException:
            line.close()
            raise
        self.counters["lines"] += 1
        return line
