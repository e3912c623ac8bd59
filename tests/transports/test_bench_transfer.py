"""The benchmark measures what it says, in two processes, and checks the bytes; how fast is not a test's business."""

from __future__ import annotations

import json

import pytest

from kvbaton.bench import transfer

pytestmark = pytest.mark.slow


def test_a_small_run_reports_every_way_and_ratio() -> None:
    report = transfer.measure(repetitions=1, region_bytes=2 << 20, moved_bytes=1 << 20, segments=(4096, 65536))
    assert json.loads(json.dumps(report)) == report
    assert "64 KiB" in transfer.table(report)
    segments = report["segments"]
    assert isinstance(segments, list)
    assert [segment["segment_bytes"] for segment in segments] == [4096, 65536]
    for segment in segments:
        assert set(segment["gb_s"]) == {"memcpy", "shm_1_thread", "shm_2_threads", "tcp", "raw_sockets"}
        assert set(segment["ratio"]) == {"shm_1_thread", "shm_2_threads", "tcp"}
        assert segment["foreign_cores"] >= 0
        assert all(value > 0 for value in segment["gb_s"].values())


def test_wrong_bytes_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer.Bench, "_memcpy", lambda self, spans: None)
    with pytest.raises(RuntimeError, match="memcpy delivered wrong bytes"):
        transfer.measure(repetitions=1, region_bytes=2 << 20, moved_bytes=1 << 20, segments=(4096,))
