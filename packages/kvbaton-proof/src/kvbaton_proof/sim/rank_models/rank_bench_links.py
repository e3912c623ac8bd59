"""The engine's end of its rank links on the bench (`rank_link`), with streams, planes and ranks that are made up.

Laws of the model: what is posted is sent in that order. A rank is asked every `ping_s`, and lost when as many pings as
fit before `lost_s` were left unanswered, or when it said what cannot be read; all of its planes and its shelf hear of
that, each time. It is back when it is heard. News goes to the plane or the shelf that it is of; of each lease the
latest progress is kept, of so many as may be. Each frame goes to its rank and comes from it. A rank of this process
gives its planes, and is never lost. Figures are those of all ranks together.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any, cast

from kvbaton.observe.metrics.node_metrics import data_refused
from kvbaton.protocol.events import LeaseProgressed
from kvbaton.protocol.geometry.progress import whole
from kvbaton.protocol.ids import JobId, LeaseId, rank_peer
from kvbaton.ranks import rank_link
from kvbaton.ranks import rank_messages as said
from kvbaton.ranks import rank_store_messages as store
from kvbaton.ranks.rank_carrying import Carrier
from kvbaton.ranks.rank_host import _HERE, RankHost
from kvbaton.ranks.rank_link import LEASES_MAX, RankLink, RankLinks
from kvbaton.ranks.rank_store_link import RemoteShelf
from kvbaton.ranks.rank_stream import Stream
from kvbaton.ranks.rank_transport import RemoteTransport
from kvbaton.ranks.store_interface import RankStoreInterface
from kvbaton.transports.core.transport import Transport
from kvbaton_proof.sim.rank_models.rank_bench import ANYTHING, PEERS, Raised, listened, outcome, same, worth
from kvbaton_proof.sim.rank_models.rank_bench_host import BAD, NOTHING, StubCarrier, StubStream
from kvbaton_proof.sim.rank_models.rank_bench_plane import Scripted
from kvbaton_proof.sim.world.sim_transport import SHM, TCP

STEPS = 50
LEASES = 3
PING_S = 1.0
UNREADABLE = b"\xc1"
KEYS = ("1" * 40, "2" * 40, "3" * 40)
ABLE = {"a": TCP, "b": SHM}


class _Spy:
    """A plane or a shelf that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.heard.append((name, *args))


class _HearingStream(StubStream):
    """The first letter of a frame says whether it counts as heard."""

    def take(self, frame: bytes, now: float) -> bytes | None:
        self.heard += frame[:1] == b"h"
        return super().take(frame[1:], now)


