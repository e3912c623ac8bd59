"""An engine as processes: all of it is hurt, all of it is gone; and its figures."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from kvbaton.observe.metrics.exposition import figures
from kvbaton_proof.rig.server import Engine, end

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


IGNORING = """
import signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(60)
"""


def test_who_is_asked_to_end_and_does_not_is_killed(tmp_path: Path) -> None:
    engines = [Engine(name, 1, [sys.executable, "-c", words], {}, tmp_path / name) for name, words in
               (("ends", "import time; time.sleep(60)"), ("stays", IGNORING))]  # fmt: skip
    try:
        for engine in engines:
            engine.start()
        _until(lambda: "ready" in (tmp_path / "stays").read_text())
        end(engines, 1.0)
        assert [engine.pids() for engine in engines] == [[], []]
    finally:
        end(engines)
