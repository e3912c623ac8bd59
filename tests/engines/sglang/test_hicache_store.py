"""HiCache's calls on kvbaton's store, with a real store server; tensors, host pool and base class are fakes."""

from __future__ import annotations

import ctypes
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import kvbaton.integrations.sglang as ours
from kvbaton.control import key_room, keyring
from kvbaton.control.zmq import ZmqControl
from kvbaton.engines.sglang import hicache_store
from kvbaton.engines.sglang.hicache_store import FILE, HiCacheBackend
from kvbaton.store.interface import OrderId
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.tcp_server_side import LineServer, StoreServer

PAGE_BYTES = 512
KEYS = [f"{number:064x}" for number in range(1, 5)]


class FakeTensor:
    """A flat page of the host's."""

    dtype = "torch.float16"

    def __init__(self, fill: int = 0) -> None:
        self.raw = bytearray([fill]) * PAGE_BYTES

    def nelement(self) -> int:
        return PAGE_BYTES // 2

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.raw))

    def contiguous(self) -> FakeTensor:
        return self


class FakePool:
    page_size, layer_num, layout = 4, 2, "layer_first"

    def __init__(self, dtype: str = "torch.float16") -> None:
        self.dtype = dtype

    def get_dummy_flat_data_page(self) -> FakeTensor:
        page = FakeTensor()
        page.dtype = self.dtype
        return page


class StoreOfTests:
    """A `kvbaton store`, and who may ask it."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.keys = place / "keys"
        keyring.mint(self.keys, ["p0:prefill", "p1:prefill", "d0:decode", "store"])
        self.memory = MemoryBackend(1 << 20)
        self.control = ZmqControl(keyring.load(self.keys, "store"))
        self.endpoint = self.control.endpoint
        self.server = StoreServer(
            self.control, self.memory, LineServer(self.memory, "127.0.0.1", value_bytes_max=1 << 16)
        )
        self.made: list[HiCacheBackend] = []

    def engine(self, name: str = "p0", pool: Any = None, *, model: str = "fake", **changes: Any) -> HiCacheBackend:
        told = {"name": name, "keys": str(self.keys), "store": self.endpoint, "model_id": model, "store_timeout": 0.5}
        file = self.place / f"{name}.json"
        file.write_text(json.dumps(told))
        config = SimpleNamespace(
            **{"tp_rank": 0, "tp_size": 1, "pp_size": 1, "is_mla_model": False, "model_name": "fake", **changes},
            extra_config={FILE: str(file)},
        )
        made = HiCacheBackend(config, {})
        made.register_mem_pool_host(pool or FakePool())
        self.made.append(made)
        return made

    def close(self) -> None:
        for each in self.made:
            each.close()
        self.server.close()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreOfTests]:
    made = StoreOfTests(tmp_path)
    yield made
    made.close()


def pages(*fills: int) -> list[FakeTensor]:
    return [FakeTensor(fill) for fill in fills]


def got(engine: HiCacheBackend, keys: list[str] = KEYS) -> list[int | None]:
    """The first byte of each page that is there, all of whose bytes are the same."""
    found = engine.batch_get(keys, pages(*[0] * len(keys)))
    assert all(page is None or set(page.raw) == {page.raw[0]} for page in found)
    return [None if page is None else page.raw[0] for page in found]


def test_what_one_engine_sets_another_gets(store: StoreOfTests) -> None:
    first, second = store.engine("p0"), store.engine("p1")
    assert first.batch_exists(KEYS) == 0 and got(first) == [None] * 4
    assert first.batch_set(KEYS[:3], pages(1, 2, 3))
    assert second.batch_exists(KEYS) == 3 and got(second) == [1, 2, 3, None]
    assert second.exists(KEYS[0]) and not second.exists(KEYS[3])
    assert second.set(KEYS[3], FakeTensor(4)) and first.get(KEYS[3], FakeTensor()).raw[0] == 4
    assert got(first, [KEYS[0], "0" * 64, KEYS[1]]) == [1, None, None]


def test_other_values_are_other_keys(store: StoreOfTests) -> None:
    """Of another model, dtype, page, or rank; every rank of MLA has the same."""
    assert store.engine("p0").batch_set(KEYS, pages(1, 2, 3, 4))
    assert got(store.engine("p1", model="another")) == [None] * 4
    assert got(store.engine("p1", FakePool("torch.bfloat16"))) == [None] * 4
    assert got(store.engine("p1", SimpleNamespace(**_pool(page_size=8)))) == [None] * 4
    assert got(store.engine("p1", tp_size=2)) == [None] * 4
    latent = ["latent"]
    assert store.engine("p0", is_mla_model=True, tp_size=2).batch_set(latent, pages(5))
    assert got(store.engine("p1", is_mla_model=True, tp_size=2), latent) == [5]


def _pool(**changes: Any) -> dict[str, Any]:
    plain = FakePool()
    page = plain.get_dummy_flat_data_page
    return {"page_size": 4, "layer_num": 2, "layout": "layer_first", "get_dummy_flat_data_page": page, **changes}


def test_a_damaged_value_is_a_miss(store: StoreOfTests) -> None:
    engine = store.engine()
    assert engine.batch_set(KEYS, pages(1, 2, 3, 4))
    for key in list(store.memory._values)[1:2]:
        value = bytearray(store.memory._values[key])
        value[-1] ^= 1
        store.memory._values[key] = bytes(value)
    assert got(engine) == [1, None, None, None]


def test_who_may_not_grant_reads_and_writes_nothing(store: StoreOfTests) -> None:
    """The role of its key decides: a decode worker's values would be believed by nobody."""
    decode, prefill = store.engine("d0"), store.engine("p0")
    assert not decode.batch_set(KEYS, pages(9, 9, 9, 9))
    assert got(prefill) == [None] * 4
    assert prefill.batch_set(KEYS, pages(1, 2, 3, 4)) and got(decode) == [1, 2, 3, 4]


