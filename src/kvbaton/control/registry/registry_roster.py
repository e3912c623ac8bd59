"""The registry's list, as pure code: registrations, pings and time go in; what is listed comes out.

Laws: the latest life of a worker replaces the one before at once, and a life once replaced does not come back while its
successor is alive. Silence makes a worker suspect and then gone, but only silence that the registry was awake to hear.
A young registry does not know whom it does not know: its directory says so. A life that was told to drain drains until
it is gone, whatever it says itself; it stays listed, since its peers still read from it. What workers and operators
have signed is kept as it is, for readers. A registration that is only signed anew is news for routers, now and then:
they see that the worker lives; workers prove that to each other.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass

import msgspec

from kvbaton.control.registry.registry_messages import (
    NOTHING,
    WORKERS_MAX,
    Directory,
    DirectoryEntry,
    DrainState,
    DrainWorker,
    Registration,
    Roster,
    RosterEntry,
    SeenWorkers,
    WorkerState,
)
from kvbaton.control.signing import Signed
from kvbaton.protocol.bounded import Remembered
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId

REPLACED_MAX = 1024
RENEWALS_S = 10.0
"""How far apart routers are told of what was signed anew."""
_YOUNG = "the registry has restarted and waits for its workers"
LEFT_MAX = 256
"""Lives that ended by their own word, of which the others are told: the last ones."""


class RegistrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Durations of discovery; the same on both sides."""

    ping_s: float = 1.0
    suspect_s: float = 3.0  # without a ping; a suspect gets no new requests if there is anyone else
    evict_s: float = 8.0  # without a ping; the others are told that it is gone
    settle_s: float = 8.0  # a young registry waits this long for everybody to register again
    workers_max: int = WORKERS_MAX

    def __post_init__(self) -> None:
        if not 0 < self.ping_s < self.suspect_s < self.evict_s or self.settle_s < 0:
            raise ValueError("expected 0 < ping_s < suspect_s < evict_s and settle_s >= 0")
        if not 0 < self.workers_max <= WORKERS_MAX:
            raise ValueError(f"workers_max: got {self.workers_max}, expected 1..{WORKERS_MAX}")


class Standing(enum.Enum):
    """How a worker stands after it said something."""

    LISTED = "listed"
    UNKNOWN = "unknown"
    SUPERSEDED = "superseded"
    FULL = "full"
    OUTDATED = "outdated"  # it has signed something newer, which `newest` holds


@dataclass(slots=True)
class _Listed:
    registration: Registration
    public_key: str
    heard_at: float
    signed: Signed | None = None
    state: WorkerState = WorkerState.READY
    ordered: bool = False  # an operator told it to drain
    order: Signed | None = None  # in these words
    held: str = ""  # what it still waits for, in its words

    @property
    def draining(self) -> bool:
        return self.ordered or self.registration.draining

    @property
    def is_ready(self) -> bool:
        return self.state is WorkerState.READY and not self.draining


