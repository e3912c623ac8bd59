"""The registry's server: in the router's process or one of its own, on its own thread.

Laws: a worker registers only under the name that its key proves, at an address that is its own or that the operator
allows, and is told that it is listed only after the router can see it. A bad message is counted, answered with the
field at fault and skipped; it never ends the server. Every worker hears of every change, once per turn however many
there were, and whoever missed it gets it with the answer to its next ping. Who may say what is decided by the role of
its key (`protocol.legality`): only an operator can have a worker drained, and the router knows before the worker is
told; only a router reads the whole list, and has workers told of tickets (`registry_watchers`). Where members may join,
every entry of the directory has a certificate, of minted members too: one that joined has no other means to know them;
the ticket keys go to members that joined, over the connection of the key that the certificate names.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec

from kvbaton.control.addressing import ControlLimits
from kvbaton.control.joining.admission import Admission
from kvbaton.control.joining.join_messages import ClusterCard
from kvbaton.control.keyring import Keyring
from kvbaton.control.registry import registry_messages as m
from kvbaton.control.registry.allowed_networks import Networks
from kvbaton.control.registry.registry_roster import RegistryRoster, RegistrySettings, Standing
from kvbaton.control.registry.registry_watchers import OnReport, Reports, RosterWatchers
from kvbaton.control.registry.statements import is_ordered, may_serve, registered
from kvbaton.control.sockets import LoopThread
from kvbaton.control.zmq import LOOPBACK, ZmqControl
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.protocol.legality import Act, Role, may
from kvbaton.protocol.wire.ticket import TICKET_CHARS_MAX

log = logging.getLogger(__name__)

ROUNDS_PER_TURN_MAX = 64  # all that came is heard before silence is judged, unless someone floods
CLOSE_S = 2.0
DISCARDS_MAX = 4096
"""Tickets that wait for the next turn; beyond it they are not told, and their leases run out by themselves."""

LIMITS = ControlLimits(frames_queued_max=512)  # a list that a member does not read is sent again with its next ping

Workers = tuple[m.RosterEntry, ...]
Answer = m.FromRegistry | m.ToOperator | m.ToRouter


def _ignore(_: Workers) -> None:
    pass


class RegistryServer:
    """Binds at once (`ControlError` if it cannot), serves from `start` on."""

    def __init__(
        self,
        keyring: Keyring,
        bind: str = LOOPBACK,
        *,
        settings: RegistrySettings | None = None,
        on_change: Callable[[Workers], None] = _ignore,
        on_report: OnReport | None = None,
        networks: Networks | None = None,
        admission: Admission | None = None,
        limits: ControlLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._wall = wall
        self.counters: Counter[str] = Counter()
        self._control = ZmqControl(keyring, bind, limits or LIMITS, clock)
        self._keyring = keyring
        self._roster = RegistryRoster(settings or RegistrySettings(), 1 + secrets.randbits(62), clock())
        self._networks = networks or Networks()
        self._admission = admission
        if admission is not None:
            admission.has_served = lambda key: key in self._roster.served
        self._discards: deque[tuple[PeerId, str]] = deque()
        self._control.on_keys = self._take_keys
        self.on_keys: Callable[[Keyring], None] = lambda _: None  # when the key directory changed; on its thread
        self._on_change = on_change
        self._watchers = RosterWatchers(self._roster, self.counters, partial(_vouched, admission))
        self._reports = Reports(self._roster, on_report, self.counters, self._watchers)
        self._workers: Workers = ()
        self._published = self._roster.revision
        self._announced = self._roster.seen
        self._behind: set[WorkerId] = set()  # who asked in this turn, and has not seen the newest directory
        self._thread = LoopThread("kvbaton-registry", self._control, self._turn, self._control.close, clock)

    @property
    def endpoint(self) -> str:
        return self._control.endpoint

    @property
    def visits(self) -> Mapping[str, int]:
        """What the control plane has counted of connections and frames."""
        return self._control.counters

    def start(self) -> None:
        self._thread.start()

    def refuse(self, own: Sequence[str]) -> None:
        """The router listens at these addresses (`host:port`): no worker is there. From any thread."""
        self._networks = self._networks.without(own)

    @property
    def is_complete(self) -> bool:
        """Whether everybody has had the time to register. From any thread."""
        return self._roster.is_complete

    @property
    def readers(self) -> int:
        """How many routers read from outside. From any thread."""
        return len(self._watchers)

    def workers(self) -> Workers:
        """Who is listed now, by name. From any thread."""
        return self._workers

    def look_soon(self) -> None:
        """Somebody joined: let it in now. From any thread."""
        self._control.look_soon()

    def is_living(self, name: str, key: str) -> bool:
        """Whether a worker of that name is listed under that key, or may be in a moment: as long as the registry is
        young, whoever it does not know may be alive. From any thread."""
        if not self.is_complete:
            return True
        return any(entry.worker == name and entry.public_key == key for entry in self._workers)

    def discard(self, worker: WorkerId, incarnation: Incarnation, tickets: Sequence[str]) -> int:
        """Have a worker told that nobody will use these tickets; returns how many will be. From any thread.

        Never blocks. A worker that is gone, or in another life, has nothing to release and is told nothing.
        """
        taken = [ticket for ticket in tickets if len(ticket) <= TICKET_CHARS_MAX]
        taken = taken[: max(0, DISCARDS_MAX - len(self._discards))]
        self.counters["discards_dropped"] += len(tickets) - len(taken)
        self._discards.extend((PeerId(worker, incarnation), ticket) for ticket in taken)
        if taken:
            self._control.wake()
        return len(taken)

    def show(self, worker: WorkerId, incarnation: Incarnation, ids: Sequence[str]) -> bool:
        """Have a worker report at once, and of these ids too; False if it never reported. From any thread.

        Never blocks. Whoever has not reported may not know the question, and is not asked.
        """
        asked = self._reports.ask(PeerId(worker, incarnation), ids)
        if asked:
            self._control.wake()
        return asked

    def close(self) -> bool:
        """Stop serving; the workers go on with what they know. False when the thread did not end in time."""
        return self._thread.stop(CLOSE_S)

    def _turn(self, now: float) -> float:
        answers: list[tuple[WorkerId, Answer]] = []
        for _ in range(ROUNDS_PER_TURN_MAX):
            frames = self._control.hear()
            if not frames:
                break
            for worker, frame, key in frames:
                answers += self._on_frame(worker, frame, key, now)
        self._roster.on_time(now)
        self._publish()
        for worker, answer in [*answers, *self._discarded(), *self._reports.questions(), *self._watchers.due(now)]:
            self._send(worker, m.encode(answer))
        self._announce()
        return min(self._roster.next_deadline(), self._watchers.next_deadline(now))

    def _on_frame(self, sender: WorkerId, frame: bytes, key: str, now: float) -> list[tuple[WorkerId, Answer]]:
        try:
            message = m.decode_to_registry(frame)
            _check_sender(sender, self._keyring.role_of(sender), message)
            if isinstance(message, m.Register):
                message = self._checked(message, sender, key)
            elif isinstance(message, m.DrainWorker):
                self._check_order(sender, message)
        except m.RegistryFault as fault:
            self.counters["bad_messages"] += 1
            if worth_saying(self.counters["bad_messages"]):
                log.warning("[member-message] a message from %s was ignored: %s", sender, fault)
            return [(sender, m.RegistryRefused(str(fault)[: m.DETAIL_CHARS_MAX]))]
        self.counters["messages"] += 1
        if isinstance(message, m.DrainWorker):
            return self._on_drain(sender, message)
        if isinstance(message, m.WorkerReport):
            self._reports.take(sender, message, now)
            return []
        if isinstance(message, m.Watch):
            told = self._watchers.watch(sender, message, now)
            return [] if told is None else [(sender, told)]
        if isinstance(message, m.DiscardFor):
            self.discard(message.worker, message.incarnation, message.tickets)
            return []
        if isinstance(message, m.ShowFor):
            self.show(message.worker, message.incarnation, message.ids)
            return []
        answers: list[tuple[WorkerId, Answer]] = [
            (sender, answer) for answer in self._answers(sender, message, key, now)
        ]
        order = self._roster.order(sender)  # with every ping, until the worker has heard it
        return answers if order is None else [*answers, (sender, order)]

    def _checked(self, message: m.Register, sender: WorkerId, key: str) -> m.Register:
        """With the words that the worker has signed, which are the ones that readers take."""
        told = registered(self._keyring, key, message.registration, message.signed, self._wall())
        _check_sender(sender, self._keyring.role_of(sender), m.Register(told))
        self._networks.check(told, self._control.address_of(sender))
        return m.Register(told, message.signed if key in self._keyring.signing else None)

    def _check_order(self, operator: WorkerId, message: m.DrainWorker) -> None:
        if not message.incarnation or not self._keyring.signing_keys(operator):
            return
        if not is_ordered(self._keyring, message.order, message.worker, message.incarnation):
            raise m.RegistryFault(f"order: not signed by {operator} for that life; run this release to drain workers")

    def _on_drain(self, operator: WorkerId, message: m.DrainWorker) -> list[tuple[WorkerId, Answer]]:
        if message.look:
            return [(operator, self._roster.look(message.worker))]
        orders = message.order is not None or not self._keyring.signing_keys(operator)
        said = self._roster.drain(message.worker, message.incarnation, message.order, is_ordered=orders)
        if not message.incarnation:
            log.info("%s requested to drain %s: %s", operator, message.worker, said.state)
        order = self._roster.order(message.worker) if said.state == "draining" else None
        answers: list[tuple[WorkerId, Answer]] = [(operator, said)]
        return answers if order is None else [*answers, (message.worker, order)]

    def _answers(self, worker: WorkerId, message: m.AboutStanding, key: str, now: float) -> list[m.FromRegistry]:
        if isinstance(message, m.Deregister):
            self._roster.deregister(worker, message.incarnation, message.signed)
            return [m.Deregistered(message.incarnation)]
        if isinstance(message, m.Register):
            incarnation = message.registration.incarnation
            standing = self._roster.register(message.registration, key, now, message.signed)
        else:
            incarnation = message.incarnation
            standing = self._roster.ping(worker, incarnation, now, message.held)
        match standing:
            case Standing.UNKNOWN:
                return [m.Unknown(incarnation)]
            case Standing.SUPERSEDED:
                return [m.Superseded(incarnation)]
            case Standing.OUTDATED:
                newest = self._roster.newest(worker)
                return [m.Outdated(incarnation, newest)] if newest is not None else []
            case Standing.FULL:
                return [
                    m.RegistryRefused(f"workers: {self._roster.settings.workers_max} are listed, the most there can be")
                ]
        certificate, cluster, card = _membership(self._admission, worker, key)
        draining = self._roster.is_draining(worker)
        listed = m.RegisteredReply(incarnation, draining, self._reports.taken, certificate, cluster, card)
        if isinstance(message, m.Ping) and message.seen != self._roster.seen:
            self._behind.add(worker)
        return [listed]

    def _take_keys(self, keyring: Keyring) -> None:
        """Whoever was listed under a key that is no longer let in, or not for that any more, has left."""
        self._keyring = keyring
        if self._admission is not None:
            self._admission.keyring = keyring
        for entry in self._roster.entries():  # also who registered since the last that was published
            told = entry.registration
            listed = entry.public_key in (keyring.peers.get(told.worker), *keyring.also.get(told.worker, ()))
            if not listed or not may_serve(keyring.role_of(told.worker), told.role):
                log.warning("[key-withdrawn] %s is no longer in the key directory, and was deregistered", told.peer)
                self._roster.deregister(told.worker, told.incarnation)
        self._watchers.keep(lambda router: router in keyring.peers and may(keyring.role_of(router), Act.WATCH))
        self.on_keys(keyring)

    def _discarded(self) -> Iterator[tuple[WorkerId, Answer]]:
        """What was queued since the last turn, together for each worker that is listed in that life."""
        if not self._discards:
            return
        here = {entry.registration.peer for entry in self._workers}
        found: dict[PeerId, list[str]] = {}
        for _ in range(len(self._discards)):
            peer, ticket = self._discards.popleft()
            found.setdefault(peer, []).append(ticket)
        for peer, tickets in found.items():
            for first in range(0, len(tickets) if peer in here else 0, m.TICKETS_MAX):
                yield peer.worker, m.DiscardTickets(peer.incarnation, tuple(tickets[first : first + m.TICKETS_MAX]))

    def _publish(self) -> None:
        """Tell the router what has changed since the last time."""
        if self._published == self._roster.revision:
            return
        self._published = self._roster.revision
        self._workers = self._roster.entries()
        try:
            self._on_change(self._workers)
        except Exception:
            self.counters["callback_faults"] += 1
            log.exception("[callback-failed] on_change failed; continuing")

    def _announce(self) -> None:
        """Tell the workers: all of them of what has changed, and who has said that it missed that; once in a turn,
        however often they say it."""
        behind, self._behind = self._behind, set()
        if self._announced != self._roster.seen:
            self._announced = self._roster.seen
            behind |= {entry.registration.worker for entry in self._workers}
        if behind:
            frame = m.encode(_certified(self._admission, self._roster.directory()))
            for worker in sorted(behind):
                self._send(worker, frame)

    def _send(self, worker: WorkerId, frame: bytes) -> None:
        if not self._control.send(worker, frame):
            self.counters["unreached"] += 1


_NEEDS: Mapping[type[m.ToRegistry], Act] = {
    m.Register: Act.REGISTER,
    m.Ping: Act.REGISTER,
    m.Deregister: Act.REGISTER,
    m.WorkerReport: Act.REPORT,
    m.DrainWorker: Act.DRAIN,
    m.Watch: Act.WATCH,
    m.DiscardFor: Act.WATCH,
    m.ShowFor: Act.WATCH,
}
_WHOSE = {
    Act.DRAIN: f"an identity named {m.OPERATOR} or {m.OPERATOR}-…",
    Act.WATCH: "a router's, named router or router-…",
}


def _check_sender(sender: WorkerId, role: Role, message: m.ToRegistry) -> None:
    """Who may say this, by the name that the sender's key proves and the role that it has."""
    act = _NEEDS[type(message)]
    if not may(role, act):
        use = _WHOSE.get(act, "a worker's")
        raise m.RegistryFault(f"{act}: the key of {sender} is for {role}; use {use}, or mint one with another role")
    if isinstance(message, m.Register):
        told = message.registration
        if told.worker != sender:
            raise m.RegistryFault(f"worker: {sender} registers as {told.worker}")
        if not may_serve(role, told.role):
            raise m.RegistryFault(f"role: {sender} registers as {told.role}, and its key is for {role}")


