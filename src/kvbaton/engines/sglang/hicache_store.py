"""kvbaton's store as a storage backend of SGLang's HiCache (`--hicache-storage-backend dynamic`).

HiCache names a page by its own chain of hashes and calls from its threads, which may wait. Laws: what crosses is a
kvbaton value, with its header: digest, writer and signature; one that is damaged, misplaced or of a writer that is not
trusted now is a miss. Its key holds what HiCache's hash does not: the model's weights, dtype and layout, the page's
size, this rank and of how many. A store that is not there costs misses, for a bounded time. Keys are read again, so
that a member that was removed is believed no more. An order that is given up may go on for a while, and HiCache then
uses its pages again: orders have copies. Nothing raises into SGLang's threads.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from kvbaton.control.addressing import ControlError
from kvbaton.engines.sglang.manager import read_settings
from kvbaton.engines.shared.connector_settings import GET_PER_LOOKUP
from kvbaton.engines.shared.store_setup import keyring_of
from kvbaton.engines.shared.weights_digest import weights_digest
from kvbaton.engines.side.guard import guarded, makes, returns
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.content import compat_digest
from kvbaton.ranks.store_trust import opener, store_place, trust_of
from kvbaton.store.interface import (
    Backend,
    Get,
    Lookup,
    Order,
    OrderEnded,
    OrderId,
    Put,
    Space,
    StoreSettings,
    prefix,
)
from kvbaton.store.threaded_store import KeptStore

log = logging.getLogger(__name__)

KEYS_REFRESH_S = 5.0
FILE = "config_file"
"""In `--hicache-storage-backend-extra-config`: the path of this engine's file."""


class WaitedStore:
    """A `Store` whose orders are waited for, by any thread."""

    def __init__(self, store: KeptStore) -> None:
        self._store = store
        self._ids = itertools.count(1)
        self._ended: dict[OrderId, OrderEnded | None] = {}  # None: somebody waits for it
        self._news = threading.Condition()
        store.set_waker(self._wake)

    def run(self, make: Callable[[OrderId], Order], timeout_s: float) -> OrderEnded | None:
        """How it ended; None where the store takes no more."""
        with self._news:
            name = OrderId(next(self._ids))
            self._ended[name] = None
        if not self._store.submit(make(name)):
            self._ended.pop(name)
            return None
        until = time.monotonic() + 2 * timeout_s + 1.0  # every order ends by its timeout, and a thread's turn
        with self._news:
            while self._ended[name] is None and time.monotonic() < until:
                self._take()
                if self._ended[name] is None:
                    self._news.wait(0.1)
            return self._ended.pop(name)

    def close(self) -> None:
        self._store.close()

    def _take(self) -> None:
        for ended in self._store.drain():
            if ended.order in self._ended:
                self._ended[ended.order] = ended
        self._news.notify_all()

    def _wake(self) -> None:
        with self._news:
            self._news.notify_all()


class _HostPages:
    """Nothing is to be held: an order has memory of its own. Implements `Pins`."""

    def pin(self, order: OrderId, blocks: Sequence[int]) -> None: ...

    def unpin(self, order: OrderId) -> None: ...


