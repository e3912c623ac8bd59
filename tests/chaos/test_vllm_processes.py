"""An engine as processes: all of it is hurt, all of it is gone; and its figures."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from kvbaton.observe.metrics.scraping import figures
from kvbaton_proof.chaos.vllm.vllm_pair import BLOCKS, handed, held
from kvbaton_proof.chaos.vllm.vllm_process import Engine

TWO_PROCESSES = """
import os, time
os.fork()
time.sleep(60)
"""


def _until(condition: object, within_s: float = 20.0) -> None:
    assert callable(condition)
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_signal_reaches_every_process_and_a_kill_ends_them_all(tmp_path: Path) -> None:
    engine = Engine("p0", 1, [sys.executable, "-c", TWO_PROCESSES], {}, tmp_path / "p0.log")
    assert engine.pids() == [] and not engine.is_alive
    engine.start()
    try:
        _until(lambda: len(engine.pids()) >= 3)  # two, and the watcher that ends them with this program
        pids = engine.pids()
        engine.send(signal.SIGSTOP)
        _until(lambda: all(_state(pid) == "T" for pid in pids))
        engine.kill()
        assert engine.pids() == [] and not engine.is_alive
        engine.kill()
    finally:
        engine.kill()
    engine.start()
    try:
        assert engine.lives == 2 and engine.is_alive
        _until(lambda: os.getpgid(engine.pids()[0]) > 0)
    finally:
        engine.kill()


def test_figures_are_summed_over_labels_and_kept_with_them() -> None:
    found = figures('# TYPE x counter\nx{end="a"} 2\nx{end="b"} 3.5\ny 1e-3\nnot a sample\n')
    assert found == {"x": 5.5, 'x{end="a"}': 2.0, 'x{end="b"}': 3.5, "y": 0.001}


def test_what_is_held_is_the_most_that_anybody_counts() -> None:
    assert held({}) == 0
    assert held({"vllm:kv_cache_usage_perc": 5 / (BLOCKS - 1)}) == 5
    assert held({"vllm:kv_cache_usage_perc": 5 / (BLOCKS - 1), "kvbaton_pinned_blocks": 6.0}) == 6
    assert held({"kvbaton_leases_held": 2.0}) == 2


def test_handoffs_are_counted_for_either_connector() -> None:
    found = {'kvbaton_ends_total{end="delivered"}': 4.0, 'kvbaton_ends_total{end="stale"}': 2.0}
    assert handed("kvbaton", found) == 4 and handed("nixl", found) == 0
    assert handed("nixl", {"vllm:nixl_xfer_time_seconds_count": 3.0}) == 3
