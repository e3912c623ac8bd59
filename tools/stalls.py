"""Run a command on a machine that stands still now and then: `tools/stalls.py [-s SECONDS] [-e EVERY] [--share F] …`.

At random times the command and all its descendants are stopped together and go on later, as on a shared machine whose
cores are taken away for a while. What fails then and not otherwise asserts on time, or has a time-out that is too short
for what it is about. With `--share` less than 1 only some of them are stopped each time, as when they get no core while
the others do (`--share 0.25 -s 0.15 -e 0.1`): what fails then takes for granted which of two processes comes first.
Processes that somebody has stopped already are left alone, but one that a test stops while it stands still here goes on
with the others, too early for that test. The status is the command's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


def family(root: int) -> list[int]:
    """`root` and its descendants that run; children before their parents."""
    children: dict[int, list[int]] = {}
    running: set[int] = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(entry.name))
            if state not in "TtZ":
                running.add(int(entry.name))
    found = [root]
    for pid in found:  # grows meanwhile
        found += children.get(pid, [])
    return [pid for pid in reversed(found) if pid in running]


def signal_all(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("-s", "--seconds", type=float, default=2.5, help="how long each stall lasts (2.5)")
    parser.add_argument("-e", "--every", type=float, default=8.0, help="seconds between two, on average (8)")
    parser.add_argument("--share", type=float, default=1.0, help="how likely each process is to be stopped (1: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    if not args.command:
        parser.error("give the command to run, such as .venv/bin/pytest tests/control")
    if not 0 < args.share <= 1:
        parser.error(f"--share {args.share:g}: give a share of the processes, over 0 and up to 1")
    rng, stalls = random.Random(args.seed), 0
    child = subprocess.Popen(args.command)
    try:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(rng.expovariate(1 / args.every))
                break
            stopped = [pid for pid in family(child.pid) if rng.random() < args.share]
            try:
                signal_all(stopped, signal.SIGSTOP)
                time.sleep(args.seconds)
            finally:
                signal_all(stopped, signal.SIGCONT)
            stalls += 1
    except KeyboardInterrupt:
        child.wait()
    print(f"{stalls} stalls of {args.seconds:g} s; status {child.returncode}", file=sys.stderr)
    return child.returncode


if __name__ == "__main__":
    sys.exit(main())
