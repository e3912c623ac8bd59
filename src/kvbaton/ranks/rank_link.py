"""The engine's end of its rank links: one thread and one set of lines for all ranks of an engine.

    links = RankLinks([RankInvitation.decode(data) for data in invitations]); links.start()
    node = Node(ledger, control, [links.transports(rank) for rank in range(len(invitations))], doorway,
                extra=links.drain_progress)

A rank whose host lives in this very process (vLLM with one worker) gets no messages: its transports are taken from it,
and the node drives them itself. That saves each command and each end two threads and a trip through the kernel. Such a
rank cannot be lost without this process. Its store, if it has one, is reached over the sockets like every other's, and
so is a rank whose transports another engine has.

Laws: what is posted for a rank arrives in that order, once, or is still in flight (`rank_stream`, whose window is
smaller than a socket queue, so that none of it is lost at a full one). A rank is lost when it left all pings of
`lost_s` unanswered: its copies then end, not at rest, and new ones fail at once. Pings are counted, not seconds, so a
stall of this process loses no rank; a rank that stalls for less than `lost_s` loses nothing. A rank that answers again
is back. `rank_store_link` says what a loss means for store orders; frames and turns are carried by `rank_carrying`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence

import msgspec

from kvbaton.observe.codes.entry import worth_saying
from kvbaton.observe.metrics.handoff_metrics import data_refused
from kvbaton.protocol.events import LeaseProgressed
from kvbaton.protocol.ids import LeaseId, PeerId, rank_peer
from kvbaton.ranks.rank_host import RankHost, host_of
from kvbaton.ranks.rank_messages import Command, News, Open, Progressed, RankInvitation, decode_news, encode_command
from kvbaton.ranks.rank_store_link import RemoteRankStore
from kvbaton.ranks.rank_store_messages import RankStoreNews
from kvbaton.ranks.rank_stream import SOCKETS, Carrier, Clock, Stream
from kvbaton.ranks.rank_transport import RemoteTransport
from kvbaton.transports.core.transport import Transport, refusals_of

log = logging.getLogger(__name__)

PING_S = 2.0
LOST_S = 15.0
LEASES_MAX = 4096
"""Of one rank, whose progress was not drained. Of each only the latest is kept; at the bound the oldest is dropped, and
its handoff then ends by its deadline."""


class RankLink:
    """One rank as the engine sees it. `post` from any thread; the rest on the link's."""

    def __init__(
        self,
        invitation: RankInvitation,
        wake: Callable[[], None],
        pings_max: int,
        ping_s: float,
        tell: Callable[[], None] = lambda: None,
        carrier: Carrier = SOCKETS,
    ) -> None:
        """`wake`: wakes the link's thread; `tell`: wakes the consumer of progress."""
        self.rank = invitation.rank
        self.lost = False
        self.counters: Counter[str] = Counter()  # losses, malformed
        self.transports = {
            name: RemoteTransport(name, able, self, carrier.arrival()) for name, able in invitation.capabilities.items()
        }
        self.store = RemoteRankStore(self) if invitation.has_store else None
        self.stream = Stream(carrier.session())
        self._wake = wake
        self._tell = tell
        self._pings_max = pings_max
        self._ping_s = ping_s
        self._pings = 0  # sent since the rank was last heard
        self._ping_at = -math.inf
        self._outbox: deque[bytes] = deque()
        self._lock = threading.Lock()  # the parts of one copy stay together
        self.leases_max = LEASES_MAX
        self._progress: dict[LeaseId, LeaseProgressed] = {}

    @property
    def backlog(self) -> int:
        return len(self._outbox) + self.stream.backlog

    def post(self, commands: Sequence[Command]) -> None:
        bodies = [encode_command(command) for command in commands]
        with self._lock:
            self._outbox.extend(bodies)
        self._wake()

    def take(self, frame: bytes, now: float) -> None:
        """A frame of the rank, which is alive then. One that cannot be decoded may have contained the end of any
        copy."""
        before = self.stream.heard
        try:
            body = self.stream.take(frame, now)
            if self.stream.heard > before:
                self._heard()
            news = decode_news(body) if body is not None else []
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.counters["malformed"] += 1
            if worth_saying(self.counters["malformed"]):
                log.error("[rank-unreadable] rank %d sent a message that cannot be decoded: %s", self.rank, error)
            self.end(f"rank {self.rank} sent a message that cannot be decoded")
            return
        for each in news:
            self._take_news(each)

    def due(self, now: float) -> list[bytes]:
        """The frames to send now, after checking whether the rank is still alive."""
        if now >= self._ping_at:
            if self._pings >= self._pings_max and not self.lost:
                self._lose()
            self._pings += 1
            self._ping_at = now + self._ping_s
            self.stream.ask()
        while self._outbox:
            self.stream.add(self._outbox.popleft())
        return self.stream.due(now)

    @property
    def next_ping(self) -> float:
        return self._ping_at

    def take_progress(self) -> list[LeaseProgressed]:
        with self._lock:
            found = list(self._progress.values())
            self._progress.clear()
        return found

    def _heard(self) -> None:
        self._pings = 0
        if self.lost:
            self.lost = False
            log.warning("[rank-back] rank %d is back", self.rank)
            if self.store is not None:
                self.store.on_back()

    def _lose(self) -> None:
        self.counters["losses"] += 1
        detail = f"rank {self.rank} did not answer {self._pings} pings; the state of its memory is unknown"
        log.error("[rank-lost] %s", detail)
        self.end(detail)

    def end(self, detail: str) -> None:
        """From now on nothing is started; copies in flight end, and whether they are at rest is unknown."""
        self.lost = True
        for transport in self.transports.values():
            transport.on_lost(detail)
        if self.store is not None:
            self.store.on_lost(detail)

    def stop(self, detail: str) -> None:
        """Nothing more will arrive from the rank."""
        self.end(detail)
        if self.store is not None:
            self.store.on_stopped(detail)

    def _take_news(self, news: News) -> None:
        if isinstance(news, Progressed):
            with self._lock:
                self._progress.pop(news.lease, None)
                if len(self._progress) >= self.leases_max:
                    self.counters["progress_lost"] += 1
                    del self._progress[next(iter(self._progress))]
                self._progress[news.lease] = LeaseProgressed(news.lease, self.rank, news.progress)
            self._tell()
        elif isinstance(news, RankStoreNews):
            if self.store is not None:
                self.store.take(news)
        elif news.transport in self.transports:
            self.transports[news.transport].take(news)


