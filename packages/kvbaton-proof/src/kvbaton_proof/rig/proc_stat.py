"""Processes as the kernel accounts for them: state, parent, session and CPU seconds, from /proc/PID/stat.

Law: read-only. A process that is gone by the time it is read is None, never zero. Figures are in clock ticks (10 ms).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


class Stat(NamedTuple):
    """One process with all its threads."""

    state: str
    parent: int
    session: int
    cpu_s: float
    family_cpu_s: float  # and of the children that it waited for

    @property
    def is_there(self) -> bool:
        """A zombie is not alive."""
        return self.state not in "ZX"


def stat(pid: int) -> Stat | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # a name may contain anything
        user, system, waited_user, waited_system = (int(each) * _TICK_S for each in fields[11:15])
        own = user + system
        return Stat(fields[0], int(fields[1]), int(fields[3]), own, own + waited_user + waited_system)
    return None


def all_stats() -> dict[int, Stat]:
    """Every process that exists now."""
    pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    return {pid: found for pid in pids if (found := stat(pid)) is not None}


def foreign_cpu_s(*pids: int) -> float:
    """CPU seconds spent since boot by everything on this host except `pids`; take the difference of two."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * _TICK_S - sum(map(cpu_s, pids))


def cpu_s(*pids: int) -> float:
    """CPU seconds that these have used together; one that is gone counts as zero."""
    return sum(found.cpu_s for pid in pids if (found := stat(pid)) is not None)
