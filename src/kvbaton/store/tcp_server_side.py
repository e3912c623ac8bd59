"""Serves lines: one thread per line, asleep in the kernel when idle.

Laws: a line is served only after its handshake. Lines, invitations and the memory of each line (one value) are bounded;
at the bound new ones are refused. Nothing that comes over a line raises past it: it costs that line.

One process's backend, served to many: members of an authenticated control plane are invited to lines.

Laws: no message of a client raises here or costs another client more than a turn. Only a member with permission is
invited; values themselves never cross the control plane, whose encryption would limit them to 50 MB/s. Any worker
of the cluster may put and discard; which values count, readers decide by who has signed them (`value_trust`).
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import socket
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial

from kvbaton.protocol.ids import WorkerId
from kvbaton.security import sealing
from kvbaton.security.sealing import SECRET_BYTES, Encrypt
from kvbaton.store.interface import Backend
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.tcp_backend import Dial, FramePort, Invited, encode, request
from kvbaton.store.tcp_connection import SIZE, Item, LineError, Op, StoreConnection, admit

log = logging.getLogger(__name__)

LINES_MAX = 256
GREETING_MAX = 64  # unauthenticated lines; beyond it the oldest of these is closed
THREADS_MAX = LINES_MAX + 2 * GREETING_MAX  # threads of refused lines end a moment later
INVITATIONS_MAX = 1024
GREETING_S = 5.0
QUESTION_S = 30.0
IDLE_S = 600.0
DROP_BYTES = 1 << 20
_NONE = SIZE.pack(0)


class LineServer:
    """Serves a backend, which it does not own, on its own port."""

    def __init__(self, backend: Backend, host: str, *, value_bytes_max: int, encrypt: Encrypt = "auto") -> None:
        sealing.check(encrypt, host)
        self._encrypt: Encrypt = encrypt
        self.counters: Counter[str] = Counter()
        self._backend = backend
        self._direct = backend if isinstance(backend, MemoryBackend) else None  # saves a copy in each direction
        self._value_bytes_max = value_bytes_max
        self._numbers = itertools.count(1)
        self._invitations: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self._threads = threading.BoundedSemaphore(THREADS_MAX)
        self._lines: set[StoreConnection] = set()
        self._greeting: OrderedDict[StoreConnection, None] = (
            OrderedDict()
        )  # not among the lines: unauthenticated peers take no member's place
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM)
        self._socket.bind((host, 0))
        self._socket.listen(64)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="kvbaton-store-lines", daemon=True).start()

    def invite(self) -> tuple[int, bytes]:
        """A number and a secret for one line; at the bound the oldest unused one is forgotten."""
        number, secret = next(self._numbers), secrets.token_bytes(SECRET_BYTES)
        with self._lock:
            self._invitations[number] = secret
            if len(self._invitations) > INVITATIONS_MAX:
                self._invitations.popitem(last=False)
        return number, secret

    @property
    def open_lines(self) -> int:
        return len(self._lines)

    def close(self) -> None:
        with self._lock:
            self._closed, lines = True, [*self._lines, *self._greeting]
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for line in lines:
            line.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.05)  # out of descriptors: a line will end
                continue
            self._threads.acquire()  # one always ends soon: a handshake has a deadline
            self._begin(StoreConnection(connection))

    def _begin(self, line: StoreConnection) -> None:
        with self._lock:
            self._greeting[line] = None
            oldest = self._greeting.popitem(last=False)[0] if len(self._greeting) > GREETING_MAX else None
        if oldest is not None:
            self.counters["turned_away"] += 1
            oldest.close()
        try:
            threading.Thread(target=self._serve, args=(line,), name="kvbaton-store-line", daemon=True).start()
        except RuntimeError:  # out of threads: a line will end
            self.counters["turned_away"] += 1
            self._leave(line)
            self._threads.release()

    def _serve(self, line: StoreConnection) -> None:
        try:
            line.until = time.monotonic() + GREETING_S
            must_seal = sealing.is_required_on(self._encrypt, line.socket)
            admit(line, self._invitations.get, self._enter(line), must_seal)
            self.counters["lines"] += 1
            buffer = bytearray()
            while True:
                line.until = time.monotonic() + IDLE_S
                buffer = self._answer(line, buffer)
        except (LineError, OSError):
            self.counters["ended"] += 1
        except Exception:  # of the backend; the client sees a closed line
            self.counters["faults"] += 1
            log.exception("[store-fault] a line of the store failed")
        finally:
            self._leave(line)
            self._threads.release()

    def _enter(self, line: StoreConnection) -> Callable[[int], bytes | None]:
        """Redeems an invitation, and takes a place among the lines."""

        def take(number: int) -> bytes | None:
            with self._lock:
                if self._closed or len(self._lines) >= LINES_MAX:
                    self.counters["turned_away"] += 1
                    return None
                self._greeting.pop(line, None)
                self._lines.add(line)
                return self._invitations.pop(number, None)

        return take

    def _leave(self, line: StoreConnection) -> None:
        line.close()
        with self._lock:
            self._lines.discard(line)
            self._greeting.pop(line, None)

    def _answer(self, line: StoreConnection, buffer: bytearray) -> bytearray:
        op, items = line.asked()
        line.until = time.monotonic() + QUESTION_S
        names = [key for key, _ in items]
        match op:
            case Op.EXISTS:
                line.send(bytes(self._backend.exists(names)))
            case Op.DISCARD:
                self._backend.discard(names)
                line.send(b"\x01")
            case Op.PUT:
                return self._put(line, items, buffer)
            case Op.GET:
                return self._get(line, items, buffer)
        return buffer

    def _put(self, line: StoreConnection, items: tuple[Item, ...], buffer: bytearray) -> bytearray:
        wrong = []
        for key, size in items:
            if not 0 < size <= self._value_bytes_max:
                wrong.append(f"a value has at most {self._value_bytes_max} bytes here")
                _drop(line, size)
                continue
            if self._direct is not None:
                whole = self._direct.spare.take(size)
                line.read_into(whole)
                self.counters["bytes_in"] += size
                wrong.append(self._direct.adopt(key, whole))
                continue
            buffer = _grown(buffer, size)
            with memoryview(buffer) as all_of_it, all_of_it[:size] as value:
                line.read_into(value)
                self.counters["bytes_in"] += size
                wrong += self._backend.put([key], [value])
        line.tell(wrong)
        return buffer

    def _get(self, line: StoreConnection, items: tuple[Item, ...], buffer: bytearray) -> bytearray:
        for key, bytes_max in items:
            room_bytes = min(bytes_max, self._value_bytes_max)
            if self._direct is not None:
                value = self._direct.value(key)
                if value is not None and len(value) > room_bytes:
                    self._direct.discard([key])  # damaged: otherwise it would look present and never be put again
                    value = None
                if value is None:
                    line.send(_NONE)
                else:
                    line.send(SIZE.pack(len(value)), memoryview(value))
                    self.counters["bytes_out"] += len(value)
                continue
            buffer = _grown(buffer, room_bytes)
            with memoryview(buffer) as all_of_it, all_of_it[:room_bytes] as into:
                size = self._backend.get([key], [into])[0]
                if 0 < size <= room_bytes:
                    line.send(SIZE.pack(size), into[:size])
                    self.counters["bytes_out"] += size
                else:
                    line.send(_NONE)
        return buffer


def _grown(buffer: bytearray, size: int) -> bytearray:
    return buffer if len(buffer) >= size else bytearray(size)


def _drop(line: StoreConnection, size: int) -> None:
    while size > 0:
        size -= len(line.read(min(size, DROP_BYTES)))


class StoreServer:
    """Serves until it is closed; owns the port, the lines and the backend."""

    def __init__(
        self,
        port: FramePort,
        backend: Backend,
        lines: LineServer,
        *,
        may_ask: Callable[[WorkerId], bool] = lambda worker: True,
    ) -> None:
        """`may_ask`: whether a member's key permits this."""
        self.counters: Counter[str] = Counter()
        self._port = port
        self._backend = backend
        self._lines = lines
        self._may_ask = may_ask
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-store-server", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop serving; bounded in time. Idempotent."""
        self._stopping.set()
        self._port.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._guard(self._turn)
        self._guard(self._lines.close)
        self._guard(self._port.close)
        self._guard(self._backend.close)

    def _turn(self) -> None:
        for worker, frame in self._port.receive():
            said = request(frame)
            if not self._may_ask(worker):
                self.counters["forbidden"] += 1
            elif said is None:
                self.counters["malformed"] += 1
            else:
                self._guard(partial(self._invite, worker, said))
        self._port.wait(None)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self.counters["faults"] += 1
            log.exception("[store-fault] the store's server failed once; continuing")
            self._stopping.wait(0.05)

    def _invite(self, worker: WorkerId, said: Dial) -> None:
        self._port.send(worker, encode(Invited(said.id, self._lines.port, *self._lines.invite())))
