"""The embedded engine's use of the shared store: prefixes that it need not compute, and prompts for other engines.

Laws: all on the engine's thread, and nothing waits. A request is looked up once, and loaded from the store at most
once: after a preemption it is computed here. Blocks under a get are held (`touch`) until its end was reported, also
when their request ended before. At most half of the pool is pinned for puts; one beyond that is skipped: a miss later
on.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from kvbaton.engines.embedded.block_cache import BlockPool
from kvbaton.engines.embedded.engine_request import EngineRequest
from kvbaton.node.doorway import Doorway
from kvbaton.protocol.content import Content
from kvbaton.protocol.ids import RequestId
from kvbaton.ranks.engine_store import AskId, EngineStore
from kvbaton.store.content_keys import chain

LATE_S = 1.0
"""How long after its time-out an answer is waited for; the ranks are bound to the time-out itself."""
PINNED_MAX = 0.5


@dataclass(slots=True)
class _Look:
    """What the store has of a request: blocks `first` to `stop`, once that is answered."""

    first: int
    stop: int
    ask: AskId | None
    until: float


class _PrefixGet(msgspec.Struct, frozen=True):
    request: RequestId
    first: int
    blocks: tuple[int, ...]


class Fetched(msgspec.Struct, frozen=True):
    """A get is over: so many tokens of the prompt are good now, of those that were promised. All is at rest."""

    request: RequestId
    blocks: int
    good_tokens: int
    is_whole: bool
    reason: str


class EmbeddedStoring:
    """One engine's look-ups, gets and puts."""

    def __init__(
        self, shelf: EngineStore, doorway: Doorway, block_tokens: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.counters: Counter[str] = Counter()
        self._shelf = shelf
        self._door = doorway
        self._block_tokens = block_tokens
        self._clock = clock
        self._hashes: dict[RequestId, list[bytes]] = {}
        self._looks: dict[RequestId, _Look] = {}
        self._asks: dict[AskId, RequestId] = {}
        self._gets: dict[AskId, _PrefixGet] = {}
        self._refused: list[Fetched] = []

    @property
    def held_blocks(self) -> int:
        return sum(len(get.blocks) for get in list(self._gets.values()))

    @property
    def busy(self) -> bool:
        return bool(self._gets or self._refused)

    # --- gets

    def look(self, request: EngineRequest, local_tokens: int) -> int | None:
        """How many tokens after the local ones the store has, in whole blocks; None: ask again in the next step."""
        first = local_tokens // self._block_tokens
        look = self._looks.get(request.request_id)
        if look is None:
            look = self._looks[request.request_id] = self._ask(request, first)
        if look.ask is not None:
            if self._clock() < look.until:
                return None
            self.counters["late"] += 1
            look.ask = None
        return max(0, look.stop - first) * self._block_tokens if first >= look.first else 0

    def most(self, request: EngineRequest) -> int:
        """The tokens of a prompt that can come from the store: whole blocks, and one token is left to compute."""
        return (len(request.prompt) - 1) // self._block_tokens * self._block_tokens

    def fetch(self, request: EngineRequest, blocks: Sequence[int], tokens: int, pool: BlockPool) -> None:
        """Bring what `look` promised; one `Fetched` follows."""
        look = self._looks[request.request_id]
        stop, first = look.stop, look.stop - tokens // self._block_tokens
        look.stop = 0  # a request is loaded once
        get = _PrefixGet(request.request_id, first, tuple(blocks[first:stop]))
        ask = self._shelf.get(self._hashes_of(request)[first:stop], get.blocks)
        if ask is None:
            self._refused.append(self._fetched(get, 0, "busy: too many store requests"))
            return
        pool.touch(get.blocks)
        self._gets[ask] = get

    def take(self, pool: BlockPool) -> list[Fetched]:
        """Gets that have ended; called at every step."""
        found, self._refused = self._refused, []
        for told in self._shelf.take():
            get = self._gets.pop(told.ask, None)
            if get is None:
                self._answered(told.ask, told.count)
                continue
            pool.unpin(get.blocks)
            self.counters["hit_blocks"] += told.count
            why = f"{told.reason}: {told.detail}" if told.reason is not None else "no longer there"
            found.append(self._fetched(get, told.count, why))
        return found

    def forget(self, request: RequestId) -> None:
        """The request is over; a get under way still gets its end, soon."""
        self._hashes.pop(request, None)
        look = self._looks.pop(request, None)
        if look is not None and look.ask is not None:
            self._shelf.forget(look.ask)
        for ask in [ask for ask, get in self._gets.items() if get.request == request]:
            self._shelf.forget(ask)

    def _ask(self, request: EngineRequest, first: int) -> _Look:
        hashes = self._hashes_of(request)[first : self.most(request) // self._block_tokens]
        ask = self._shelf.lookup(hashes)
        if ask is not None:
            self._asks[ask] = request.request_id
        return _Look(first, 0, ask, self._clock() + self._shelf.settings.lookup_timeout_s + LATE_S)

    def _answered(self, ask: AskId, count: int) -> None:
        look = self._looks.get(self._asks.pop(ask))
        if look is not None and look.ask == ask:
            look.ask, look.stop = None, look.first + count

    def _fetched(self, get: _PrefixGet, count: int, reason: str) -> Fetched:
        good = (get.first + count) * self._block_tokens
        return Fetched(get.request, count, good, count == len(get.blocks), f"store_failed: {reason}")

    # --- puts

    def put(self, request: EngineRequest, blocks: Sequence[int], known_tokens: int, pool: BlockPool) -> None:
        """Store a computed prompt, unless all of its whole blocks were here already.

        All of them go, not the new ones alone: the store checks what it has, and a hole at the front hides the rest.
        """
        whole = len(request.prompt) // self._block_tokens
        if known_tokens // self._block_tokens >= whole:
            return
        if self._door.put_blocks + whole > PINNED_MAX * len(pool.refs):
            self.counters["puts_skipped"] += 1
            return
        pool.touch(self._door.put((tuple(blocks[:whole]),), tuple(self._hashes_of(request)[:whole])))

    def _hashes_of(self, request: EngineRequest) -> list[bytes]:
        found = self._hashes.get(request.request_id)
        if found is None:
            content = Content(request.prompt, len(request.prompt), salt=request.cache_salt)
            found = self._hashes[request.request_id] = list(chain(content, self._block_tokens))
        return found

    # --- figures

    def stats(self) -> dict[str, int]:
        """As a worker tells them; from any thread."""
        shelf = self._shelf.counters
        return {
            "store_lookups_total": shelf["lookups"],
            "store_gets_total": shelf["gets"],
            "store_puts_total": shelf["puts.stored"],
            "store_hits_blocks_total": self.counters["hit_blocks"],
            "store_errors_total": shelf["errors"] + self.counters["late"],
            "store_pins": self._door.put_blocks + self.held_blocks,
            "second_source_total": self.counters["second_source"],
        }


STATS = (
    "store_lookups_total", "store_gets_total", "store_puts_total", "store_hits_blocks_total", "store_errors_total",
    "store_pins", "second_source_total",
)  # fmt: skip
NO_STATS = dict.fromkeys(STATS, 0)
"""Of a worker without a store."""
