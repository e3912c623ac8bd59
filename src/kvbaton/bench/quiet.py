"""How much of the machine others used meanwhile: what makes a measurement on a shared machine worth keeping, or not."""

from __future__ import annotations

import os
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def foreign_cpu_s(*pids: int) -> float:
    """CPU seconds spent since boot by everything on this host except `pids`; take the difference of two."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    )
    own = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        own += int(fields[11]) + int(fields[12])
    return (user + nice + system + irq + softirq + steal - own) * _TICK_S