class RegistryRoster:
    """Who is here. `revision` rises with every change, `version` with those that the workers must hear of."""

    def __init__(self, settings: RegistrySettings, registry: int, now: float) -> None:
        self.settings = settings
        self.revision = 0
        self._seen = SeenWorkers(registry, 1)
        self._settles_at = now + settings.settle_s
        self._looked_at = now
        self._renewals_at = now + RENEWALS_S
        self._is_renewed = False
        self._listed: dict[WorkerId, _Listed] = {}
        self._replaced: Remembered[PeerId, None] = Remembered(REPLACED_MAX)
        self._gone: deque[PeerId] = deque(maxlen=WORKERS_MAX)
        self._left: deque[PeerId] = deque(maxlen=LEFT_MAX)
        self.served: Remembered[str, None] = Remembered(REPLACED_MAX)  # keys by which workers were listed
        self._ended_by: Remembered[PeerId, Signed] = Remembered(LEFT_MAX)
        self._newest: Remembered[WorkerId, tuple[Registration, Signed]] = Remembered(WORKERS_MAX)

    @property
    def seen(self) -> SeenWorkers:
        """Which directory is the newest."""
        return self._seen

    @property
    def watched(self) -> SeenWorkers:
        """Which roster is the newest: routers hear of every change."""
        return SeenWorkers(self._seen.registry, self.revision + 1)

    def newest(self, worker: WorkerId) -> Signed | None:
        """What a worker has last signed, as far as it is remembered."""
        known = self._newest.get(worker)
        return None if known is None else known[1]

    def register(
        self, registration: Registration, public_key: str, now: float, signed: Signed | None = None
    ) -> Standing:
        """A worker can serve, under a name that was found to be its own, in words that it has signed."""
        worker, current = registration.worker, self._listed.get(registration.worker)
        if current is None and len(self._listed) >= self.settings.workers_max:
            return Standing.FULL
        if current is not None and current.registration.incarnation != registration.incarnation:
            if registration.peer in self._replaced:
                return Standing.SUPERSEDED
            if self._is_outdated(registration, signed):
                return Standing.OUTDATED
            self._replaced.put(current.registration.peer, None)
            self._left.append(current.registration.peer)
            self._leave(current)
        elif self._is_outdated(registration, signed):
            return Standing.OUTDATED
        if current is None or (current.registration, current.public_key) != (registration, public_key):
            self._list(registration, public_key, now)
        listed = self._listed[worker]
        self._is_renewed |= listed.signed != signed
        listed.signed = signed
        self.served.put(public_key, None)
        if signed is not None:
            self._newest.put(worker, (registration, signed))
        self._hear(listed, now)
        return Standing.LISTED

    def _is_outdated(self, registration: Registration, signed: Signed | None) -> bool:
        """Whether readers would take this life for an older one than they know."""
        known = self._newest.get(registration.worker)
        if signed is None or known is None or known[0].incarnation == registration.incarnation:
            return False
        return registration.born <= known[0].born

    def ping(self, worker: WorkerId, incarnation: Incarnation, now: float, held: str = "") -> Standing:
        current = self._listed.get(worker)
        if current is None:
            return Standing.UNKNOWN
        if current.registration.incarnation != incarnation:
            return Standing.SUPERSEDED if PeerId(worker, incarnation) in self._replaced else Standing.UNKNOWN
        self._hear(current, now)
        current.held = held
        return Standing.LISTED

    def drain(
        self, worker: WorkerId, incarnation: int, order: Signed | None = None, *, is_ordered: bool = True
    ) -> DrainState:
        """An operator wants a worker (in this life, if given) to finish and go; asked again, says how far that is.
        Without an order it is only asked which life is listed."""
        current = self._listed.get(worker)
        if current is None and self._may_be_back(worker, incarnation):
            return DrainState(worker, "draining", incarnation, _YOUNG)
        if current is None or incarnation not in (0, current.registration.incarnation):
            names = () if incarnation else tuple(sorted(self._listed))
            young = current is None and self._looked_at < self._settles_at
            said = _YOUNG if young and not incarnation else ""
            return DrainState(worker, "gone" if incarnation else "unknown", incarnation, said, names)
        if is_ordered:
            if not current.draining:
                self.revision += 1
            current.ordered, current.order = True, order or current.order
        told = current.registration
        idle = told.stays and told.draining and current.held == NOTHING
        return DrainState(worker, "idle" if idle else "draining", told.incarnation, current.held)

    def look(self, worker: WorkerId) -> DrainState:
        """How a worker stands, and who could take its place: of one with both roles, who could in either."""
        said, current = self.drain(worker, 0, is_ordered=False), self._listed.get(worker)
        if current is None:
            return said
        role = current.registration.role
        parts = ("prefill", "decode") if role == "both" else (role,)
        ready = {name: each.registration.role for name, each in self._listed.items() if each.is_ready}
        beside = [{name for name in ready if name != worker and ready[name] in ("both", part)} for part in parts]
        names = tuple(sorted(set().union(*beside))) if all(beside) else ()
        if not current.draining:
            said = DrainState(worker, "ready", said.incarnation, "" if self.is_complete else _YOUNG)
        return msgspec.structs.replace(said, workers=names, role=role)

    def is_draining(self, worker: WorkerId) -> bool:
        return worker in self._listed and self._listed[worker].draining

    def is_listed(self, worker: WorkerId) -> bool:
        return worker in self._listed

    def lists(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Whether a worker is listed in that life."""
        return worker in self._listed and self._listed[worker].registration.incarnation == incarnation

    def order(self, worker: WorkerId) -> DrainWorker | None:
        """What a worker must be told, until it says the same of itself."""
        current = self._listed.get(worker)
        if current is None or not current.ordered or current.registration.draining:
            return None
        return DrainWorker(worker, current.registration.incarnation, current.order)

    def deregister(self, worker: WorkerId, incarnation: Incarnation, signed: Signed | None = None) -> None:
        """A worker leaves; a life that is not listed has left already."""
        current = self._listed.get(worker)
        if current is not None and current.registration.incarnation == incarnation:
            if signed is not None:
                self._ended_by.put(current.registration.peer, signed)
                self._newest.put(worker, (current.registration, signed))
            self._left.append(current.registration.peer)
            self._leave(current)

    def on_time(self, now: float) -> None:
        """Let silence have its consequences. What the registry slept through itself is nobody's silence."""
        slept_s = now - self._looked_at - self.settings.ping_s
        if self._settles_at > self._looked_at and now >= self._settles_at:
            self._changed()
        self._looked_at = now
        if self._is_renewed and now >= self._renewals_at:
            self._is_renewed, self._renewals_at = False, now + RENEWALS_S
            self.revision += 1
        for listed in list(self._listed.values()):
            if slept_s > 0:
                listed.heard_at = min(now, listed.heard_at + slept_s)
            silent_s = now - listed.heard_at
            if silent_s >= self.settings.evict_s:
                self._leave(listed)
            elif silent_s >= self.settings.suspect_s and listed.state is WorkerState.READY:
                listed.state = WorkerState.SUSPECT
                self.revision += 1

    def next_deadline(self) -> float:
        """At the latest in half an interval of pings, or sleeping could not be told from waiting."""
        return self._looked_at + self.settings.ping_s / 2

    def entries(self) -> tuple[RosterEntry, ...]:
        return tuple(
            RosterEntry(
                listed.registration,
                listed.public_key,
                listed.state,
                listed.draining,
                signed=listed.signed,
                order=listed.order,
            )
            for _, listed in sorted(self._listed.items())
        )

    def directory(self) -> Directory:
        """The list, for workers."""
        entries = tuple(_told(listed) for _, listed in sorted(self._listed.items()))
        return Directory(self._seen, self.is_complete, entries, *self._ended())

    def roster(self) -> Roster:
        """The list, for routers."""
        return Roster(self.watched, self.is_complete, self.entries(), *self._ended())

    @property
    def is_complete(self) -> bool:
        """Whether everybody has had the time to register."""
        return self._looked_at >= self._settles_at

    def _ended(self) -> tuple[tuple[PeerId, ...], tuple[PeerId, ...], tuple[Signed, ...]]:
        """Lives that are gone, while absence means nothing yet; lives that left by their own word, and those words."""
        here = {listed.registration.peer for listed in self._listed.values()}
        gone = () if self.is_complete else tuple(peer for peer in self._gone if peer not in here)
        left = tuple(dict.fromkeys(peer for peer in self._left if peer not in here))
        words = (self._ended_by.get(peer) for peer in left)
        return gone, left, tuple(signed for signed in words if signed is not None)

    def _may_be_back(self, worker: WorkerId, incarnation: int) -> bool:
        """Whether a life that is not listed may not have been heard yet: of a young registry that it has not left."""
        young = self._looked_at < self._settles_at
        return young and incarnation != 0 and PeerId(worker, Incarnation(incarnation)) not in self._gone

    def _list(self, registration: Registration, public_key: str, now: float) -> None:
        before = self._listed.get(registration.worker)
        fresh = _Listed(registration, public_key, now)
        if before is not None:  # the same life, presented anew
            fresh.ordered, fresh.order, fresh.held = before.ordered, before.order, before.held
        self._listed[registration.worker] = fresh
        fresh.signed = None if before is None else before.signed  # not yet news
        if before is not None and _told(before) == _told(fresh):
            self.revision += 1  # the router's business alone
        else:
            self._changed()

    def _hear(self, listed: _Listed, now: float) -> None:
        listed.heard_at = now
        if listed.state is WorkerState.SUSPECT:
            listed.state = WorkerState.READY
            self.revision += 1

    def _leave(self, listed: _Listed) -> None:
        del self._listed[listed.registration.worker]
        self._gone.append(listed.registration.peer)
        self._changed()

    def _changed(self) -> None:
        self.revision += 1
        self._seen = SeenWorkers(self._seen.registry, self._seen.version + 1)


def _told(listed: _Listed) -> DirectoryEntry:
    told = listed.registration
    return DirectoryEntry(
        told.worker,
        told.incarnation,
        told.role,
        told.control_endpoint,
        listed.public_key,
        b"",
        told.born,
        listed.signed,
    )
