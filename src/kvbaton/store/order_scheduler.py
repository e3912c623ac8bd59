"""The orders of one store: running, waiting and abandoned. Pure: no threads, no clock, no I/O.

Laws: an order ends once, in `_end`, and every failure enters by `_fail`. There is one lane for each kind of order, and
a lane has one call in flight; a call that has not returned by its deadline is *stuck*: its order ends, its slot stays
with it, and the lane continues with another slot and another thread. At most `stuck_max` calls may be stuck; beyond it
the store is dead. Gets and puts have separate staging memory, so bytes that land late cannot corrupt a value being put.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial

from kvbaton.protocol.errors import Reason
from kvbaton.store.interface import Get, Lookup, Order, OrderEnded, OrderId, Put, StoreSettings
from kvbaton.store.order_scripts import BackendCall, CallAnswer, RefusedCall, Staging, Task

log = logging.getLogger(__name__)

DETAIL_CHARS_MAX = 200
TOO_LATE = "the store did not answer in time"

LANES: dict[type[Order], str] = {Lookup: "lookup", Get: "get", Put: "put"}


@dataclass(slots=True, eq=False)
class _Lane:
    name: str
    slot: int | None = None
    tasks: deque[Task] = field(default_factory=deque)  # the first has its turn
    call: BackendCall | None = None  # under way
    waiting: Task | None = None  # whose call it is, unless that order has ended


class Keeper:
    """Tasks in, calls and ends out. All times are instants of one clock, given by the caller."""

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        self.counters: Counter[str] = Counter()
        size = 1 + settings.stuck_max, settings.values_per_call_max, settings.value_bytes_max
        self.staging = {"get": Staging(*size), "put": Staging(*size)}  # separate: late bytes must not be put
        self._breaker = Breaker(settings.retry_s_min, settings.retry_s_max)
        self._lanes = {name: _Lane(name) for name in LANES.values()}
        self._stuck: dict[BackendCall, tuple[str, int | None]] = {}  # the lane that it was on, and its slot
        self._closed = False
        self._calls: list[BackendCall] = []
        self._ends: list[OrderEnded] = []
        self._find_slots()

    @property
    def stuck(self) -> int:
        return len(self._stuck)

    @property
    def under_way(self) -> int:
        """Calls that have started and have not returned."""
        return len(self._stuck) + sum(lane.call is not None for lane in self._lanes.values())

    # --- inputs

    def take(self, task: Task, now: float) -> None:
        """A task that has started; from here on it ends exactly once."""
        lane = self._lanes[LANES[type(task.order)]]
        lane.tasks.append(task)
        self._pump(lane, now)

    def cancel(self, order: OrderId, now: float) -> None:
        for lane in self._lanes.values():
            for task in [task for task in lane.tasks if task.order.order == order]:
                self._fail(lane, task, RefusedCall(Reason.CANCELLED, "cancelled"), now)

    def returned(self, call: BackendCall, outcome: CallAnswer | Exception, now: float) -> None:
        """A call has returned, in time or not."""
        if isinstance(outcome, Exception):
            self._breaker.failed(now)
            self.counters[f"errors.{call.kind.value}"] += 1
            told = f"{call.kind.value}: {type(outcome).__name__}: {outcome}"
            answer: CallAnswer | RefusedCall = RefusedCall(Reason.STORE_FAILED, told[:DETAIL_CHARS_MAX])
        else:
            self._breaker.succeeded()
            self.counters["damaged"] += outcome.damaged
            answer = outcome
        if call in self._stuck:
            self._rescue(call)
            return
        lane = next(lane for lane in self._lanes.values() if lane.call is call)
        task, lane.call, lane.waiting = lane.waiting, None, None
        self._pump(lane, now, None if task is None else answer)

    def on_time(self, now: float) -> None:
        """End what is due."""
        for lane in self._lanes.values():
            if lane.call is not None and lane.call.deadline <= now:
                self._abandon(lane, lane.call, now)
            for task in [task for task in lane.tasks if task.deadline <= now]:
                self._fail(lane, task, RefusedCall(Reason.TRANSFER_TIMEOUT, TOO_LATE), now)

    def next_deadline(self) -> float | None:
        due = [lane.call.deadline for lane in self._lanes.values() if lane.call is not None]
        due += [task.deadline for lane in self._lanes.values() for task in lane.tasks]
        return min(due, default=None)

    def close(self, now: float) -> None:
        """End every order; no further call starts."""
        self._closed = True
        for lane in self._lanes.values():
            for task in list(lane.tasks):
                self._fail(lane, task, RefusedCall(Reason.CANCELLED, "the store was closed"), now)
            if lane.call in self._calls:  # never begun
                lane.call = None
        self._calls.clear()

    # --- outputs

    def calls(self) -> list[BackendCall]:
        """Calls to begin now, each on a thread of its own."""
        calls, self._calls = self._calls, []
        return calls

    def ends(self) -> list[OrderEnded]:
        ends, self._ends = self._ends, []
        return ends

    # --- lanes

    def _pump(self, lane: _Lane, now: float, answer: CallAnswer | RefusedCall | None = None) -> None:
        """Continue with the first task, and the next, until a call is in flight or none is left."""
        while lane.tasks and lane.call is None:
            task = lane.tasks[0]
            call = self._step(lane, task, answer)
            answer = None
            if call is None:
                continue
            answer = self._refusal(now)
            if answer is None:
                call.deadline = min(task.deadline, now + self.settings.call_timeout_s)
                lane.call, lane.waiting = call, task
                self._calls.append(call)

    def _step(self, lane: _Lane, task: Task, answer: CallAnswer | RefusedCall | None) -> BackendCall | None:
        """Resume a script; its next call, or None once its order has ended."""
        slot = lane.slot
        task.frame = None if slot is None else partial(self.staging[lane.name].frame, slot)
        try:
            if isinstance(answer, RefusedCall):
                return task.script.throw(answer)
            if answer is not None:
                return task.script.send(answer)
            return task.first or next(task.script)
        except StopIteration:
            pass
        except RefusedCall as refused:
            task.reason, task.detail = refused.reason, refused.detail
        except Exception as error:  # from the engine's memory or pins: fails this order only
            self.counters["faults"] += 1
            log.exception("[store-order-failed] order %d of a store failed", task.order.order)
            task.reason, task.detail = Reason.STORE_FAILED, f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX]
        self._end(lane, task)
        return None

    def _fail(self, lane: _Lane, task: Task, refused: RefusedCall, now: float) -> None:
        """The only way to fail. A call in flight continues, and keeps the lane until it returns or is stuck."""
        if lane.waiting is task:
            lane.waiting = None
        self._step(lane, task, refused)
        self._pump(lane, now)

    def _end(self, lane: _Lane, task: Task) -> None:
        lane.tasks.remove(task)
        task.frame = None
        self.counters[f"{lane.name}.{task.reason or 'done'}"] += 1
        self.counters[f"{lane.name}.keys"] += task.count
        self._ends.append(OrderEnded(task.order.order, task.count, task.reason, task.detail, tuple(task.writers)))

    def _refusal(self, now: float) -> RefusedCall | None:
        """Why no call may start now."""
        if self._closed:
            return RefusedCall(Reason.CANCELLED, "the store was closed")
        if len(self._stuck) >= self.settings.stuck_max:
            self.counters["skipped"] += 1
            return RefusedCall(Reason.BUSY, f"{len(self._stuck)} calls to the store have not returned")
        if not self._breaker.may_ask(now):
            self.counters["skipped"] += 1
            return RefusedCall(Reason.STORE_FAILED, "the store has failed and is not retried yet")
        return None

    # --- calls that do not return

    def _abandon(self, lane: _Lane, call: BackendCall, now: float) -> None:
        self.counters["stuck"] += 1
        self._breaker.failed(now)
        self._stuck[call] = lane.name, lane.slot if call.frames else None
        if call.frames:
            lane.slot = None
            self._find_slots()
        task, lane.call = lane.waiting, None
        if task is not None:
            self._fail(lane, task, RefusedCall(Reason.TRANSFER_TIMEOUT, TOO_LATE), now)
        else:
            self._pump(lane, now)

    def _rescue(self, call: BackendCall) -> None:
        """A stuck call has returned: its slot can be used again."""
        name, slot = self._stuck.pop(call)
        if slot is not None:
            self.staging[name].give_back(slot)
            self._find_slots()

    def _find_slots(self) -> None:
        for name, staging in self.staging.items():
            if self._lanes[name].slot is None:
                self._lanes[name].slot = staging.take()


class Breaker:
    """A circuit breaker for a store that has failed: closed (all calls pass), open (none), or trying (one). Time is an
    argument.

    Law: after a failure no call is made until `retry_s` has passed, then one at a time may try; success closes it, each
    further failure doubles the wait, up to its bound. So a dead store costs a request nothing, not a timeout.
    """

    def __init__(self, retry_s_min: float, retry_s_max: float) -> None:
        self._bounds = retry_s_min, retry_s_max
        self._wait_s = 0.0
        self._until = 0.0
        self._trying = False

    def may_ask(self, now: float) -> bool:
        """Whether a call may start; if this is the trial, others wait for its result."""
        if not self._wait_s:
            return True
        if self._trying or now < self._until:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        self._wait_s, self._trying = 0.0, False

    def failed(self, now: float) -> None:
        if self._wait_s and not self._trying and now < self._until:
            return  # it started before the known failure
        low, high = self._bounds
        self._wait_s = min(high, max(low, self._wait_s * 2))
        self._until = now + self._wait_s
        self._trying = False
