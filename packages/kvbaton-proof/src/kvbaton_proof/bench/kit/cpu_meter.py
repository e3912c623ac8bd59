"""CPU seconds of what is measured, by group of processes, and of everything else on this machine, from the kernel.

Laws: a process is counted with all its threads and all its descendants. One that is gone counts nothing, and what it
used is its parent's by then. Figures are in clock ticks (10 ms), so a window is seconds long or its figure is coarse.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Mapping

import msgspec

from kvbaton_proof.rig.proc_stat import all_stats, foreign_cpu_s, stat

Watched = Mapping[str, tuple[int, ...]]
"""Whose CPU time is told apart: processes, by the name of their group."""


class Cpu(msgspec.Struct, frozen=True):
    """CPU seconds since each began, at one moment; or, of two moments, what was used between them."""

    at: float
    used: dict[str, float]  # by group
    others: float  # everything else on this host

    def until(self, later: Cpu) -> Cpu:
        used = {name: later.used[name] - seconds for name, seconds in self.used.items()}
        return Cpu(later.at - self.at, used, later.others - self.others)

    @property
    def others_cores(self) -> float:
        """Cores that everything else kept busy between the two moments."""
        return max(0.0, self.others) / max(self.at, 1e-9)


def read(watched: Watched) -> Cpu:
    used = {name: cpu_s(pids) for name, pids in watched.items()}
    return Cpu(time.perf_counter(), used, foreign_cpu_s() - sum(used.values()))


def cpu_s(pids: Iterable[int]) -> float:
    """User and system time of these and of the children they waited for."""
    return sum(known.family_cpu_s for pid in pids if (known := stat(pid)) is not None)


def family(pid: int) -> tuple[int, ...]:
    """A process and all its descendants, now."""
    return descended(pid, {each: known.parent for each, known in all_stats().items()})


def descended(pid: int, parents: Mapping[int, int]) -> tuple[int, ...]:
    """`pid` and whatever comes from it, by each one's parent."""
    found = [pid]
    for each in found:  # grows while it is read: children of children
        found += sorted(child for child, parent in parents.items() if parent == each and child not in found)
    return tuple(found)


def scheduled_s(pid: int) -> float:
    """CPU seconds that the threads of one process have used, to the nanosecond: ticks are too coarse for one copy."""
    spent_ns = 0
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/schedstat") as schedstat:
            spent_ns += int(schedstat.read().split()[0])
    return spent_ns / 1e9
