"""The scheduler side's half for the shared store: prompts whose beginning is there, and prompts that go there.

Laws: a prompt is looked up at most once and loaded from the store at most once, whatever becomes of it (matching again
after a failure is a livelock). Nothing waits for the store without a deadline. What the store is known to have is not
put again. A store that fails costs a miss. After a reset of the cache no key from before is used: weights may have been
replaced.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import msgspec

from kvbaton.engines.side.guard import guarded, makes, note, returns
from kvbaton.engines.side.protocols import NOT_YET, NOTHING, Grouping, LoadVerdict, PinPool, SideRequests, Tables
from kvbaton.engines.side.stored_puts import GRACE_S, AnswerCopies, Phase, StoredLoads, StoredPrompt, StoredPuts
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.geometry.layout import needed_blocks
from kvbaton.ranks.engine_store import AskId, EngineStore, StoreTold
from kvbaton.store.interface import chain, root

LOOKUPS_MAX = 64
"""Under way; further ones wait for their turn, within their deadline. What the shelf takes beyond it is for loads."""
SPARE_BLOCKS = 1
"""For each request, since vLLM rounds up and keeps a place for the next token."""


class NoStore:
    """An engine without a store: nothing is done. `StoreSide` has the same methods, so no hook asks which it is."""

    __slots__ = ()

    def promised(self, request_id: str) -> None:
        """A request came whose KV somebody else has: the store is its second source."""

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        return NOTHING

    def offers(self, request_id: str) -> bool:
        return False

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        pass

    def reports(self, request_id: str) -> bool:
        return False

    def take(self) -> None:
        pass

    def take_verdicts(self) -> tuple[LoadVerdict, ...]:
        return ()

    def passed_over(self, request_id: str) -> None:
        pass

    def brought(self, request: Any) -> None:
        pass

    def preempted(self, request_id: str) -> None:
        pass

    def ends_prompts(self, step: int, chunks: Mapping[str, int], tables_of: Callable[[str], Tables]) -> bool:
        return False

    def computed(self, step: int) -> None:
        pass

    def finished(self, request: Any, tables: Tables, *, well: bool) -> None:
        pass

    def reset(self) -> bool:
        return True

    def let_go(self) -> None:
        pass

    def let_loads_go(self) -> None:
        pass

    @property
    def holders(self) -> Iterable[Sequence[int]]:
        """The blocks of each load."""
        return ()

    @property
    def held_blocks(self) -> int:
        return 0

    @property
    def busy(self) -> bool:
        return False

    def figures(self) -> dict[str, int]:
        """Counts for the metrics, by name."""
        return {}


@dataclass(slots=True)
class SecondLoads:
    """Requests that got blocks for a load and have not run since: whether one of them may be loaded again.

    vLLM (0.32.0) goes on reserving blocks for a load that failed until its request runs, and admits a load only into
    what nobody has reserved. So a second load needs its blocks twice; without that room it bars the queue, behind
    itself, for ever: three failed loads of half a cache each wait for one another (`kvbaton conformance vllm --seeds
    292`). Law: a second load begins only if its blocks are free beyond all that loads have reserved, or its prompt is
    computed.
    """

    pool: PinPool
    block_tokens: int
    _reserved: dict[str, int] = field(default_factory=dict)

    def allocated(self, request: Any, external_tokens: int) -> None:
        """A request got blocks: to be loaded, or to run."""
        if external_tokens:
            self._reserved[request.request_id] = self._need(request)
        else:
            self.left(request.request_id)

    def left(self, request_id: str) -> None:
        self._reserved.pop(request_id, None)

    def admits(self, request: Any) -> bool:
        if request.request_id not in self._reserved:
            return True
        return self.pool.free_blocks >= sum(self._reserved.values()) + self._need(request)

    def _need(self, request: Any) -> int:
        return needed_blocks(request.num_tokens, self.block_tokens) + SPARE_BLOCKS


class StoreSide(NoStore):
    """One engine's prompts, as the shared store knows them. One group of blocks (`rank_values` refuses others)."""

    __slots__ = (
        "_asks", "_generation", "_promised", "_prompts", "_queues", "clock", "counts", "grouping", "loads",
        "pool", "puts", "requests", "second", "shelf",
    )  # fmt: skip

    def __init__(
        self,
        shelf: EngineStore,
        door: Doorway,
        pool: PinPool,
        grouping: Grouping,
        requests: SideRequests,
        blocks_total: int,
        clock: Callable[[], float] = time.monotonic,
        *,
        queues: bool = True,
    ) -> None:
        """`queues`: a look-up that the store has no room for waits for its turn; else its prompt is computed."""
        self.shelf = shelf
        self.pool = pool
        self.grouping = grouping
        self.requests = requests
        self.clock = clock
        self.counts: Counter[str] = Counter()
        self.loads = StoredLoads(shelf, pool, self.counts, grouping.block_tokens[0])
        most = shelf.settings.hashes_max
        copies = AnswerCopies(door, pool, grouping, requests, self._copied_at_once(blocks_total), most, self.counts)
        self.puts = StoredPuts(door, pool, grouping, blocks_total, self.counts, copies)
        self.second = SecondLoads(pool, grouping.block_tokens[0])
        self._queues = queues
        self._prompts: dict[str, StoredPrompt] = {}
        self._asks: dict[AskId, str] = {}  # look-ups
        self._promised: set[str] = set()  # requests whose first source is a handoff
        self._generation = ""  # of the engine's weights, beyond its compatibility key

    # --- loads

    def promised(self, request_id: str) -> None:
        self._promised.add(request_id)

    def match(self, request: Any, local_tokens: int) -> tuple[int | None, bool]:
        """How many tokens after the local ones the store has. May be asked often, and the answer discarded."""
        prompt = self._prompts.get(request.request_id)
        if prompt is None:
            prompt = self._look_up(request, local_tokens)
        if prompt.phase is Phase.ASKING:
            self._ask(prompt)
        if prompt.phase is Phase.ASKING:
            if self.clock() < prompt.until:
                return NOT_YET
            self._forget(request.request_id)
            self.counts["lookups.late"] += 1
            prompt.phase = Phase.OVER
        if prompt.phase is Phase.FOUND and not self.second.admits(request):
            prompt.phase = Phase.OVER
        if prompt.phase is not Phase.FOUND:
            return NOTHING
        missing = self._upto(prompt) - local_tokens
        return (missing, True) if missing > 0 else NOTHING

    def offers(self, request_id: str) -> bool:
        """Whether blocks that the engine has found for this request are for a load from the store."""
        prompt = self._prompts.get(request_id)
        return prompt is not None and prompt.phase is Phase.FOUND

    def passed_over(self, request_id: str) -> None:
        """What it has of this prompt is not enough: it is not loaded."""
        if self.offers(request_id):
            self._prompts[request_id].phase = Phase.OVER

    def brought(self, request: Any) -> None:
        """Another source has brought the beginning of a prompt. The rest is computed, and all of it put."""
        if request.request_id not in self._prompts:
            self._prompts[request.request_id] = self._stored_prompt(request)

    def allocated(self, request: Any, tables: Tables, external_tokens: int) -> None:
        """The engine has blocks for the request; with external tokens it now waits for a report."""
        prompt = self._prompts.get(request.request_id)
        if prompt is not None and prompt.phase is not Phase.FOUND:
            prompt = None
        if prompt is not None:
            prompt.phase = Phase.OVER  # whatever fails from here on, it is not matched again
        self.second.allocated(request, external_tokens)
        if external_tokens == 0:
            self._runs(request)
        if prompt is None or external_tokens == 0:
            return
        size = self.grouping.block_tokens[0]
        first, last = (self._upto(prompt) - external_tokens) // size, self._upto(prompt) // size
        [blocks] = self.grouping.cut(tables, (first,), (last,))
        hashes, is_second = prompt.hashes[first:last], request.request_id in self._promised
        if self.loads.begin(request.request_id, first, hashes, blocks, self.clock(), is_second_source=is_second):
            prompt.phase = Phase.LOADING
        else:
            self.loads.refuse(request.request_id)

    def reports(self, request_id: str) -> bool:
        """Whether the engine is still to be told of a load of this request."""
        return self.loads.waits(request_id)

    @guarded(returns(None))
    def take(self) -> None:
        """What the store has said, and what is overdue; at every step."""
        for told in self.shelf.take():
            try:
                self._told(told)
            except Exception as error:  # noqa: BLE001 - promise 4: the others' answers are still to be taken
                note("store", error)
                self.loads.let_go(told.ask)
        self.loads.on_time(self.clock())

    @guarded(makes(tuple))
    def take_verdicts(self) -> tuple[LoadVerdict, ...]:
        return self.loads.take_verdicts()

    # --- puts

    @guarded(returns(None))
    def preempted(self, request_id: str) -> None:
        self.puts.drop(request_id)

    @guarded(returns(False))
    def ends_prompts(self, step: int, chunks: Mapping[str, int], tables_of: Callable[[str], Tables]) -> bool:
        """A step is about to be computed. True: it ends prompts, or blocks of answers, that the store lacks, so its own
        end must be told."""
        self.puts.copies.is_of_use = self.shelf.provenance.may_write  # else nobody would take them
        return self.puts.scheduled(step, chunks, self._prompts, tables_of)

    @guarded(returns(None))
    def computed(self, step: int) -> None:
        """Every rank is done with this step, and so with those before it."""
        self.puts.computed(step, self._prompts)

    @guarded(returns(None))
    def finished(self, request: Any, tables: Tables, *, well: bool) -> None:
        """The request is over in the engine; a load under way still gets its report."""
        request_id = request.request_id
        prompt = self._prompts.pop(request_id, None)
        self._promised.discard(request_id)
        self.second.left(request_id)
        self.puts.drop(request_id)
        self._forget(request_id)
        self.loads.give_up(request_id)
        if prompt is not None and well:
            self.puts.finished(prompt, tables)

    # --- both

    def reset(self) -> bool:
        """The cache is replaced: True when nothing is on its way into it any more."""
        self._generation = secrets.token_hex(8)
        self.let_go()
        return not self.loads.busy

    def let_go(self) -> None:
        """Nothing that is under way is loaded, or put: it may be computed on what must not be shared."""
        self.puts.drop_all()
        self.loads.void()
        for request_id, prompt in self._prompts.items():
            self._forget(request_id)
            prompt.phase, prompt.is_put, prompt.is_kept = Phase.OVER, True, False

    def let_loads_go(self) -> None:
        """Their blocks are needed: what they bring is not."""
        self.loads.void()

    @property
    def holders(self) -> Iterable[Sequence[int]]:
        return self.loads.holders

    @property
    def held_blocks(self) -> int:
        return self.loads.held_blocks

    @property
    def busy(self) -> bool:
        return self.loads.busy

    def figures(self) -> dict[str, int]:
        late = self.counts["lookups.late"] + self.counts["loads.late"]
        return {
            "store_lookups_total": self.counts["lookups"],
            "store_gets_total": self.counts["loads"],
            "store_hits_blocks_total": self.counts["loaded_blocks"],
            "store_puts_total": self.shelf.counters["puts.stored"],
            "store_errors_total": self.shelf.counters["errors"] + late,
            "second_source_total": self.counts["second_source"],
            "store_copied_blocks_total": self.counts["copied_blocks"],
        }

    # --- helpers

    def _runs(self, request: Any) -> None:
        """One whose prompt came whole from elsewhere was not looked up. What the store has of it is not put again; its
        answer is copied behind what the store has."""
        if request.request_id in self._prompts or not self.puts.copies.blocks_most:
            return
        prompt = self._prompts[request.request_id] = self._stored_prompt(request)
        prompt.ran_first = True
        if prompt.hashes:
            prompt.phase, prompt.until = Phase.ASKING, self.clock() + self.shelf.settings.lookup_timeout_s + GRACE_S
            self._ask(prompt)
            if not prompt.is_asked:  # no room: a copy that is not made costs computing
                prompt.phase, prompt.is_put, prompt.is_kept = Phase.OVER, True, False

    def _look_up(self, request: Any, local_tokens: int) -> StoredPrompt:
        """Ask the store, unless the engine itself has all that could be loaded."""
        size = self.grouping.block_tokens[0]
        prompt = self._prompts[request.request_id] = self._stored_prompt(request)
        prompt.usable = min(len(prompt.hashes), (request.num_tokens - 1) // size)
        prompt.known = local_tokens // size
        if prompt.usable * size <= local_tokens:
            return prompt  # what is here was put, or came from there, when it was computed
        prompt.phase, prompt.known = Phase.ASKING, 0
        prompt.until = self.clock() + self.shelf.settings.lookup_timeout_s + GRACE_S
        return prompt

    def _ask(self, prompt: StoredPrompt) -> None:
        """Begin its look-up, unless that was done or there is no room for it yet."""
        if prompt.is_asked or len(self._asks) >= LOOKUPS_MAX:
            return
        ask = self.shelf.lookup(prompt.hashes)
        if ask is None and not self._queues:
            prompt.phase = Phase.OVER
        if ask is not None:
            prompt.is_asked = True
            self._asks[ask] = prompt.request.request_id
            self.counts["lookups"] += 1

    def _stored_prompt(self, request: Any) -> StoredPrompt:
        if getattr(request, "resumable", False):
            return StoredPrompt(request, (), 0, is_kept=False)
        size = self.grouping.block_tokens[0]
        content = self.requests.content(request, request.num_tokens)  # with a history, which may have been copied
        if self._generation:
            content = msgspec.structs.replace(content, salt=f"{self._generation} {content.salt}")
        hashes = tuple(islice(chain(content, size), self.shelf.settings.hashes_max))
        return StoredPrompt(request, hashes, 0, last_hash=hashes[-1] if hashes else root(content, size))

    def _copied_at_once(self, blocks_total: int) -> int:
        """A drafter's KV hangs on tokens that may be refused: its answers are not copied."""
        return 0 if self.grouping.lookahead else int(blocks_total * self.shelf.settings.copies_percent / 100)

    def _told(self, told: StoreTold) -> None:
        if told.ask in self.loads:
            self._landed(self.loads.told(told))
            return
        prompt = self._prompts.get(self._asks.pop(told.ask, ""))
        if prompt is None or prompt.phase is not Phase.ASKING:
            return
        prompt.known = min(told.count, len(prompt.hashes))
        prompt.phase = Phase.FOUND if prompt.known else Phase.OVER

    def _landed(self, short: tuple[str, int] | None) -> None:
        """The store has less than it said: what is missing is put again when it has been computed."""
        if short is not None and short[0] in self._prompts:
            self._prompts[short[0]].known = short[1]

    def _forget(self, request_id: str) -> None:
        for ask in [ask for ask, of in self._asks.items() if of == request_id]:
            del self._asks[ask]
            self.shelf.forget(ask)

    def _upto(self, prompt: StoredPrompt) -> int:
        """Tokens that the store has of it, as far as they are of use. A drafter's KV at the end of a block hangs on the
        block after it, which must be the same: as vLLM itself does, the last one is left out."""
        known = prompt.known - (1 if self.grouping.lookahead else 0)
        return min(max(known, 0), prompt.usable) * self.grouping.block_tokens[0]
