"""D's book of links: says hello to source workers when first needed, repeats until answered, notices their loss.

A link that is down is forgotten; the next need opens a new one. Waiting handoffs are told through callbacks.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Protocol

from kvbaton.protocol.effects import Connect, Direction, Disconnect, GivenUp, Holder, Invitation, Send, StartFence
from kvbaton.protocol.errors import ProtocolError, Reason, reason_of
from kvbaton.protocol.events import CopyEnded, Departed
from kvbaton.protocol.geometry.spans import Move
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId, rank_peer
from kvbaton.protocol.legality import Verdict
from kvbaton.protocol.machines.context import LedgerContext, Parts
from kvbaton.protocol.machines.pairing_state import (
    LINK,
    Greeting,
    Link,
    LinkEvent,
    LinkState,
    Shunned,
    has_fallback,
    pair_as_target,
    reaches,
)
from kvbaton.protocol.wire.messages import Card, Goodbye, Hello, HelloRefused, Joined, Message, Welcome


class LinkWatcher(Protocol):
    """The consumer, as seen by links."""

    def on_link_up(self, link: Link, now: float) -> None: ...
    def on_link_down(self, link: Link, reason: Reason, detail: str, now: float) -> None: ...
    def on_link_fenced(self, link: Link, now: float) -> None: ...
    def is_idle(self, link: Link) -> bool: ...


class Links:
    """Links opened by this node, one per source worker, and those that are being fenced."""

    def __init__(self, desk: LedgerContext, watcher: LinkWatcher) -> None:
        self.desk = desk
        self.by_worker: dict[WorkerId, Link] = {}
        self.fencing: list[Link] = []
        self.on_fence: Callable[[PeerId, float], None] = _ignored
        self.on_pairing: Callable[[PeerId, int, float], None] = _also_ignored
        self.joined_since: Callable[[PeerId, int, int], bool] = lambda peer, session, since: False
        self._watcher = watcher
        self._shunned = Shunned(desk.settings.shun_s)
        self._last_nonce = 0

    def need(self, worker: WorkerId, now: float) -> Link:
        """The link to that worker, opened if there is none."""
        # Opened when first needed and not before: n workers would otherwise hold n * n sessions, most of them unused. A
        # pair that had to take a worse transport pairs again when nothing depends on its link (rule 23).
        link = self.by_worker.get(worker)
        if link is not None and self._may_improve(link, now):
            self.send(link, Goodbye())
            self.lose(link, Reason.PEER_GONE, "a data plane that had failed is tried again", now)
            link = None
        if link is None:
            if len(self.by_worker) >= self.desk.settings.sessions_max:
                self._let_one_go(now)
            self._last_nonce += 1
            deadline = now + self.desk.settings.claim_timeout
            link = Link(worker, Greeting(self._last_nonce, deadline, self.desk.confirmed))
            self.by_worker[worker] = link
            self._say(link, now)
        return link

    def _let_one_go(self, now: float) -> None:
        """Make room: say goodbye to a source that nothing is read from."""
        idle = next((each for each in self.by_worker.values() if self._watcher.is_idle(each)), None)
        if idle is None:
            raise ProtocolError(Reason.BUSY, f"sessions_max: {len(self.by_worker)} links are in use")
        if idle.peer is not None:
            self.send(idle, Goodbye())
        self.lose(idle, Reason.PEER_GONE, "made room for another source", now)

    def send(self, link: Link, message: Message, version: int | None = None) -> None:
        assert link.peer is not None
        self.desk.send(link.worker, link.peer.incarnation, link.session, message, version or link.version)

    def session_with(self, peer: PeerId) -> int:
        """The session in which we are linked to that peer; 0 when we are not."""
        link = self.by_worker.get(peer.worker)
        return link.session if link is not None and link.peer == peer else 0

    def current(self, sender: PeerId, session: int) -> Link | None:
        """The link that a message of this sender and session belongs to."""
        link = self.by_worker.get(sender.worker)
        return link if link is not None and link.peer == sender and link.session == session else None

    def awaits(self, sender: PeerId, nonce: int) -> bool:
        """Whether a Welcome of that worker is the first answer to that hello of ours."""
        link = self.by_worker.get(sender.worker)
        if link is None or link.greeting.nonce != nonce:
            return False
        return LINK.step(link.state, LinkEvent.WELCOMED) is LinkState.JOINING

    def on_welcome(self, sender: PeerId, session: int, message: Welcome, version: int, now: float) -> None:
        """The source accepts, as expected, and its answer's version settles the version of the pair."""
        link = self.by_worker[sender.worker]
        if self.joined_since(sender, message.link_session, link.greeting.confirmed):
            # Two nodes that decode from each other say hello both ways, and their messages cross. This one has linked
            # to us since our hello, and says that it has not: is it an old message, or has it lost the link since?
            # Asked again, it reports its current state.
            self._last_nonce += 1
            link.greeting.nonce, link.greeting.confirmed = self._last_nonce, self.desk.confirmed
            self._say(link, now)
            return
        try:
            link.plan, link.transport = pair_as_target(self.desk.identity, message.card, message.transport)
        except ProtocolError as error:
            self.lose(link, error.reason, error.detail, now)
            return
        if link.transport.name not in (self._worth_a_try(link, now) or self.desk.identity.transport_names):
            self.lose(link, Reason.NO_TRANSPORT, f"transport: the peer chose {message.transport!r}, not offered", now)
            return
        ranks = len(link.plan.source.ranks)
        if len(message.endpoints) != ranks * len(self.desk.identity.layout.ranks):
            self.lose(link, Reason.BAD_MESSAGE, "endpoints: not one for each pair of ranks", now)
            return
        link.state, link.peer, link.session, link.version = LinkState.JOINING, sender, session, version
        link.features = message.card.optional
        self._shun_passed_over(link, message.card, now)
        worth_a_try = self._worth_a_try(link, now)
        link.choice.fallback = has_fallback(self.desk.identity, message.card, worth_a_try, link.transport.name)
        link.choice.left_out = tuple(n for n in message.card.transports if self._is_shunned(link, n, now))
        # Before we connect: if that peer has fenced us as a writer, and we have not noticed, our writes must not get
        # back in by the admission that comes with this link (rule 14).
        self.on_pairing(sender, message.link_session, now)
        link.endpoints = message.endpoints
        self.desk.emit(Connect(sender, link.transport.name, ranks, message.endpoints, _holder(link)))
        self.desk.count(f"links.{link.transport.name}")
        # Opened now, by empty copies, if there is an alternative: later a handoff would have to fail before we learn
        # that the transport is closed (rule 23). Joined waits for it, so that no claim comes before.
        if link.choice.fallback:
            self._probe(link, ranks, now)
        self._say(link, now)

    def on_linked(self, link: Link, now: float) -> None:
        if link.probes is not None:  # an answer to a Joined that was not sent yet: no honest source sends it
            self.desk.count("illegal.linked")
            return
        state = LINK.step(link.state, LinkEvent.LINKED)
        if isinstance(state, Verdict):
            self.desk.count("late.linked")
            return
        link.state = state
        self.desk.timers.clear(("link", link.worker))
        self._watcher.on_link_up(link, now)

    def on_refused(self, sender: PeerId, message: HelloRefused, now: float) -> None:
        link = self.by_worker.get(sender.worker)
        if link is None or link.greeting.nonce != message.nonce or link.state is not LinkState.GREETING:
            self.desk.count("late.hello_refused")
            return
        self.lose(link, reason_of(message.reason), message.detail, now)

    def lose(self, link: Link, reason: Reason, detail: str, now: float) -> None:
        """The link is down: its handoffs are told. Its data connections stay until they are at rest."""
        if self.by_worker.get(link.worker) is not link:
            return
        del self.by_worker[link.worker]
        link.state = LinkState.DOWN
        self.desk.timers.clear(("link", link.worker))
        if link.probes is not None:
            self.desk.cancel(link.probes)
        self._watcher.on_link_down(link, reason, detail, now)
        if link.peer is not None and link.transport is not None and link.plan is not None:
            self.desk.emit(Disconnect(link.peer, link.transport.name, len(link.plan.source.ranks), _holder(link)))

    def lose_worker(self, event: Departed, now: float) -> None:
        link, reason = self.by_worker.get(event.worker), event.reason
        if link is None:
            return
        # A link whose hello is unanswered has no known incarnation yet: news of an earlier one does not concern it.
        if event.incarnation == 0 or (link.peer is not None and link.peer.incarnation == event.incarnation):
            self.lose(link, reason, f"worker {event.worker} has left or is not registered", now)

    def avoid(self, link: Link, detail: str, now: float) -> None:
        """The transport of this link could not be opened: pair again, with another one if there is one."""
        if self.by_worker.get(link.worker) is not link:
            return
        if link.choice.fallback:
            assert link.transport is not None
            self._shunned.add(link.worker, link.transport.name, now)
            self.desk.count(f"planes_given_up.{link.transport.name}")
            self.desk.emit(GivenUp(link.worker, link.transport.name, detail))
        self.lose(link, Reason.UNREACHABLE, detail, now)

    def on_probe_ended(self, link: Link, event: CopyEnded, now: float) -> None:
        """One of the empty copies is over; when all are, the source may know that we are ready."""
        if self.by_worker.get(link.worker) is not link or link.probes is None:
            return
        if event.reason is not None:
            self.avoid(link, event.detail or str(event.reason), now)
        elif not link.probes.moving:
            link.probes = None
            self._say(link, now)

    def on_connected(self, other: Connect, now: float) -> None:
        """Both roles of a pair share one data connection, and as a target that peer has just announced its endpoints.

        If they differ from those of our own link to it, one of the two messages was delayed and is outdated, and it
        cannot be known which: the next need asks.
        """
        link = self.by_worker.get(other.peer.worker)
        if link is None or link.peer != other.peer or link.transport is None or link.transport.name != other.transport:
            return
        if link.endpoints != other.endpoints:
            self.desk.count("links_in_doubt")
            self.send(link, Goodbye())
            self.lose(link, Reason.WRONG_INCARNATION, "the source's data plane has moved, or it says so late", now)

    def fence(self, link: Link, now: float) -> None:
        """Shut that peer out of our memory; everything that it may still be writing comes to rest with it."""
        # The last resort where a peer cannot be asked: it may be dead, partitioned, or still writing. Its access is
        # closed rank by rank, and only when all of them have confirmed may the blocks be reused (rule 14).
        if link.fencing:
            return
        assert link.peer is not None and link.transport is not None and link.plan is not None
        sources = [rank_peer(link.peer, n) for n in range(len(link.plan.source.ranks))]
        ours = range(len(self.desk.identity.layout.ranks))
        link.fencing = {(rank, source) for rank in ours for source in sources}
        self.fencing.append(link)
        self.desk.count("fences")
        for rank, source in sorted(link.fencing):
            self.desk.emit(StartFence(rank, link.transport.name, source))
        self.on_fence(link.peer, now)
        self.lose(link, Reason.PEER_GONE, "fenced after it did not confirm that it had stopped writing", now)

    def on_fenced(self, rank: int, peer: PeerId, now: float) -> None:
        """One fence has ended: the oldest that waits for this rank and peer, never a later one of the same pair."""
        link = next((each for each in self.fencing if (rank, peer) in each.fencing), None)
        if link is None:
            self.desk.count("late.fence")
            return
        link.fencing.discard((rank, peer))
        if not link.fencing:
            self.fencing.remove(link)
            self._watcher.on_link_fenced(link, now)

    def on_timer(self, worker: WorkerId, now: float) -> None:
        link = self.by_worker[worker]
        if link.probes is not None and now >= link.probed_until:
            self.avoid(link, "could not be opened in time", now)
        elif now >= link.greeting.deadline:
            self.lose(link, Reason.HANDSHAKE_TIMEOUT, f"worker {worker} did not answer the handshake", now)
        else:
            self._say(link, now)

    def say_goodbye(self, now: float) -> None:
        for link in list(self.by_worker.values()):
            if link.peer is not None:
                self.send(link, Goodbye())
            self.lose(link, Reason.PEER_GONE, "this node is leaving", now)

    def _say(self, link: Link, now: float) -> None:
        if link.state is LinkState.GREETING:
            card = self.desk.identity.card(self._worth_a_try(link, now) or None)  # all failed: better than none
            oldest = self.desk.identity.versions.oldest  # every node that reads any of ours reads that
            self.desk.send(link.worker, Incarnation(0), 0, Hello(link.greeting.nonce, card), oldest)
        elif link.probes is None:
            assert link.peer is not None and link.plan is not None and link.transport is not None
            invitation = Invitation(link.peer, link.transport.name, len(link.plan.source.ranks), _holder(link))
            message = Joined(())
            self.desk.emit(Send(link.worker, link.peer.incarnation, link.session, message, invitation, link.version))
        at = min(now + self.desk.settings.retry_s, link.greeting.deadline)
        self.desk.timers.set(("link", link.worker), at if link.probes is None else min(at, link.probed_until))

    def _is_shunned(self, link: Link, name: str, now: float) -> bool:
        return self.desk.identity.capabilities(name) is not None and name not in self._worth_a_try(link, now)

    def _shun_passed_over(self, link: Link, card: Card, now: float) -> None:
        """Better transports that both have and the source did not choose have failed there: tried again in a while."""
        assert link.transport is not None
        better = itertools.takewhile(link.transport.name.__ne__, card.transports)
        for plane in map(self.desk.identity.capabilities, better):
            if plane is not None and reaches(plane, self.desk.identity, card):
                self._shunned.add(link.worker, plane.name, now)

    def _may_improve(self, link: Link, now: float) -> bool:
        """Nothing is being read, and a transport that had failed may work by now."""
        if not link.choice.left_out or link.state is not LinkState.UP or not self._watcher.is_idle(link):
            return False
        return not any(self._is_shunned(link, name, now) for name in link.choice.left_out)

    def _worth_a_try(self, link: Link, now: float) -> tuple[str, ...]:
        return self._shunned.without(link.worker, self.desk.identity.transport_names, now)

    def _probe(self, link: Link, ranks: int, now: float) -> None:
        """Make every rank of ours open the transport to every rank of theirs, while nothing depends on it yet."""
        assert link.peer is not None and link.transport is not None
        link.probes = Parts(link)
        share_s = self.desk.settings.claim_timeout / (2 * len(self.desk.identity.transports))  # all get a turn in time
        link.probed_until = now + min(self.desk.settings.probe_timeout, share_s)
        for rank in range(len(self.desk.identity.layout.ranks)):
            moves = [Move(remote, 0, 0, array("q")) for remote in range(ranks)]
            self.desk.start(link.probes, link.transport.name, link.peer, Direction.READ, rank, moves)


def _ignored(peer: PeerId, now: float) -> None:
    """No other role concerns that peer."""


def _also_ignored(peer: PeerId, session: int, now: float) -> None:
    """This node is no source."""


def _holder(link: Link) -> Holder:
    return ("link", link.greeting.nonce)
