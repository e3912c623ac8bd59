"""The measurement of checksums measures what it says, in two processes; how much they cost is not a test's business."""

from __future__ import annotations

import json

import pytest

from kvbaton_proof.bench.transfer import checksum_cost
from kvbaton_proof.bench.transfer.workload import WrongBytes

pytestmark = pytest.mark.slow


def small() -> list[dict[str, object]]:
    return checksum_cost.measure(repetitions=2, region_bytes=2 << 20, copies=(1 << 20,), segments=(4096, 65536))


def test_a_small_run_reports_every_way_and_size() -> None:
    rows = small()
    assert json.loads(json.dumps(rows)) == rows
    ways = [(plane, mode) for plane in ("shm", "tcp") for mode in ("off", "sample", "full")]
    assert [(row["segment_bytes"], row["plane"], row["checksum"]) for row in rows] == [
        (size, *way) for size in (4096, 65536) for way in ways
    ]
    assert all(row["ratio"] == 1.0 and row["added_ms"] == 0.0 for row in rows if row["checksum"] == "off")
    assert all(isinstance(row["gb_s"], float) and row["gb_s"] > 0 for row in rows)
    shown = checksum_cost.table(rows)
    assert "64 KiB" in shown and len(shown.splitlines()) == 2 + len(rows)


def test_wrong_bytes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum_cost.Driven, "read", lambda _self, _spans: None)
    with pytest.raises(WrongBytes, match="shm off"):
        small()
