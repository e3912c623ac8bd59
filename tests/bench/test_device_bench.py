"""The device benchmark, as far as it needs no device: what it moves, how it judges, and a handoff on a fake one."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import numpy as np
import pytest

from kvbaton.cli.main import main
from kvbaton.control import keyring
from kvbaton.transports.core.shared_memory import DeviceMemory
from kvbaton.transports.cuda import cuda_driver
from kvbaton_proof.bench.device import device_ways
from kvbaton_proof.bench.device.device_nixl import Reads
from kvbaton_proof.bench.device.device_peer import device_side
from kvbaton_proof.bench.device.device_ways import Bus, DeviceReport, Size
from kvbaton_proof.bench.device.device_world import (
    BLOCK_BYTES,
    BLOCKS,
    REGION_BYTES,
    SEGMENT_BYTES,
    SEGMENTS,
    blocks_of,
    spans_of,
    weave_of,
)
from kvbaton_proof.bench.kit.handoff_side import Want
from kvbaton_proof.bench.kit.run_facts import Stopwatch
from tests.transports.device.fake_gpu import FakeGpu


def size(**changes: object) -> Size:
    ways = ("contiguous", "cuda", "handoff", "staged-shm", "staged-tcp")
    good = Size(
        1000, 1000 * BLOCK_BYTES, dict.fromkeys(ways, 1.0), {"contiguous": 1.0, "cuda": 1.05},
        dict.fromkeys(ways, 47.0), {"cuda, launch": 0.95, "cuda": 0.7, "handoff": 0.5}, 2.4, True,
    )  # fmt: skip
    return msgspec.structs.replace(good, **changes)


def report(*sizes: Size, nixl: list[Reads] | None = None) -> DeviceReport:
    return DeviceReport("a device", list(sizes) or [size()], Bus(55.0, 55.0, 50.0), nixl or [], 3)


def test_blocks_by_layers_are_the_same_bytes_as_span_by_span() -> None:
    source, target = blocks_of(1, 50), blocks_of(2, 50)
    spans = spans_of(source, target)
    assert weave_of(source, target).flat() == spans and len(spans) == 3 * 50 * SEGMENTS
    rows = np.frombuffer(spans, np.int64).reshape(-1, 3)
    assert len(set(rows[:, 0].tolist())) == len(rows) and rows[:, :2].max() <= REGION_BYTES - SEGMENT_BYTES
    assert rows[:, 0].min() >= SEGMENT_BYTES, "block 0 is nobody's"


def test_a_run_that_holds_every_bound_holds() -> None:
    assert all(verdict.ok for verdict in device_ways.checks(report()))


@pytest.mark.parametrize(
    "change",
    [
        {"right": False},
        {"of_contiguous": {"cuda, launch": 0.92, "cuda": 0.7, "handoff": 0.5}},
        {"handoff_over_copy": 2.51},
        {"gb_s": {"staged-shm": 42.0}},
    ],
)
def test_each_bound_that_is_missed_is_one_verdict(change: dict[str, object]) -> None:
    missed = [verdict for verdict in device_ways.checks(report(size(**change))) if not verdict.ok]
    assert len(missed) == 1 and str(missed[0]).startswith("DOES NOT HOLD")


def test_an_aim_is_told_beside_its_bound_and_missing_it_is_no_miss() -> None:
    (handoff,) = (verdict for verdict in device_ways.checks(report()) if verdict.aim is not None)
    assert handoff.ok and handoff.value > handoff.aim  # type: ignore[operator]
    assert str(handoff).endswith("2.4 (<= 2.5, aim 1.5)")


def test_wrong_bytes_by_nixl_are_wrong_bytes_and_a_setting_that_failed_is_not() -> None:
    assert not device_ways.checks(report(nixl=[Reads("x", {16: 1.0}, right=False)]))[0].ok
    assert device_ways.checks(report(nixl=[Reads("x", problem="no such back end")]))[0].ok


def test_the_best_setting_is_the_fastest_at_the_largest_size_that_it_finished() -> None:
    reads = [
        Reads("quick and small", {16: 0.1}, True),
        Reads("slow", {16: 5.0, 1000: 900.0}, True),
        Reads("best", {16: 9.0, 1000: 150.0}, True),
        Reads("one descriptor (contiguous)", {16: 0.1, 1000: 2.0}, True),
        Reads("failed", problem="x"),
    ]
    best = device_ways.best_nixl(report(nixl=reads))
    assert best is not None and best.setting == "best"
    assert device_ways.best_nixl(report()) is None


def test_the_page_and_the_plot_name_every_way() -> None:
    found = report(size(blocks=16, handoff_over_copy=9.0), size(), nixl=[Reads("as installed", {1000: 4000.0}, True)])
    shown, drawn = device_ways.findings(Stopwatch().facts("kvbaton", {}), found), device_ways.plot(found)
    text = shown.as_text()
    assert shown.ok and "handoff" in shown.as_page()
    for name in ("contiguous", "handoff", "staged-tcp"):
        assert name in text and name in drawn
    assert "as installed" in text and "NIXL, best found" in drawn


def test_without_a_driver_the_command_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    assert main(["bench", "transfer", "--device", "cuda"]) == 2
    assert "--device cuda: the transports 'cuda' and 'staged' require an NVIDIA driver" in capsys.readouterr().err


@pytest.mark.parametrize("plane", ["cuda", "cuda+sums", "staged-tcp+sums"])
def test_a_whole_handoff_brings_the_blocks(tmp_path: Path, plane: str) -> None:
    directory, gpu = str(tmp_path / "keys"), FakeGpu()
    keyring.mint(directory, ["p", "d"])
    memory = {name: gpu.allocate(REGION_BYTES) for name in "pd"}  # never touched but for a few pages
    sides = {
        name: device_side(name, directory, DeviceMemory(memory[name], REGION_BYTES), gpu, plane, (1 << 20, 2))
        for name in "pd"
    }
    try:
        sides["d"].knows("p", sides["p"].address)
        source, target = [3, 700], [900, 5]
        view = {name: gpu.regions[memory[name]].view for name in "pd"}
        last = (SEGMENTS - 1) * BLOCKS
        data = random.Random(1).randbytes(SEGMENT_BYTES)
        view["p"][(last + 700) * SEGMENT_BYTES : (last + 701) * SEGMENT_BYTES] = data
        assert sides["d"].fetch([Want(sides["p"].grant(source), source, target)])[0] > 0
        assert view["d"][(last + 5) * SEGMENT_BYTES : (last + 6) * SEGMENT_BYTES] == data
        assert ("digest_rows" in gpu.calls) is plane.endswith("+sums")
        with pytest.raises(RuntimeError, match="failed"):
            sides["d"].fetch([Want("no ticket", source, target)])
    finally:
        for side in sides.values():
            side.close()
        for address in memory.values():
            gpu.free(address)
