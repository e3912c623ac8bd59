"""The one thread of a process that runs its node: sleep until an input or a deadline, step, repeat.

Laws: only this thread touches the node and the control plane; other threads use `tell` and `call`. When idle it sleeps
in the kernel. An exception out of a step is a bug: it is logged, counted and followed by a short pause, and the node
continues. Stopping says goodbye to the peers and closes the node's transports and the control plane.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from kvbaton.control.sockets import LoopThread
from kvbaton.node.node import Node
from kvbaton.node.ports import ControlPort
from kvbaton.protocol.events import Event

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
