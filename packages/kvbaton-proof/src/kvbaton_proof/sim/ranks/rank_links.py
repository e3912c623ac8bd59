"""The ranks of one simulated engine in processes of their own, behind the production rank links.

`RankHost` drives the simulated data planes in each rank's process, `RankLinks` gives the node its transports; between
them is a seeded channel (`rank_channel`). A rank may also be *near*: its engine lives in its process, and takes the
planes.

Laws: a rank's process can stall, die, hang for good and be cut off, apart from its engine's. When it dies, its copies
and its memory are gone with it, and its devices compute nothing more; the engine dies of that in the end, as vLLM does,
but not at once. Another process may be given its place and even its keys: it has none of its memory and of its past.
What must be true of all that is in `rank_checks` and, of each data plane, in `rank_watch`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import cast

import msgspec

from kvbaton.protocol.geometry.progress import Progress
from kvbaton.protocol.ids import JobId, LeaseId, PeerId
from kvbaton.ranks import rank_host
from kvbaton.ranks.rank_host import RankHost
from kvbaton.ranks.rank_link import LEASES_MAX, RankLinks
from kvbaton.ranks.rank_messages import SPAN_BYTES, RankDisconnect, RankInvitation
from kvbaton.ranks.rank_planes import WAITING_MAX
from kvbaton.ranks.rank_store_messages import ORDERS_MAX, RankStoreAsk
from kvbaton.ranks.rank_stream import Clock, Stream
from kvbaton.ranks.rank_transport import COMMANDS_MAX, RemoteTransport
from kvbaton.transports.core.transport import Capabilities, Copy, Transport, TransportEvent
from kvbaton.transports.core.wrapped import UnnamedTransport
from kvbaton_proof.sim.promises import STRANGER, Broken
from kvbaton_proof.sim.ranks.rank_channel import ChannelFaults, SimCarrier, SimProcess
from kvbaton_proof.sim.ranks.rank_ports import ReportFaults, ReportingPlane, WatchedPort
from kvbaton_proof.sim.ranks.sim_rank_store import COMPAT, RankStore, ShelfFetching, make_shelf, values_of
from kvbaton_proof.sim.world.sim_engine import SimEngine
from kvbaton_proof.sim.world.sim_transport import KINDS, SimTransport
from kvbaton_proof.sim.world.world import World

TIGHT_PART_ROWS, TIGHT_WINDOW = 2, 8
TELLS_AGAIN_S = 0.25
EXCUSED = (TimeoutError, ConnectionError, RuntimeError)
"""What a port behind a link may throw at the node: the rank is slow, is lost, or could not make an endpoint."""


class RankTraits(msgspec.Struct, frozen=True):
    """What stays the same of an engine's ranks over its lives."""

    near: bool = False
    ping_s: float = 1.0
    lost_s: float = 4.0
    store: bool = False  # they reach a shared store
    tight: bool = False  # tables in many parts, batches of little, queues that are soon full
    bounded: bool = False  # bounds are met at which something is refused or forgotten
    throws: float = 0.0
    double: float = 0.0
    garble: float = 0.0
    stray: float = 0.0
    slow: float = 0.0
    strange: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    tells: bool = False  # of chunks as of layers, each rank for itself and nobody for all


class Rank:
    """One rank's process."""

    def __init__(self, number: int, planes: Mapping[str, ReportingPlane]) -> None:
        self.number = number
        self.planes = planes
        self.process = SimProcess()
        self.host: RankHost | None = None
        self.stalled_s = 0.0  # the longest stall so far
        self.dead_since = float("inf")

    def stall(self, stalled: bool) -> None:
        """Or go on."""
        for plane in self.planes.values():
            plane.inner.paused = stalled
        self.process.pause(stalled)

    def die(self, now: float) -> None:
        self.process.alive = False
        self.dead_since = now
        for plane in self.planes.values():
            plane.inner.alive = False


