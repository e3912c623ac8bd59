"""A vLLM worker's way to the shared store: what is refused at start, who it is there, and what it moves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvbaton.control import keyring
from kvbaton.control.addressing import ControlError
from kvbaton.control.zmq import ZmqControl
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.shared.store_setup import keyring_of, rank_identity
from kvbaton.engines.vllm.memory.rank_shelf import rank_shelf
from kvbaton.engines.vllm.memory.vllm_layout import GroupFacts, RankFacts
from kvbaton.protocol.geometry.layout import Cell, GroupKind, Place, Plane
from kvbaton.ranks import device_store
from kvbaton.ranks.device_store import DeviceRankStore
from kvbaton.ranks.engine_store import RankStoreInterface
from kvbaton.ranks.store_trust import trust_of
from kvbaton.store.interface import OrderEnded, OrderId
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.tcp_server_side import LineServer, StoreServer
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.core.shared_memory import DeviceMemory
from tests.transports.device.fake_gpu import FakeGpu

GOOD: dict[str, Any] = {"name": "p0", "keys": "/keys"}
MOONCAKE = "mooncake://10.0.0.1:50051"
BLOCKS, BLOCK_BYTES = 8, 64
COMPAT = "ab" * 16
HASHES = tuple(bytes([each]) * 32 for each in range(4))


# --- settings


def test_a_store_is_a_place_a_name_and_a_time_out() -> None:
    settings = ConnectorSettings.parse(GOOD | {"store": "tcp://10.0.0.1:7710", "store_timeout": 3, "store_name": "s"})
    shelf = settings.shelf()
    assert (shelf.lookup_timeout_s, shelf.get_timeout_s, shelf.put_timeout_s) == (3, 15, 20)
    assert not settings.is_alone
    assert ConnectorSettings.parse(GOOD | {"transfer_timeout": 4}).shelf().put_timeout_s == 4


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"store": "http://a:1"}, "store: "),
        ({"store": "tcp://"}, "store: "),
        ({"store": "mooncake://a:1?lend=much"}, "store: "),
        ({"store_timeout": 0}, "store_timeout: got"),
        ({"copies_percent": 25}, "above 0 with a store"),
        ({"store_timeout": 7}, "store_timeout: got 7.0, expected at most 6"),
        ({"store_name": "a b"}, "store_name: got"),
    ],
)
def test_a_store_that_cannot_be_meant_is_refused_by_name(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match="kv_connector_extra_config") as refusal:
        ConnectorSettings.parse(GOOD | change)
    assert named in str(refusal.value)


def test_an_engine_that_shares_through_mooncake_alone_needs_no_keys() -> None:
    settings = ConnectorSettings.parse({"store": MOONCAKE})
    assert settings.is_alone
    ours, theirs = keyring_of(settings), keyring_of(settings)
    assert ours.secret != theirs.secret and ours.ticket_keys != theirs.ticket_keys, "nobody else has them"
    putting, getting = trust_of(ours).trust, trust_of(theirs).trust
    assert putting.sign is not None and getting.believes([putting.me]), "and they share all the same"
    assert getting.has_signed(putting.me, b"batch", putting.sign(b"batch"))


@pytest.mark.parametrize(
    "extra",
    [
        {"store": "tcp://10.0.0.1:7710"},
        {"store": MOONCAKE, "peers": {"d0": "tcp://10.0.0.1:2"}},
        {"store": MOONCAKE, "registry": "tcp://10.0.0.1:7700", "http_address": "a:1"},
    ],
    ids=str,
)
def test_whoever_speaks_with_others_needs_keys(extra: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"name: got None.*kvbaton keys new"):
        ConnectorSettings.parse(extra)


# --- a worker's shelf


@pytest.fixture
def key_directory(tmp_path: Path) -> Path:
    keyring.mint(tmp_path / "keys", ["p0", "p0.1", "store"])
    return tmp_path / "keys"


@pytest.fixture
def store(key_directory: Path) -> Iterator[tuple[str, MemoryBackend]]:
    memory = MemoryBackend(1 << 20)
    control = ZmqControl(keyring.load(key_directory, "store"))
    lines = LineServer(memory, "127.0.0.1", value_bytes_max=1 << 16)
    server = StoreServer(control, memory, lines)
    yield control.endpoint, memory
    server.close()


def facts(kind: GroupKind = GroupKind.FULL, **more: Any) -> RankFacts:
    layers = ("model.layers.0.attn", "model.layers.1.attn")
    places = tuple(Place(index, index * BLOCKS * BLOCK_BYTES, BLOCK_BYTES, 0) for index in range(2))
    group = GroupFacts(
        vllm_group=0, kind=kind, block_tokens=4, window=0, heads=1, head_start=0, head_count=1, dtype="float32",
        optional=False, cells=(Cell("kv", BLOCK_BYTES // 4),), planes=(Plane(0, BLOCK_BYTES, BLOCK_BYTES // 4),),
        layers=layers, places=places, block_count=BLOCKS,
    )  # fmt: skip
    group = msgspec.structs.replace(group, **more)
    return RankFacts(0, 0, (2 * BLOCKS * BLOCK_BYTES,), (group,), "rows of tokens")


def settings_for(key_directory: Path, url: str) -> ConnectorSettings:
    return ConnectorSettings.parse({"name": "p0", "keys": str(key_directory), "store": url})


def test_what_one_rank_put_another_engines_rank_gets(key_directory: Path, store: tuple[str, MemoryBackend]) -> None:
    url, held = store
    ours, theirs = bytearray(range(256)) * 4, bytearray(1024)
    putting = made(settings_for(key_directory, url), memoryview(ours), rank=0)
    getting = made(settings_for(key_directory, url), memoryview(theirs), rank=1)
    try:
        assert putting.put(OrderId(1), HASHES, (5, 2, 7, 1), 20.0)
        assert ended(putting) == OrderEnded(OrderId(1), 4)
        assert len(held) == 4
        assert getting.get(OrderId(1), HASHES, (0, 1, 2, 3), 20.0)
        assert_taken(ended(getting), 4)
    finally:
        putting.close()
        getting.close()
    for layer in range(2):
        base = layer * BLOCKS * BLOCK_BYTES
        for mine, other in zip((0, 1, 2, 3), (5, 2, 7, 1), strict=True):
            there, here = base + other * BLOCK_BYTES, base + mine * BLOCK_BYTES
            assert theirs[here : here + BLOCK_BYTES] == ours[there : there + BLOCK_BYTES]


def test_caches_of_a_device_and_of_the_host_share_a_store(
    key_directory: Path, store: tuple[str, MemoryBackend]
) -> None:
    url, _ = store
    gpu = FakeGpu()
    memory = DeviceMemory(gpu.allocate(1024), 1024)
    ours, theirs = gpu.regions[memory.address].view, bytearray(1024)
    ours[:] = bytes(range(256)) * 4
    make = rank_shelf(settings_for(key_directory, url), facts(), 0, 2, [memory], lambda _device: gpu)
    assert make is not None
    putting, getting = make(COMPAT), made(settings_for(key_directory, url), memoryview(theirs), rank=1)
    try:
        assert isinstance(putting, DeviceRankStore)
        assert putting.put(OrderId(1), HASHES[:2], (5, 2), 20.0)
        assert ended(putting) == OrderEnded(OrderId(1), 2)
        assert getting.get(OrderId(1), HASHES[:2], (0, 1), 20.0)
        assert_taken(ended(getting), 2)
    finally:
        putting.close()
        getting.close()
    for base in (0, BLOCKS * BLOCK_BYTES):
        for mine, other in ((0, 5), (1, 2)):
            there, here = base + other * BLOCK_BYTES, base + mine * BLOCK_BYTES
            assert theirs[here : here + BLOCK_BYTES] == ours[there : there + BLOCK_BYTES]


def test_a_block_that_no_slot_holds_is_refused_at_start(key_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_store, "SLOT_BYTES", range(1, 2 * BLOCK_BYTES))
    settings = settings_for(key_directory, "tcp://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"extra_config\.store: a block has 128 bytes"):
        rank_shelf(settings, facts(), 0, 1, [DeviceMemory(4096, 1024)])


def made(settings: ConnectorSettings, memory: memoryview, rank: int) -> RankStoreInterface:
    make = rank_shelf(settings, facts(), rank, 2, [memory])
    assert make is not None
    return make(COMPAT)


def assert_taken(end: OrderEnded, count: int) -> None:
    """All of them, and the reader is told whose they are."""
    assert (end.order, end.count, end.reason, len(end.writers)) == (OrderId(1), count, None, 1)


def ended(shelf: RankStoreInterface) -> OrderEnded:
    found: list[OrderEnded] = []

    def came() -> bool:
        found.extend(shelf.drain())
        return bool(found)

    assert poll(came, 20.0)
    return found[0]


def test_without_a_store_there_is_no_shelf(key_directory: Path) -> None:
    settings = ConnectorSettings.parse({"name": "p0", "keys": str(key_directory)})
    assert rank_shelf(settings, facts(), 0, 1, []) is None


def test_a_cache_that_cannot_be_stored_is_refused_by_its_group(key_directory: Path) -> None:
    settings = settings_for(key_directory, "tcp://127.0.0.1:9")
    with pytest.raises(ValueError, match=r"extra_config\.store: group .*window"):
        rank_shelf(settings, facts(GroupKind.SLIDING, window=16), 0, 1, [])


def test_an_identity_that_is_missing_is_named_at_start(key_directory: Path) -> None:
    settings = settings_for(key_directory, "tcp://127.0.0.1:9")
    with pytest.raises(ControlError, match=r"p0\.2"):
        rank_shelf(settings, facts(), 2, 3, [])
    (key_directory / "public" / "store.json").unlink()
    with pytest.raises(ControlError, match="'store'; mint one"):
        rank_shelf(settings, facts(), 0, 1, [])


def test_each_rank_has_a_name_of_its_own() -> None:
    assert [rank_identity("p0", rank) for rank in range(3)] == ["p0", "p0.1", "p0.2"]


def test_a_mooncake_store_asks_ranks_for_no_identity() -> None:
    settings = ConnectorSettings.parse({"store": MOONCAKE})
    assert rank_shelf(settings, facts(), 3, 4, []) is not None
