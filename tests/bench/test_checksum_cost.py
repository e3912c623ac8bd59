"""The measurement of checksums measures what it says, in two processes; how much they cost is not a test's business."""

from __future__ import annotations

import pytest

from kvbaton_proof.bench.transfer import checksum_cost

pytestmark = pytest.mark.slow


def small() -> list[checksum_cost.Row]:
    return checksum_cost.measure(repetitions=2, region_bytes=2 << 20, copies=(1 << 20,), segments=(4096, 65536))


def test_a_small_run_reports_every_way_and_size() -> None:
    rows = small()
    ways = [(plane, mode) for plane in ("shm", "tcp") for mode in ("off", "sample", "full")]
    assert [(row.segment_bytes, row.plane, row.checksum) for row in rows] == [
        (size, *way) for size in (4096, 65536) for way in ways
    ]
    assert all(row.ratio == 1.0 and row.added_ms == 0.0 for row in rows if row.checksum == "off")
    assert all(row.gb_s > 0 and row.cpu_ms_gb > 0 for row in rows)
    shown = checksum_cost.table(rows)
    assert "64 KiB" in shown and len(shown.splitlines()) == 1 + len(rows)
