"""One process's backend, served to many: members of an authenticated control plane are invited to lines.

Laws: no message of a client raises here or costs another client more than a turn. Only a member with permission is
invited; values themselves never cross the control plane, whose encryption would limit them to 50 MB/s. Any worker
of the cluster may put and discard; which values count, readers decide by who has signed them (`value_trust`).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial

from kvbaton.protocol.ids import WorkerId
from kvbaton.store.interface import Backend
from kvbaton.store.store_client import Dial, FramePort, Invited, encode, request
from kvbaton.store.tcp_server_side import LineServer

log = logging.getLogger(__name__)


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
