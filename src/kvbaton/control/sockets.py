"""Sockets as this project uses them: encrypted, bounded, never blocking, and quick to notice that a host is dead.

Laws: every option that bounds or protects a socket is set here, before it is bound or connected. No heartbeats of
libzmq's: its timer writes to a connection that was reset while its queue was full, and an assertion there ends the
process (4.3.5, `!_io_error`). Dead hosts are noticed by TCP, and peers that do not answer by the dialler.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import zmq

from kvbaton.control.addressing import ControlLimits
from kvbaton.control.keyring import Keyring
from kvbaton.protocol.ids import WorkerId
from kvbaton.protocol.machines.quotas import Buckets

log = logging.getLogger(__name__)

Socket: TypeAlias = "zmq.Socket[bytes]"

Heard = tuple[WorkerId, bytes, str]
"""Who said something, what it was, and the public key that its connection has proven."""

NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)  # flags of zmq's own kind take longer to join than a frame to send
_READABLE = int(zmq.POLLIN)

CURVE_OVERHEAD_BYTES = 64  # libzmq counts its 33 bytes of envelope against ZMQ_MAXMSGSIZE
PROBES_MAX = 3
RECONNECT_MS_MIN, RECONNECT_MS_MAX = 50, 1000


class Context(zmq.Context["zmq.Socket[bytes]"]):
    """A context that is closed by its owner, never by the garbage collector.

    pyzmq's `__del__` terminates it, which waits for sockets that the collector may be about to close only after it: a
    control plane dropped in a reference cycle then hangs the thread that collects. Seen with pyzmq 27.3; `gc.collect()`
    in `test_zmq` shows when this can go.
    """

    def __del__(self) -> None:
        pass


def has_frame(socket: Socket) -> bool:
    """Whether a whole frame can be taken; asked sooner than tried, which ends in an exception."""
    return bool(int(socket.getsockopt(zmq.EVENTS)) & _READABLE)


@dataclass(slots=True)
class SocketPlane:
    """What the sockets of one control plane share."""

    keyring: Keyring
    limits: ControlLimits = field(default_factory=ControlLimits)
    clock: Callable[[], float] = time.monotonic
    context: Context = field(default_factory=Context)
    poller: zmq.Poller = field(default_factory=zmq.Poller)
    counters: Counter[str] = field(default_factory=Counter)
    peers: Mapping[WorkerId, tuple[str, ...]] = field(init=False)  # who may come in and be dialled, by public keys
    quota: Buckets[WorkerId] = field(init=False)  # of frames that are heard

    def __post_init__(self) -> None:
        self.take(self.keyring.peers, self.keyring.also)
        self.quota = Buckets(self.limits.frames_per_s_max, self.limits.frames_burst_max)

    def take(self, peers: Mapping[WorkerId, str], also: Mapping[WorkerId, tuple[str, ...]]) -> None:
        """From now on these are who there is; while a peer's key is rotated it has two."""
        self.peers = {worker: (key, *also.get(worker, ())) for worker, key in peers.items()}

    @property
    def members_join(self) -> bool:
        """Whether somebody who is unknown now may be a member in a moment."""
        return bool(self.keyring.admission)

    def hears(self, worker: WorkerId) -> bool:
        """Whether a frame of that worker is within what one may send; what is not is counted, and said of each once."""
        if self.quota.take(worker, self.clock()):
            return True
        self.counters["over_quota"] += 1
        if self.quota.is_first_refusal(worker):
            log.warning("[peer-flooding] %s sends over %g frames a second; more is dropped", worker, self.quota.per_s)
        return False

    def open(self, kind: int, *, ipv6: bool) -> Socket:
        """A socket with our key and bounds, not yet bound or connected."""
        socket: Socket = self.context.socket(kind)
        limits, probe_s = self.limits, max(1, int(self.limits.silence_s / PROBES_MAX))
        for option, value in (
            (zmq.SNDHWM, limits.frames_queued_max),
            (zmq.RCVHWM, limits.frames_queued_max),
            (zmq.MAXMSGSIZE, limits.frame_bytes_max + CURVE_OVERHEAD_BYTES),
            (zmq.LINGER, int(limits.linger_s * 1000)),
            (zmq.HANDSHAKE_IVL, int(limits.handshake_s * 1000)),
            (zmq.TCP_MAXRT, int(limits.silence_s * 1000)),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, probe_s),
            (zmq.TCP_KEEPALIVE_INTVL, probe_s),
            (zmq.TCP_KEEPALIVE_CNT, PROBES_MAX),
            (zmq.IPV6, int(ipv6)),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keyring.public.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keyring.secret.encode())
        return socket

    def server(self, *, ipv6: bool) -> Socket:
        """A ROUTER that admits only whom this plane's gate lets in."""
        socket = self.open(zmq.ROUTER, ipv6=ipv6)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, b"kvbaton")
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a dead route says so, instead of swallowing the frame
        return socket

    def client(self, server_key: str, *, ipv6: bool) -> Socket:
        """A DEALER that talks only to the holder of `server_key`."""
        socket = self.open(zmq.DEALER, ipv6=ipv6)
        socket.setsockopt(zmq.CURVE_SERVERKEY, server_key.encode())
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS_MIN)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX)
        return socket
