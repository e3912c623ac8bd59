"""Copies and digests have a bounded part of the device: few blocks, one kernel at a time, launches of bounded bytes."""

from __future__ import annotations

import ctypes
import random
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvbaton.protocol.geometry.spans import Weave
from kvbaton.transports.cuda import cuda_driver, cuda_runner
from kvbaton.transports.cuda.cuda_driver import THREADS, CudaGpu
from kvbaton.transports.cuda.cuda_runner import LaunchGroup, Tables, rows_a_launch
from tests.transports.device.fake_gpu import FakeGpu

MULTIPROCESSORS = 132


class Driver:
    """libcuda that does nothing, and remembers what it was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.mode = 0  # of stream captures: 0 global, 2 relaxed

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            if name == "cuDeviceGetAttribute":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))[0] = MULTIPROCESSORS
            elif name == "cuThreadExchangeStreamCaptureMode":
                mode = ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_int))
                self.mode, mode[0] = mode[0], self.mode
            elif name == "cuEventCreate":
                ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = 77
            return 0

        return call

    def grids(self) -> list[tuple[int, int]]:
        return [(call[1], call[4]) for name, call in self.calls if name == "cuLaunchKernel"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(cuda_driver, "load", lambda: driver)
    monkeypatch.setattr(cuda_driver, "_lanes", {})
    return driver


@pytest.mark.parametrize(("share", "blocks"), [(1.0, 132), (0.5, 66), (0.25, 33), (0.001, 1)])
def test_a_launch_has_its_share_of_the_multiprocessors_however_many_rows_there_are(
    driver: Driver, share: float, blocks: int
) -> None:
    gpu = CudaGpu(0, share)
    gpu.move_rows(1, 1, range(100_000), 5)
    gpu.digest_rows(1, 1, range(7, 100_000), 5)
    gpu.move_rows(1, 1, range(3, 4), 5)
    assert gpu.blocks == blocks and driver.grids() == [(blocks, THREADS), (blocks, THREADS), (1, THREADS)]


@pytest.mark.parametrize("share", [0.0, -0.5, 1.01, float("nan")])
def test_what_is_no_share_is_refused(driver: Driver, share: float) -> None:
    with pytest.raises(ValueError, match="share: got"):
        CudaGpu(0, share)


def test_all_kernels_of_a_process_on_one_device_follow_each_other(driver: Driver) -> None:
    """Two transports with a share each would have two shares otherwise."""
    one, other, elsewhere = CudaGpu(0), CudaGpu(0), CudaGpu(1)
    driver.calls.clear()
    for gpu, stream in ((one, 5), (other, 6), (elsewhere, 7)):
        gpu.move_rows(1, 1, range(9), stream)
    names = [name for name, _ in driver.calls]
    each = ["cuStreamWaitEvent", "cuLaunchKernel", "cuEventRecord"]
    assert names == ["cuEventCreate", *each, *each, "cuEventCreate", *each]  # one event for each device
    streams = [call[0].value for name, call in driver.calls if name == "cuStreamWaitEvent"]
    recorded = [call[1].value for name, call in driver.calls if name == "cuEventRecord"]
    assert streams == recorded == [5, 6, 7]


def test_launches_on_one_stream_wait_for_each_other_as_it_is(driver: Driver) -> None:
    gpu = CudaGpu(0)
    driver.calls.clear()
    for stream in (5, 5, 6, 5):
        gpu.move_rows(1, 1, range(9), stream)
    gpu.drop_stream(5)
    gpu.move_rows(1, 1, range(9), 5)  # another that got the same name
    waits = [call[0].value for name, call in driver.calls if name == "cuStreamWaitEvent"]
    assert waits == [5, 6, 5, 5] and len(driver.grids()) == 5


@pytest.mark.parametrize("woven", [False, True])
def test_a_long_copy_is_several_launches_that_move_every_byte_once(
    monkeypatch: pytest.MonkeyPatch, woven: bool
) -> None:
    monkeypatch.setattr(cuda_runner, "LAUNCH_BYTES", 1000)
    gpu = FakeGpu()
    source, target = gpu.allocate(1 << 16), gpu.allocate(1 << 16)
    gpu.regions[source].view[:] = random.Random(1).randbytes(1 << 16)
    column = array("q", [number for at in range(0, 4096, 256) for number in (at, 8192 - at, 100)])
    shifts = array("q", (0, 0, 16384, 16384))
    spans: Any = Weave(column, shifts) if woven else Weave(column, shifts).flat()
    tables, ranges = Tables(gpu, 1), list[range]()
    original = gpu.move_rows

    def noted(table: int, groups: int, rows: range, stream: int) -> None:
        ranges.append(rows)
        original(table, groups, rows, stream)

    gpu.move_rows = noted  # type: ignore[method-assign]
    tables.launch([LaunchGroup(target, source, spans)], 0, 1)
    assert [row for rows in ranges for row in rows] == list(range(32)) and {len(rows) for rows in ranges} == {10, 2}
    flat = spans.flat() if woven else spans
    wanted = bytearray(1 << 16)
    for to, at, size in zip(flat[0::3], flat[1::3], flat[2::3], strict=True):
        wanted[to : to + size] = gpu.regions[source].view[at : at + size]
    assert bytes(gpu.regions[target].view) == bytes(wanted)
    tables.clear()


def test_what_one_launch_takes_goes_by_one() -> None:
    small = LaunchGroup(1, 1, array("q", (0, 0, 5)))
    assert rows_a_launch([small, small]) == 2 and small.bytes == 5
    assert rows_a_launch([LaunchGroup(1, 1, array("q", (0, 0, 1 << 40)))]) == 1


def test_while_another_thread_captures_a_graph_calls_are_allowed_and_a_strangers_thread_is_as_it_was(
    driver: Driver,
) -> None:
    """By default any allocation, by any thread, fails and breaks a capture that is under way."""
    gpu = CudaGpu(0)
    assert driver.mode == 0
    with gpu:
        assert driver.mode == 2
        with gpu:
            assert driver.mode == 2
        assert driver.mode == 2
    assert driver.mode == 0
    gpu.enter()
    assert driver.mode == 2


def test_what_waits_for_the_device_lets_go_of_the_interpreter_and_what_only_asks_it_does_not(driver: Driver) -> None:
    gpu, brief = CudaGpu(0), Driver()
    gpu.__dict__["_brief"] = brief
    driver.calls.clear()
    with gpu:
        gpu.copy(1, 2, 64 << 10, 5)  # a table
        gpu.move_rows(1, 1, range(9), 5)
        gpu.move_rows(1, 1, range(9), 6)
        gpu.copy(1, 2, 1 << 20, 5)
        gpu.wait(7)
    assert [name for name, _ in driver.calls] == ["cuEventCreate", "cuMemcpyAsync", "cuEventSynchronize"]
    assert [name for name, _ in brief.calls].count("cuLaunchKernel") == 2
    assert {"cuCtxPushCurrent_v2", "cuMemcpyAsync", "cuStreamWaitEvent"} <= {name for name, _ in brief.calls}
