"""Caches on a device: what is refused, what is offered, and that a layer is spoken of only when its event is over."""

from __future__ import annotations

import queue
import threading
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from kvbaton.engines.shared import caches
from kvbaton.engines.shared.caches import DeviceCache, DeviceClock, HostClock, planes_over
from kvbaton.engines.shared.connector_settings import ConnectorSettings
from kvbaton.engines.vllm.memory.vllm_caches import cache_of, spoken_of
from kvbaton.transports import catalogue
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.cuda.cuda_driver import CudaError
from tests.transports.device.fake_gpu import FakeGpu


@dataclass
class Device:
    type: str
    index: int | None = None

    def __str__(self) -> str:
        return self.type if self.index is None else f"{self.type}:{self.index}"


@dataclass
class Storage:
    address: int
    size: int

    def data_ptr(self) -> int:
        return self.address

    def nbytes(self) -> int:
        return self.size


class Tensor:
    def __init__(self, device: Device, address: int = 4096, size: int = 8192) -> None:
        self.device = device
        self._storage = Storage(address, size)

    def untyped_storage(self) -> Storage:
        return self._storage


def settings(**changed: Any) -> ConnectorSettings:
    return ConnectorSettings(name="p0", keys="keys", **changed)


def test_a_cache_on_a_device_is_registered_where_it_lies() -> None:
    one, two = Tensor(Device("cuda", 3)), Tensor(Device("cuda", 3), 1 << 20)
    found = cache_of({"a": one, "b": one, "c": two})
    assert isinstance(found, DeviceCache)
    assert found.memories == [DeviceMemory(4096, 8192, 3), DeviceMemory(1 << 20, 8192, 3)]


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": Tensor(Device("cuda", 0)), "b": Tensor(Device("cuda", 1))},
        {"a": Tensor(Device("cuda", 0)), "b": Tensor(Device("cpu"))},
        {"a": Tensor(Device("xpu", 0))},
    ],
)
def test_other_memory_is_refused_by_the_name_of_a_layer(tensors: dict[str, Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"lies on .*\(a\).*docs/vllm.md"):
        cache_of(tensors)


def test_device_planes_are_offered_for_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_usable", lambda choice, device: ("cuda", "staged-tcp") if device == "cuda" else ())
    cache = DeviceCache([Storage(4096, 8192)], 0)
    assert list(planes_over(cache, settings())) == ["cuda", "staged-tcp"]


def test_a_plane_of_host_memory_is_refused_for_a_device() -> None:
    with pytest.raises(RuntimeError, match="transport tcp does not move device memory"):
        planes_over(DeviceCache([Storage(4096, 8192)], 0), settings(transport="tcp"))


def test_no_plane_at_all_is_refused_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalogue, "_usable", lambda choice, device: ())
    with pytest.raises(RuntimeError, match="no data plane can be offered for a KV cache in cuda memory"):
        planes_over(DeviceCache([Storage(4096, 8192)], 0), settings())


def test_on_the_host_a_layer_that_was_called_was_computed() -> None:
    told: list[int] = []
    HostClock().when_done(lambda: told.append(1), last=False)
    assert told == [1]


class SlowGpu(FakeGpu):
    """Work that ends when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[int, int]] = []
        self.over = threading.Semaphore(0)

    def record(self, event: int, stream: int) -> None:
        super().record(event, stream)
        self.recorded.append((event, stream))

    def wait(self, event: int) -> None:
        super().wait(event)
        assert self.over.acquire(timeout=10)


def test_a_layer_on_a_device_is_told_after_its_event_and_in_order() -> None:
    gpu, told = SlowGpu(), queue.Queue[int]()
    clock = DeviceClock(gpu, lambda: 77)
    for layer in range(3):
        clock.when_done(lambda layer=layer: told.put(layer), last=True)
    assert [stream for _, stream in gpu.recorded] == [77, 77, 77]
    assert told.empty()
    for layer in range(3):
        gpu.over.release()
        assert told.get(timeout=10) == layer
    assert told.empty()
    clock.close()


def test_notes_of_a_step_keep_their_distance_and_its_last_is_told_at_once() -> None:
    """Each wait takes 8 ms by this clock: the notes of 4 and 5 layers are told 20 ms apart at least, and the last."""
    ms, told = iter(range(0, 10**6, 4)), queue.Queue[tuple[str, int]]()
    clock = DeviceClock(FakeGpu(), lambda: 1, lambda: next(ms) / 1000)
    for step, layers in (("a", 8), ("b", 2)):
        for layer in range(layers):
            clock.when_done(partial(told.put, (step, layer)), last=layer == layers - 1)
    clock.close()
    clock._thread.join(10)
    assert list(told.queue) == [("a", 4), ("a", 7), ("b", 1)]


@pytest.mark.parametrize(
    ("layers", "chosen"), [(1, [0]), (8, list(range(8))), (9, [0, 2, 4, 6, 8]), (32, list(range(3, 32, 4)))]
)
def test_some_layers_of_a_step_are_spoken_of_and_its_last_always(layers: int, chosen: list[int]) -> None:
    names = [f"layers.{number}" for number in range(layers)]
    assert spoken_of(names) == {names[number]: number == layers - 1 for number in chosen}
    assert spoken_of([]) == {}


def test_events_are_used_again_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "EVENTS_MAX", 2)
    gpu, told = SlowGpu(), queue.Queue[int]()
    clock = DeviceClock(gpu, lambda: 1)
    for layer in range(3):
        clock.when_done(lambda layer=layer: told.put(layer), last=True)  # the third finds no event
    gpu.over.release(2)
    assert [told.get(timeout=10), told.get(timeout=10)] == [0, 1]
    clock.when_done(lambda: told.put(3), last=True)
    gpu.over.release()
    assert told.get(timeout=10) == 3
    assert len({event for event, _ in gpu.recorded}) == 2
    clock.close()


def test_a_lost_device_is_never_taken_for_a_finished_layer() -> None:
    gpu, told = FakeGpu(), []
    gpu.refusals["wait"] = CudaError("cuEventSynchronize", 700, "CUDA_ERROR_ILLEGAL_ADDRESS")
    clock = DeviceClock(gpu, lambda: 1)
    clock.when_done(lambda: told.append(1), last=True)
    clock._thread.join(10)
    assert not clock._thread.is_alive()
    clock.when_done(lambda: told.append(2), last=True)
    assert told == []
