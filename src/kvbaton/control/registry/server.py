"""The registry's server: lives in the router's process, on its own thread.

Laws: a worker registers only under the name that its key proves, and is told that it is listed only after the router
can see it. A bad message is counted, answered with the field at fault and skipped; it never ends the server. Every
worker hears of every change, once per turn however many there were, and whoever missed it gets it with the answer to
its next ping.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping

from kvbaton.control.base import Limits, worth_saying
from kvbaton.control.keys import Keyring
from kvbaton.control.looping import LoopThread
from kvbaton.control.registry import messages as m
from kvbaton.control.registry.roster import Entry, RegistrySettings, Roster, Standing
from kvbaton.control.zmq import LOOPBACK, ZmqControl
from kvbaton.protocol.ids import WorkerId

log = logging.getLogger(__name__)

ROUNDS_PER_TURN_MAX = 64  # all that came is heard before silence is judged, unless someone floods
CLOSE_S = 2.0

Workers = tuple[Entry, ...]


def _ignore(_: Workers) -> None:
    pass


class RegistryServer:
    """Binds at once (`ControlError` if it cannot), serves from `start` on."""

    def __init__(
        self,
        keyring: Keyring,
        bind: str = LOOPBACK,
        *,
        settings: RegistrySettings | None = None,
        on_change: Callable[[Workers], None] = _ignore,
        limits: Limits | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._control = ZmqControl(keyring, bind, limits, clock)
        self._roster = Roster(settings or RegistrySettings(), 1 + secrets.randbits(62), clock())
        self._peers: Mapping[WorkerId, str] = keyring.peers
        self._on_change = on_change
        self._workers: Workers = ()
        self._published = self._roster.revision
        self._announced = self._roster.seen
        self._thread = LoopThread("kvbaton-registry", self._control, self._turn, self._control.close, clock)

    @property
    def endpoint(self) -> str:
        return self._control.endpoint

    @property
    def strangers(self) -> int:
        """Connections that came and have not proven an identity of this cluster."""
        return self._control.strangers

    def start(self) -> None:
        self._thread.start()

    def workers(self) -> Workers:
        """Who is listed now, by name. From any thread."""
        return self._workers

    def set_peers(self, peers: Mapping[WorkerId, str]) -> None:
        """The identities of a key directory that was loaded again. From any thread."""
        self._peers = dict(peers)
        self._control.set_peers(peers)

    def close(self) -> bool:
        """Stop serving; the workers go on with what they know. False when the thread did not end in time."""
        return self._thread.stop(CLOSE_S)

    def _turn(self, now: float) -> float:
        answers: list[tuple[WorkerId, m.FromRegistry]] = []
        for _ in range(ROUNDS_PER_TURN_MAX):
            frames = self._control.receive()
            if not frames:
                break
            for worker, frame in frames:
                answers += [(worker, answer) for answer in self._on_frame(worker, frame, now)]
        self._roster.on_time(now)
        self._publish()
        for worker, answer in answers:
            self._send(worker, m.encode(answer))
        self._announce()
        return self._roster.next_deadline()

    def _on_frame(self, worker: WorkerId, frame: bytes, now: float) -> list[m.FromRegistry]:
        try:
            message = m.decode_from_worker(frame)
            if isinstance(message, m.Register) and message.registration.worker != worker:
                raise m.RegistryFault(f"worker: {worker} registers as {message.registration.worker}")
        except m.RegistryFault as fault:
            self.counters["bad_messages"] += 1
            if worth_saying(self.counters["bad_messages"]):
                log.warning("a message of %s was skipped: %s", worker, fault)
            return [m.Refused(str(fault)[: m.DETAIL_CHARS_MAX])]
        self.counters["messages"] += 1
        return self._answers(worker, message, now)

    def _answers(self, worker: WorkerId, message: m.FromWorker, now: float) -> list[m.FromRegistry]:
        if isinstance(message, m.Deregister):
            self._roster.deregister(worker, message.incarnation)
            return [m.Deregistered(message.incarnation)]
        if isinstance(message, m.Register):
            incarnation = message.registration.incarnation
            standing = self._roster.register(message.registration, self._peers.get(worker, ""), now)
        else:
            incarnation = message.incarnation
            standing = self._roster.ping(worker, incarnation, now)
        match standing:
            case Standing.UNKNOWN:
                return [m.Unknown(incarnation)]
            case Standing.SUPERSEDED:
                return [m.Superseded(incarnation)]
            case Standing.FULL:
                return [m.Refused(f"workers: {self._roster.settings.workers_max} are listed, the most there can be")]
        if isinstance(message, m.Ping) and message.seen != self._roster.seen:
            return [m.Registered(incarnation), self._roster.directory()]
        return [m.Registered(incarnation)]

    def _publish(self) -> None:
        """Tell the router what has changed since the last time."""
        if self._published == self._roster.revision:
            return
        self._published = self._roster.revision
        self._workers = self._roster.entries()
        try:
            self._on_change(self._workers)
        except Exception:
            self.counters["callback_faults"] += 1
            log.exception("on_change failed; going on")

    def _announce(self) -> None:
        """Tell the workers."""
        if self._announced == self._roster.seen:
            return
        self._announced = self._roster.seen
        frame = m.encode(self._roster.directory())
        for entry in self._workers:
            self._send(entry.registration.worker, frame)

    def _send(self, worker: WorkerId, frame: bytes) -> None:
        if not self._control.send(worker, frame):
            self.counters["unreached"] += 1
