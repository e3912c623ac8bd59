"""The node: one ledger and its ports. `step(now)` is run by the production loop and by the simulator alike.

Laws: inputs noted before a message was received are handled before it (a ticket can reach D, and D's claim this node,
faster than the loop turns). Effects are carried out in order, after the input that caused them. An exception of a
port costs the copy, put or frame concerned, and is counted; it never leaves `step`.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from kvbaton.protocol import effects as fx
from kvbaton.protocol.codec import encode
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.events import CopyEnded, Departed, Event, RankFenced, StoreEnded
from kvbaton.protocol.ids import JobId, PeerId, rank_peer
from kvbaton.protocol.ledger import Ledger
from kvbaton.protocol.messages import Joined, Welcome
from kvbaton.runtime.doorway import Doorway
from kvbaton.runtime.ports import ControlPort, StorePort
from kvbaton.transports.base import FenceEnded, Transport

Rank = Mapping[str, Transport]
"""One rank's data planes by name."""

_ENGINE_EFFECTS = (fx.Unpin, fx.UnpinPut, fx.MatchFound, fx.MatchFailed, fx.Report, fx.DropHold)


class Node:
    """One engine's presence in the cluster."""

    def __init__(
        self,
        ledger: Ledger,
        control: ControlPort,
        ranks: Sequence[Rank],
        doorway: Doorway,
        store: StorePort | None = None,
    ) -> None:
        self.ledger = ledger
        self.control = control
        self.ranks = ranks
        self.doorway = doorway
        self.store = store
        self.faults: Counter[str] = Counter()
        self._backlog: dict[tuple[int, str], deque[fx.Copy]] = {}
        self._next_events: deque[Event] = deque()

    def step(self, now: float) -> None:
        """Take in all that has happened, decide, and do what follows."""
        frames = self.control.receive()
        for event in self.doorway.take_events():
            self._handle(event, now)
        for event in self._port_events():
            self._handle(event, now)
        for worker, frame in frames:
            self.ledger.on_frame(worker, frame, now)
            self._carry_out(now)
        self.ledger.on_time(now)
        self._carry_out(now)
        while self._next_events:
            self._handle(self._next_events.popleft(), now)
        self._submit_backlog()

    def next_deadline(self) -> float | None:
        return self.ledger.next_deadline()

    def tell(self, event: Event) -> None:
        """Note something from the surroundings for the next step (loop thread only)."""
        self._next_events.append(event)

    def close(self, now: float) -> None:
        """Say goodbye and shut the data planes."""
        self.ledger.leave(now)
        self._carry_out(now)
        for rank in self.ranks:
            for transport in rank.values():
                transport.close()

    # --- inputs

    def _handle(self, event: Event, now: float) -> None:
        self.ledger.on_event(event, now)
        self._carry_out(now)

    def _port_events(self) -> list[Event]:
        found: list[Event] = []
        for index, rank in enumerate(self.ranks):
            for transport in rank.values():
                for event in transport.drain():
                    found.append(RankFenced(index, event.peer) if isinstance(event, FenceEnded) else event)
        if self.store is not None:
            found.extend(self.store.drain())
        return found

    # --- effects

    def _carry_out(self, now: float) -> None:
        while effects := self.ledger.take_effects():
            for effect in effects:
                self._do(effect, now)

    def _do(self, effect: fx.Effect, now: float) -> None:
        if isinstance(effect, _ENGINE_EFFECTS):
            self.doorway.hand_in(effect)
        elif isinstance(effect, fx.Send):
            self._send(effect)
        elif isinstance(effect, fx.StartCopy):
            self._backlog.setdefault((effect.rank, effect.transport), deque()).append(effect.copy)
            self._submit(effect.rank, effect.transport)
        elif isinstance(effect, fx.CancelCopy):
            self._cancel(effect.rank, effect.transport, effect.job)
        elif isinstance(effect, fx.StartFence):
            self.ranks[effect.rank][effect.transport].fence(effect.peer)
        elif isinstance(effect, fx.Connect):
            self._connect(effect)
        elif isinstance(effect, fx.Disconnect):
            for rank in self.ranks:
                for remote in range(effect.ranks):
                    rank[effect.transport].disconnect(rank_peer(effect.peer, remote))
        else:
            self._store(effect)

    def _send(self, effect: fx.Send) -> None:
        message = effect.message
        if effect.invitation is not None and isinstance(message, Welcome | Joined):
            message = msgspec.structs.replace(message, endpoints=self._endpoints(effect.invitation))
        frame = encode(self.ledger.desk.identity.me, effect.to, effect.session, message)
        if not self.control.send(effect.worker, frame):
            self._next_events.append(Departed(effect.worker, reason=Reason.PEER_UNKNOWN))

    def _endpoints(self, invitation: fx.Invitation) -> tuple[bytes, ...]:
        return tuple(
            rank[invitation.transport].endpoint(rank_peer(invitation.peer, remote))
            for rank in self.ranks
            for remote in range(invitation.ranks)
        )

    def _connect(self, effect: fx.Connect) -> None:
        ours = len(self.ranks)
        for remote in range(effect.ranks):
            for index, rank in enumerate(self.ranks):
                peer = rank_peer(effect.peer, remote)
                endpoint = effect.endpoints[remote * ours + index]
                try:
                    rank[effect.transport].connect(peer, endpoint)
                except ValueError:
                    self.faults["connect"] += 1
                    self._next_events.append(Departed(effect.peer.worker, effect.peer.incarnation, Reason.NO_TRANSPORT))

    def _submit(self, rank: int, name: str) -> None:
        """Hand over as much of the backlog as the data plane takes."""
        backlog = self._backlog[rank, name]
        transport = self.ranks[rank][name]
        while backlog:
            try:
                accepted = transport.submit(backlog[0])
            except Exception as error:  # noqa: BLE001 - a broken adapter must cost the copy, not the node
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
                self.store.put(effect.put, effect.blocks, effect.keys)
            except Exception:  # noqa: BLE001 - seed 003: a store that raises must not keep the pin
                self.faults["put"] += 1
                self._next_events.append(StoreEnded(effect.put, Reason.STORE_FAILED))
        elif isinstance(effect, fx.CancelPut) and self.store is not None:
            self.store.cancel(effect.put)

    def peer(self) -> PeerId:
        return self.ledger.desk.identity.me
