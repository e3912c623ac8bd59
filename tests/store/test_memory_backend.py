"""The embedded back end keeps the contract, and its bounds."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvbaton.store.disk_tier import DiskTier
from kvbaton.store.interface import Backend
from kvbaton.store.memory_backend import KEY_COST_BYTES, MemoryBackend, SpareRoom
from kvbaton.testing.store_case import StoreCase
from kvbaton.testing.store_contract import check_store


class Shared:
    """One memory for several stores: closing one must not close it for the others."""

    lands_late = False

    def __init__(self, memory: MemoryBackend) -> None:
        self.register, self.exists, self.put = memory.register, memory.exists, memory.put
        self.get, self.discard = memory.get, memory.discard

    def close(self) -> None:
        pass


class MemoryHarness:
    offers = frozenset({"idle"})

    def __init__(self) -> None:
        self.memory = self._make()

    def _make(self) -> MemoryBackend:
        return MemoryBackend(64 << 20)

    def backend(self) -> Backend:
        return Shared(self.memory)

    def reset(self) -> None:
        self.memory.close()
        self.memory = self._make()


class DiskHarness(MemoryHarness):
    """Hardly any memory: nearly every value goes to disk and comes back from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._round = 0
        super().__init__()

    def _make(self) -> MemoryBackend:
        self._round += 1
        return MemoryBackend(14_000, DiskTier(self._folder / str(self._round), 64 << 20))


@pytest.mark.parametrize("case", check_store.cases, ids=str)
def test_memory_keeps_the_contract(case: StoreCase) -> None:
    case(MemoryHarness())


@pytest.mark.parametrize("case", check_store.cases, ids=str)
def test_disk_keeps_the_contract(case: StoreCase, tmp_path: Path) -> None:
    case(DiskHarness(tmp_path))


def test_memory_of_a_value_is_used_again_once_nobody_can_see_it() -> None:
    spare = SpareRoom(300)
    first = spare.take(100)
    first[:] = b"1" * 100
    reader = first[10:20]
    del first
    second = spare.take(100)
    second[:] = b"2" * 100
    assert reader == b"1" * 10, "a reader has it still"
    del reader
    third = spare.take(100)
    assert third == b"1" * 100, "nobody has: the very memory, not zeroed"
    assert spare.take(99).nbytes == 99


def test_spare_memory_is_bounded() -> None:
    spare = SpareRoom(300)
    taken = [spare.take(100) for _ in range(5)] + [spare.take(400)]
    assert spare.bytes == 0
    while taken:
        taken.pop()
        assert spare.bytes <= 300
    assert spare.bytes == 200, "four were more than it keeps, so it began anew"


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    memory = MemoryBackend(3 * (100 + KEY_COST_BYTES))
    value = memoryview(bytes(100))
    for key in ("a", "b", "c"):
        assert memory.put([key], [value]) == [""]
    memory.get(["a"], [memoryview(bytearray(100))])
    memory.put(["d"], [value])
    assert memory.exists(["a", "b", "c", "d"]) == [True, False, True, True]
    assert memory.bytes_used <= 3 * (100 + KEY_COST_BYTES)
    assert memory.put(["huge"], [memoryview(bytes(5000))]) != [""]
    assert len(memory) == 3
    memory.put(["d"], [memoryview(bytes(50))])
    assert memory.bytes_used == 250 + 3 * KEY_COST_BYTES


def test_what_was_evicted_comes_back_from_disk_and_outlives_the_process(tmp_path: Path) -> None:
    value = memoryview(b"x" * 100)
    memory = MemoryBackend(100 + KEY_COST_BYTES, DiskTier(tmp_path, 10_000))
    assert memory.put(["a", "b"], [value, value]) == ["", ""]
    assert len(memory) == 1
    assert memory.exists(["a", "b"]) == [True, True]
    buffer = memoryview(bytearray(100))
    assert memory.get(["a"], [buffer]) == [100]
    assert buffer == value
    memory.close()
    again = MemoryBackend(1000, DiskTier(tmp_path, 10_000))
    assert again.exists(["a", "b", "c"]) == [True, True, False]
    again.discard(["a"])
    assert again.exists(["a"]) == [False]
    again.close()
