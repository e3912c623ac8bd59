"""The last report of each worker: its gauges, and whether it is alive.

Law: a worker's new incarnation replaces the one before; the last report of a worker that is gone stays for a while, and
is marked. Not locked: the collector does that.

The share of prompt tokens that decode workers computed although a prefill worker should have, by their reports.

Law: pure. Reports are of authenticated workers, and may still be wrong: what is no count is taken as none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from kvbaton.observe.flight import journey as j
from kvbaton.observe.flight.flight_records import Flight, FlightReport
from kvbaton.observe.flight.recorder import LEVEL_MAX, is_shared

WORKERS_MAX = 1024
GONE_S = 300.0
"""For which the last word of a worker that is gone is shown."""
LATE_S = 3.0
"""After its end a flight is told within this, or it is not told."""


class WorkerGauges(msgspec.Struct, frozen=True):
    """One worker, by its last report."""

    name: str
    incarnation: str = ""  # hexadecimal
    seat: str = ""  # prefill, decode or both; "" if unknown
    here: bool = False  # registered now
    age_s: float | None = None  # since its last report; None: it never sent one
    gauges: Mapping[str, float] = {}
    links: Mapping[str, str] = {}  # source worker: data plane
    share: float = 1.0  # of its flights that ended well and are told
    missed: int = 0
    version: str = ""
    host: str = ""


@dataclass(slots=True)
class _Worker:
    incarnation: int = 0
    seat: str = ""
    here: bool = False
    left_at: float = 0.0
    heard_at: float = 0.0
    reports: int = 0
    report: FlightReport = field(default_factory=lambda: FlightReport(0.0))


class WorkerReports:
    """All workers of one router."""

    def __init__(self) -> None:
        self._workers: dict[str, _Worker] = {}

    def heard(self, name: str, incarnation: int, tidy: FlightReport, now: float) -> None:
        """Apply a sanitised report."""
        worker = self._workers.get(name)
        if worker is None:
            self._make_room(now)
            worker = self._workers[name] = _Worker(incarnation)
        if worker.incarnation != incarnation:
            if worker.here:  # a late report of the previous incarnation: its flights count, its gauges do not
                return
            worker.incarnation, worker.reports = incarnation, 0
        worker.report = msgspec.structs.replace(tidy, flights=())
        worker.heard_at = now
        worker.reports += 1

    def listed(self, workers: Mapping[str, tuple[int, str]], now: float) -> None:
        for name, (incarnation, seat) in workers.items():
            worker = self._workers.get(name)
            if worker is None or worker.incarnation != incarnation:
                if worker is None:
                    self._make_room(now)
                worker = self._workers[name] = _Worker(incarnation)
            worker.seat, worker.here = seat, True
        for name, worker in self._workers.items():
            if worker.here and name not in workers:
                worker.here, worker.left_at = False, now

    def told(self, now: float) -> list[WorkerGauges]:
        self._drop_old(now)
        return [_told(name, worker, now) for name, worker in sorted(self._workers.items())]

    def reporters(self) -> list[tuple[str, int]]:
        return [(name, each.incarnation) for name, each in sorted(self._workers.items()) if each.here and each.heard_at]

    def seats_of(self, name: str) -> tuple[str, ...]:
        """In which a worker can have been, by the role that it registered in."""
        worker = self._workers.get(name)
        return (worker.seat,) if worker is not None and worker.seat in ("prefill", "decode") else ("prefill", "decode")

    def reports_of(self, name: str) -> int:
        worker = self._workers.get(name)
        return 0 if worker is None else worker.reports

    def is_gone(self, flight: Flight) -> bool:
        """Whether the process that wrote this is gone; the router's own is not."""
        worker = self._workers.get(flight.worker)
        if worker is None or not flight.incarnation:
            return False
        return f"{worker.incarnation:016x}" != flight.incarnation or (not worker.here and worker.left_at > 0)

    def why(self, name: str, handoff: str, latest: float) -> str:
        """Why a worker's record of a handoff is not here."""
        worker = self._workers.get(name)
        if worker is None:
            return j.FOREIGN
        if not worker.here and worker.left_at:
            return j.GONE
        if not worker.heard_at:
            return j.FOREIGN
        if not is_shared(handoff, _level(worker.report.share)):
            return j.SAMPLED_OUT
        return j.NOT_YET if worker.heard_at < latest + LATE_S else j.FORGOTTEN

    def _make_room(self, now: float) -> None:
        if len(self._workers) < WORKERS_MAX:
            return
        self._drop_old(now)
        while len(self._workers) >= WORKERS_MAX:
            name = min(self._workers, key=lambda name: (self._workers[name].here, self._workers[name].heard_at))
            del self._workers[name]

    def _drop_old(self, now: float) -> None:
        old = [name for name, each in self._workers.items() if each.left_at and not each.here]
        for name in old:
            if now - self._workers[name].left_at > GONE_S:
                del self._workers[name]


def _level(share: float) -> int:
    return 0 if share >= 1.0 else round(-math.log2(max(share, 2.0**-LEVEL_MAX)))


def _told(name: str, worker: _Worker, now: float) -> WorkerGauges:
    report = worker.report
    return WorkerGauges(
        name,
        f"{worker.incarnation:016x}",
        worker.seat,
        worker.here,
        round(max(now - worker.heard_at, 0.0), 3) if worker.heard_at else None,
        report.gauges,
        report.links,
        report.share,
        report.missed,
        report.version,
        report.host,
    )


TOKENS, ALONE, BY_REASON = "prompt_tokens_total", "alone_tokens_total", "alone_tokens."
RESETS, RESET_BLOCKS = "cache_resets_total", "cache_reset_blocks_total"
REASONS_MAX = 8


class PromptShare(msgspec.Struct, frozen=True):
    """Of all workers that are registered now, since each of them started."""

    tokens: int = 0
    alone: int = 0
    reasons: dict[str, int] = {}  # the main ones
    resets: int = 0  # of prefix caches, since a member was removed
    reset_blocks: int = 0  # that these dropped


def share_of(workers: Iterable[WorkerGauges]) -> PromptShare:
    tokens = alone = resets = blocks = 0
    reasons: Counter[str] = Counter()
    for worker in workers:
        if not worker.here:
            continue
        tokens += _count(worker, TOKENS)
        alone += _count(worker, ALONE)
        resets += _count(worker, RESETS)
        blocks += _count(worker, RESET_BLOCKS)
        for name in worker.gauges:
            if name.startswith(BY_REASON):
                reasons[name.removeprefix(BY_REASON)] += _count(worker, name)
    return PromptShare(tokens, alone, dict(reasons.most_common(REASONS_MAX)), resets, blocks)


def _count(worker: WorkerGauges, name: str) -> int:
    value = worker.gauges.get(name, 0.0)
    return int(value) if value > 0 else 0
