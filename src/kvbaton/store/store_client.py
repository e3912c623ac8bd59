"""The client's side of invitations: requests a line from a `StoreServer`, over the authenticated control plane.

Laws: a call returns within its timeout, with an invitation or `ServerSilent`; a lost frame causes nothing else. One
thread touches the port.

Invitations: the messages that give a member of the cluster a line (`tcp_connection`) to a store's server.

They cross an authenticated and encrypted control plane. Law: external data becomes one of these types when received,
within bounds, or is dropped and counted.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Annotated, Protocol

import msgspec

from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.numbers import Number, Port


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
