"""A worker's standing with one registry, as pure code: answers and time go in; what to say comes out.

Laws: until the registry says otherwise, registering is repeated; a worker that drains is listed once the registry says
that of it. Who is listed registers again from time to time: what it signed grows old (`statements`). The registry's
last list survives it; what it means beside those of other registries is `registry_union`'s.
"""

from __future__ import annotations

import enum

import msgspec

from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_messages import NOTHING
from kvbaton.control.registry.registry_roster import RegistrySettings
from kvbaton.control.registry.registry_union import RegistryView
from kvbaton.control.registry.statements import RESIGN_S, OwnStatements


class MemberState(enum.StrEnum):
    JOINING = "joining"  # not listed yet, or no longer
    LISTED = "listed"
    SUPERSEDED = "superseded"  # another process took the name; listed again when that one is gone
    REFUSED = "refused"  # the registry said why; tried again all the same


class Member:
    """One worker's side of discovery."""

    def __init__(
        self,
        registration: m.Registration,
        settings: RegistrySettings,
        now: float,
        own_statements: OwnStatements | None = None,
    ) -> None:
        self.registration = m.validate(registration)
        self._own_statements = own_statements
        self._sign_at = now
        self.state = MemberState.JOINING
        self.detail = ""  # why, when refused
        self.has_spoken = False  # the registry may list it, even if no answer has come
        self.held = ""  # what it still waits for while it drains
        self._takes_reports = False
        self._is_answered = False  # what was said last
        self._ping_s = settings.ping_s
        self._speak_at = now
        self._seen = m.SeenWorkers()
        self.view: RegistryView[m.DirectoryEntry] | None = None  # the registry's last list

    def on_time(self, now: float) -> m.FromWorker | None:
        """What to say now, if anything is due."""
        if now < self._speak_at:
            return None
        self._speak_at = now + self._ping_s
        self.has_spoken = True
        self._is_answered = False
        unlisted = self.state in (MemberState.JOINING, MemberState.REFUSED)
        if unlisted or (self._own_statements and now >= self._sign_at and self.state is MemberState.LISTED):
            self._sign_at = now + RESIGN_S
            return self._register()
        return m.Ping(self.registration.incarnation, self._seen, self.held)

    def _register(self) -> m.Register:
        return m.Register(self.registration) if self._own_statements is None else m.Register(
            *self._own_statements.of(self.registration)
        )  # fmt: skip

    def goodbye(self) -> m.Deregister:
        """That this life is over."""
        signed = self._own_statements.of(self.registration, left=True)[1] if self._own_statements is not None else None
        return m.Deregister(self.registration.incarnation, signed)

    def next_deadline(self) -> float:
        return self._speak_at

    @property
    def is_known_to_drain(self) -> bool:
        """Whether the registry has said that nobody new is sent here."""
        return self.registration.draining and self.state is MemberState.LISTED

    @property
    def may_report(self) -> bool:
        """Whether the registry lists this worker, knows what a report is, and is there: what it misses is lost."""
        return self.state is MemberState.LISTED and self._takes_reports and self._is_answered

    def present(self, registration: m.Registration, now: float) -> None:
        """Register anew: the worker began another life, or can be reached otherwise."""
        self.state = MemberState.JOINING  # first: another thread may look whether the registry knows
        self.registration = m.validate(registration)
        self._speak_at = now

    def on_message(self, message: m.FromRegistry, now: float) -> None:
        """Take an answer."""
        if isinstance(message, m.Directory):
            self._on_directory(message)
        elif isinstance(message, m.RegistryRefused):
            self.state, self.detail = MemberState.REFUSED, message.detail
        elif message.incarnation == self.registration.incarnation:
            if isinstance(message, m.RegisteredReply):
                self._on_registered(message)
            elif isinstance(message, m.Superseded):
                self.state = MemberState.SUPERSEDED
            elif isinstance(message, m.Unknown) or (
                isinstance(message, m.Outdated) and self._own_statements and self._own_statements.above(message.signed)
            ):
                self.state = MemberState.JOINING
                self._speak_at = now

    def _on_registered(self, message: m.RegisteredReply) -> None:
        self._takes_reports, self._is_answered = message.reports, True
        if self.registration.draining and not message.draining:
            return  # the answer to what was said before
        self.state, self.detail = MemberState.LISTED, ""

    def _on_directory(self, message: m.Directory) -> None:
        if message.seen.registry == self._seen.registry and message.seen.version <= self._seen.version:
            return
        self._seen = message.seen
        others = tuple(entry for entry in message.entries if entry.worker != self.registration.worker)
        gone, left = frozenset(message.gone), frozenset(message.left)
        self.view = RegistryView(others, message.complete, gone, left, ended=message.ended)


class HeldReport(msgspec.Struct, frozen=True):
    """What a worker still does or keeps for others."""

    requests: int = 0
    leases: int = 0
    intakes: int = 0
    claims: int = 0  # that wait for a prompt to begin

    @property
    def nothing(self) -> bool:
        return not any(msgspec.structs.astuple(self))

    def __str__(self) -> str:
        counts = msgspec.structs.asdict(self).items()
        return ", ".join(f"{n} {name if n > 1 else name[:-1]}" for name, n in counts if n) or NOTHING
