"""CPU seconds of a router under load, of its peers, and of everything else, from the kernel.

Laws: a process is counted with all its threads and all its descendants. One that is gone counts nothing, and what it
used is its parent's by then. Figures are in clock ticks (10 ms), so a window is seconds long or its figure is coarse.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import msgspec

from kvbaton.processes.proc_stat import all_stats, foreign_cpu_s, stat


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
    return sum(found.family_cpu_s for pid in pids if (found := stat(pid)) is not None)


def family(pid: int) -> tuple[int, ...]:
    """A process and all its descendants, now."""
    return descended(pid, {each: found.parent for each, found in all_stats().items()})


def descended(pid: int, parents: Mapping[int, int]) -> tuple[int, ...]:
    """`pid` and whatever comes from it, by each one's parent."""
    found = [pid]
    for each in found:  # grows while it is read: children of children
        found += sorted(child for child, parent in parents.items() if parent == each and child not in found)
    return tuple(found)
