"""One process's back end, served to many over an authenticated control plane.

Laws: nothing that a client says raises here or costs another client more than a turn. What clients have begun to send
is bounded in bytes, over all of them; at the bound the oldest half-sent value is dropped, which its sender sees as no
answer. Values are as good as their senders: any worker of the cluster may put and discard. Over the control plane
speed is that of its encryption (50 MB/s); who needs more is invited to a line.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from functools import partial

from kvbaton.protocol.ids import WorkerId
from kvbaton.store.interface import Backend
from kvbaton.store.memory_backend import KEY_COST_BYTES
from kvbaton.store.store_messages import (
    Ask,
    Dial,
    Discard,
    Fetch,
    FramePort,
    Invited,
    Keep,
    Kept,
    Piece,
    Reply,
    Request,
    Told,
    encode,
    pieces,
    request,
)
from kvbaton.store.tcp_server_side import LineServer

log = logging.getLogger(__name__)


class StoreServer:
    """Answers until it is closed; owns the port and the back end."""

    def __init__(
        self,
        port: FramePort,
        backend: Backend,
        *,
        arriving_bytes_max: int,
        value_bytes_max: int,
        lines: LineServer | None = None,
        may_ask: Callable[[WorkerId], bool] = lambda worker: True,
    ) -> None:
        """`may_ask`: whether a member's key is for this."""
        self.counters: Counter[str] = Counter()
        self._port = port
        self._backend = backend
        self._lines = lines  # owned, if given
        self._may_ask = may_ask
        self._arriving_bytes_max = arriving_bytes_max
        self._value_bytes_max = value_bytes_max
        self._arriving: OrderedDict[tuple[WorkerId, int], bytearray] = OrderedDict()
        self._arriving_bytes = 0
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvbaton-store-server", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop answering; bounded in time. Idempotent."""
        self._stopping.set()
        self._port.wake()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._guard(self._turn)
        if self._lines is not None:
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
                self._guard(partial(self._handle, worker, said))
        self._port.wait(None)

    def _guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:  # a back end's; the client sees no answer
            self.counters["faults"] += 1
            log.exception("[store-fault] the store's server failed at one thing; going on")
            self._stopping.wait(0.05)

    def _handle(self, worker: WorkerId, said: Request) -> None:
        match said:
            case Ask(number, keys):
                self._answer(worker, Told(number, bytes(self._backend.exists(keys))))
            case Keep():
                self._take(worker, said)
            case Fetch(number, key, bytes_max):
                self._fetch(worker, number, key, min(bytes_max, self._value_bytes_max))
            case Discard(_, keys):
                self._backend.discard(keys)
            case Dial(number):
                port = 0 if self._lines is None else self._lines.port
                invitation = (0, b"") if self._lines is None else self._lines.invite()
                self._answer(worker, Invited(number, port, *invitation))

    def _take(self, worker: WorkerId, said: Keep) -> None:
        place = worker, said.id
        if said.total > self._value_bytes_max:
            self._answer(worker, Kept(said.id, f"a value has at most {self._value_bytes_max} bytes here"))
            return
        value = self._arriving.get(place)
        if said.at == 0 and value is None:
            value = self._arriving[place] = bytearray()
            self._arriving_bytes += KEY_COST_BYTES  # many small ones are bounded too
        if value is None or said.at != len(value):
            self._forget(place)  # a piece was lost: its sender will hear nothing
            return
        value += said.data
        self._arriving_bytes += len(said.data)
        if len(value) == said.total:
            self._forget(place)
            self._answer(worker, Kept(said.id, self._backend.put([said.key], [memoryview(value)])[0][:200]))
        while self._arriving_bytes > self._arriving_bytes_max:
            self.counters["dropped"] += 1
            self._forget(next(iter(self._arriving)))

    def _fetch(self, worker: WorkerId, number: int, key: str, bytes_max: int) -> None:
        buffer = memoryview(bytearray(bytes_max))
        size = self._backend.get([key], [buffer])[0]
        if not 0 < size <= bytes_max:
            self._answer(worker, Piece(number, 0, 0, b""))
            return
        for at, to in pieces(size):
            self._answer(worker, Piece(number, at, size, bytes(buffer[at:to])))

    def _forget(self, place: tuple[WorkerId, int]) -> None:
        value = self._arriving.pop(place, None)
        if value is not None:
            self._arriving_bytes -= len(value) + KEY_COST_BYTES

    def _answer(self, worker: WorkerId, said: Reply) -> None:
        self._port.send(worker, encode(said))
