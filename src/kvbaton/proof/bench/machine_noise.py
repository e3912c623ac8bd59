"""How much of the machine others used meanwhile: what makes a measurement on a shared machine worth keeping, or not."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, with all its threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def foreign_cpu_s(*pids: int) -> float:
    """CPU seconds spent since boot by everything on this host except `pids`; take the difference of two."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) * _TICK_S - sum(map(cpu_s, pids))