def _certified(admission: Admission | None, directory: m.Directory) -> m.Directory:
    """The directory, with certificates."""
    if admission is None:
        return directory
    entries = tuple(
        msgspec.structs.replace(each, certificate=_certificate(admission, each)) for each in directory.entries
    )
    return msgspec.structs.replace(directory, entries=entries)


def _vouched(admission: Admission | None, roster: m.Roster) -> m.Roster:
    """The roster, with the certificates of those who joined: a router on another host may not know them."""
    if admission is None:
        return roster
    entries = tuple(
        msgspec.structs.replace(each, certificate=_certificate(admission, each))
        if each.worker in admission.keyring.joined else each
        for each in roster.entries
    )  # fmt: skip
    return msgspec.structs.replace(roster, entries=entries)


def _certificate(admission: Admission, entry: m.DirectoryEntry | m.RosterEntry) -> bytes:
    return admission.vouch(entry.worker, entry.public_key, admission.keyring.role_of(entry.worker))


def _membership(admission: Admission | None, worker: WorkerId, key: str) -> tuple[bytes, ClusterCard | None, bytes]:
    """What a worker is told with every answer: one that joined its certificate and the card, others who was removed."""
    if admission is None:
        return b"", None, b""
    joined = admission.keyring.joined.get(worker)
    if joined is None:
        return b"", None, admission.signed_card() if admission.keyring.removed else b""
    # One of a release that did not sign reads the card as it is, and believes a registry.
    plain = None if joined.signing else msgspec.structs.replace(admission.card(), removed=(), removed_keys=())
    return admission.vouch(worker, key, admission.keyring.role_of(worker)), plain, admission.signed_card()
