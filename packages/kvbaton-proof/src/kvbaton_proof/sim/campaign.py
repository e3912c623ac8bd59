"""Many seeds, over all cores: the sums of what happened."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context

import msgspec

from kvbaton_proof.sim.run import Result, run_seed

BATCH_SEEDS = 20
BROKEN_TOLD_MAX = 10
GARBAGE_MAX = 50_000
"""Objects between two collections: a world is one large cycle, and is collected when it is over."""


class Summary(msgspec.Struct):
    """What came of a range of seeds."""

    seeds: int = 0
    hold: int = 0
    handoffs: int = 0
    delivered: int = 0
    events: int = 0
    sim_seconds: float = 0.0
    wall_s: float = 0.0
    jobs: int = 1
    handoffs_per_s: float = 0.0
    handoffs_per_s_per_core: float = 0.0
    trace_hash: str = ""
    profiles: dict[str, int] = {}
    faults: dict[str, int] = {}
    ends: dict[str, int] = {}
    broken: list[dict[str, str | int]] = []

    @property
    def holds(self) -> bool:
        return self.seeds == self.hold


Told = Callable[[str], None]


def run_seeds(seeds: range, jobs: int, tell: Told) -> Summary:
    """Every seed of the range; `tell` hears of progress about once a second."""
    started = time.monotonic()
    total = Summary(jobs=jobs)
    sums = {"faults": Counter[str](), "ends": Counter[str](), "profiles": Counter[str]()}
    hashes: dict[int, str] = {}
    told_at = started
    for result in _results(_batches(seeds), jobs):
        total.seeds += 1
        total.hold += result.holds
        total.handoffs += result.handoffs
        total.delivered += result.delivered
        total.events += result.events
        total.sim_seconds += result.sim_seconds
        sums["faults"].update(result.faults)
        sums["ends"].update(result.ends)
        sums["profiles"][result.profile] += 1
        hashes[result.seed] = result.trace_hash
        if not result.holds and len(total.broken) < BROKEN_TOLD_MAX:
            total.broken.append(_told(result))
        if time.monotonic() - told_at > 1.0:
            told_at = time.monotonic()
            tell(f"{total.seeds} of {len(seeds)} seeds, {total.handoffs} handoffs, {total.seeds - total.hold} broken")
    total.faults, total.ends, total.profiles = (
        dict(sorted(sums[key].items())) for key in ("faults", "ends", "profiles")
    )
    total.trace_hash = _combined(hashes)
    total.sim_seconds = round(total.sim_seconds, 1)
    total.wall_s = round(time.monotonic() - started, 2)
    total.handoffs_per_s = round(total.handoffs / max(total.wall_s, 0.01), 1)
    total.handoffs_per_s_per_core = round(total.handoffs_per_s / jobs, 1)
    return total


def run_batch(seeds: range) -> list[Result]:
    """One process's share; stories stay out of the pipe, `--replay` tells them."""
    gc.set_threshold(GARBAGE_MAX)
    results = [run_seed(seed) for seed in seeds]
    for result in results:
        result.story = []
    return results


def default_jobs() -> int:
    return len(os.sched_getaffinity(0))


def _results(batches: list[range], jobs: int) -> Iterator[Result]:
    if jobs == 1 or len(batches) == 1:
        for batch in batches:
            yield from run_batch(batch)
        return
    with pool(jobs) as processes:
        waiting: set[Future[list[Result]]] = set()
        todo = iter(batches)
        for batch in todo:
            waiting.add(processes.submit(run_batch, batch))
            if len(waiting) >= 2 * jobs:
                done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
                for future in done:
                    yield from future.result()
        for future in waiting:
            yield from future.result()


@contextlib.contextmanager
def pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with the work, or at once when it is broken off: nobody waits for what nobody wants."""
    context = get_context("spawn")
    before = {process.pid for process in multiprocessing.active_children()}
    processes = ProcessPoolExecutor(jobs, mp_context=context, initializer=_leave_interrupts_to_the_first)
    try:
        yield processes
    except BaseException:
        processes.shutdown(wait=False, cancel_futures=True)
        for process in multiprocessing.active_children():
            if process.pid not in before:
                process.kill()
        raise
    finally:
        processes.shutdown()


def _leave_interrupts_to_the_first() -> None:
    """Ctrl-C reaches every process of a terminal; the one that was started ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _batches(seeds: range) -> list[range]:
    return [seeds[start : start + BATCH_SEEDS] for start in range(0, len(seeds), BATCH_SEEDS)]


def _combined(hashes: dict[int, str]) -> str:
    whole = hashlib.blake2b(digest_size=16)
    for seed in sorted(hashes):
        whole.update(f"{seed}:{hashes[seed]};".encode())
    return whole.hexdigest()


def _told(result: Result) -> dict[str, str | int]:
    return {
        "seed": result.seed,
        "profile": result.profile,
        "promise": result.promise,
        "what": result.what,
        "replay": f"kvbaton sim --replay {result.seed}",
    }
