"""`tools/stalls.py` stops a command with all of its children, lets them go on, and keeps its status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STALLS = Path(__file__).parents[2] / "tools" / "stalls.py"
PAUSED = """
import subprocess, sys, time
child = len(sys.argv) == 1 and subprocess.Popen([sys.executable, sys.argv[0], "child"])
until, before, longest = time.monotonic() + 60, time.monotonic(), 0.0
while longest < 0.8 and time.monotonic() < until:
    time.sleep(0.01)
    longest, before = max(longest, time.monotonic() - before), time.monotonic()
sys.exit(7 if longest >= 0.8 and (not child or child.wait(60) == 7) else 1)
"""


def test_a_command_and_its_children_stand_still_and_its_status_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "paused.py"
    script.write_text(PAUSED)
    words = [sys.executable, str(STALLS), "--seconds", "1", "--every", "0.5", sys.executable, str(script)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=110)
    assert done.returncode == 7, done.stderr
    assert "stalls of 1 s; status 7" in done.stderr


def test_a_share_of_them_stands_still(tmp_path: Path) -> None:
    """Parent and child are seldom stopped together, but each is in its turn: both end, and only after a pause."""
    script = tmp_path / "paused.py"
    script.write_text(PAUSED)
    words = ["--share", "0.5", "--seconds", "1", "--every", "0.2", sys.executable, str(script)]
    done = subprocess.run(
        [sys.executable, str(STALLS), *words], capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 7, done.stderr


@pytest.mark.parametrize("share", ["0", "-1", "1.5", "nan"])
def test_what_is_no_share_is_refused(share: str) -> None:
    words = [sys.executable, str(STALLS), f"--share={share}", "true"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and f"--share {share}: give a share" in done.stderr


def test_without_a_command_it_says_what_to_give() -> None:
    done = subprocess.run([sys.executable, str(STALLS)], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2 and "give the command to run" in done.stderr
