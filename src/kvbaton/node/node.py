"""The node: one ledger and its ports. `step(now)` is run by the production loop and by the simulator alike.

Laws: inputs recorded before a message was received are handled before it (a ticket can reach D, and D's claim this
node, faster than the loop turns). Effects are carried out in order, after the input that caused them. An exception of a
port costs the copy, put or frame concerned, and is counted; it never leaves `step`. A stop, a fence or a goodbye at
which a port raised is retried, and so is polling: nothing waits forever because a port raised once.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

import msgspec

from kvbaton.node.doorway import Doorway
from kvbaton.node.ports import ControlPort, StorePort
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.observe.flight.recorder import Recorder
from kvbaton.protocol import effects as fx
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, Departed, Event, PlaneFailed, RankFenced, StoreEnded
from kvbaton.protocol.geometry.layout import pages
from kvbaton.protocol.ids import JobId, PeerId, WorkerId, owner_of, rank_peer
from kvbaton.protocol.machines.ledger import Ledger
from kvbaton.protocol.wire.codec import encode
from kvbaton.protocol.wire.messages import Joined, Welcome
from kvbaton.transports.core.transport import FenceEnded, LendingTransport, OpenFailed, Transport

log = logging.getLogger(__name__)

DETAIL_CHARS_MAX = 200
FAULTS_LOGGED_MAX = 5
"""Of each kind; all are counted."""
AGAIN_S = 0.1
"""After this a port that threw is asked again for what somebody waits for."""
PARTINGS_MAX = 4096
"""Data connections that a port threw at when told to close them, and is told again to close; the others stay."""

Rank = Mapping[str, Transport]
"""One rank's data planes by name."""

_AWAITED = (fx.CancelCopy, fx.CancelPut, fx.StartFence)
_ENGINE_EFFECTS = (fx.Unpin, fx.UnpinPut, fx.MatchFound, fx.MatchFailed, fx.Report, fx.DropHold, fx.ForgetCache)


def log_fault(what: str, count: int, error: Exception) -> None:
    """Log an exception of a port, the first few times."""
    if count <= FAULTS_LOGGED_MAX:
        log.error("[port-failed] a port failed (%s, %d so far)", what, count, exc_info=error)


class _Faults:
    """Exceptions of ports: counted, logged, with the effects still owed, which are retried after `AGAIN_S`."""

    __slots__ = ("_report_fault", "counts", "due", "owed")

    def __init__(self, report: Callable[[str, int, Exception], None]) -> None:
        self.counts: Counter[str] = Counter()
        self.owed: list[fx.Effect] = []  # at most one for each copy, put and fence under way, and `PARTINGS_MAX`
        self.due: float | None = None
        self._report_fault = report

    def note(self, what: str, error: Exception, now: float) -> None:
        self.counts[what] += 1
        if self.due is None:  # also where nothing is owed: a failed poll must be repeated
            self.due = now + AGAIN_S
        self._report_fault(what, self.counts[what], error)

    def take_due(self, now: float) -> list[fx.Effect]:
        if self.due is None or now < self.due:
            return []
        self.due = None
        owed, self.owed = self.owed, []
        return owed


@dataclass(slots=True)
class _Held:
    """A data connection with a peer: its holders, and the highest number of ranks that the peer ever announced.

    A peer that says four and then three was invited with four, and keeps none of them.
    """

    by: set[fx.Holder] = field(default_factory=set)
    ranks: int = 0


