"""Ending the processes of a network: all that a test for them finds, and no other.

Law: a process is killed through a descriptor that was opened before it was tested, so never another with its number.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection

WAIT_S_MAX = 2.0


def end_all(ours: Callable[[int], bool], spare: Collection[int]) -> list[int]:
    """Kill every process that is `ours` (which may raise OSError for no), until none is left; the pids that stay."""
    deadline = time.monotonic() + WAIT_S_MAX
    while True:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        there = [pid for pid in pids if pid not in spare and _kill_if(pid, ours)]
        if not there or time.monotonic() > deadline:
            return there
        time.sleep(0.01)


def _kill_if(pid: int, ours: Callable[[int], bool]) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not ours(pid):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
    except OSError:  # another user's, or gone (of a zombie nothing can be asked)
        return False
    finally:
        os.close(fd)
    return True
