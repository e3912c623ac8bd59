"""Conditions at rest: nothing is held, nothing has grown, every process is alive; and what the kernel counts of them:
descriptors, threads, resident memory, files in /dev/shm.

Laws: each finding is one line that names who and what; an empty list is the only good verdict. A slack has a reason.
What is gone by the time it is read is None, never zero.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

import kvbaton
import kvbaton_proof
from kvbaton_proof.chaos.fleet import Fleet
from kvbaton_proof.chaos.members import ROUTER
from kvbaton_proof.rig.proc_stat import stat

REST_S = 40.0
"""More than any lease, time-out or deadline of these members together."""
POLL_S = 0.25
TRACEBACK = "Traceback (most recent call last):"
OURS = tuple(f'File "{Path(str(package.__file__)).parent}/' for package in (kvbaton, kvbaton_proof))
HELD = ("pins", "leases", "intakes", "quarantined_blocks", "running", "waiting", "loading")

FDS_SLACK = 40
"""Links between pairs are opened when first used, two or three descriptors each, and connections of a burst are kept
for a while; a leak of one descriptor per request would be hundreds."""
THREADS_SLACK = 8
"""Pools start threads as they are needed: the store's workers, the event loop's own."""
LONG_LIFE_S = 240.0
LEVEL_SLACK_MIB = 16.0
"""More than that over half of a long life is a leak, not an arena that is filled or a peer's connection."""
RSS_SLACK_MIB = 64.0
"""A Python process that has seen a flood keeps arenas, some MiB, and a P its last 4,096 leases, about 2 KiB each.
A request's KV is about 60 KiB: who kept that of every request would have passed this after a thousand."""
SHM = Path("/dev/shm")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Usage(msgspec.Struct, frozen=True):
    """One process at one instant."""

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


class Held(msgspec.Struct, frozen=True):
    """What a worker holds for somebody."""

    pins: int
    used_blocks: int
    others: int  # leases, intakes, requests
    said: str = ""

    @property
    def count(self) -> int:
        return self.pins + self.used_blocks + self.others


def held(stats: Mapping[str, Any]) -> Held:
    """From a worker's /stats; KeyError if it is not of this release."""
    used = stats["blocks"] - stats["free_blocks"]
    named = {**{name: stats[name] for name in HELD}, "used_blocks": used}
    others = sum(stats[name] for name in HELD if name not in ("pins", "quarantined_blocks"))
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in named.items() if count)
    return Held(stats["pins"], used, others, said)


async def at_rest(fleet: Fleet, within_s: float = REST_S) -> tuple[dict[str, Held | None], list[str]]:
    """What each engine holds once nobody asks for anything, and what is wrong with that."""
    until = asyncio.get_running_loop().time() + within_s
    while True:
        found, problems = await _look(fleet)
        if not problems or asyncio.get_running_loop().time() > until:
            return found, problems
        await asyncio.sleep(POLL_S)


async def _look(fleet: Fleet) -> tuple[dict[str, Held | None], list[str]]:
    found: dict[str, Held | None] = {}
    problems = []
    for name in fleet.engines:
        stats, health = await fleet.ask(name, "/stats"), await fleet.ask(name, "/health")
        found[name] = None if stats is None else held(stats)
        problems += judge_worker(name, stats, health is not None)
    router = await fleet.ask(ROUTER, "/stats")
    if router is None:
        problems.append("router: does not answer")
    elif router["in_flight"]:
        problems.append(f"router: {router['in_flight']} requests are still under way")
    return found, problems


def judge_worker(name: str, stats: Mapping[str, Any] | None, is_healthy: bool) -> list[str]:
    """What is wrong with a worker at rest."""
    if stats is None:
        return [f"{name}: does not answer"]
    problems = [] if is_healthy else [f"{name}: says that it is not healthy"]
    holding = held(stats)
    if holding.count:
        problems.append(f"{name}: holds {holding.said}")
    if stats["faults_total"]:
        problems.append(f"{name}: {stats['faults_total']} faults inside; its log has them")
    return problems


def grown(name: str, before: Usage | None, after: Usage | None) -> list[str]:
    """What a process has more of than before, beyond what can be explained."""
    if after is None:
        return [f"{name}: its process is gone"]
    if before is None:
        return []
    bounds = (
        ("file descriptors", before.fds, after.fds, FDS_SLACK),
        ("threads", before.threads, after.threads, THREADS_SLACK),
        ("MiB resident", before.rss_mib, after.rss_mib, RSS_SLACK_MIB),
    )
    return [
        f"{name}: {what} grew from {was:g} to {now:g}, more than {slack:g}"
        for what, was, now, slack in bounds
        if now > was + slack
    ]


def keeps_growing(name: str, samples: Sequence[tuple[float, float]]) -> list[str]:
    """Whether a long life still takes more memory in its second half, when all that is bounded is at its bound."""
    slope = growth_mib_per_minute(samples)
    lived_s = samples[-1][0] - samples[0][0] if samples else 0.0
    if slope is None or lived_s < LONG_LIFE_S or slope * lived_s / 120 <= LEVEL_SLACK_MIB:
        return []
    return [
        f"{name}: memory was not level in a life of {lived_s:.0f} s: {slope:+.2f} MiB a minute over its second half"
    ]


def growth_mib_per_minute(samples: Sequence[tuple[float, float]]) -> float | None:
    """The slope of resident memory over the second half of a life; None: too short to tell."""
    later = samples[len(samples) // 2 :]
    if len(later) < 6:
        return None
    mean_t = sum(at for at, _ in later) / len(later)
    mean_m = sum(mib for _, mib in later) / len(later)
    spread = sum((at - mean_t) ** 2 for at, _ in later)
    slope = sum((at - mean_t) * (mib - mean_m) for at, mib in later) / spread if spread else 0.0
    return round(60 * slope, 2)


def unexpected(name: str, log: str) -> list[str]:
    """Tracebacks that lead through kvbaton: whatever a peer, a client or the kernel does, none is raised unhandled."""
    found = []
    for piece in log.split(TRACEBACK)[1:]:
        frames, told = [], ""
        for line in piece.splitlines()[1:]:
            if not line.startswith(" "):
                told = line
                break
            frames.append(line)
        if any(ours in line for line in frames for ours in OURS):
            found.append(told)
    first = next(iter(found), "")[:200]
    return [f"{name}: {len(found)} tracebacks in its log, the first: {first}"] if found else []


def left_files(before: frozenset[str], after: frozenset[str]) -> list[str]:
    return [f"/dev/shm/{name} was left behind" for name in sorted(after - before)]