class Node:
    """One engine's presence in the cluster."""

    def __init__(
        self,
        ledger: Ledger,
        control: ControlPort,
        ranks: Sequence[Rank],
        doorway: Doorway,
        store: StorePort | None = None,
        report_fault: Callable[[str, int, Exception], None] | None = None,
        extra: Callable[[], Sequence[Event]] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.ledger = ledger
        self.control = control
        self.ranks = ranks
        self.doorway = doorway
        self.store = store
        self.extra = extra  # rank events besides their transports', such as progress; polled at each step
        self.recorder = recorder  # records each handoff
        self._backlog: dict[tuple[int, str], deque[fx.Copy]] = {}
        self._next_events: deque[Event] = deque()
        self._given_up = 0
        self._stepped_at = 0.0
        self.say: Callable[..., None] = log.warning  # messages for operators
        self._held: dict[tuple[PeerId, str], _Held] = {}
        self._faults = _Faults(report_fault or log_fault)
        self._lay_out()

    @property
    def faults(self) -> Counter[str]:
        """Exceptions of ports, counted by call."""
        return self._faults.counts

    def step(self, now: float) -> None:
        """Take in everything that happened, decide, and carry out the effects."""
        self._stepped_at = now
        self._ask_again(now)
        # Frames are received first and handled last. A frame may result from something that the engine did just before
        # it was sent, as a claim follows from a ticket. Its cause is then certainly among the inputs collected after
        # it; the other way round the claim could be refused for a lease that is not known yet.
        frames: Sequence[tuple[WorkerId, bytes]] = ()
        try:
            frames = self.control.receive()
        except Exception as error:  # noqa: BLE001 - as in `_guarded`, which costs each step more than it looks
            self._fault("receive", error)
        of_ports = self._port_events()  # read before the engine's, handled after them: ranks may refer to them
        self._next_events.extend(self.doorway.take_events())
        self._next_events.extend(of_ports)
        self._handle_events(now)
        for worker, frame in frames:
            self.ledger.on_frame(worker, frame, now)
            self._carry_out()
        # Deadlines come after inputs: what arrived in time is not late because this thread was.
        self.ledger.on_time(now)
        self._carry_out()
        self._submit_backlog()
        self._handle_events(now)  # results of the effects, such as a copy that could not be started
        self._record(now)

    def set_wall(self, wall: float, now: float) -> None:
        """The wall clock; it may be adjusted while we run, and tickets are judged by it."""
        self.ledger.desk.identity.wall_offset_s = wall - now

    def next_deadline(self) -> float | None:
        """The time of the next deadline, no later than the last step's if something is pending."""
        soonest = self.ledger.next_deadline()
        look = self.recorder.next_look(self._stepped_at) if self.recorder is not None else None
        for at in (look, self._faults.due):
            if at is not None and (soonest is None or at < soonest):
                soonest = at
        return soonest

    def tell(self, event: Event) -> None:
        """Record an event from outside for the next step (loop thread only)."""
        self._next_events.append(event)

    def close(self, now: float) -> None:
        """Say goodbye and close the transports."""
        self.ledger.leave(now)
        self._carry_out()
        self._record(now)
        for rank in self.ranks:
            for name, transport in rank.items():
                with self._guarded(f"close.{name}"):
                    transport.close()

    def _record(self, now: float) -> None:
        if self.recorder is None:
            return
        taken = self.doorway.taken
        found = [taken.popleft() for _ in range(len(taken))] if taken else []
        try:
            offset_s = self.ledger.desk.identity.wall_offset_s
            self.recorder.take(self.ledger.take_marks(), found, now, offset_s, self.doorway.times.take)
        except Exception as error:  # noqa: BLE001 - as in `_guarded`, which costs each step more than it looks
            self._fault("record", error)

    # --- inputs

    def _handle_events(self, now: float) -> None:
        while self._next_events:
            self.ledger.on_event(self._next_events.popleft(), now)
            self._carry_out()

    def _port_events(self) -> list[Event]:
        found: list[Event] = []
        for index, rank in enumerate(self.ranks):
            for name, transport in rank.items():
                try:
                    for event in transport.drain():
                        if isinstance(event, FenceEnded):
                            found.append(RankFenced(index, event.peer))
                        elif isinstance(event, OpenFailed):
                            found.extend(self._plane_failed(name, event))
                        else:
                            found.append(event)
                except Exception as error:  # noqa: BLE001 - an adapter may throw anything
                    self._fault(f"drain.{name}", error)
        if self.store is not None:
            try:
                found.extend(self.store.drain())
            except Exception as error:  # noqa: BLE001 - an adapter may throw anything
                self._fault("drain.store", error)
        if self.extra is not None:
            with self._guarded("drain.extra"):
                found.extend(self.extra())
        return found

    # --- effects

    def _carry_out(self) -> None:
        while effects := self.ledger.take_effects():
            for effect in effects:
                self._do_guarded(effect)

    def _do_guarded(self, effect: fx.Effect) -> None:
        try:
            self._do(effect)
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._fault(type(effect).__name__, error)
            if isinstance(effect, _AWAITED):
                self._faults.owed.append(effect)

    def _ask_again(self, now: float) -> None:
        for effect in self._faults.take_due(now):
            self._do_guarded(effect)

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """A port that raises costs what it was asked to do, never the step: deadlines and other inputs go on."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - an adapter may throw anything
            self._fault(what, error)

    def _fault(self, what: str, error: Exception) -> None:
        self._faults.note(what, error, self._stepped_at)

    def _do(self, effect: fx.Effect) -> None:
        if isinstance(effect, _ENGINE_EFFECTS):
            self.doorway.hand_in(effect)
        elif isinstance(effect, fx.Send):
            self._send(effect)
        elif isinstance(effect, fx.StartCopy):
            self._backlog.setdefault((effect.rank, effect.transport), deque()).append(effect.copy)
            self._submit(effect.rank, effect.transport)
        elif isinstance(effect, fx.CancelCopy):
            self._cancel(effect.rank, effect.transport, effect.job)
        elif isinstance(effect, fx.Lend):
            self._lend(effect)
        elif isinstance(effect, fx.StartFence):
            self.ranks[effect.rank][effect.transport].fence(effect.peer)
        elif isinstance(effect, fx.Connect):
            self._connect(effect)
        elif isinstance(effect, fx.Disconnect):
            self._disconnect(effect)
        elif isinstance(effect, fx.GivenUp):
            self._tell_given_up(effect)
        else:
            self._store(effect)

    def _lay_out(self) -> None:
        """Tell transports that lend blocks, rather than memory, where the blocks are."""
        for index, rank in enumerate(self.ranks):
            for name, transport in rank.items():
                if transport.capabilities.lends_writes:
                    with self._guarded(f"lay_out.{name}"):
                        lending = cast(LendingTransport, transport)
                        lending.lay_out(())  # if the rest fails, nothing can be lent
                        lending.lay_out(pages(self.ledger.desk.identity.layout, index))

    def _lend(self, effect: fx.Lend) -> None:
        """A transport that raises has lent nothing: its reader is refused, and its loan is over."""
        try:
            cast(LendingTransport, self.ranks[effect.rank][effect.transport]).lend(effect.loan)
        except Exception as error:
            detail = f"{type(error).__name__}: {error}"[:DETAIL_CHARS_MAX]
            self._next_events.append(CopyEnded(effect.loan.job, Reason.TRANSFER_FAILED, detail=detail))
            raise

    def _send(self, effect: fx.Send) -> None:
        message = effect.message
        if effect.invitation is not None and isinstance(message, Welcome | Joined):
            # The ledger decides that a peer is invited; only here are there transports that can create its endpoint. If
            # the answer is not sent, nothing is lost: the peer sends its hello again.
            invitation = effect.invitation
            if not self._fenced(invitation):
                return
            try:
                message = msgspec.structs.replace(message, endpoints=self._endpoints(invitation))
            except TimeoutError:  # a slow rank, which says nothing about its transport
                raise
            except Exception as error:
                detail = str(error)[:DETAIL_CHARS_MAX]
                self._next_events.append(PlaneFailed(invitation.peer, invitation.holder, detail))
                raise
        frame = encode(self.ledger.desk.identity.me, effect.to, effect.session, message, effect.version)
        if not self.control.send(effect.worker, frame):  # no address: waiting for a deadline would only lose time
            self._next_events.append(Departed(effect.worker, reason=Reason.PEER_UNKNOWN))

    def _endpoints(self, invitation: fx.Invitation) -> tuple[bytes, ...]:
        self._hold(invitation)
        return tuple(
            rank[invitation.transport].endpoint(rank_peer(invitation.peer, remote))
            for rank in self.ranks
            for remote in range(invitation.ranks)
        )

    def _hold(self, effect: fx.Connect | fx.Invitation) -> None:
        held = self._held.setdefault((effect.peer, effect.transport), _Held())
        held.by.add(effect.holder)
        held.ranks = max(held.ranks, effect.ranks)

    def _fenced(self, invitation: fx.Invitation) -> bool:
        """Whether no fence is owed: a retried one would shut out the endpoint that is created now."""
        invited = {rank_peer(invitation.peer, remote) for remote in range(invitation.ranks)}
        fences = [each for each in self._faults.owed if isinstance(each, fx.StartFence) and each.peer in invited]
        for fence in fences:
            if fence.transport == invitation.transport:
                self._faults.owed.remove(fence)
                self._do_guarded(fence)
        return not any(fence in self._faults.owed for fence in fences)

    def _connect(self, effect: fx.Connect) -> None:
        ours = len(self.ranks)
        self._hold(effect)  # before the first connect: if one raises, `_disconnect` closes the half-open rest
        try:
            for remote in range(effect.ranks):
                for index, rank in enumerate(self.ranks):
                    endpoint = effect.endpoints[remote * ours + index]
                    rank[effect.transport].connect(rank_peer(effect.peer, remote), endpoint)
            log.info("KV to and from %s uses transport %s", effect.peer.worker, effect.transport)
        except Exception as error:  # whatever it was, nothing can be moved between the two
            peer, detail = effect.peer, str(error)[:DETAIL_CHARS_MAX]
            self._next_events.append(PlaneFailed(peer, effect.holder, detail))
            if not isinstance(error, ValueError):  # ValueError: the endpoint is unusable, the transport is not broken
                raise

    def _plane_failed(self, transport: str, event: OpenFailed) -> list[Event]:
        """For all holders of the connection: whose `connect` it was is no longer known, and all use it."""
        peer = owner_of(event.peer)
        held = self._held.get((peer, transport), _Held())
        return [PlaneFailed(peer, holder, event.detail) for holder in sorted(held.by)]

    def _tell_given_up(self, effect: fx.GivenUp) -> None:
        self._given_up += 1
        if worth_saying(self._given_up):
            said = "[plane-given-up] %s cannot be reached over %s: %s"
            self.say(said, effect.worker, effect.transport, effect.detail)

    def _disconnect(self, effect: fx.Disconnect) -> None:
        """Both roles of a pair share one data connection: the last holder to release it closes it."""
        key = (effect.peer, effect.transport)
        held = self._held.get(key, _Held())
        held.by.discard(effect.holder)
        if held.by:
            return
        self._held.pop(key, None)
        ranks = max(effect.ranks, held.ranks)  # all that were ever opened, also if the peer has fewer now
        threw = self.faults[f"disconnect.{effect.transport}"]
        for rank in self.ranks:
            for remote in range(ranks):
                with self._guarded(f"disconnect.{effect.transport}"):
                    rank[effect.transport].disconnect(rank_peer(effect.peer, remote))
        if self.faults[f"disconnect.{effect.transport}"] > threw and len(self._faults.owed) < PARTINGS_MAX:
            self._faults.owed.append(
                msgspec.structs.replace(effect, ranks=ranks)
            )  # unless it has a holder again by then

    def _submit(self, rank: int, name: str) -> None:
        """Hand over as much of the backlog as the transport accepts."""
        # A full transport says so, and the rest waits here, in order: a bounded queue below must not become a failed
        # handoff above.
        backlog = self._backlog[rank, name]
        transport = self.ranks[rank][name]
        while backlog:
            try:
                accepted = transport.submit(backlog[0])
            except Exception as error:  # noqa: BLE001 - a copy that could not be started has ended
                self.faults["submit"] += 1
                detail = f"{type(error).__name__}: {error}"[:200]
                self._next_events.append(CopyEnded(backlog.popleft().job, Reason.TRANSFER_FAILED, detail=detail))
                continue
            if not accepted:
                return
            backlog.popleft()

    def _submit_backlog(self) -> None:
        for (rank, name), backlog in self._backlog.items():
            if backlog:
                self._submit(rank, name)

    def _cancel(self, rank: int, name: str, job: JobId) -> None:
        backlog = self._backlog.get((rank, name), deque())
        for copy in backlog:
            if copy.job == job:
                backlog.remove(copy)
                self._next_events.append(CopyEnded(job, Reason.CANCELLED))
                return
        self.ranks[rank][name].cancel(job)

    def _store(self, effect: fx.Effect) -> None:
        if isinstance(effect, fx.StorePut):
            if self.store is None:
                self._next_events.append(StoreEnded(effect.put, Reason.STORE_FAILED))
                return
            try:
                self.store.put(effect.put, effect.blocks, effect.keys, effect.origins)
            except Exception:  # seed 003: a store that raises must not keep the pin
                self._next_events.append(StoreEnded(effect.put, Reason.STORE_FAILED))
                raise
        elif isinstance(effect, fx.CancelPut) and self.store is not None:
            self.store.cancel(effect.put)
