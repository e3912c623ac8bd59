"""A backend that calls a `StoreServer` over lines: one line per call in flight.

Laws: a call returns within `timeout_s`, with an answer or `ServerSilent`. Only the calling thread writes into its
buffers, and none after it returned: a late line is closed. Invitations to lines come over the control plane, so an
unauthenticated peer gets none. An idle line that the server has closed is replaced once, in the same call.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TypeVar

from kvbaton.security import sealing
from kvbaton.security.sealing import Encrypt
from kvbaton.store.store_client import InvitationClient, ServerSilent
from kvbaton.store.tcp_connection import SIZE, Item, LineError, Op, StoreConnection, greet

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