class RankLinks:
    """The links to all ranks of one engine. Construct, `start`, hand `transports` to a node; `stop` after the node."""

    def __init__(
        self,
        invitations: Sequence[RankInvitation],
        ping_s: float = PING_S,
        lost_s: float = LOST_S,
        clock: Clock = time.monotonic,
        me: PeerId | None = None,
        tell: Callable[[], None] = lambda: None,
        carrier: Carrier = SOCKETS,
    ) -> None:
        """With `me`, the ranks' transports are told whose they are, before anything else. `tell` is called, from any
        thread, when there is progress to drain."""
        ranks = [invitation.rank for invitation in invitations]
        if not ranks or sorted(ranks) != list(range(len(ranks))):
            raise ValueError(f"invitations: got ranks {ranks}; expected one for each rank 0..n-1")
        self._lines = carrier.dial(invitations, clock)
        self._thread = carrier.loop("kvbaton-ranks", self._lines, self._turn, self._finish, clock)
        self._clock = clock
        self._refusals_told: list[Mapping[str, int]] = []
        self._refused: Mapping[str, int] = {}
        self._links: dict[int, RankLink] = {}
        self._near: dict[int, RankHost] = {}
        self._transports: dict[int, Mapping[str, Transport]] = {}
        pings_max = max(1, math.ceil(lost_s / ping_s) - 1)
        for invitation in sorted(invitations, key=lambda invitation: invitation.rank):
            link = RankLink(invitation, self._lines.wake, pings_max, ping_s, tell, carrier)
            self._add(invitation, link, me, tell)

    def _add(self, invitation: RankInvitation, link: RankLink, me: PeerId | None, tell: Callable[[], None]) -> None:
        rank, host = invitation.rank, host_of(invitation)
        planes = host.give(invitation, link.stream.session, tell) if host is not None else None
        named = [Open(name, rank_peer(me, rank)) for name in link.transports] if me is not None else []
        if host is None or planes is None:
            self._links[rank], self._transports[rank] = link, link.transports
            link.post(named)
            return
        self._near[rank] = host
        self._transports[rank] = {name: plane.transport for name, plane in planes.items()}
        for command in named:
            planes[command.transport].carry_out(command)
        if link.store is not None:
            link.transports = {}
            self._links[rank] = link

    def __len__(self) -> int:
        return len(self._transports)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 5.0) -> bool:
        """End the links after sending what is queued; False when that took longer than `timeout_s`."""
        return self._thread.stop(timeout_s)

    def transports(self, rank: int) -> Mapping[str, Transport]:
        """The transports of one rank, by name."""
        return self._transports[rank]

    def store(self, rank: int) -> RemoteRankStore | None:
        """The rank's access to a shared store, if it has one."""
        return self._links[rank].store if rank in self._links else None

    def drain_progress(self) -> list[LeaseProgressed]:
        """Progress of the ranks' devices since the last call."""
        near = [(rank, each) for rank, host in self._near.items() for each in host.take_progress()]
        far = [event for link in self._links.values() for event in link.take_progress()]
        return [*(LeaseProgressed(each.lease, rank, each.progress) for rank, each in near), *far]

    def data_refused(self) -> Mapping[str, int]:
        """`metrics.node.data_refused` of all ranks, for one thread that polls often: summed again when there is
        news."""
        told = [_refusals(each) for rank in self._transports.values() for each in rank.values()]
        if told != self._refusals_told:
            self._refusals_told = told
            self._refused = data_refused(self._transports.values())
        return self._refused

    def mapped_bytes(self) -> int:
        """Device memory of other processes that all ranks have mapped."""
        return sum(each.mapped_bytes for link in self._links.values() for each in link.transports.values())

    def is_lost(self, rank: int) -> bool:
        return rank not in self._near and self._links[rank].lost

    @property
    def counters(self) -> Counter[str]:
        """losses, malformed, progress_lost, connects_refused; refused, repeated, resent, gaps; those of the lines."""
        found = Counter(self._lines.counters)
        for link in self._links.values():
            found += link.counters + link.stream.counters
            for transport in link.transports.values():
                found += transport.counters
        return found

    def _turn(self, now: float) -> float | None:
        for rank, frame in self._lines.receive():
            self._links[rank].take(frame, now)
        for rank, link in self._links.items():
            for frame in link.due(now):
                self._lines.send(rank, frame)
        return min((link.next_ping for link in self._links.values()), default=None)

    def _finish(self) -> None:
        try:
            self._turn(self._clock())
            for rank, link in self._links.items():
                link.stop(f"the link to rank {rank} was stopped")
        finally:
            self._lines.close()


def _refusals(transport: Transport) -> Mapping[str, int]:
    """Counters reported by a rank are stable; those of a transport in this process are not."""
    return transport.refusals if isinstance(transport, RemoteTransport) else refusals_of(transport)
