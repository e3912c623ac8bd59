"""A worker's lines to all registries of its cluster, as one: `RegistryClient` for each, and one list made of theirs.

Laws: the worker is listed with each of them, by itself; what it knows of its peers is `registry_union`'s. Callbacks
come one at a time, the directory first and the departures after it, so that whoever is told of a departure already
knows the new address. An order to drain counts whichever registry brings
it; that this worker drains is known once every registry that answers knows it. Each report goes to all of them.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from kvbaton.control.addressing import RegistryPlace
from kvbaton.control.joining.join_token import Membership
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_client import (
    REPORT_S,
    ClientCallbacks,
    MakeReport,
    OnDiscard,
    OnDrain,
    OnMembership,
    OnShow,
    RegistryClient,
)
from kvbaton.control.registry.registry_roster import RegistrySettings
from kvbaton.control.registry.registry_union import News, RegistryUnion, RegistryView
from kvbaton.control.registry.statement_reader import StatementReader
from kvbaton.control.registry.statements import MemberState, OwnStatements
from kvbaton.protocol.ids import Incarnation, WorkerId

OnDirectory = Callable[[tuple[m.DirectoryEntry, ...], dict[WorkerId, Membership]], None]
OnDeparted = Callable[[WorkerId, Incarnation], None]
REPORTS_KEPT_MAX = 8
"""That one registry has not taken yet while others have."""
_STATES = (MemberState.LISTED, MemberState.SUPERSEDED, MemberState.REFUSED)


def _ignore(*_: object) -> None:
    pass


def _same(entry: m.DirectoryEntry) -> m.DirectoryEntry:
    """One that a registry withholds is known all the same: routers decide whom to ask."""
    return entry


def _vouched(entries: Sequence[m.DirectoryEntry]) -> m.DirectoryEntry:
    """The entry with a certificate, of one life in several lists: a registry without the admission key gives none."""
    return max(entries, key=lambda entry: bool(entry.certificate))


class RegistryGroup:
    """Keeps one worker listed with all registries, and its owner informed about the others."""

    def __init__(
        self,
        keyring: Keyring,
        places: Sequence[RegistryPlace],
        registration: m.Registration,
        *,
        on_directory: OnDirectory,
        on_departed: OnDeparted,
        on_drain: OnDrain = _ignore,
        on_discard: OnDiscard = _ignore,
        report: MakeReport | None = None,
        on_show: OnShow = _ignore,
        on_membership: OnMembership = _ignore,
        settings: RegistrySettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`places`: of each registry its name in the key directory and its endpoint. `on_directory` is called with the
        one list and who of it is a member by a certificate, `on_departed` with each life that is over; for the others
        see `ClientCallbacks`."""
        self._on_directory = on_directory
        self._on_departed = on_departed
        self.statements: StatementReader[m.DirectoryEntry] = StatementReader(keyring, clock=clock)
        self._union: RegistryUnion[m.DirectoryEntry] = RegistryUnion(len(places), _vouched, _same, self.statements)
        self._lock = threading.Lock()  # of the list, and of the callbacks that tell of it
        self._on_drain = on_drain
        self._is_draining = False
        self._drain_lock = threading.Lock()
        self._reports = _SharedReports(report, on_show, len(places), clock) if report is not None else None
        self.clients: list[RegistryClient] = []
        own_statements = OwnStatements(keyring)
        settings = settings or RegistrySettings()
        for number, place in enumerate(places):
            callbacks = ClientCallbacks(
                on_view=partial(self._take, number),
                on_drain=self._order_drain,
                on_discard=on_discard,
                report=None if self._reports is None else partial(self._reports.next, number),
                on_show=on_show if self._reports is None else self._reports.ask,
                on_membership=on_membership,
                on_keys=_ignore if number else self._take_keys,
            )
            client = RegistryClient(keyring, place, registration, own_statements, callbacks, settings, clock)
            self.clients.append(client)

    @property
    def state(self) -> MemberState:
        """The best of its states: who is listed somewhere is known to those who read there."""
        states = {client.state for client in self.clients}
        return next((state for state in _STATES if state in states), MemberState.JOINING)

    def start(self) -> None:
        for client in self.clients:
            client.start()

    def update(self, registration: m.Registration) -> None:
        """Present this worker anew (another life, another address). From any thread."""
        for client in self.clients:
            client.update(registration)

    def set_keyring(self, keyring: Keyring) -> None:
        """The keys of a member that joined, as of now. From any thread."""
        for client in self.clients:
            client.set_keyring(keyring)

    def drain(self) -> None:
        """Say that this worker finishes what it has and then goes. From any thread."""
        self._is_draining = True
        for client in self.clients:
            client.drain()

    @property
    def is_known_to_drain(self) -> bool:
        """Whether each registry that answers, and one at least, has confirmed it."""
        answering = [client for client in self.clients if client.answers]
        return bool(answering) and all(client.is_known_to_drain for client in answering)

    def tell_held(self, held: str) -> None:
        """What is still waited for, in words for the operator; goes with the next pings. From any thread."""
        for client in self.clients:
            client.tell_held(held)

    def close(self) -> bool:
        """Deregister everywhere and stop; False when a thread did not end in time."""
        ended = [client.close() for client in self.clients]
        return all(ended)

    def _order_drain(self) -> None:
        """One order, though several registries bring it at once."""
        with self._drain_lock:
            if not self._is_draining:
                self._on_drain()

    def _take(self, registry: int, view: RegistryView[m.DirectoryEntry]) -> None:
        with self._lock:
            self._pass_on(self._union.take(registry, view))

    def _take_keys(self, keyring: Keyring) -> None:
        with self._lock:
            self.statements.take_keys(keyring)
            self._pass_on(self._union.refresh())

    def _pass_on(self, news: News[m.DirectoryEntry] | None) -> None:
        if news is None:
            return
        try:
            self._on_directory(news.entries, self.statements.members(news.entries))
        finally:
            for peer in news.departed:
                self._on_departed(peer.worker, peer.incarnation)


class _SharedReports:
    """One report made, and sent to every registry: each line asks for its next one, on its own thread."""

    def __init__(self, make: MakeReport, on_show: OnShow, lines: int, clock: Callable[[], float]) -> None:
        self._make = make
        self._on_show = on_show
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: list[deque[bytes]] = [deque(maxlen=REPORTS_KEPT_MAX) for _ in range(lines)]
        self._made_at = clock() - REPORT_S
        self._asked = False

    def ask(self, ids: Sequence[str]) -> None:
        self._on_show(ids)
        with self._lock:
            self._asked = True

    def next(self, line: int) -> bytes | None:
        with self._lock:
            now = self._clock()
            # Lines come out of step: a report for each of their turns would be as many times too many.
            if len(self._waiting) == 1 or self._asked or now - self._made_at >= REPORT_S / 2:
                self._asked, self._made_at = False, now
                made = self._make()
                if made is not None:
                    for waiting in self._waiting:
                        waiting.append(made)
            return self._waiting[line].popleft() if self._waiting[line] else None
