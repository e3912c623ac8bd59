"""A prefix cache that vLLM empties: what the connector holds in it goes first, as if the engine were alone.

vLLM empties it only while no block is in use, and answers a pause, or a reset that preempts, with an error where one
is. It has preempted all that runs by then. What waits for a load it cannot preempt, and leases and turns are not its
own: those are ended here.

Laws: only the scheduler's thread is here. Where requests that run hold blocks as well, nothing but turns is ended: vLLM
refuses such a reset of an engine alone too. What is ended is waited for, for `RESET_S` at most: an operator's call. A
request that waited for a load has no blocks afterwards and is computed, also where a failed load fails its request:
an engine alone would have preempted it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

from kvbaton.engines.side.protocols import NULL_BLOCK_ID
from kvbaton.engines.vllm.block_pool import PinnedPool
from kvbaton.engines.vllm.pacing import NAP_S

RESET_S = 2.0
"""For copies to be at rest and for the node to let leases go: milliseconds, unless a transport cannot be stopped."""


class CacheResets:
    """Of one engine. Requests with blocks for a load are known here until they are scheduled, or over."""

    def __init__(self, pool: PinnedPool, holders: Callable[[], Iterable[Iterable[int]]]) -> None:
        """`holders`: the blocks of everything that has a reference of ours, a lease's, a load's, a put's each."""
        self._pool = pool
        self._holders = holders
        self._loading: dict[str, Any] = {}
        self._reported: set[str] = set()
        self._preempted: set[str] = set()

    # --- requests that wait for a load

    def begun(self, request: Any) -> None:
        """vLLM has blocks for a load, and waits for its report."""
        self._loading[request.request_id] = request
        self._reported.discard(request.request_id)

    def reported(self, request_id: str) -> None:
        request = self._loading.get(request_id)
        self._preempted.discard(request_id)
        if request is not None:
            self._reported.add(request_id)
            if request.is_finished():
                self._forget(request_id)

    def finished(self, request_id: str) -> None:
        """The request is over; vLLM keeps its blocks until its load is reported."""
        if request_id in self._reported:
            self._forget(request_id)

    def scheduled(self, request_ids: Iterable[str]) -> None:
        for request_id in self._loading.keys() & set(request_ids):
            self._forget(request_id)

    def preempts(self, request_id: str) -> bool:
        """Whether the load that vLLM still waits for was ended by a reset: it has brought nothing, and not failed."""
        return request_id in self._preempted

    # --- a reset

    def is_ours(self, manager: Any) -> bool:
        """Whether nobody else has a reference to any block."""
        tables = [manager.get_block_ids(request_id) for request_id in self._loading] if manager is not None else []
        ours = Counter(chain.from_iterable(chain(self._holders(), chain.from_iterable(tables))))
        return all(ours[number] >= count for number, count in self._pool.references().items())

    def preempt(self, manager: Any) -> list[str]:
        """Take the blocks of all requests that wait for a load. Returns those that vLLM has still to look at."""
        if manager is None:
            return []
        taken = []
        for request_id, request in list(self._loading.items()):
            if any(each != NULL_BLOCK_ID for each in chain.from_iterable(manager.get_block_ids(request_id))):
                manager.free(request)
            request.num_computed_tokens = 0
            if request_id not in self._reported:
                self._preempted.add(request_id)
            if not request.is_finished():
                taken.append(request_id)
        return taken

    def wait(self, do_duties: Callable[[], None], nap: Callable[[float], None], left: Callable[[], int]) -> None:
        """Until no block is held, or time is up; `do_duties` takes in what the node has said."""
        until = time.monotonic() + RESET_S
        do_duties()
        while left() and time.monotonic() < until:
            nap(NAP_S)
            do_duties()

    def _forget(self, request_id: str) -> None:
        self._loading.pop(request_id, None)
        self._reported.discard(request_id)
