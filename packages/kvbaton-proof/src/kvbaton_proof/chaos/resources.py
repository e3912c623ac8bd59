"""Resources of a process, as the kernel counts them: descriptors, threads, resident memory; and files in /dev/shm.

Law: reads of /proc only. What is gone by the time it is read is None, never zero.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import msgspec

from kvbaton.processes.proc_stat import stat

SHM = Path("/dev/shm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage(msgspec.Struct, frozen=True):
    """Of one process, at one instant."""

    fds: int
    threads: int
    rss_mib: float


def usage(pid: int) -> Usage | None:
    """None: there is no such process."""
    try:
        fds = len(os.listdir(f"/proc/{pid}/fd"))
        threads = len(os.listdir(f"/proc/{pid}/task"))
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return None
    return Usage(fds, threads, round(pages * PAGE_BYTES / (1 << 20), 1))


def is_there(pid: int) -> bool:
    """Whether it runs, or is stopped; one that ended and was not waited for is not there."""
    found = stat(pid)
    return found is not None and found.is_there


def shared_files(marks: tuple[str, ...] = ("kvbaton",)) -> frozenset[str]:
    """Names in /dev/shm that bear one of these marks: others share this machine."""
    with contextlib.suppress(OSError):
        return frozenset(name for name in os.listdir(SHM) if any(mark in name for mark in marks))
    return frozenset()
