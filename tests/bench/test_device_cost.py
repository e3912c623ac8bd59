"""The benchmarks of shares and of checksums, as far as they need no device: what they move, digest and judge."""

from __future__ import annotations

import random
from array import array
from pathlib import Path
from typing import Any, cast

import pytest

from kvbaton.protocol.geometry.spans import Weave
from kvbaton.transports.cuda import cuda_runner
from kvbaton.transports.cuda.cuda_driver import CudaError
from kvbaton_proof.bench.device import device_checksums, device_share
from kvbaton_proof.bench.device.device_checksums import Cost
from kvbaton_proof.bench.device.device_share import Mover, Row
from tests.transports.device.fake_gpu import FakeGpu

SIZE = 1 << 16
WEAVE = Weave(array("q", (0, 5, 64, 256, 9, 32)), array("q", (0, 0, 4096, 77)))


class TimedFake(FakeGpu):
    multiprocessors = 8

    def __init__(self) -> None:
        super().__init__()
        self.digested: list[tuple[int, int, int]] = []

    def digest_rows(self, table: int, groups: int, rows: range, stream: int) -> None:
        super().digest_rows(table, groups, rows, stream)
        self.digested = list(self._rows(table, groups, rows))

    def last_ms(self) -> float:
        return 1.5


class Memory:
    """A cache, as far as a mover knows it."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.address = gpu.allocate(SIZE)
        self.view = gpu.regions[self.address].view


def test_the_digest_that_is_timed_reads_every_row_of_the_receivers_side_once() -> None:
    gpu = TimedFake()
    address = gpu.allocate(SIZE)
    assert device_checksums.digest_ms(cast(Any, gpu), address, WEAVE, 3) == 1.5
    assert [(at - address, size) for _, at, size in gpu.digested] == [(0, 64), (256, 32), (4096, 64), (4352, 32)]
    first = gpu.digested[0][0]
    assert [to - first for to, _, _ in gpu.digested] == [0, 8, 16, 24] and gpu.calls.count("digest_rows") == 3
    assert not gpu._hosts and not gpu.live and list(gpu.regions) == [address]


def test_a_mover_moves_what_it_is_told_and_leaves_nothing() -> None:
    gpu = TimedFake()
    near, far = Memory(gpu), Memory(gpu)
    far.view[:] = random.Random(1).randbytes(SIZE)
    mover = Mover(cast(Any, gpu), cast(Any, near), cast(Any, far))
    mover.begin(WEAVE)
    assert mover.wait() == 1.5 and near.view[4352:4384] == far.view[86 : 86 + 32] and near.view[:64] == far.view[5:69]
    mover.close()
    assert not gpu._hosts and not gpu.live and len(gpu.regions) == 2


@pytest.mark.parametrize(
    ("ratio", "right", "ok"), [(1.0, True, True), (1.1, True, True), (1.101, True, False), (0.9, False, False)]
)
def test_the_bound_is_a_tenth_of_the_handoff_and_right_bytes(ratio: float, right: bool, ok: bool) -> None:
    cost = Cost("staged-tcp", 67 << 20, 0.05, 1.0, 20.0, 20.0 * ratio, ratio, right)
    told = device_checksums.shown(cost)
    assert cost.ok is ok and ("NOT WITHIN" in told) is not ok and ("WRONG" in told) is not right


def test_a_share_is_told_with_all_that_was_measured_at_it() -> None:
    row = Row(
        "kernel", 0.25, 33, 128, {16: 0.1}, {"decode": 2.0}, {"decode": 1.05}, {"decode": 1.2}, {"decode": 0.4}, True
    )
    told = device_share.shown(row)
    for part in ("share 0.25 (33 blocks)", "16 blocks 0.1 ms", "decode 2.0 ms", "x1.05 (worst x1.2)"):
        assert part in told


class Shaped(TimedFake):
    """Loads any kernel but one."""

    def __init__(self, _device: int, share: float = 1.0, ptx: str = "") -> None:
        super().__init__()
        if ptx == "torn":
            raise CudaError("cuModuleLoadData", 218, "CUDA_ERROR_INVALID_PTX")

    def told(self) -> str:
        return "a device"


class Filled(Memory):
    def fill(self, words: Any) -> None:
        self.view[:8] = bytes(8)


@pytest.mark.parametrize("last", ["one", "torn"])
def test_every_file_of_a_kernel_is_a_line_of_one_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, last: str
) -> None:
    for name, value in (("TimedGpu", Shaped), ("Cache", Filled), ("pattern", lambda: None)):
        monkeypatch.setattr(device_share, name, value)
    monkeypatch.setattr(device_share, "is_right", lambda *_: True)
    monkeypatch.setattr(device_share, "weave_of", lambda *_: WEAVE)
    monkeypatch.setattr(cuda_runner, "LAUNCH_BYTES", cuda_runner.LAUNCH_BYTES)
    files = [tmp_path / "t32l2.ptx", tmp_path / "t512l8.ptx"]
    for path, text in zip(files, ("one", last), strict=True):
        path.write_text(text)
    arguments = ["x", "--shares", "1", "--fill", "1,2", "--alone", "--ptx", *map(str, files)]
    monkeypatch.setattr("sys.argv", arguments)
    assert device_share.main() == (0 if last == "one" else 1)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines[:-1]] == ["kernel"] * 2 + ["t32l2"] * 2 + ["t512l8"] * 2
    assert "(4 blocks)" in lines[0] and "(8 blocks)" in lines[1] and "1000 blocks 1.5 ms" in lines[3]
    assert ("INVALID_PTX" in lines[4]) is (last == "torn") and lines[-1].count("alone_ms") == (
        6 if last == "one" else 4
    )
