"""A worker at one registry: registers, pings, and passes on what it hears. Runs on its own thread.

Laws: callbacks run on that thread; one that raises costs only itself (`registry_line`). When the registry is away the
last list stands. Closing says goodbye and waits for the answer, but not for long.

One registry as a worker or a router hears it: what came, whether it answers, and its last list. Of one thread.

Laws: a message that breaks the rules is counted and skipped; a callback that raises is logged and costs only itself. A
registry that says nothing for `SILENCE_S` is named once, until it has answered.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import msgspec

from kvbaton.control.addressing import ControlError, ControlLimits, RegistryPlace, check_endpoint
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.registry_roster import RegistrySettings
from kvbaton.control.registry.registry_union import Hearing, RegistryView, UnionEntry
from kvbaton.control.registry.statements import Member, MemberState, OwnStatements, must_obey
from kvbaton.control.sockets import LoopThread
from kvbaton.control.zmq import ZmqControl
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.ids import WorkerId

log = logging.getLogger(__name__)

GOODBYE_S = 0.3
CLOSE_S = 2.0
REPORT_S = 0.5
"""Reports are at least this far apart, unless one is asked for."""
SHOW_S = 0.05
"""Also when one is asked for."""
LIMITS = ControlLimits(frames_queued_max=64)  # pings to a registry that is away are worth nothing later

OnDrain = Callable[[], None]
OnDiscard = Callable[[Sequence[str]], None]
OnShow = Callable[[Sequence[str]], None]
OnMembership = Callable[[bytes, bytes], None]
MakeReport = Callable[[], bytes | None]
OnView = Callable[[RegistryView[m.DirectoryEntry]], None]
OnKeys = Callable[[Keyring], None]


@dataclass(frozen=True, slots=True)
class ClientCallbacks:
    """The owner's; they run on the client's thread.

    `on_view` is called when the registry's list changes, and when the registry begins or ceases to answer; `on_drain`
    when an operator wants this worker to drain, until it has called `drain`; `on_discard` with the tickets that nobody
    will use. `report` makes the next report, or None if there is nothing to tell; it is called every half a second at
    most while the registry takes reports, and soon after `on_show`, which is called with what somebody wants to be told
    of. `on_membership`: the certificate of a member that joined, and the cluster's signed card, as of now; told with
    every answer. `on_keys`: the key directory changed.
    """

    on_view: OnView
    on_drain: OnDrain
    on_discard: OnDiscard
    report: MakeReport | None
    on_show: OnShow
    on_membership: OnMembership
    on_keys: OnKeys


class _ReportTimes:
    """When a report is due: every `REPORT_S`, sooner if one is asked for, and never two within `SHOW_S`."""

    def __init__(self, now: float) -> None:
        self.next_at = now
        self._last_at = now - SHOW_S

    def is_due(self, now: float) -> bool:
        """Whether one is to be sent now; then it counts as sent."""
        if now < self.next_at:
            return False
        self.next_at, self._last_at = now + REPORT_S, now
        return True

    def hasten(self, now: float) -> None:
        self.next_at = min(self.next_at, max(now, self._last_at + SHOW_S))


class RegistryClient:
    """Keeps one worker listed at one registry. `registry_group` makes one list of what several tell."""

    def __init__(
        self,
        keyring: Keyring,
        registry: RegistryPlace,
        registration: m.Registration,
        own_statements: OwnStatements,
        callbacks: ClientCallbacks,
        settings: RegistrySettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """What this worker says of itself is one of its `own_statements`, for all registries."""
        _check_known(keyring, registry[0])
        place = registry[0], _dialable(registry[1])
        self._callbacks = callbacks
        self._report_times = _ReportTimes(clock())
        self._is_draining = False
        self._clock = clock
        self._keyring = keyring
        self._member = _member(keyring, registration, settings, clock(), own_statements)
        self._line: RegistryLine[m.DirectoryEntry, m.FromRegistry] = RegistryLine(
            keyring, place, LIMITS, m.decode_from_registry, callbacks.on_view, settings, clock, str(registration.peer)
        )
        self._control = self._line.control
        self._control.on_keys = self._take_keys
        self._updates: deque[m.Registration] = deque(maxlen=1)
        self._thread = LoopThread("kvbaton-discovery", self._control, self._turn, self._finish, clock)

    @property
    def counters(self) -> Counter[str]:
        return self._line.counters

    @property
    def state(self) -> MemberState:
        return self._member.state

    @property
    def answers(self) -> bool:
        """Whether the registry does: it has, and not long ago."""
        return self._line.answers

    def start(self) -> None:
        self._thread.start()

    def update(self, registration: m.Registration) -> None:
        """Present this worker anew (another life, another address). From any thread."""
        self._updates.append(m.validate(registration))
        self._control.wake()

    def drain(self) -> None:
        """Say that this worker finishes what it has and then goes. From any thread."""
        self._is_draining = True
        self.update(msgspec.structs.replace(self._member.registration, draining=True))

    @property
    def is_known_to_drain(self) -> bool:
        """Whether the registry has confirmed it: from then on the router sends nobody new."""
        return self._member.is_known_to_drain

    def tell_held(self, held: str) -> None:
        """What is still waited for, in words for the operator; goes with the next ping. From any thread."""
        self._member.held = held[: m.FIELD_CHARS_MAX]

    def set_keyring(self, keyring: Keyring) -> None:
        """The renewed keyring of a member that joined. From any thread."""
        self._control.set_keyring(keyring)

    def _take_keys(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._line.guard(partial(self._callbacks.on_keys, keyring))

    def close(self) -> bool:
        """Deregister and stop; False when the thread did not end in time."""
        return self._thread.stop(CLOSE_S)

    def _turn(self, now: float) -> float:
        while self._updates:
            self._member.present(self._updates.popleft(), now)
        for message in self._line.messages():
            self._line.heard(now)
            self._take(message, now)
        self._line.look(self._member.view, now)
        due = self._member.on_time(now)
        if due is not None:
            self._line.say(due)
        report = self._callbacks.report
        if report is None or not self._member.may_report:
            return self._member.next_deadline()
        if self._report_times.is_due(now):
            self._line.guard(partial(self._send_report, report))
        return min(self._member.next_deadline(), self._report_times.next_at)

    def _send_report(self, make: MakeReport) -> None:
        data = make()
        if data is None:
            return
        if len(data) > m.REPORT_BYTES_MAX:
            self.counters["reports_too_long"] += 1
            return
        self.counters["reports"] += 1
        self._line.say(m.WorkerReport(self._member.registration.incarnation, data))

    def _take(self, message: m.FromRegistry, now: float) -> None:
        if isinstance(message, m.DrainWorker | m.DiscardTickets | m.Show):
            self._obey(message, now)
            return
        if isinstance(message, m.RegisteredReply) and (message.certificate or message.card):
            self._line.guard(partial(self._callbacks.on_membership, message.certificate, message.card))
        before = self._member.state
        self._member.on_message(message, now)
        if self._member.state is not before:
            quiet = self._member.state in (MemberState.LISTED, MemberState.JOINING)
            said = "[registry-state] registry %s: %s is %s %s"
            args = (self._line.place[0], self._member.registration.peer, self._member.state, self._member.detail)
            log.log(logging.INFO if quiet else logging.ERROR, said, *args)

    def _obey(self, message: m.DrainWorker | m.DiscardTickets | m.Show, now: float) -> None:
        """The registry's key was proven with the connection; an order for another life is nobody's. That this worker is
        to drain counts if an operator has signed it, whichever registry brings it."""
        if message.incarnation != self._member.registration.incarnation:
            self.counters["orders_late"] += 1
        elif isinstance(message, m.DrainWorker) and not must_obey(self._keyring, message):
            self.counters["orders_unsigned"] += 1
            if worth_saying(self.counters["orders_unsigned"]):
                said = "[order-refused] registry %s brings an order to drain that no operator has signed; ignored"
                log.warning(said, self._line.place[0])
        elif isinstance(message, m.DiscardTickets):
            self._line.guard(partial(self._callbacks.on_discard, message.tickets))
        elif isinstance(message, m.Show):
            self._line.guard(partial(self._callbacks.on_show, message.ids))
            self._report_times.hasten(now)
        elif not self._is_draining:
            self._line.guard(self._callbacks.on_drain)
        elif self._member.registration.draining:  # said, but it did not get there: the order comes until it has
            self._member.present(self._member.registration, self._clock())

    def _finish(self) -> None:
        try:
            if self._member.has_spoken and self._member.state is not MemberState.SUPERSEDED:
                self._line.say(self._member.goodbye())
                self._await_goodbye(self._clock() + GOODBYE_S)
        finally:
            self._control.close()

    def _await_goodbye(self, until: float) -> None:
        while (left_s := until - self._clock()) > 0:
            if any(isinstance(message, m.Deregistered) for message in self._line.messages()):
                return
            self._control.wait(left_s)


def _member(
    keyring: Keyring,
    registration: m.Registration,
    settings: RegistrySettings,
    now: float,
    own_statements: OwnStatements,
) -> Member:
    if registration.worker != keyring.name:
        raise ControlError(f"worker: these are {keyring.name}'s keys; load those of {registration.worker}")
    try:
        return Member(registration, settings, now, own_statements)
    except m.RegistryFault as fault:
        raise ControlError(f"registration: {fault}") from None


def _dialable(endpoint: str) -> str:
    try:
        return check_endpoint(endpoint, names=True)
    except ValueError as error:
        raise ControlError(f"registry address: {error}") from None


def _check_known(keyring: Keyring, registry: WorkerId) -> None:
    if registry not in keyring.peers:
        raise ControlError(f"{registry}: not in the key directory; give the registry's name there")


SILENCE_S = 10.0
E = TypeVar("E", bound=UnionEntry)
M = TypeVar("M")


class RegistryLine(Generic[E, M]):
    """The connection to one registry, whose messages `decode` reads."""

    def __init__(
        self,
        keyring: Keyring,
        place: RegistryPlace,
        limits: ControlLimits,
        decode: Callable[[bytes], M],
        on_view: Callable[[RegistryView[E]], None],
        settings: RegistrySettings,
        clock: Callable[[], float],
        reader: str = "",
    ) -> None:
        """`on_view` is called when the registry's list changes, and when the registry begins or ceases to answer;
        `reader` is who listens, for the log."""
        self.counters: Counter[str] = Counter()
        self.place = place
        self.control = ZmqControl(keyring, None, limits, clock)
        self.control.set_directory({place[0]: (place[1], "")})  # under whichever key it has by then
        self._decode = decode
        self._on_view = on_view
        self._reader = reader
        self._hearing: Hearing[E] = Hearing(settings.evict_s, settings.ping_s)
        self._silent_since: float | None = clock()  # None: it is said that the registry is silent

    @property
    def answers(self) -> bool:
        """Whether the registry does: it has, and not long ago."""
        return self._hearing.is_answered

    def messages(self) -> list[M]:
        found: list[M] = []
        for _, frame in self.control.receive():
            try:
                found.append(self._decode(frame))
            except m.RegistryFault as fault:
                self.counters["bad_messages"] += 1
                if worth_saying(self.counters["bad_messages"]):
                    log.warning("[registry-message] a message from the registry was ignored: %s", fault)
        return found

    def heard(self, now: float, *, is_answer: bool = True) -> None:
        """Something came; a refusal to let this process read is no answer."""
        self._silent_since = now
        if is_answer:
            self._hearing.heard(now)

    def look(self, view: RegistryView[E] | None, now: float) -> None:
        """In every turn: say what is new of the registry, whose last list is `view`."""
        news = self._hearing.news(view, now)
        if news is not None:
            self.guard(partial(self._on_view, news))
        if self._silent_since is not None and now - self._silent_since >= SILENCE_S:
            self._silent_since = None
            who = f"{self._reader}: " if self._reader else ""
            said = "[registry-silent] %sregistry %s at %s has not answered for %g s; still trying"
            log.warning(said, who, *self.place, SILENCE_S)

    def guard(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception:
            self.counters["callback_faults"] += 1
            if worth_saying(self.counters["callback_faults"]):
                log.exception("[callback-failed] a discovery callback failed; continuing")

    def say(self, message: m.ToRegistry) -> None:
        self.control.send(self.place[0], m.encode(message))
