"""The Mooncake back end against a fake of the library's surface; the real one is in tests/mooncake_store."""

from __future__ import annotations

import ctypes
import socket
from collections.abc import Iterator

import pytest

from kvbaton.store.interface import Backend
from kvbaton.store.mooncake_backend import ALREADY_THERE, NOT_FOUND, MooncakeBackend, MooncakeError, MooncakeSettings
from kvbaton.testing.store_case import StoreCase
from kvbaton.testing.store_contract import check_store


class FakeMaster:
    """A port that answers a connection, and what a master and its owners hold."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.values: dict[str, bytes] = {}
        self.code = 0  # what everything answers, if it is not 0


class FakeClient:
    """Exactly the calls that the adapter uses, with the codes that 0.3.13 gives."""

    def __init__(self, master: FakeMaster) -> None:
        self.master = master
        self.memories: list[range] = []
        self.closed = False

    def setup(self, host: str, metadata: str, segment: int, buffer: int, protocol: str, devices: str, at: str) -> int:
        assert at == self.master.address
        return self.master.code

    def register_buffer(self, address: int, size: int) -> int:
        self.memories.append(range(address, address + size))
        return 0

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        return [self.master.code or int(key in self.master.values) for key in keys]

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        for key, at, size in zip(keys, addresses, sizes, strict=True):
            self._check(at, size)
            if not self.master.code:
                self.master.values.setdefault(key, ctypes.string_at(at, size))
        return [self.master.code] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        return [self._get(*each) for each in zip(keys, addresses, sizes, strict=True)]

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        return [0 if self.master.values.pop(key, None) is not None else NOT_FOUND for key in keys]

    def close(self) -> int:
        self.closed = True
        return 0

    def _get(self, key: str, at: int, size: int) -> int:
        self._check(at, size)
        value = self.master.values.get(key)
        if self.master.code or value is None:
            return self.master.code or NOT_FOUND
        if len(value) > size:
            return -600
        ctypes.memmove(at, value, len(value))
        return len(value)

    def _check(self, at: int, size: int) -> None:
        assert any(at in memory and at + size <= memory.stop for memory in self.memories), "memory of somebody else"


class FakeHarness:
    offers = frozenset({"idle"})

    def __init__(self) -> None:
        self.master = FakeMaster()

    def backend(self) -> Backend:
        return MooncakeBackend(MooncakeSettings(master=self.master.address), lambda: FakeClient(self.master))

    def reset(self) -> None:
        self.master.values.clear()


@pytest.fixture
def master() -> Iterator[FakeMaster]:
    master = FakeMaster()
    yield master
    master.listener.close()


def backend(master: FakeMaster) -> MooncakeBackend:
    return MooncakeBackend(MooncakeSettings(master=master.address), lambda: FakeClient(master))


@pytest.mark.parametrize("case", check_store.cases, ids=str)
def test_the_adapter_keeps_the_contract(case: StoreCase) -> None:
    harness = FakeHarness()
    try:
        case(harness)
    finally:
        harness.master.listener.close()


def test_no_master_is_told_at_once_and_by_name() -> None:
    with socket.socket() as nobody:  # bound, so that nobody else takes it meanwhile
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        one = MooncakeBackend(MooncakeSettings(master=address), lambda: pytest.fail("the library would block for 90 s"))
        with pytest.raises(MooncakeError, match="start mooncake_master there"):
            one.exists(["a"])


@pytest.mark.parametrize("code", [-900, -901])
def test_a_master_out_of_reach_is_an_exception(master: FakeMaster, code: int) -> None:
    one = backend(master)
    memory = memoryview(bytearray(64))
    one.register(memory)
    assert one.exists(["a"]) == [False]
    master.code = code
    for call in (lambda: one.exists(["a"]), lambda: one.put(["a"], [memory]), lambda: one.get(["a"], [memory])):
        with pytest.raises(MooncakeError, match="does not answer"):
            call()
    assert one.counters[f"put.{code}"] == 1


@pytest.mark.parametrize(("code", "wrong"), [(0, ""), (ALREADY_THERE, ""), (-200, "mooncake: code -200")])
def test_a_code_of_a_put_is_about_its_key(master: FakeMaster, code: int, wrong: str) -> None:
    one = backend(master)
    memory = memoryview(bytearray(64))
    one.register(memory)
    one.exists(["a"])
    master.code = code
    assert one.put(["a"], [memory]) == [wrong]


def test_an_owner_that_is_gone_is_a_miss_and_a_count(master: FakeMaster) -> None:
    one = backend(master)
    memory = memoryview(bytearray(64))
    one.register(memory)
    one.exists(["a"])
    master.code = -800
    assert one.get(["a"], [memory]) == [0]
    assert one.counters["get.-800"] == 1


def test_large_batches_are_cut(master: FakeMaster) -> None:
    one = backend(master)
    memory = memoryview(bytearray(64))
    one.register(memory)
    keys = [str(number) for number in range(2500)]
    assert one.put(keys, [memory] * 2500) == [""] * 2500
    assert one.get(keys, [memory] * 2500) == [64] * 2500


def test_a_set_up_that_failed_is_tried_again_and_a_closed_one_is_not(master: FakeMaster) -> None:
    one = backend(master)
    master.code = -1
    with pytest.raises(MooncakeError, match="set-up: code -1"):
        one.exists(["a"])
    master.code = 0
    assert one.exists(["a"]) == [False]
    one.close()
    with pytest.raises(MooncakeError, match="closed"):
        one.exists(["a"])


def test_a_missing_package_is_told_with_the_next_step(master: FakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvbaton.store.mooncake_backend.PACKAGE", "no_such_package")
    with pytest.raises(MooncakeError, match=r"install mooncake-transfer-engine"):
        MooncakeBackend(MooncakeSettings(master=master.address)).exists(["a"])


def test_a_master_without_a_port_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^master:"):
        MooncakeBackend(MooncakeSettings(master="nowhere"))
