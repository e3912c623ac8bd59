"""A liar's hands: others' memory, reached for over the product's own data plane.

Law: every piece of memory that moves though it was not leased is a lie that was believed, and counted as one.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec

from kvbaton.protocol.ids import JobId, PeerId, rank_peer
from kvbaton.protocol.wire.messages import Welcome
from kvbaton.transports.core.shared_memory import allocate
from kvbaton.transports.core.transport import Copy, CopyEnded, Direction
from kvbaton.transports.shm.shm_transport import ShmTransport
from kvbaton.transports.tcp.tcp_transport import SealedTcpEndpoint, TcpConfig, TcpEndpoint, TcpTransport
from kvbaton_proof.chaos.liars.lies import Count

PER_S_MAX = 400.0
ANSWER_S = 1.0
"""How long an answer is waited for, where one is due; silence is a refusal."""
COPY_S = 2.0
BUFFER_BYTES = 4 << 20
CHUNKS = 4
"""All memory in so many pieces: each is far more than any one lease or offer of this cluster can cover."""


class Pace:
    """No more than `PER_S_MAX` of anything a second."""

    def __init__(self) -> None:
        self._left, self._since = PER_S_MAX / 4, time.monotonic()

    def wait(self, rest: Callable[[float], None]) -> None:
        """Until one more may leave; `rest` passes the time."""
        while True:
            now = time.monotonic()
            self._left = min(PER_S_MAX / 4, self._left + (now - self._since) * PER_S_MAX)
            self._since = now
            if self._left >= 1.0:
                self._left -= 1.0
                return
            rest(now + 2 / PER_S_MAX)


class Poster(Protocol):
    """Who reaches: its count, and how it passes the time."""

    count: Count

    def rest(self, until: float) -> None: ...


class Reach:
    """One life's data plane, with memory of its own to move from and to."""

    def __init__(self, post: Poster, buffer: bytearray) -> None:
        self.pace = Pace()
        self._post = post
        self._buffer = buffer
        self._jobs = 0
        self._ends: dict[int, CopyEnded] = {}
        self.plane: TcpTransport
        self._mapping: ShmTransport | None = None

    def be_born(self, me: PeerId, address: str) -> None:
        self.plane = TcpTransport(rank_peer(me, 0), TcpConfig(host=address))
        self.plane.register(0, memoryview(self._buffer))

    def close(self) -> None:
        self.plane.close()
        if self._mapping is not None:
            self._mapping.close()
            self._mapping = None

    def endpoint_for(self, peer: PeerId) -> bytes:
        """What lets that rank of a member dial the liar's own memory."""
        return self.plane.endpoint(peer)

    def move_all(self, peer: PeerId, endpoints: tuple[bytes, ...], direction: Direction, until: float) -> None:
        """READ or WRITE all memory of every rank; each piece that moves is a lie that was believed."""
        for rank, endpoint in enumerate(endpoints):
            for region, size in self._connect(rank_peer(peer, rank), endpoint).items():
                step = min(BUFFER_BYTES, -(-size // CHUNKS))
                for at in range(0, size, max(step, 1)):
                    self.move(rank_peer(peer, rank), region, ((at, min(step, size - at)),), direction, until)

    def map_all(self, me: PeerId, peer: PeerId, welcome: Welcome, until: float) -> None:
        """Read all memory of every rank by mapping it, as `shm` does."""
        if self._mapping is None:
            self._mapping = ShmTransport(rank_peer(me, 0))
            self._mapping.register(0, allocate(BUFFER_BYTES).view)
        for rank, endpoint in enumerate(welcome.endpoints):
            try:
                self._mapping.connect(rank_peer(peer, rank), endpoint)
            except ValueError:
                continue
            for region, size in enumerate(welcome.card.layout.ranks[rank].region_bytes):
                whole = ((0, min(size, BUFFER_BYTES)),)
                self.move(rank_peer(peer, rank), region, whole, Direction.READ, until, self._mapping)

    def move(
        self,
        rank: PeerId,
        region: int,
        there: Sequence[tuple[int, int]],
        direction: Direction,
        until: float,
        plane: ShmTransport | None = None,
    ) -> None:
        """One request for (offset, bytes) of a rank that is connected."""
        by = plane or self.plane
        self.pace.wait(self._post.rest)
        self._jobs += 1
        self._post.count.told += 1
        spans = array("q", [number for at, size in there for number in (0, at, size)])
        by.submit(Copy(JobId(self._jobs), rank, direction, 0, region, spans))
        until = min(until + ANSWER_S, time.monotonic() + COPY_S)
        while self._jobs not in self._ends and time.monotonic() < until:
            self._ends |= {each.job: each for each in by.drain() if isinstance(each, CopyEnded)}
            self._post.rest(time.monotonic() + 0.005)
        end = self._ends.pop(self._jobs, None)
        if end is not None and end.reason is None:
            name = str(rank.worker).partition("#")[0]
            verb = "gave" if direction is Direction.READ else "took"
            size = sum(size for _, size in there)
            self._post.count.believe(f"{name} {verb} {size} bytes at {there[0][0]} that were not leased")
        else:
            self._post.count.refused += 1
            if end is None:
                by.cancel(JobId(self._jobs))

    def _connect(self, rank: PeerId, endpoint: bytes) -> Mapping[int, int]:
        """Bytes by region of a rank that can now be dialled; none where its endpoint is not of tcp."""
        try:
            there = msgspec.msgpack.decode(endpoint, type=TcpEndpoint | SealedTcpEndpoint)
            self.plane.connect(rank, endpoint)
        except (msgspec.MsgspecError, ValueError):
            return {}
        return there.regions