class HiCacheBackend:
    """What SGLang's `HiCacheStorage` asks, by way of flat pages."""

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        told = getattr(storage_config, "extra_config", None) or {}
        self._settings = read_settings(str(told.get(FILE) or ""), f"--hicache-storage-backend-extra-config {FILE}")
        if not self._settings.store or self._settings.joins:
            raise ValueError(f"{FILE}: a store, and keys of a directory, are needed for HiCache (docs/sglang.md)")
        for name in ("pp_size", "attn_cp_size", "dcp_size"):
            if (getattr(storage_config, name, None) or 1) != 1:
                raise ValueError(f"kvbaton: {name} {getattr(storage_config, name)}: 1 is stored (docs/sglang.md)")
        if getattr(storage_config, "should_split_heads", False):
            raise ValueError("kvbaton: tp_lcm_size: pages are stored whole (docs/sglang.md)")
        self._config = storage_config
        self._store: KeptStore | None = None
        self._waited: WaitedStore | None = None
        self._front = ""
        self._page_bytes = 0
        self._lock = threading.Lock()
        self._looked = time.monotonic()
        self._unsaid = 0
        self._writes = True  # else this engine's key does not let it grant, and nobody would take its values

    # --- coming to life: what goes wrong here is told at start, by raising

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """SGLang has its host pages: now it is known what a value is."""
        page = mem_pool_host.get_dummy_flat_data_page()
        self._page_bytes = _bytes_of(page)
        space = self._space(mem_pool_host, str(page.dtype))
        settings, rank = self._settings, int(self._config.tp_rank)
        ranks = int(self._config.tp_size)
        keyring = keyring_of(settings, rank)
        make, _ = opener(store_place(settings.store), keyring, ranks=ranks, server=settings.store_name)
        self.begin(make(), space)
        self._take_keys()

    def begin(self, backend: Backend, space: Space) -> None:
        """With a backend of its own, and this space."""
        self._front, self._page_bytes = prefix(space), space.value_bytes
        bounds = StoreSettings(value_bytes_max=space.value_bytes)
        self._store = KeptStore(backend, _HostPages(), bounds)
        self._waited = WaitedStore(self._store)

    def _space(self, pool: Any, dtype: str) -> Space:
        config, settings = self._config, self._settings
        is_replicated = bool(config.is_mla_model)
        compat = {
            "engine": "sglang hicache",
            "weights": settings.model_id or weights_digest(str(config.model_name), None),
            "dtype": dtype,
            "pool": type(pool).__name__,
        }
        return Space(
            compat=compat_digest(compat),
            block_tokens=int(pool.page_size),
            value_bytes=self._page_bytes,
            ranks=1 if is_replicated else int(config.tp_size),
            rank=0 if is_replicated else int(config.tp_rank),
            layer_stop=int(getattr(pool, "layer_num", 1)),
            layout=f"{getattr(pool, 'layout', '')} {dtype}",
        )

    def _take_keys(self) -> None:
        """Whom the key directory names now; one that cannot be read leaves what was."""
        try:
            keyring = keyring_of(self._settings, int(self._config.tp_rank))
        except (ControlError, OSError) as error:
            self._say(f"keys cannot be read again: {error}")
            return
        trust = trust_of(keyring).trust
        self._writes = trust.sign is not None
        if self._store is not None:
            self._store.set_trust(trust)

    # --- SGLang's calls

    @guarded(returns(0))
    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        return self._run(lambda name: Lookup(name, self._keys(keys), self._timeout(Lookup)), Lookup)

    def exists(self, key: str) -> bool:
        return self.batch_exists([key]) == 1

    @guarded(lambda self, keys, *_args, **_kwargs: [None] * len(keys))
    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:
        """The leading pages that are there, filled into the given ones."""
        pages = list(target_locations or ())
        if len(pages) != len(keys) or any(_bytes_of(page) != self._page_bytes for page in pages):
            return [None] * len(keys)
        held = [bytearray(self._page_bytes) for _ in pages]
        into = tuple((memoryview(each),) for each in held)
        count = self._run(lambda name: Get(name, self._keys(keys), into, self._timeout(Get)), Get)
        for page, each in zip(pages[:count], held, strict=False):
            _view(page)[:] = each
        return [*pages[:count], *[None] * (len(keys) - count)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        return self.batch_get([key], [target_location] if target_location is not None else None)[0]

    @guarded(returns(False))
    def batch_set(
        self, keys: list[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        pages = [page.contiguous() for page in values or ()] if self._writes else []
        if len(pages) != len(keys) or any(_bytes_of(page) != self._page_bytes for page in pages):
            return False
        held, blocks = tuple((memoryview(bytes(_view(page))),) for page in pages), tuple(range(len(pages)))
        put = self._run(lambda name: Put(name, self._keys(keys), held, blocks, self._timeout(Put)), Put)
        return put == len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        return value is not None and self.batch_set([key], [value])

    def clear(self) -> None:
        """The store is other engines' too: what it holds goes by its own eviction."""

    def get_stats(self) -> None:
        """SGLang's own are of other backends; these are in the store's counters."""

    @guarded(makes(lambda: None))
    def close(self) -> None:
        if self._waited is not None:
            self._waited.close()

    # --- helpers

    def _keys(self, told: Sequence[str]) -> tuple[str, ...]:
        """HiCache's names, whatever their form, in this space."""
        return tuple(self._front + hashlib.blake2b(each.encode(), digest_size=32).hexdigest() for each in told)

    def _timeout(self, kind: type[Order]) -> float:
        lookup_s = self._settings.store_timeout
        return lookup_s if kind is Lookup else GET_PER_LOOKUP * lookup_s

    def _run(self, make: Callable[[OrderId], Order], kind: type[Order]) -> int:
        waited = self._waited
        if waited is None:
            return 0
        with self._lock:
            is_due = time.monotonic() - self._looked >= KEYS_REFRESH_S
            if is_due:
                self._looked = time.monotonic()
        if is_due:
            self._take_keys()
        ended = waited.run(make, self._timeout(kind))
        if ended is None or ended.reason is not None:
            self._say("the store takes no more" if ended is None else f"{ended.reason}: {ended.detail}")
        return 0 if ended is None else ended.count

    def _say(self, what: str) -> None:
        self._unsaid += 1
        if worth_saying(self._unsaid):
            log.warning("[store-order-failed] kvbaton: HiCache (%d so far): %s", self._unsaid, what)


def _bytes_of(page: Any) -> int:
    return int(page.nelement()) * int(page.element_size())


def _view(page: Any) -> memoryview:
    """A flat page of the host's, as bytes."""
    return memoryview((ctypes.c_char * _bytes_of(page)).from_address(page.data_ptr())).cast("B")


def hicache_class(base: type) -> type:
    """A storage backend over the `HiCacheStorage` of the SGLang that is installed, which asks for a subclass."""
    return type("BatonHiCache", (HiCacheBackend, base), {})