class _Link:
    """A link and its model."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.wakes = self.tells = 0
        self.pings_max = rng.randrange(1, 4)
        invitation = said.RankInvitation(2, "tcp://127.0.0.1:5000", *KEYS, ABLE, rng.random() < 0.6)
        carrier = StubCarrier(rng)
        self.real = RankLink(
            invitation, self._wake, self.pings_max, PING_S, self._tell, cast(Carrier, carrier)
        )  # fmt: skip
        session = self.real.stream.session
        same("the session of a link", session, carrier.session() - 1)
        same("what a link is made of", list(self.real.transports), list(ABLE))
        same("the shelf of a rank", self.real.shelf is not None, invitation.has_shelf)
        same("leases at most", self.real.leases_max, LEASES_MAX)
        self.real.leases_max = LEASES
        self.stream = _HearingStream()
        self.real.stream = cast(Stream, self.stream)
        self.spies = {name: _Spy() for name in ABLE}
        self.real.transports = cast("dict[str, RemoteTransport]", self.spies)
        if invitation.has_shelf:
            self.spies["shelf"] = _Spy()
            self.real.transports = cast("dict[str, RemoteTransport]", {name: self.spies[name] for name in ABLE})
            self.real.shelf = cast(RemoteShelf, self.spies["shelf"])
        self.has_shelf = invitation.has_shelf
        self.heard: dict[str, list[tuple[Any, ...]]] = {name: [] for name in self.spies}
        self.lost = False
        self.pings = self.backs = 0
        self.ping_at = -math.inf
        self.outbox: list[bytes] = []
        self.sent: list[bytes] = []
        self.asked = 0
        self.counters: Counter[str] = Counter()
        self.progress: dict[LeaseId, LeaseProgressed] = {}
        self.expected_wakes = self.expected_tells = 0

    def _wake(self) -> None:
        self.wakes += 1

    def _tell(self) -> None:
        self.tells += 1

    def post(self) -> None:
        commands: list[said.Command] = [
            said.Cancel("a", JobId(self.rng.randrange(9))) for _ in range(self.rng.randrange(4))
        ]
        self.outbox += [said.encode_command(command) for command in commands]
        self.expected_wakes += 1
        self.real.post(commands)
        self.stream.backlog = self.rng.randrange(5)
        same("commands that a rank may lack", self.real.backlog, len(self.outbox) + self.stream.backlog)

    def take(self) -> None:
        news = [self._any_news() for _ in range(self.rng.randrange(6))]
        body = self.rng.choice((said.encode_news(news), said.encode_news(news), BAD, NOTHING, UNREADABLE))
        is_heard = self.rng.random() < 0.5 and body != BAD
        if is_heard:
            self.pings = 0
            if self.lost:
                self.lost = False
                self.backs += 1
                if self.has_shelf:
                    self.heard["shelf"].append(("on_back",))
        if body in (BAD, UNREADABLE):
            self.counters["malformed"] += 1
            self._end()
        elif body != NOTHING:
            for each in news:
                self._take_news(each)
        self.real.take((b"h" if is_heard else b"-") + body, self.now)

    def _any_news(self) -> said.News:
        lease = LeaseId(self.rng.randrange(LEASES + 3))
        if self.rng.random() < 0.4:
            return said.Progressed(lease, whole([self.rng.randrange(9)]))
        return self.rng.choice(
            (
                said.Rested(self.rng.choice(("a", "b", "nobody")), JobId(1)),
                said.Rested(self.rng.choice(("a", "b")), JobId(self.rng.randrange(9))),
                store.ShelfEnded(self.rng.randrange(9), 1, None, ""),
            )
        )

    def _take_news(self, news: said.News) -> None:
        if isinstance(news, said.Progressed):
            self.progress.pop(news.lease, None)
            if len(self.progress) >= LEASES:
                del self.progress[next(iter(self.progress))]
                self.counters["progress_lost"] += 1
            self.progress[news.lease] = LeaseProgressed(news.lease, 2, news.progress)
            self.expected_tells += 1
        elif isinstance(news, store.ShelfNews):
            if self.has_shelf:
                self.heard["shelf"].append(("take", news))
        elif news.transport in self.heard:
            self.heard[news.transport].append(("take", news))

    def _end(self, detail: str = ANYTHING) -> None:
        self.lost = True
        for heard in self.heard.values():
            heard.append(("on_lost", detail))

    def due(self) -> None:
        self.now += self.rng.choice((0, PING_S / 2, PING_S))
        if self.now >= self.ping_at:
            if self.pings >= self.pings_max and not self.lost:
                self.counters["losses"] += 1
                self._end()
            self.pings += 1
            self.ping_at = self.now + PING_S
            self.asked += 1
        sent, self.outbox = self.outbox, []
        same("frames that are due", self.real.due(self.now), sent)
        same("the next ping", self.real.next_ping, self.ping_at)

    def take_progress(self) -> None:
        same("progress of a rank", self.real.take_progress(), list(self.progress.values()))
        self.progress.clear()

    def stop(self) -> None:
        self._end("why")
        if self.has_shelf:
            self.heard["shelf"].append(("on_stopped", "why"))
        self.real.stop("why")

    def compare(self) -> None:
        same("is lost", self.real.lost, self.lost)
        same("what planes and shelf heard", {name: spy.heard for name, spy in self.spies.items()}, self.heard)
        same("pings", self.stream.asked, self.asked)
        same("counters of a link", +self.real.counters, +self.counters)
        same("how often others were woken", (self.wakes, self.tells), (self.expected_wakes, self.expected_tells))


def _bench_link(rng: random.Random) -> int:
    link = _Link(rng)
    steps = (link.post, link.take, link.take, link.due, link.due, link.due, link.take_progress)
    for _ in range(STEPS):
        rng.choice(steps)()
        link.compare()
    link.stop()
    link.compare()
    return worth(link.counters["malformed"]) + link.counters["losses"] + link.backs


bench_link = listened(rank_link, _bench_link)


# --- all of an engine's ranks


class _Links:
    """Ranks elsewhere, and some of this process, of which one may have given its planes to another engine."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.now = 0.0
        self.carrier = StubCarrier(rng)
        self.count = rng.randrange(1, 4)
        self.here = [rank for rank in range(self.count) if rng.random() < 0.6]
        self.taken = rng.choice((-1, -1, *self.here))
        self.near = [rank for rank in self.here if rank != self.taken]
        self.has_shelf = rng.random() < 0.5
        self.hosts: dict[int, RankHost] = {}
        self.planes = {rank: {name: Scripted() for name in ABLE} for rank in self.here}
        self.tells = 0
        invitations = [self._invitation(rank) for rank in range(self.count)]
        rng.shuffle(invitations)
        self.me = rng.choice((None, PEERS[0]))
        self.lost_s = rng.choice((0.5, 1.0, 1.5, 3.0, 4.5))
        self.real = RankLinks(
            invitations, PING_S, self.lost_s, lambda: self.now, self.me, self._tell, cast(Carrier, self.carrier)
        )
        self.line = self.carrier.lines[-1]
        self.loop = self.carrier.loops[-1]
        self.streams = self._stub_streams()

    def _tell(self) -> None:
        self.tells += 1

    def _invitation(self, rank: int) -> said.RankInvitation:
        if rank not in self.here:
            key = f"{rank}".rjust(40, "k")
            return said.RankInvitation(rank, "tcp://127.0.0.1:1", key, *KEYS[1:], ABLE, self.has_shelf)
        planes = cast("Mapping[str, Transport]", self.planes[rank])
        make = (lambda compat: cast(RankStoreInterface, None)) if self.has_shelf else None
        host = self.hosts[rank] = RankHost(rank, planes, shelf=make, carrier=cast(Carrier, self.carrier))
        if rank == self.taken:
            host.give(host.invitation, 1, self._tell)
        return host.invitation

    def _stub_streams(self) -> dict[int, _HearingStream]:
        found = {}
        for rank, link in self.real._links.items():
            found[rank] = _HearingStream()
            link.stream = cast(Stream, found[rank])
            link._ping_at = self.now + self.rng.randrange(1, 9)
        return found

    def check_made(self) -> None:
        far = [rank for rank in range(self.count) if rank not in self.near]
        spoken_to = [rank for rank in range(self.count) if rank not in self.near or self.has_shelf]
        same("ranks that are spoken to", sorted(self.real._links), spoken_to)
        same("how many ranks there are", len(self.real), self.count)
        same("who sleeps between turns", self.carrier.sleepers[-1], self.line)
        pings = max(1, math.ceil(self.lost_s / PING_S) - 1)
        for rank in far:
            link = self.real._links[rank]
            same("pings that fit before a loss", (link._pings_max, link._ping_s), (pings, PING_S))
            same("the planes of a rank", self.real.transports(rank), link.transports)
            opens = [said.Open(name, rank_peer(self.me, rank)) for name in ABLE] if self.me is not None else []
            same("the first commands", list(link._outbox), [said.encode_command(each) for each in opens])
        for rank in range(self.count):
            shelf = self.real._links[rank].shelf if self.has_shelf else None
            same("the shelf of a rank", self.real.shelf(rank), shelf)
            same("ranks that are lost at first", self.real.is_lost(rank), False)
        for rank in self.near:
            self._check_near(rank)
            self.hosts[rank].progressed(LeaseId(6), whole([2]))
        both = [(LeaseId(5), whole([1])), (LeaseId(6), whole([2]))]
        expected = [LeaseProgressed(lease, rank, progress) for rank in self.near for lease, progress in both]
        same("progress of this process", self.real.drain_progress(), expected)
        self.real.start()
        same("links that were started", self.loop.started, 1)
        same("links that are stopped", (self.real.stop(), self.real.stop(0.5)), (True, False))
        same("how long a stop may take", self.loop.timeouts, [5.0, 0.5])

    def _check_near(self, rank: int) -> None:
        host = self.hosts[rank]
        same("planes of this process", self.real.transports(rank), self.planes[rank])
        same("whose session it is", host._stream.session > 1, True)
        faults = [plane.faults for plane in host._given.values()]
        same("planes that were told their name", faults, [int(self.me is not None)] * len(ABLE))  # they had one
        if self.has_shelf:
            same("planes that are spoken to", self.real._links[rank].transports, {})
        tells = self.tells
        host.progressed(LeaseId(5), whole([1]))
        same("progress of this process that is told", self.tells, tells + 1)

    def turn(self) -> None:
        """Each frame goes to its rank, and comes from it."""
        self.now += 1.0
        leases = []
        for rank, link in self.real._links.items():
            for lease in range(self.rng.randrange(3)):
                progress = whole([self.rng.randrange(9)])
                self.line.inbox.append((rank, b"h" + said.encode_news([said.Progressed(LeaseId(lease), progress)])))
                leases.append(LeaseProgressed(LeaseId(lease), rank, progress))
            for job in range(self.rng.randrange(3)):
                link.post([said.Cancel("a", JobId(job))])
        expected = [(rank, body) for rank, link in self.real._links.items() for body in link._outbox]
        pings = {rank: link.next_ping for rank, link in self.real._links.items()}
        due = [self.now + PING_S if at <= self.now else at for at in pings.values()]
        same("when to turn again", self.loop.turn(self.now), min(due, default=None))
        same("frames to ranks", self.line.sent, expected)
        self.line.sent.clear()
        same("progress of all ranks", self.real.drain_progress(), leases)
        same("progress that was taken", self.real.drain_progress(), [])

    def count_figures(self) -> None:
        """Of all ranks together; what this process counts itself is looked up each time."""
        far = [link for link in self.real._links.values() if link.transports]
        for link in far:
            for name, transport in link.transports.items():
                transport.mapped_bytes = self.rng.randrange(9)
                if self.rng.random() < 0.2:
                    transport.refusals = {"left": self.rng.randrange(3)}
                transport.counters["connects_refused"] += name == "b"
            link.counters["malformed"] += 1
        for stream in self.streams.values():
            stream.counters["gaps"] += 2
        for plane in (plane for planes in self.planes.values() for plane in planes.values()):
            plane.turned_away["full"] = self.rng.randrange(3)
            plane.mapped = 5
        mapped = sum(each.mapped_bytes for link in far for each in link.transports.values())
        same("mapped bytes of all ranks", self.real.mapped_bytes(), mapped)
        ranks = [self.real.transports(rank) for rank in range(self.count)]
        same("who was turned away", self.real.data_refused(), data_refused(ranks))
        same("sums that are made anew", self.real.data_refused() is self.real.data_refused(), True)
        told: Counter[str] = Counter(refused_frames=1)
        for link in self.real._links.values():
            told += link.counters + link.stream.counters
            for transport in link.transports.values():
                told += transport.counters
        same("counters of all ranks", self.real.counters, told)
        same("counters of all streams", told["gaps"] >= 2 * len(self.streams), True)

    def lose(self) -> None:
        for rank in self.real._links:
            self.real._links[rank].lost = self.rng.random() < 0.5
        for rank in range(self.count):
            lost = rank not in self.near and self.real._links[rank].lost
            same("is lost", self.real.is_lost(rank), lost)
        for link in self.real._links.values():
            link.lost = False

    def finish(self) -> None:
        """What is posted is sent, then nothing is heard any more; the lines are closed, whatever happens."""
        breaks = self.rng.random() < 0.3
        expected = []
        for rank, link in self.real._links.items():
            link.post([said.Cancel("a", JobId(1))])
            expected += [(rank, body) for body in link._outbox]
        if breaks:
            self.line.receive = lambda: 1 // 0  # type: ignore[method-assign,assignment,return-value]
        found = outcome(self.loop.finish, ZeroDivisionError)
        same("an end that breaks", found, Raised("ZeroDivisionError") if breaks else None)
        same("lines that are closed", self.line.closed, 1)
        if not breaks:
            same("the last frames", self.line.sent, expected)
            lost = [link.lost for link in self.real._links.values()]
            closed = [link.shelf._closed for link in self.real._links.values() if link.shelf is not None]
            same("ranks of whom something is still awaited", (all(lost), all(closed)), (True, True))


def bench_links(rng: random.Random) -> None:
    links = _Links(rng)
    try:
        links.check_made()
        steps = (links.turn, links.turn, links.count_figures, links.lose)
        for _ in range(8):
            rng.choice(steps)()
        links.count_figures()
        links.count_figures()
        links.finish()
    finally:
        for host in links.hosts.values():
            _HERE.pop(host.invitation.rank_public, None)
    for ranks in ((), (1,), (0, 0), (0, 2)):
        wrong = [said.RankInvitation(rank, "tcp://127.0.0.1:1", *KEYS, ABLE) for rank in ranks]
        carrier = cast(Carrier, StubCarrier(rng))
        made = outcome(partial(RankLinks, wrong, carrier=carrier), ValueError)
        same(f"invitations of ranks {ranks}", made, Raised("ValueError"))
