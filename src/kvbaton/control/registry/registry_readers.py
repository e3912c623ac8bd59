"""A router's lines to registries that run elsewhere: one list of their rosters, and the way back to the workers.

Laws: a router reads and does not register. What it knows is `registry_union`'s: with all registries gone the last list
stands, and the router's own health checks say who is alive. A worker is told of tickets and questions by its registries
only: of tickets by each of those that list it, of questions by each that has its reports. Nothing here blocks its
caller, and what waits is bounded.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import msgspec

from kvbaton.control.addressing import ControlError, ControlLimits, RegistryPlace
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.allowed_networks import Networks
from kvbaton.control.registry.registry_client import RegistryLine
from kvbaton.control.registry.registry_roster import RegistrySettings
from kvbaton.control.registry.registry_union import News, RegistryUnion, RegistryView
from kvbaton.control.registry.registry_watchers import OnReport
from kvbaton.control.registry.statement_reader import StatementReader
from kvbaton.control.registry.statements import RESIGN_S
from kvbaton.control.sockets import LoopThread
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.legality import Act, may
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX

log = logging.getLogger(__name__)

ACK_REPORTS = 16
"""Reports after which the registry is told that they have arrived."""
ORDERS_MAX = 4096
"""That wait for the next turn; beyond it they are dropped: leases run out by themselves."""
RENEWAL_S = 4 * RESIGN_S
"""A worker that has not signed anew for so long is not listed: one that is alive has missed three renewals."""
CLOSE_S = 2.0
LIMITS = ControlLimits(frames_queued_max=512)

View = RegistryView[m.RosterEntry]
Workers = tuple[m.RosterEntry, ...]


def _ignore(*_: object) -> None:
    pass


class RegistryReader:
    """One registry, read by a thread of its own."""

    def __init__(
        self,
        keyring: Keyring,
        place: RegistryPlace,
        on_view: Callable[[View], None],
        on_report: OnReport,
        on_look: Callable[[], None],
        settings: RegistrySettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if place[0] not in keyring.peers:
            raise ControlError(f"{place[0]}: not in the key directory; give the registry's name there: NAME@{place[1]}")
        self.line: RegistryLine[m.RosterEntry, m.ToRouter] = RegistryLine(
            keyring, place, LIMITS, m.decode_to_router, on_view, settings, clock
        )
        self.control, self.counters = self.line.control, self.line.counters
        self._on_report, self._on_look = on_report, on_look
        self._ping_s = settings.ping_s
        self._speak_at = clock()
        self._said = m.Watch(m.SeenWorkers())  # which roster is here, and how many reports have come
        self._view: View | None = None
        self._orders: deque[m.FromRouter] = deque()
        self.thread = LoopThread("kvbaton-reader", self.control, self._turn, self.control.close, clock)

    def order(self, order: m.FromRouter) -> bool:
        """Have the registry tell a worker something; False when too much waits. From any thread."""
        if len(self._orders) >= ORDERS_MAX:
            self.counters["orders_dropped"] += 1
            return False
        self._orders.append(order)
        self.control.wake()
        return True

    def _turn(self, now: float) -> float:
        for message in self.line.messages():
            self._take(message, now)
        self.line.look(self._view, now)
        for _ in range(len(self._orders)):
            self.line.say(self._orders.popleft())
        if now >= self._speak_at:
            self._speak_at = now + self._ping_s
            self.line.say(self._said)
            self.line.guard(self._on_look)
        return self._speak_at

    def _take(self, message: m.ToRouter, now: float) -> None:
        self.line.heard(now, is_answer=not isinstance(message, m.RegistryRefused))
        if isinstance(message, m.RegistryRefused):
            self.counters["refused"] += 1
            if worth_saying(self.counters["refused"]):
                said = "[registry-state] registry %s at %s does not let this router read: %s"
                log.error(said, *self.line.place, message.detail)
        elif isinstance(message, m.Roster):
            # Counts of reports are of one life of the registry: a new one begins anew.
            same = message.seen.registry == self._said.seen.registry
            self._said = m.Watch(message.seen, self._said.reports if same else 0)
            ended = frozenset(message.gone), frozenset(message.left)
            self._view = RegistryView(message.entries, message.complete, *ended, ended=message.ended)
            self._speak_at = now
        elif isinstance(message, m.RelayedReport):
            self._said = msgspec.structs.replace(self._said, reports=self._said.reports + 1)
            if self._said.reports % ACK_REPORTS == 0:
                self._speak_at = now
            self.counters["reports"] += 1
            self.line.guard(partial(self._on_report, message.worker, message.incarnation, message.data))


class RegistryReaders:
    """All registries of a cluster, as one. `workers`, `discard` and `show` are those of `RegistryServer`."""

    def __init__(
        self,
        keyring: Keyring,
        places: Sequence[RegistryPlace],
        *,
        on_change: Callable[[Workers], None] = _ignore,
        on_report: OnReport = _ignore,
        settings: RegistrySettings | None = None,
        networks: Networks | None = None,
        renewal_s: float = RENEWAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`networks`: where the operator of this router allows workers to be, whatever registries allow."""
        role = keyring.role_of(keyring.name)
        if not may(role, Act.WATCH):
            raise ControlError(
                f"name: the key of {keyring.name} is for {role}, and only a router's may read a registry; "
                "use one named router or router-…"
            )
        self.on_keys: Callable[[Keyring], None] = _ignore  # when the key directory changed; on a thread of its own
        self.keyring = keyring  # as the key directory was last found
        self._on_change = on_change
        self._on_report = on_report
        self._lock = threading.Lock()
        self._was_read = threading.Event()
        self._networks = networks or Networks()
        self.statements: StatementReader[m.RosterEntry] = StatementReader(
            keyring, allows=self._networks.elsewhere, renewal_s=renewal_s, clock=clock
        )
        self._union: RegistryUnion[m.RosterEntry] = RegistryUnion(len(places), _merged, _suspect, self.statements)
        self._workers: Workers = ()
        # By registry, who has reported there: a registry asks nobody who may not know what a question is.
        self._reported: list[dict[WorkerId, Incarnation]] = [{} for _ in places]
        settings = settings or RegistrySettings()
        self.readers = [
            RegistryReader(
                keyring,
                place,
                partial(self._take, number),
                partial(self._take_report, number),
                _ignore if number else self._look_again,  # once is enough
                settings,
                clock,
            )
            for number, place in enumerate(places)
        ]
        self.readers[0].control.on_keys = self._take_keys

    def start(self) -> None:
        for reader in self.readers:
            reader.thread.start()

    def wait_until_read(self, within_s: float) -> bool:
        """Until a registry has told of a worker, or each that there is none; False if not by then. From any thread."""
        return self._was_read.wait(within_s)

    def close(self) -> bool:
        ended = [reader.thread.stop(CLOSE_S) for reader in self.readers]
        return all(ended)

    @property
    def answering(self) -> int:
        """How many registries answer."""
        return sum(reader.line.answers for reader in self.readers)

    def workers(self) -> Workers:
        """The list, by name; the same tuple until it changes. From any thread."""
        return self._workers

    def discard(self, worker: WorkerId, incarnation: Incarnation, tickets: Sequence[str]) -> int:
        """Have a worker told that nobody will use these tickets; returns how many will be. From any thread."""
        taken = tuple(ticket for ticket in tickets if len(ticket) <= TICKET_CHARS_MAX)[: m.TICKETS_MAX]
        peer = PeerId(worker, incarnation)
        with self._lock:
            listing = [number for number in range(len(self.readers)) if self._union.lists(number, peer)]
        asked = bool(taken) and self._order(m.DiscardFor(worker, incarnation, taken), listing)
        return len(taken) if asked else 0

    def show(self, worker: WorkerId, incarnation: Incarnation, ids: Sequence[str]) -> bool:
        """Have a worker report at once, and of these ids too; False if it never reported. From any thread."""
        order = m.ShowFor(worker, incarnation, tuple(each[: m.FIELD_CHARS_MAX] for each in ids[: m.SHOWN_MAX]))
        with self._lock:
            through = [number for number, lives in enumerate(self._reported) if lives.get(worker) == incarnation]
        return self._order(order, through)

    def _order(self, order: m.DiscardFor | m.ShowFor, through: Sequence[int]) -> bool:
        sent = [self.readers[number].order(order) for number in through]
        return any(sent)

    def refuse(self, own: Sequence[str]) -> None:
        """This router listens at these addresses (`host:port`): no worker is there. From any thread."""
        with self._lock:
            self._networks = self._networks.without(own)
            self.statements.allows = self._networks.elsewhere
            self.statements.take_keys(self.keyring)
            self._pass_on(self._union.refresh())

    def _take_keys(self, keyring: Keyring) -> None:
        with self._lock:
            self.keyring = keyring
            self.statements.take_keys(keyring)
            self._pass_on(self._union.refresh())
        self.on_keys(keyring)

    def _look_again(self) -> None:
        """Time alone can end a listing."""
        with self._lock:
            self._pass_on(self._union.refresh())

    def _take(self, registry: int, view: View) -> None:
        with self._lock:
            news = self._union.take(registry, view)
            if view.answers and (self._union.known or self._union.all_answer):
                self._was_read.set()
            self._pass_on(news)

    def _pass_on(self, news: News[m.RosterEntry] | None) -> None:
        if news is None:
            return
        self._workers = news.entries
        here = {entry.worker for entry in news.entries}
        for number, lives in enumerate(self._reported):
            self._reported[number] = {worker: life for worker, life in lives.items() if worker in here}
        self._on_change(news.entries)

    def _take_report(self, registry: int, worker: WorkerId, incarnation: Incarnation, data: bytes) -> None:
        with self._lock:
            known = any(entry.peer == PeerId(worker, incarnation) for entry in self._workers)
            if known:
                self._reported[registry][worker] = incarnation
        if known:
            self._on_report(worker, incarnation, data)


def _suspect(entry: m.RosterEntry) -> m.RosterEntry:
    """One of several registries, the only one that answers, does not list it: others are asked first."""
    return msgspec.structs.replace(entry, state=m.WorkerState.SUSPECT)


def _merged(entries: Sequence[m.RosterEntry]) -> m.RosterEntry:
    """One entry of several registries' for one life: whoever hears a worker is believed; whoever saw it drain, too."""
    ready = next((entry for entry in entries if entry.state is m.WorkerState.READY), entries[0])
    drains = next((entry for entry in entries if entry.draining), None)
    if drains is None or ready.draining:
        return ready
    return msgspec.structs.replace(ready, draining=True, order=drains.order)
