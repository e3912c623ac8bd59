"""tcp: READ and WRITE between any two hosts, over a few sockets per peer that only this module uses.

Closing a socket, on the one thread that uses it, is both the cancel and the fence: a guarantee that libraries could not
give (reference/transports.md 2.6, 3.1: late data overwrote reused blocks). Two streams fill two cores; payload is
gathered and scattered by sendmsg and recvmsg straight from and into registered memory.

Law: `fence` and `disconnect` revoke the peer's secret before they close its sockets, so that incarnation cannot come
back until `endpoint(peer)` is called again, which mints a new one. That a WRITE has come to rest is known from the
peer's answer or from its closing the connection (a reset counts: a kernel sends one when it closes with bytes unread);
a connection that merely timed out proves nothing, and such a WRITE claims no rest while the peer is connected. The end
of an encrypted connection counts only with the peer's last record: an attacker on the path could have forged it, and
hold back what was sent before. After `disconnect` nothing relies on it any more: our side of it is at rest, and that is
then reported.

Between hosts everything after the handshake is encrypted and signed (`encrypt`, docs/decisions/0011-encrypted-tcp.md).
An endpoint whose owner requires that has another tag, so that a version which cannot is refused when it pairs.
"""

from __future__ import annotations

import ipaddress
from collections import deque
from functools import partial

import msgspec

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import PeerId
from kvbaton.protocol.numbers import Bytes, Number, Port
from kvbaton.security import sealing
from kvbaton.security.records import load
from kvbaton.security.sealing import SECRET_BYTES, Encrypt
from kvbaton.transports.core.jobs import CopyJob, cut
from kvbaton.transports.core.loans import GRACE_S, Loans
from kvbaton.transports.core.shared_memory import RegisteredMemory
from kvbaton.transports.core.shell import CLOSED, ServingShell, at_least_one
from kvbaton.transports.core.transport import Capabilities, Copy, FenceEnded, Spans
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.net.stream_socket import ROWS_MAX, ByteStrip
from kvbaton.transports.tcp.tcp_client import TcpLink, TcpRoute
from kvbaton.transports.tcp.tcp_server import STREAMS_PER_PEER_MAX, TcpServer

CLOSE_S = 2.0
PART_BYTES = range(512 << 10, 32 << 20)
"""Smaller copies are not split: a second request costs more than it saves."""

CAPABILITIES = Capabilities(
    name="tcp",
    one_sided=False,
    can_write=True,
    can_fence=True,
    cancels=True,
    same_host=False,
    enforces=True,
    knows_writes=True,
)


class TcpConfig(msgspec.Struct, frozen=True):
    """Addresses are numeric, so that nothing ever waits for a resolver."""

    host: str = "127.0.0.1"
    port: int = 0
    advertise: str = ""  # what peers connect to, when `host` is a wildcard
    streams: int = 2  # per peer; more than two cores' worth do not help
    threads: int = 2
    window_bytes: int = 48 << 20  # requested and unanswered, per stream
    copies_max: int = 1024
    dial_deadline_s: float = 5.0
    strangers_max: int = 64
    pure_python: bool = False
    encrypt: Encrypt = "auto"  # unless both ends are loopback addresses

    def __post_init__(self) -> None:
        host = ipaddress.ip_address(self.host)
        if (ipaddress.ip_address(self.advertise) if self.advertise else host).is_unspecified:
            raise ValueError(f"peers cannot connect to {self.advertise or host}: set advertise to this host's address")
        if not 1 <= self.streams <= STREAMS_PER_PEER_MAX or self.window_bytes < 1 or self.threads < 1:
            raise ValueError(f"streams, window_bytes and threads are out of bounds: {self}")
        sealing.check(self.encrypt, self.advertise or self.host)

    @property
    def must_seal(self) -> bool:
        """Whether this side requires encryption, with any peer."""
        return sealing.is_required(self.encrypt, self.advertise or self.host)


class TcpEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="tcp1"):
    """The endpoint of this rank, for plain or encrypted connections."""

    owner: PeerId
    host: str
    port: Port
    secret: bytes
    regions: dict[Number, Bytes]  # bytes by number, so that a whole copy can be refused before any of it moves
    seals: bool = False  # can encrypt; older versions omit it


class SealedTcpEndpoint(TcpEndpoint, frozen=True, array_like=True, tag="tcp2"):
    """The same for a rank that requires encryption."""


