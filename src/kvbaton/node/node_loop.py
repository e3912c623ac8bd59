"""The one thread of a process that runs its node: sleep until an input or a deadline, step, repeat.

Laws: only this thread touches the node and the control plane; other threads use `tell` and `call`. When idle it sleeps
in the kernel. An exception out of a step is a bug: it is logged, counted and followed by a short pause, and the node
continues. Stopping says goodbye to the peers and closes the node's transports and the control plane.

Observability of one engine: records of its handoffs, metrics derived from them, files, spans and reports.

Law: observation delays no handoff: records are made on the node's thread and handed on; files and spans have their own
threads; a report is made when the registry's client asks.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol, TypeVar

from kvbaton import __version__
from kvbaton.control.sockets import LoopThread
from kvbaton.node.node import Node
from kvbaton.node.ports import ControlPort
from kvbaton.observe.flight.dumps import Dumps, default_directory
from kvbaton.observe.flight.flight_records import DELIVERED, QUIET, Flight
from kvbaton.observe.flight.recorder import KEPT_MAX, Recorder
from kvbaton.observe.metrics import handoff_metrics as figures
from kvbaton.observe.metrics.handoff_metrics import HandoffMetrics
from kvbaton.observe.tracing.export import SpanExport
from kvbaton.protocol.events import Event
from kvbaton.protocol.ids import PeerId

More = Callable[[], Mapping[str, float]]
_COUNTED = (
    "bytes_total", "copies_total", "leases_total", "leases_expired_total", "commits_stale_total",
    "cache_resets_total", "cache_reset_blocks_total",
)  # fmt: skip


def dump_on_signal(dumps: Dumps) -> bool:
    """SIGUSR2 dumps all records, if the signal is unused and this is the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return False
    if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    signal.signal(signal.SIGUSR2, lambda *_: dumps.ask())
    return True


class NodeObservation:
    """Made before the node, which gets its recorder; `begin` when the node exists."""

    def __init__(
        self,
        me: PeerId,
        *,
        directory: str = "",
        spans: SpanExport | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.recorder = Recorder(me)
        self.handoffs = HandoffMetrics()
        self.dumps = Dumps(Path(directory) if directory else default_directory(), me.worker, self.flights)
        self._keeps_failures = bool(directory)  # without a directory only requested dumps are written
        self._spans = spans
        self._clock = clock
        self._wall = wall
        self._node: Node | None = None
        self._more: More = dict

    def begin(self, node: Node, more: More = dict) -> None:
        """`more`: gauges of the engine itself, by name. Called on the thread that asks for a report."""
        self._node, self._more = node, more
        self.recorder.on_flight.append(self.handoffs.observe)
        if self._keeps_failures:
            self.recorder.on_flight.append(self.dumps.on_flight)
        if self._spans is not None:
            self.recorder.on_flight.append(self._spans.take)

    def flights(self) -> Iterator[Flight]:
        """All records, oldest first."""
        over = {id(each): each for each in (*self.recorder.last(KEPT_MAX, failed=True), *self.recorder.last(KEPT_MAX))}
        yield from sorted((*over.values(), *self.recorder.under_way()), key=lambda each: each.began)

    def report(self) -> bytes | None:
        """For the router: the current state, and the handoffs since the last report."""
        if self._node is None:
            return None
        ledger = self._node.ledger
        told = {name: float(value) for name, value in figures.gauges(ledger, self._clock()).items()}
        counted = figures.counters(ledger, {})
        told |= {name: float(value) for name in _COUNTED if isinstance(value := counted[name], int)}
        ends = counted["ends_total"]
        assert isinstance(ends, dict)
        told["handoffs_total"] = float(sum(ends.values()))
        told["delivered_total"] = float(ends.get(DELIVERED, 0))
        told["failed_total"] = float(sum(count for end, count in ends.items() if end not in (DELIVERED, *QUIET)))
        told["pins"] = float(self._node.doorway.pinned_blocks)
        links = {
            str(link.worker): link.transport.name
            for link in list(ledger.consumer.links.by_worker.values())
            if link.transport is not None
        }
        return self.recorder.report(self._wall(), {**told, **self._more()}, links, __version__, socket.gethostname())

    def close(self) -> None:
        self.dumps.close()
        if self._spans is not None:
            self._spans.close()


T = TypeVar("T")

QUEUED_MAX = 4096


class LoopControl(ControlPort, Protocol):
    """A control plane that a thread can sleep on."""

    def wait(self, timeout_s: float | None) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class NodeLoop:
    """Runs one node. The node, its control plane and its transports belong to this loop from `start` on."""

    def __init__(
        self,
        node: Node,
        control: LoopControl,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.node = node
        self._wall = wall
        self._control = control
        self._clock = clock
        self._tells: deque[Event] = deque()
        self._calls: deque[Callable[[], None]] = deque()
        self._open = True
        self._lock = threading.Lock()  # between queueing a call and closing the queue
        self._thread = LoopThread("kvbaton-node", control, self._turn, self._finish, clock)

    @property
    def faults(self) -> int:
        """Exceptions that came out of steps; each is a bug."""
        return self._thread.faults

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    def start(self) -> None:
        """Connect the wakers of all inputs, and start."""
        self.node.doorway.wake_node = self._control.wake
        for rank in self.node.ranks:
            for transport in rank.values():
                transport.set_waker(self._control.wake)
        if self.node.store is not None:
            self.node.store.set_waker(self._control.wake)
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """Say goodbye, close everything, end the thread; False when that took longer than `timeout_s`."""
        return self._thread.stop(timeout_s)

    def tell(self, event: Event) -> bool:
        """Record an event from outside for the node; False when the queue is full. From any thread."""
        if len(self._tells) >= QUEUED_MAX:
            return False
        self._tells.append(event)
        self._control.wake()
        return True

    def call(self, action: Callable[[], T]) -> Future[T]:
        """Run `action` on the loop's thread, between steps. From any thread; on the loop's own it runs at once."""
        future: Future[T] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(action())
                except Exception as error:  # noqa: BLE001 - it is the caller's, who gets it
                    future.set_exception(error)

        if self._thread.is_current:  # queued, it would deadlock with the turn that waits for it
            run()
            return future
        with self._lock:  # queued before the queue closes, it runs; otherwise it fails at once
            if self._open and len(self._calls) < QUEUED_MAX:
                self._calls.append(run)
            else:
                future.set_exception(RuntimeError("the loop has stopped" if not self._open else "the loop is busy"))
        self._control.wake()
        return future

    def _turn(self, now: float) -> float | None:
        self.node.set_wall(self._wall(), now)
        self._run_calls()
        while self._tells:
            self.node.tell(self._tells.popleft())
        self.node.step(now)
        return self.node.next_deadline()

    def _run_calls(self) -> None:
        for _ in range(len(self._calls)):  # only those queued now, so that the node gets its turn
            self._calls.popleft()()

    def _finish(self) -> None:
        with self._lock:
            self._open = False
        self._run_calls()  # every accepted call has a caller waiting for it
        try:
            self.node.close(self._clock())
        finally:
            self._control.close()