def test_who_was_removed_is_believed_no_more(store: StoreOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its values are misses as soon as the keys were read again."""
    monkeypatch.setattr(hicache_store, "KEYS_REFRESH_S", 0.0)
    writer, reader = store.engine("p0"), store.engine("p1")
    assert writer.batch_set(KEYS, pages(1, 2, 3, 4)) and got(reader) == [1, 2, 3, 4]
    key_room.remove(str(store.keys), "p0")
    assert got(reader) == [None] * 4


def test_a_store_that_is_gone_costs_misses(store: StoreOfTests) -> None:
    engine = store.engine()
    store.server.close()
    began = time.monotonic()
    assert (engine.batch_exists(KEYS), got(engine)) == (0, [None] * 4)
    assert not engine.batch_set(KEYS, pages(1, 2, 3, 4))
    assert time.monotonic() - began < 15.0


def test_an_order_that_is_given_up_touches_no_page(store: StoreOfTests, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, orders = store.engine(), []
    monkeypatch.setattr(engine._waited, "run", lambda make, _: orders.append(make(OrderId(7))))
    [read], [written] = pages(0), pages(1)
    assert engine.batch_get(KEYS[:1], [read]) == [None] and not engine.batch_set(KEYS[:1], [written])
    got_late, put_late = orders
    got_late.into[0][0][:] = bytes([9]) * PAGE_BYTES
    written.raw[:] = bytes([9]) * PAGE_BYTES  # HiCache has another prompt's page there now
    assert set(read.raw) == {0}
    assert set(bytes(put_late.values[0][0])) == {1}


def test_several_threads_each_get_their_own(store: StoreOfTests) -> None:
    """HiCache prefetches and backs up at once."""
    engine = store.engine()
    wrong: list[object] = []

    def work(number: int) -> None:
        names = [f"{number}-{page}" for page in range(4)]
        fills = [10 * number + page for page in range(4)]
        for _ in range(3):
            if not engine.batch_set(names, pages(*fills)) or got(engine, names) != fills:
                wrong.append(names)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert not wrong


def test_pages_of_another_size_are_not_touched(store: StoreOfTests) -> None:
    engine = store.engine()
    assert not engine.batch_set(KEYS[:1], pages(1, 2)) and engine.batch_get(KEYS[:1], []) == [None]
    assert engine.get(KEYS[0]) is None and not engine.set(KEYS[0])


@pytest.mark.parametrize(
    ("changes", "named"), [({"pp_size": 2}, "pp_size 2"), ({"should_split_heads": True}, "tp_lcm_size")]
)
def test_what_is_not_stored_is_refused_at_start(store: StoreOfTests, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        store.engine(**changes)


def test_a_file_without_a_store_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "p0.json"
    file.write_text(json.dumps({"name": "p0", "keys": str(tmp_path)}))
    for told, named in (({}, "not set"), ({FILE: str(file)}, "a store, and keys")):
        with pytest.raises(ValueError, match=named):
            HiCacheBackend(SimpleNamespace(extra_config=told), {})


def test_sglang_finds_a_subclass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the module path and name of its `dynamic` backend."""
    module = ModuleType("sglang.srt.mem_cache.hicache_storage")
    module.HiCacheStorage = type("HiCacheStorage", (), {"of_a_newer_sglang": True})  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    ours._hicache.cache_clear()
    found = ours.BatonHiCache
    ours._hicache.cache_clear()
    assert issubclass(found, module.HiCacheStorage) and issubclass(found, HiCacheBackend) and found.of_a_newer_sglang
    with pytest.raises(AttributeError):
        _ = ours.Nothing