class LinkedRanks:
    """All ranks of one engine in one life."""

    def __init__(
        self,
        world: World,
        me: PeerId,
        traits: RankTraits,
        transports: Sequence[Mapping[str, SimTransport]],
        clock: Clock,
        pace: float,
        wake: Callable[[], None],
        store: RankStore | None = None,
    ) -> None:
        self.store = store
        self.world = world
        self.me = me
        self.traits = traits
        self._clock = clock
        faults = ChannelFaults(traits.double, traits.garble, traits.stray, traits.slow, traits.strange, traits.ping_s)
        seed = f"kvbaton-sim-{world.seed}-ranks-{me}"
        self.carrier = SimCarrier(world, str(me.worker), faults, pace, seed)
        self.reports = ReportFaults() if traits.near else ReportFaults(traits.twice, traits.late, traits.throws)
        self.ranks = [self._rank(number, planes) for number, planes in enumerate(transports)]
        for rank in self.ranks:
            rank.host = self._host(rank)
        invitations = [RankInvitation.decode(rank.host.invitation.encode()) for rank in self.ranks if rank.host]
        self.links = RankLinks(
            invitations, traits.ping_s, traits.lost_s, clock=clock, me=me, tell=wake, carrier=self.carrier
        )
        shelves = [shelf for rank in self.ranks if (shelf := self.links.store(rank.number)) is not None]
        self.shelf = make_shelf(shelves, store) if store is not None else None
        self.shelves = shelves
        self.ports = [self._ports(rank, wake) for rank in self.ranks]
        for rank in self.ranks:
            assert rank.host is not None
            self._try_to_take(rank.host)
            rank.host.start()
        self.links.start()
        self._bound()

    @property
    def is_crippled(self) -> bool:
        """One is gone for good."""
        return any(rank.dead_since < float("inf") for rank in self.ranks)

    def is_busy(self, number: int) -> bool:
        """Whether something is under way in that rank's process."""
        kept = self.store.kept.get(number) if self.store is not None else None
        return any(plane.inner._jobs for plane in self.ranks[number].planes.values()) or bool(kept and kept.is_busy)

    def progressed(self, lease: LeaseId, progress: Progress, rank: int) -> None:
        """A rank's device is so far; its process says so if there is one, and later where it must."""
        host, process = self.ranks[rank].host, self.ranks[rank].process
        if host is not None and process.runs:
            host.progressed(lease, progress)
        elif self.traits.tells and process.alive:
            self.world.after(TELLS_AGAIN_S, partial(self.progressed, lease, progress, rank))

    def shelve(self, engine: SimEngine, wake: Callable[[], None]) -> None:
        """Have an engine put and get by way of its ranks, where they reach the store."""
        if self.shelf is not None and self.store is not None:
            self.shelf.wake_engine = wake
            engine.fetching = ShelfFetching(
                self.world, engine.pool, engine.device, engine._fetched, self.shelf, self.store
            )
            engine.values_of = partial(values_of, engine.shape.block_tokens)

    # --- what befalls them

    def stall(self, number: int, stall_s: float) -> None:
        rank = self.ranks[number]
        if rank.process.runs:
            rank.stalled_s = max(rank.stalled_s, stall_s)
            rank.stall(True)
            self.world.after(stall_s, lambda: self._resume(rank))

    def _resume(self, rank: Rank) -> None:
        if rank.process.alive and rank.dead_since == float("inf"):
            rank.stall(False)

    def kill(self, number: int) -> None:
        self.ranks[number].die(self.world.now)
        self.carrier.channels[number].haunt(self.traits.ping_s)

    def hang(self, number: int) -> None:
        """It lives, and is never heard of again."""
        self.ranks[number].stall(True)
        self.ranks[number].dead_since = self.world.now

    def pause_engine(self, paused: bool) -> None:
        self.carrier.engine.pause(paused)
        for rank in self.ranks:
            if rank.dead_since < float("inf"):
                rank.dead_since = self.world.now
        if self.traits.near:
            for rank in self.ranks:
                rank.stall(paused)

    def crash(self) -> None:
        """The engine's process is gone, and its ranks with it."""
        self.carrier.engine.alive = False
        for rank in self.ranks:
            rank.die(self.world.now)

    def leave(self) -> None:
        """The engine has closed its data planes; the links say the rest, and the ranks end."""
        if self.shelf is not None:
            self.shelf.close()
        self.links.stop()
        self.carrier.pump()
        for rank in self.ranks:
            if rank.process.runs and rank.host is not None:
                rank.host.stop()

    def replace(self, number: int) -> None:
        """Another process is given the place and the keys of a rank that is gone; none of its memory is there."""
        if not self.carrier.engine.alive or not self.links._links[number].stream.heard:
            return
        self.world.faults["rank_replaced"] += 1
        vacant = {name: Vacant(f"{self.me.worker} rank {number}", KINDS[name]) for name in self.ranks[number].planes}
        host = RankHost(number, vacant, clock=self._clock, carrier=self.carrier.within(SimProcess()))
        del rank_host._HERE[host.invitation.rank_public]
        host.start()

    def heal(self) -> None:
        """No more faults; who is dead stays dead."""
        self.carrier.faults = ChannelFaults()
        self.reports.twice = self.reports.late = self.reports.throws = 0.0
        self._loosen()
        if self.store is not None:
            self.store.fails = 0.0
        for rank in self.ranks:
            self._resume(rank)

    # --- making

    def _rank(self, number: int, transports: Mapping[str, SimTransport]) -> Rank:
        planes = {name: ReportingPlane(each, self.carrier, self.reports) for name, each in transports.items()}
        return Rank(number, planes)

    def _host(self, rank: Rank) -> RankHost:
        planes: dict[str, Transport] = {
            name: cast(Transport, plane)
            if self.traits.bounded  # made with a name, and told it all the same
            else UnnamedTransport(KINDS[name], self._named(plane))
            for name, plane in rank.planes.items()
        }
        carrier = self.carrier.within(rank.process if not self.traits.near else self.carrier.engine)
        process, shelf = carrier.listening, None
        if self.store is not None:
            shelf = self.store.maker(self.carrier, rank.number, process, self._clock)
        host = RankHost(rank.number, planes, clock=self._clock, store=shelf, carrier=carrier)
        if not self.traits.near:
            del rank_host._HERE[host.invitation.rank_public]  # as in another process
        return host

    def _named(self, plane: ReportingPlane) -> Callable[[PeerId], Transport]:
        def make(me: PeerId) -> Transport:
            if me != plane.inner.me:
                raise Broken(STRANGER, f"{plane.inner.me}: a data plane was told to be {me}")
            return plane

        return make

    def _tighten(self, transport: RemoteTransport) -> None:
        if self.traits.tight:
            transport.part_bytes = TIGHT_PART_ROWS * SPAN_BYTES
            transport.tables_bytes_max = 4 * transport.part_bytes
            transport._jobs._copies_max = 3
            self._note_queued(transport)

    def _note_queued(self, transport: RemoteTransport) -> None:
        """A copy that waits for room behind another has that one's fate."""
        submit = transport.submit

        def submitted(copy: Copy) -> bool:
            is_accepted = submit(copy)
            if not is_accepted:
                plane = self.ranks[transport._link.rank].planes[transport._name].inner
                plane.fabric.on_fate(plane, copy, "queued_copy", 0.0)
            return is_accepted

        transport.submit = submitted  # type: ignore[method-assign]

    def _bound(self) -> None:
        """Make bounds small; and ask for what this rank does not have, which is refused and costs nobody anything."""
        for rank in self.ranks:
            assert rank.host is not None
            if self.traits.tight:
                rank.host.batch_max = 1
                _tighten(rank.host._stream)
            if self.traits.bounded:
                rank.host.leases_max = 1
                for plane in rank.host._planes.values():
                    plane.waiting_max = 1
        for link in self.links._links.values() if self.traits.tight else ():
            _tighten(link.stream)
        for link in self.links._links.values() if self.traits.bounded else ():
            link.leases_max = 1
            if link.store is not None:
                link.store.orders_max = 2
                link.store.open(COMPAT)
            for transport in link.transports.values():
                transport.commands_max = 8
            link.post([RankDisconnect("nowhere", self.me), RankStoreAsk(0)])

    def _loosen(self) -> None:
        """Bounds as they are, so that nothing is refused any more."""
        for rank in self.ranks:
            if rank.host is not None:
                rank.host.leases_max = LEASES_MAX
                for plane in rank.host._planes.values():
                    plane.waiting_max = WAITING_MAX
        for link in self.links._links.values():
            link.leases_max = LEASES_MAX
            if link.store is not None:
                link.store.orders_max = ORDERS_MAX
            for transport in link.transports.values():
                transport.commands_max = COMMANDS_MAX

    def _try_to_take(self, host: RankHost) -> None:
        """A second engine with the same invitation gets nothing, nor one with another; nobody is shown the secret."""
        shown = f"{host.invitation} {host.invitation.__rich_repr__()}"
        if host.invitation.engine_secret in shown:
            raise Broken(STRANGER, f"{self.me.worker}: the secret of an invitation is shown: {shown}")
        other = msgspec.structs.replace(host.invitation, engine_secret="0" * 40)
        if self.traits.near and (host.give(host.invitation, 1, _nobody) or host.give(other, 1, _nobody)):
            raise Broken(STRANGER, f"{self.me.worker}: a rank's data planes were given to two")

    def _ports(self, rank: Rank, wake: Callable[[], None]) -> dict[str, WatchedPort]:
        found = {}
        for name, transport in self.links.transports(rank.number).items():
            port = WatchedPort(f"{self.me.worker} rank {rank.number} {name}", transport, rank.planes[name])
            transport.set_waker(wake)
            rank.planes[name].inner.lends_late = not self.traits.near
            if isinstance(transport, RemoteTransport):
                self._tighten(transport)
            found[name] = port
        return found


class Vacant:
    """A data plane of somebody to whom nothing was ever said."""

    def __init__(self, name: str, capabilities: Capabilities) -> None:
        self.capabilities = capabilities
        self._name = name

    def drain(self) -> Sequence[TransportEvent]:
        return ()

    def set_waker(self, waker: Callable[[], None]) -> None:
        pass

    def cancel(self, job: JobId) -> None:
        pass

    def close(self) -> None:
        pass

    def disconnect(self, peer: PeerId) -> None:
        pass

    def endpoint(self, peer: PeerId) -> bytes:
        raise self._stranger("an endpoint")

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        raise self._stranger("a connection")

    def submit(self, copy: Copy) -> bool:
        raise self._stranger("a copy")

    def fence(self, peer: PeerId) -> None:
        raise self._stranger("a fence")

    def _stranger(self, what: str) -> Broken:
        return Broken(
            STRANGER, f"{self._name}: {what} was meant for a rank that is gone, and another in its place has it"
        )


def _tighten(stream: Stream) -> None:
    stream.window_max, stream.answer_frames = TIGHT_WINDOW, TIGHT_WINDOW // 4


def _nobody() -> None:
    """Whoever is told of nothing."""
