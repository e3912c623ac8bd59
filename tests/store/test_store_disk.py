"""The disk tier is bounded, one process's at a time, and turns whatever is wrong with a file into a miss."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from kvbaton.store.base import Get, OrderEnded, OrderId, Put, StoreSettings
from kvbaton.store.disk import DiskError, DiskTier
from kvbaton.store.kept import KeptStore
from kvbaton.store.memory import MemoryBackend
from kvbaton.testing.store_case import VALUE_BYTES, blank, data, names, values
from kvbaton.testing.store_harness import Ends, PinBook


def test_a_value_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / f"{7}.tmp").write_bytes(b"torn")
    tier = DiskTier(tmp_path, 1000)
    assert list(tmp_path.glob("*.tmp")) == []
    assert tier.write("a", b"1" * 100)
    assert tier.read("a") == b"1" * 100
    assert tier.read("b") is None
    assert [path.stat().st_size for path in tmp_path.glob("*.kv")] == [100]
    tier.close()


def test_the_bound_holds_and_the_least_recently_used_file_goes(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 300)
    for key in "abc":
        assert tier.write(key, bytes(100))
    assert tier.has("a")
    assert tier.write("d", bytes(100))
    assert [tier.has(key) for key in "abcd"] == [True, False, True, True]
    assert not tier.write("e", bytes(301))
    assert tier.bytes_used == sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == 300
    tier.close()
    smaller = DiskTier(tmp_path, 150)
    assert smaller.bytes_used == sum(path.stat().st_size for path in tmp_path.glob("*.kv")) == 100
    smaller.close()


def test_a_disk_that_refuses_is_a_miss_and_a_count(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path / "store", 1000)
    assert tier.write("a", b"1")
    for path in (tmp_path / "store").iterdir():
        path.unlink()
    (tmp_path / "store").rmdir()
    assert tier.read("a") is None
    assert not tier.write("b", b"2")
    assert (tier.counters["read_errors"], tier.counters["write_errors"]) == (1, 1)
    assert not tier.has("b")
    tier.close()


def test_a_folder_has_one_owner_at_a_time(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    with pytest.raises(DiskError, match="another process serves it"):
        DiskTier(tmp_path, 1000)
    tier.close()
    tier.close()
    assert not tier.write("late", b"1"), "the folder may be another's now"
    DiskTier(tmp_path, 1000).close()


@pytest.mark.parametrize("damage", ["truncated", "flipped", "swapped", "empty", "longer"])
def test_a_damaged_file_is_a_miss_then_gone_and_can_be_put_again(tmp_path: Path, damage: str) -> None:
    tier = DiskTier(tmp_path, 1 << 20)
    memory = MemoryBackend(1 << 20, tier)
    store = KeptStore(memory, PinBook(), StoreSettings(value_bytes_max=VALUE_BYTES))
    ends = Ends(store)
    assert store.submit(Put(OrderId(1), names(2), values(2), (0, 1), 10.0))
    assert ends.end(1) == OrderEnded(OrderId(1), 2)
    store.close()

    files = sorted(tmp_path.glob("*.kv"))
    whole = [file.read_bytes() for file in files]
    for file, other in zip(files, reversed(whole), strict=True):
        good = file.read_bytes()
        spoiled = bytes([*good[:-1], good[-1] ^ 1])
        bad = {"truncated": good[:-9], "flipped": spoiled, "swapped": other, "empty": b"", "longer": good + b"x"}
        file.write_bytes(bad[damage])

    tier = DiskTier(tmp_path, 1 << 20)
    store = KeptStore(MemoryBackend(1 << 20, tier), PinBook(), StoreSettings(value_bytes_max=VALUE_BYTES))
    ends, into = Ends(store), blank(2)
    assert store.submit(Get(OrderId(1), names(2), into, 10.0))
    assert (ends.end(1).count, ends.end(1).reason) == (0, None)
    assert data(into) == [bytes(VALUE_BYTES)] * 2
    assert store.submit(Put(OrderId(2), names(2), values(2), (0, 1), 10.0))
    assert ends.end(2) == OrderEnded(OrderId(2), 2)
    assert store.submit(Get(OrderId(3), names(2), into, 10.0))
    assert ends.end(3).count == 2
    assert data(into) == data(values(2))
    store.close()


def test_a_value_that_is_read_while_it_is_being_written_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path / "kv", 1 << 20)
    begun, looked, go_on = threading.Event(), threading.Event(), threading.Event()
    real, real_open = Path.write_bytes, Path.open

    def slow(path: Path, data: bytes) -> int:
        begun.set()
        go_on.wait(20)
        return real(path, data)

    def seen(path: Path, *words: str, **more: str) -> object:
        try:
            return real_open(path, *words, **more)  # type: ignore[call-overload]
        finally:
            if path.suffix == ".kv":
                looked.set()

    monkeypatch.setattr(Path, "write_bytes", slow)
    monkeypatch.setattr(Path, "open", seen)
    writer = threading.Thread(target=lambda: tier.write("a", b"value"))
    writer.start()
    assert begun.wait(20)
    found: list[bytes | None] = []
    reader = threading.Thread(target=lambda: found.append(tier.read("a")))
    reader.start()
    assert looked.wait(20), "it is not there yet"
    go_on.set()
    writer.join(20)
    reader.join(20)
    assert found == [b"value"] and tier.read("a") == b"value"
    assert tier.counters["read_errors"] == 0
    tier.close()
