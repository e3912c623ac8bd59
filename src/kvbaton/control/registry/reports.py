"""Reports that workers send through the registry, and questions that go back to them; nothing here knows their content.

Laws: a report never changes how a worker stands. Only one of a listed life is passed on, and of each worker only so
many a second; the rest is counted and dropped. Nobody is asked who has not reported: it may not know the question.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_roster import RegistryRoster
from kvbaton.control.registry.registry_watchers import RosterWatchers
from kvbaton.observe.codes.saying import worth_saying
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId

log = logging.getLogger(__name__)

REPORTS_PER_S_MAX = 8.0
REPORTS_BURST_MAX = 16.0
QUESTIONS_MAX = 4096
"""That wait for the registry's next turn; beyond it they are not asked."""

OnReport = Callable[[WorkerId, Incarnation, bytes], None]
"""A report of a worker that is listed in that life; on the registry's thread, and must not block."""


@dataclass(slots=True)
class _Reporter:
    incarnation: Incarnation
    left: float  # reports that it may send at once
    at: float


class Reports:
    """One registry's. `ask` may be called from any thread, all else on the registry's."""

    def __init__(
        self,
        roster: RegistryRoster,
        on_report: OnReport | None,
        counters: Counter[str],
        watchers: RosterWatchers | None = None,
    ) -> None:
        self._watchers = RosterWatchers(roster, counters) if watchers is None else watchers
        self._on_report = on_report
        self._roster = roster
        self._counters = counters
        self._reporters: dict[WorkerId, _Reporter] = {}  # of those that are listed, and for a turn or so of others
        self._questions: deque[tuple[PeerId, tuple[str, ...]]] = deque()

    @property
    def taken(self) -> bool:
        """Whether anyone wants them."""
        return self._on_report is not None or len(self._watchers) > 0

    def take(self, worker: WorkerId, message: m.WorkerReport, now: float) -> None:
        if not self.taken or not self._roster.lists(worker, message.incarnation):
            self._counters["reports_late"] += 1
            return
        if not self._allows(worker, message.incarnation, now):
            self._counters["reports_over_rate"] += 1
            if worth_saying(self._counters["reports_over_rate"]):
                said = "[peer-flooding] %s reports over %g times a second; more is dropped"
                log.warning(said, worker, REPORTS_PER_S_MAX)
            return
        self._counters["reports"] += 1
        self._watchers.take_report(worker, message.incarnation, message.data)
        if self._on_report is None:
            return
        try:
            self._on_report(worker, message.incarnation, message.data)
        except Exception:
            self._counters["callback_faults"] += 1
            if worth_saying(self._counters["callback_faults"]):
                log.exception("[callback-failed] a report from %s could not be processed; continuing", worker)

    def ask(self, peer: PeerId, ids: Sequence[str]) -> bool:
        reporter = self._reporters.get(peer.worker)
        if reporter is None or reporter.incarnation != peer.incarnation or len(self._questions) >= QUESTIONS_MAX:
            return False
        self._questions.append((peer, tuple(each[: m.FIELD_CHARS_MAX] for each in ids[: m.SHOWN_MAX])))
        return True

    def questions(self) -> Iterator[tuple[WorkerId, m.Show]]:
        """What was asked since the last turn, of whoever is still listed."""
        for _ in range(len(self._questions)):
            peer, ids = self._questions.popleft()
            if self._roster.lists(peer.worker, peer.incarnation):
                yield peer.worker, m.Show(peer.incarnation, ids)

    def _allows(self, worker: WorkerId, incarnation: Incarnation, now: float) -> bool:
        reporter = self._reporters.get(worker)
        if reporter is None or reporter.incarnation != incarnation:
            self._reporters = {name: each for name, each in self._reporters.items() if self._roster.is_listed(name)}
            reporter = self._reporters[worker] = _Reporter(incarnation, REPORTS_BURST_MAX, now)
        earned = (now - reporter.at) * REPORTS_PER_S_MAX
        reporter.left, reporter.at = min(REPORTS_BURST_MAX, reporter.left + earned), now
        if reporter.left < 1.0:
            return False
        reporter.left -= 1.0
        return True