class TcpTransport(ServingShell[TcpLink]):
    """See `base.Transport`. `threads` of them, and one more to wait for devices, however many peers."""

    capabilities = CAPABILITIES
    _memory: RegisteredMemory
    _server: TcpServer

    def __init__(self, me: PeerId, config: TcpConfig | None = None) -> None:
        self._config = config = config or TcpConfig()
        super().__init__(me, config.copies_max, config.pure_python)
        self._memory = RegisteredMemory()
        self._loops = [SocketLoop(f"kvbaton-tcp-{index}-{me}") for index in range(config.threads)]
        self._loans = Loans(self._mover, self._jobs.loan_ended, partial(self._loops[0].call_later, GRACE_S))
        self._server = TcpServer(
            me,
            self._loops,
            self._memory,
            self._mover,
            self._loans,
            config.strangers_max,
            config.dial_deadline_s,
            config.encrypt,
        )
        if config.must_seal:
            load()

    def endpoint(self, peer: PeerId) -> bytes:
        """Listens from the first call on. The same until `peer` is fenced or disconnected, then a new one."""
        config = self._config
        port = self._server.listen(config.host, config.port)
        secret = self._server.keyring.mint(peer)
        kind = SealedTcpEndpoint if config.must_seal else TcpEndpoint
        place = config.advertise or config.host, port
        return msgspec.msgpack.encode(kind(self._me, *place, secret, self._memory.sizes(), sealing.can_seal()))

    def connect(self, peer: PeerId, endpoint: bytes) -> None:
        """A new endpoint of a known peer replaces the old one, and ends what was in flight on it. ValueError, naming
        `encrypt`, where one side requires encryption and the other cannot."""
        there = _parse(peer, endpoint)
        config = self._config
        insists = isinstance(there, SealedTcpEndpoint)
        sealed = sealing.agree(str(peer), config.encrypt, there.host, insists, there.seals)
        if sealed:
            load()
        route = TcpRoute(
            self._me,
            peer,
            (there.host, there.port),
            there.secret,
            there.regions,
            config.window_bytes,
            config.dial_deadline_s,
            sealed,
        )
        loops = [self._loops[index % len(self._loops)] for index in range(config.streams)]
        self._link(peer, route, lambda: TcpLink(route, loops, self._jobs, self._strip))

    def fence(self, peer: PeerId) -> None:
        """Both ways: `peer`'s writes are shut out and our copies with it end. We may connect to it again; it may not to
        us."""
        with self._jobs:
            self._turn_away(peer)
            link = self._end_copies(peer, Reason.TRANSFER_FAILED, "the peer was fenced")
            if link is not None:
                self._shut(link)
        self._shut_out(peer, partial(self._jobs.post, FenceEnded(peer)))

    def _strip(self, region: int, spans: Spans, size: int) -> ByteStrip:
        memory = self._memory.get(region)
        if memory is None:
            raise ValueError(f"region {region} is not registered")
        return ByteStrip(self._mover, memory, spans, 3, size)

    def _cut(self, copy: Copy, link: TcpLink) -> deque[Spans]:
        total = self._total(copy, link.there.regions.get(copy.remote_region))
        return at_least_one(cut(copy.spans, total, self._config.streams, PART_BYTES, ROWS_MAX))

    def _start(self, job: CopyJob, link: TcpLink) -> None:
        link.add(job)

    def _stop(self, job: CopyJob, link: TcpLink | None, reason: Reason, detail: str) -> None:
        if link is not None:
            link.remove(job)
        self._end(job, reason, detail)
        if job.live and link is not None:
            link.discard(job)

    def _retire(self, link: TcpLink, detail: str) -> None:
        link.forget()
        self._shut(link)

    def _shut(self, link: TcpLink) -> None:
        for loop in self._loops:
            loop.call(partial(link.shut_on, loop))

    def _wind_up(self) -> None:
        for job in self._jobs.of_peer():
            self._jobs.fail(job, *CLOSED)

    def _halt(self) -> bool:
        stopped = [loop.stop(CLOSE_S) for loop in self._loops]
        if all(stopped):
            self._loans.close()
            with self._jobs:
                for job in self._jobs.of_peer():
                    job.live = 0  # no thread, no landing: at rest
        return True


def _parse(peer: PeerId, endpoint: bytes) -> TcpEndpoint:
    try:
        there = msgspec.msgpack.decode(endpoint, type=TcpEndpoint | SealedTcpEndpoint)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ValueError(f"not an endpoint of tcp: {error}") from None
    if there.owner != peer:
        raise ValueError(f"the endpoint belongs to {there.owner}, not to {peer}")
    ipaddress.ip_address(there.host)
    if not 0 < there.port < 1 << 16 or len(there.secret) != SECRET_BYTES:
        raise ValueError("the endpoint has no usable port or secret")
    return there
