"""vLLM's block pool as kvbaton uses it: `touch` to pin, `unpin_blocks` to let go, a word before each reuse; its resets.

Laws: only the scheduler's thread calls this. Every release goes through `unpin_blocks` with one shared callback, so
that each reuse of a block that was ever pinned raises its epoch before a kernel can overwrite it (rules 7 and 8). vLLM
keeps one watcher per block: one that was there before ours is told after us, and where another took our place, nobody
is believed about that block: a judge sees an epoch that no pin ever had, and the next pin begins a new one. Null blocks
never come here. Where `unpin_blocks` is missing, or where its watchers cannot be seen, `exact` is False: the ledger
then believes no commit that comes after the release.

A prefix cache that vLLM empties: what the connector holds in it goes first, as if the engine were alone. vLLM empties
it only while no block is in use, and answers a pause, or a reset that preempts, with an error where one is. It has
preempted all that runs by then. What waits for a load it cannot preempt, and leases and turns are not its own: those
are ended here.

Laws: where requests that run hold blocks as well, nothing but turns is ended: vLLM refuses such a reset of an engine
alone too. What is ended is waited for, for `RESET_S` at most: an operator's call. A request that waited for a load has
no blocks afterwards and is computed, also where a failed load fails its request: an engine alone would have preempted
it.

Requests that wait for P's answer, and an engine that waits: what neither costs a step.

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

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any

from kvbaton.engines.side.protocols import NULL_BLOCK_ID
from kvbaton.node.epochs import EpochTable
from kvbaton.observe.codes.entry import worth_saying

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


log = logging.getLogger(__name__)

NEEDED = ("touch", "free_blocks", "blocks", "get_num_free_blocks")
WATCHERS = "_reuse_watchers"
"""Of vLLM's pool: by block id, whom it tells of a reuse. `unpin_blocks` overwrites an entry without a word."""

Watcher = Callable[[Any], None]


def is_exact(block_pool: Any) -> bool:
    """Whether each reuse of a released block is told, and it can be seen to whom."""
    return hasattr(block_pool, "unpin_blocks") and isinstance(getattr(block_pool, WATCHERS, None), dict)


class Watchers:
    """Several who want to hear of one reuse, in this order."""

    __slots__ = ("each",)

    def __init__(self, each: tuple[Watcher, ...]) -> None:
        self.each = each

    def __call__(self, block: Any) -> None:
        for watcher in self.each:
            watcher(block)


class PinnedPool:
    """The engine's one pool of KV blocks."""

    def __init__(self, block_pool: Any, epochs: EpochTable) -> None:
        missing = [name for name in NEEDED if not hasattr(block_pool, name)]
        if missing:
            raise RuntimeError(f"this vLLM's BlockPool has no {missing[0]}: see docs/vllm.md for supported versions")
        self._pool = block_pool
        self._epochs = epochs
        self._mine: Watcher = self._on_reuse  # one object: a bound method is a new one each time
        self._released: set[int] = set()  # by us, not reused and not pinned by us since
        self._untold = 0
        self.exact = is_exact(block_pool)
        if self.exact:
            epochs.are_told = self._are_told

    def touch(self, ids: Iterable[int]) -> None:
        """Pin. A block that was perhaps reused behind our back begins a new epoch, before its new pin notes one."""
        ids = tuple(ids)
        self._pool.touch([self._pool.blocks[each] for each in ids])
        for each in self._released.intersection(ids):  # a prompt may have 1,000 blocks: only these can be in doubt
            if self.exact and not self._is_told(each):
                self._epochs.raise_epoch(each)
                self._say(each)
            self._released.discard(each)

    def unpin(self, ids: Sequence[int]) -> None:
        """The end of a prompt is reused first: its beginning is what prefix caches and late commits can still use."""
        blocks = [self._pool.blocks[each] for each in reversed(ids)]
        if not hasattr(self._pool, "unpin_blocks"):
            self._pool.free_blocks(blocks)
            return
        if self._is_alone(ids):
            self._pool.unpin_blocks(blocks, self._mine)
        else:
            for block, each in zip(blocks, reversed(ids), strict=True):
                self._pool.unpin_blocks([block], self._with_others(each))
        self._released.update(ids)

    def overwritten(self, ids: Iterable[int]) -> None:
        """Their own request is about to write to these pinned blocks again: what was granted of them is over."""
        for each in ids:
            self._epochs.raise_epoch(each)

    def forget_cached(self) -> None:
        """Let no request find what is cached now; what is in use stays with those who use it."""
        if hasattr(self._pool, "evict_blocks"):
            self._pool.evict_blocks({block.block_id for block in self._pool.blocks if block.block_id != NULL_BLOCK_ID})

    def forget_spoilt(self) -> int:
        """The same, and what was granted of any block is over; how many could be found until now."""
        cached = sum(1 for block in self._pool.blocks if block.block_hash is not None)
        self._pool.evict_blocks({block.block_id for block in self._pool.blocks if block.block_id != NULL_BLOCK_ID})
        self.overwritten(range(1, len(self._pool.blocks)))
        return cached

    def before_reset(self, call: Callable[[], None]) -> None:
        """Have `call` called before vLLM empties its prefix cache: it does so only while nobody holds a block, and
        tells a connector afterwards, if at all (vLLM 0.32: `Scheduler.reset_prefix_cache`)."""
        genuine = getattr(self._pool, "reset_prefix_cache", None)
        if genuine is not None:

            def reset() -> bool:
                call()
                return bool(genuine())

            self._pool.reset_prefix_cache = reset

    def references(self) -> dict[int, int]:
        """Of each block in use, how many hold it."""
        found = {block.block_id: block.ref_cnt for block in self._pool.blocks if block.ref_cnt > 0}
        found.pop(NULL_BLOCK_ID, None)
        return found

    @property
    def free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def _on_reuse(self, block: Any) -> None:
        """Inside `schedule()`: an exception here would be the engine's death, so this must not be able to raise."""
        number = getattr(block, "block_id", -1)
        self._epochs.raise_epoch(number)
        self._released.discard(number)

    # --- whom the pool tells

    def _watching(self, number: int) -> tuple[Watcher, ...]:
        watchers = getattr(self._pool, WATCHERS, None)
        found = watchers.get(number) if isinstance(watchers, dict) else None
        return found.each if isinstance(found, Watchers) else () if found is None else (found,)

    def _is_told(self, number: int) -> bool:
        """On any thread: whether we would have been told of a reuse of this block. While it is pinned there is none."""
        return number not in self._released or self._mine in self._watching(number)

    def _are_told(self, numbers: Sequence[int]) -> bool:
        return self._released.isdisjoint(numbers) or all(map(self._is_told, numbers))

    def _is_alone(self, ids: Sequence[int]) -> bool:
        """Whether nobody else is told of these blocks."""
        watchers, mine = getattr(self._pool, WATCHERS, None), self._mine
        return not isinstance(watchers, dict) or all(watchers.get(each, mine) is mine for each in ids)

    def _with_others(self, number: int) -> Watcher:
        others = tuple(each for each in self._watching(number) if each is not self._mine)
        return Watchers((self._mine, *others)) if others else self._mine

    def _say(self, number: int) -> None:
        self._untold += 1
        if worth_saying(self._untold):
            log.warning(
                "[reuse-untold] kvbaton: another watcher has taken our place at block %d (%d so far): its earlier KV "
                "is handed to nobody any more",
                number, self._untold,
            )  # fmt: skip


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
