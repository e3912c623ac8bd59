"""Numbers as Prometheus text."""

from __future__ import annotations

from kvbaton.api import prometheus


def test_numbers_become_metrics_and_texts_do_not() -> None:
    ends = {'a"b': 1, "x": "no"}
    text = prometheus.render({"pins": 3, "moved_total": 7, "ends_total": ends, "name": "p0", "up": True})
    assert text.splitlines() == [
        "# TYPE kvbaton_pins gauge", "kvbaton_pins 3",
        "# TYPE kvbaton_moved_total counter", "kvbaton_moved_total 7",
        "# TYPE kvbaton_ends_total counter", 'kvbaton_ends_total{kind="a\\"b"} 1',
        "# TYPE kvbaton_up gauge", "kvbaton_up 1",
    ]  # fmt: skip
