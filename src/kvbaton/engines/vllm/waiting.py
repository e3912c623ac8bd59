"""Requests that wait for P's answer, and an engine that waits: what neither costs a step.

vLLM looks up the prefix of every request that is answered "ask again" at every step: 0.2 ms for one of 2,000 tokens of
which 1,600 are cached, 100 ms for 512 of them. So a few are asked about at every step, and all others are put aside, as
vLLM itself puts aside what loads: by the status `WAITING_FOR_REMOTE_KVS`, but without blocks. A report that they have
"arrived", once there is something to answer, makes vLLM look at them again.

Laws: the status is the last thing that is set before "ask again" is answered, or a failure in between would be the
engine's. Whoever was put aside is reported exactly once, also after an abort: when it does not wait any more, whatever
the reason. vLLM then finds it among the requests that hold blocks, where one that gets none bars all behind it: so it
is answered "ask again" once more, which brings it back to the head of those that hold none.

The scheduler's steps as the connector counts them, and the naps that it takes where vLLM would take one itself. Law:
news end a nap at once. One that lies between two steps is short enough that a request that comes meanwhile does not
notice it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

ASKED_MAX = 4
"""Requests that are asked about at every step: those that came first, and so are answered first."""


class Waiting:
    """`blocked`: whether a request has to wait. `aside`: vLLM's status of one that is put aside; None: none is."""

    def __init__(self, blocked: Callable[[Any], bool], aside: Any = None) -> None:
        self._blocked = blocked
        self._aside = aside
        self._asked: set[str] = set()
        self._held: dict[str, Any] = {}
        self._back: set[str] = set()  # reported, and not seen since

    def comes_back(self, request_id: str) -> bool:
        """Whether this is vLLM's first look at a request that was put aside: it is to be asked for again."""
        if request_id not in self._back:
            return False
        self._back.discard(request_id)
        return True

    def comes_again(self, request_id: str) -> None:
        """vLLM will find this request among those that hold blocks, and it holds none any more."""
        if self._aside is not None:
            self._back.add(request_id)

    def answered(self, request_id: str) -> None:
        self._asked.discard(request_id)

    def waits(self, request: Any) -> None:
        """A request is about to be answered "ask again", now and with nothing in between."""
        request_id = request.request_id
        if self._aside is None or request_id in self._asked or not self._blocked(request):
            return
        if len(self._asked) < ASKED_MAX:
            self._asked.add(request_id)
            return
        self._held[request_id] = request
        request.status = self._aside

    def left(self, request_id: str) -> None:
        """The request is over in the engine; if it was put aside, it is still to be reported."""
        self._asked.discard(request_id)
        self._back.discard(request_id)

    def over(self) -> list[str]:
        """Those put aside that wait no more."""
        return [request_id for request_id, request in self._held.items() if not self._blocked(request)]

    def back_to_vllm(self, request_id: str) -> None:
        """vLLM has its report."""
        request = self._held.pop(request_id, None)
        if request is not None and not request.is_finished():
            self._back.add(request_id)

    def __bool__(self) -> bool:
        return bool(self._held)


def status_aside() -> Any:
    """vLLM's status of a request that loads, where its scheduler is known to pass over those at no cost."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import RequestStatus

    known = all(hasattr(Scheduler, name) for name in ("_holds_kv_blocks", "_handle_blocked_waiting_request"))
    return getattr(RequestStatus, "WAITING_FOR_REMOTE_KVS", None) if known else None


NAP_S = 0.004
"""Per step, of an engine that has nothing to do but to wait for its leases, unless there is news (docs/lab: 0.3 cores
instead of 0.7). A request that comes meanwhile waits this long at most."""
LOAD_NAP_S = 0.002
"""The same, of one that waits for loads: vLLM sleeps 1 ms between such steps, whatever arrives; from this nap a load
that arrives wakes it, and its thread has left the interpreter to those that bring it."""


class Pace:
    """Of one engine; the scheduler's thread alone uses it, other threads set `news`."""

    def __init__(self, *, lock_step: bool = False) -> None:
        """`lock_step`: other data-parallel ranks wait for each of our steps (a mixture of experts)."""
        self.lock_step = lock_step
        self.step = 0
        self.news = threading.Event()
        self._napped = 0
        self._computes = 0  # the last step that has something to compute

    def begin(self, computes: bool) -> None:
        """The next step."""
        self.step += 1
        if computes:
            self._computes = self.step

    def computes_since(self, step: int) -> bool:
        """Whether that step, or one that is on its way since, has something to compute."""
        return self._computes >= step

    def nap(self, seconds: float) -> None:
        self.news.wait(seconds)
        self.news.clear()

    def nap_once(self, seconds: float) -> None:
        """At most one between two steps, however often vLLM asks; none in lock-step, where others may have work."""
        if self._napped != self.step and not self.lock_step:
            self._napped = self.step
            self.nap(seconds)
