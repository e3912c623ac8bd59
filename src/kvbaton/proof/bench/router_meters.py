"""What the kernel says of a router under load: CPU seconds of it, of what it talks to, and of everybody else.

Laws: a process is counted with all its threads and all its descendants. One that is gone counts nothing, and what it
used is its parent's by then. Figures are in clock ticks (10 ms), so a window is seconds long or its figure is coarse.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from kvbaton.proof.bench.machine_noise import foreign_cpu_s

TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Watched(msgspec.Struct, frozen=True):
    """Whose CPU time is told apart."""

    router: tuple[int, ...] = ()
    backends: tuple[int, ...] = ()
    client: tuple[int, ...] = ()
    bench: tuple[int, ...] = ()


class Cpu(msgspec.Struct, frozen=True):
    """CPU seconds since each began, at one moment; or, of two moments, what was used between them."""

    at: float
    router: float
    backends: float
    client: float
    others: float  # everything else on this host

    def until(self, later: Cpu) -> Cpu:
        return Cpu(later.at - self.at, later.router - self.router, later.backends - self.backends,
                   later.client - self.client, later.others - self.others)  # fmt: skip


def read(watched: Watched) -> Cpu:
    router, backends, client = cpu_s(watched.router), cpu_s(watched.backends), cpu_s(watched.client)
    ours = router + backends + client + cpu_s(watched.bench)
    return Cpu(time.perf_counter(), router, backends, client, foreign_cpu_s() - ours)


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of these and of the children they waited for."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            ticks += sum(map(int, _fields(pid)[11:15]))
    return ticks * TICK_S


def family(pid: int) -> tuple[int, ...]:
    """A process and all its descendants, now."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[int(name)] = int(_fields(int(name))[1])
    return descended(pid, parents)


def descended(pid: int, parents: Mapping[int, int]) -> tuple[int, ...]:
    """`pid` and whatever comes from it, by each one's parent."""
    found = [pid]
    for each in found:  # grows while it is read: children of children
        found += sorted(child for child, parent in parents.items() if parent == each and child not in found)
    return tuple(found)


def _fields(pid: int) -> list[str]:
    """Of /proc/PID/stat, from the state on; a name in brackets before it may contain anything."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
