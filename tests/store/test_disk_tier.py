"""The disk tier is bounded, one process's at a time, and turns whatever is wrong with a file into a miss."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvbaton.store import disk_tier
from kvbaton.store.disk_tier import DiskError, DiskTier, _name
from kvbaton.store.interface import Get, OrderEnded, OrderId, Put, StoreSettings
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.threaded_store import KeptStore
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
    real, real_open = disk_tier._write_private, disk_tier._open_private

    def slow(path: Path, data: bytes | memoryview) -> None:
        begun.set()
        go_on.wait(20)
        real(path, data)

    def seen(path: Path) -> int:
        try:
            return real_open(path)
        finally:
            looked.set()

    monkeypatch.setattr(disk_tier, "_write_private", slow)
    monkeypatch.setattr(disk_tier, "_open_private", seen)
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


def modes(folder: Path) -> dict[str, int]:
    return {path.name.partition(".")[2]: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


@pytest.fixture(params=[0o000, 0o022, 0o777], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_nobody_else_can_read_a_value_whatever_the_umask_is(tmp_path: Path, umask: int) -> None:
    tier = DiskTier(tmp_path / "nvme" / "kv", 1000)
    assert tier.write("a", b"prompt") and tier.read("a") == b"prompt"
    assert modes(tmp_path / "nvme" / "kv") == {"": 0o600, "kv": 0o600}
    assert [stat.S_IMODE(each.stat().st_mode) for each in (tmp_path / "nvme", tmp_path / "nvme" / "kv")] == [0o700] * 2
    tier.close()


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o711, 0o701, 0o770, 0o777, 0o1777, 0o2750], ids=oct)
def test_a_folder_that_others_can_enter_or_list_is_refused_with_the_next_step(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "kv"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(DiskError, match=f"mode {mode:04o}.*chmod 700 {folder}"):
        DiskTier(folder, 1000)
    assert list(folder.iterdir()) == [], "nothing is written there"
    folder.chmod(0o700)
    DiskTier(folder, 1000).close()


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kv"
    folder.mkdir(mode=0o700)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    with pytest.raises(DiskError, match="belongs to user"):
        DiskTier(folder, 1000)


def test_files_that_an_earlier_run_left_open_to_others_are_closed_to_them(tmp_path: Path) -> None:
    tier = DiskTier(tmp_path, 1000)
    assert tier.write("a", b"1" * 100)
    tier.close()
    for path in tmp_path.iterdir():
        path.chmod(0o644)
    tier = DiskTier(tmp_path, 1000)
    assert set(modes(tmp_path).values()) == {0o600}
    assert tier.read("a") == b"1" * 100
    tier.close()


def test_what_another_put_under_a_values_name_is_neither_followed_nor_kept(tmp_path: Path) -> None:
    """A link, a pipe or a second name of a file elsewhere: whoever has the other end could read, write or stall."""
    folder, elsewhere = tmp_path / "kv", tmp_path / "elsewhere"
    tier = DiskTier(folder, 1000)
    for key in ("linked", "twice", "pipe", "later"):
        assert tier.write(key, b"2" * 10)
    tier.close()
    elsewhere.write_bytes(b"3" * 10)
    elsewhere.chmod(0o644)
    for key in ("linked", "twice", "pipe"):
        (folder / _name(key)).unlink()
    (folder / _name("linked")).symlink_to(elsewhere)
    (folder / _name("twice")).hardlink_to(elsewhere)
    os.mkfifo(folder / _name("pipe"))
    tier = DiskTier(folder, 1000)
    (folder / _name("later")).unlink()
    (folder / _name("later")).symlink_to(elsewhere)
    assert [tier.read(key) for key in ("linked", "twice", "pipe", "later")] == [None] * 4
    assert list(folder.glob("*.kv")) == []
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o644 and elsewhere.read_bytes() == b"3" * 10
    tier.close()
