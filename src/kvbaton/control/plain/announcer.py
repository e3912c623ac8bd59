"""How a worker makes itself known to a router that speaks MoRI-IO's or P2pNccl's discovery, as vllm-router does.

Laws: opt-in, and plain by nature. The format has no keys, no answer and no goodbye, so whoever listens at the router's
address learns this worker's addresses, and anybody could announce others; kvbaton's own registry is the safe way, and
nothing here is trusted or read: the socket only sends. Nothing is sent before `start`, which is for a worker that can
serve: such a router sends requests to whatever it has heard of in the last four to five seconds, unprobed.

A router that is away costs nothing but its own requests: at most one announcement waits, the thread sleeps in the
kernel until the router is back or the next announcement is due, and `stop` waits for nobody.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, get_args

import msgspec
import zmq

from kvbaton.control.addressing import ControlError, check_authority, check_endpoint
from kvbaton.control.sockets import Context, LoopThread, Socket, Waker, is_ipv6

log = logging.getLogger(__name__)

INTERVAL_S = 3.0  # vLLM's. vllm-router forgets after 4 to 5 s, so one that is lost can cost a worker its place
FORGET_S = 6.0
"""vllm-router forgets a worker five seconds after its last announcement, and sends it requests until then."""
STOP_S = 2.0
RANKS_MAX = 65_536
QUEUED_MAX = 1  # an announcement is worth nothing once the next is due
RECEIVED_BYTES_MAX = 1024  # nothing is read, but a stranger may send
UNACKNOWLEDGED_MS_MAX = 6000  # then TCP gives the connection up and libzmq dials anew
RECONNECT_MS_MIN, RECONNECT_MS_MAX = 100, 1000
REDIAL_S = 5.0
"""After so long without a connection the socket is another one: libzmq dials nobody again who greeted by another
mechanism, as something else may that had the router's address for a while."""

Role = Literal["P", "D"]
TransferMode = Literal["READ", "WRITE"]

_MORIIO = re.compile(r"host:(?P<host>[^,]*),handshake:(?P<handshake>[^,]*),notify:(?P<notify>[^,]*)")


class MoriioRegistration(msgspec.Struct, frozen=True):
    """One announcement, ready to be sent, and the socket identity it is sent under (None: the router draws one)."""

    payload: bytes
    identity: bytes | None = None


class _Moriio(msgspec.Struct, frozen=True):
    type: str
    http_address: str
    zmq_address: str
    dp_size: int
    tp_size: int
    transfer_mode: str


class _P2pNccl(msgspec.Struct, frozen=True):
    type: str
    http_address: str
    zmq_address: str


def registration(
    role: Role,
    http_address: str,
    zmq_address: str,
    *,
    transfer_mode: TransferMode,
    tp_size: int = 1,
    dp_size: int = 1,
) -> MoriioRegistration:
    """MoRI-IO's announcement: `http_address` is `host:port`, `zmq_address` is `host:IP,handshake:PORT,notify:PORT`.

    `dp_size` counts all data-parallel ranks, not those of one host. `ControlError` names the field that is wrong.
    """
    _choice("role", role, get_args(Role))
    _choice("transfer_mode", transfer_mode, get_args(TransferMode))
    _http_address(http_address)
    match = _MORIIO.fullmatch(zmq_address)
    if match is None:
        raise ControlError(f"zmq_address: {zmq_address[:80]!r} is not host:IP,handshake:PORT,notify:PORT")
    host = f"[{match['host']}]" if ":" in match["host"] else match["host"]
    for port in ("handshake", "notify"):
        _dialable(f"zmq_address.{port}", f"{host}:{match[port]}")
    for field, count in (("tp_size", tp_size), ("dp_size", dp_size)):
        if not 1 <= count <= RANKS_MAX:
            raise ControlError(f"{field}: got {count}, expected 1..{RANKS_MAX}")
    return MoriioRegistration(
        msgspec.msgpack.encode(_Moriio(role, http_address, zmq_address, dp_size, tp_size, transfer_mode))
    )


def p2p_nccl_registration(role: Role, http_address: str, zmq_address: str) -> MoriioRegistration:
    """P2pNccl's announcement, sent under its `zmq_address`, an `ip:port`. `ControlError` names the field."""
    _choice("role", role, get_args(Role))
    _http_address(http_address)
    _dialable("zmq_address", zmq_address)
    return MoriioRegistration(msgspec.msgpack.encode(_P2pNccl(role, http_address, zmq_address)), zmq_address.encode())


class MoriioAnnouncer:
    """Tells one router, from `start` to `stop`, that a worker can serve. The router forgets it seconds after `stop`.

    Counters: `sent` (handed to a connection; nobody says whether they were heard), `lost` (not sent before the next was
    due), `failed` (the socket could not be opened).
    """

    def __init__(
        self,
        router: str,
        registration: MoriioRegistration,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`router` is the `tcp://HOST:PORT` of its discovery address. Connects to nothing yet."""
        if not (math.isfinite(interval_s) and interval_s > 0):
            raise ControlError(f"interval_s: got {interval_s}, expected a positive number of seconds")
        try:
            self._line = _MoriioLine(check_endpoint(router, names=True), registration)
        except ValueError as error:
            raise ControlError(f"router: {error}") from None
        self.counters: Counter[str] = Counter()
        self._interval_s = interval_s
        self._clock = clock
        self._connected = clock()  # or dialled anew
        self._due: float | None = None  # before the first
        self._heard = False
        self._thread = LoopThread("kvbaton-moriio", self._line, self._turn, self._line.close, clock)

    def start(self) -> None:
        """Begin: the worker can serve. At most once."""
        self._thread.start()

    def stop(self, timeout_s: float = STOP_S) -> bool:
        """Announce no more; what was not sent yet is dropped. False when the thread did not end in time. Idempotent."""
        return self._thread.stop(timeout_s)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive

    def _turn(self, now: float) -> float:
        if self._due is None or now >= self._due:
            if self._line.owes:
                self._miss("lost", "no connection")
                if now - self._connected > REDIAL_S:
                    self._connected = now
                    self._line.hang_up()
            self._due = now + self._interval_s
            self._announce()
        elif self._line.owes and self._line.is_writable:
            self._due = now + self._interval_s
            self._announce()
        return self._due

    def _announce(self) -> None:
        try:
            sent = self._line.send()
        except zmq.ZMQError as error:
            self._miss("failed", str(error))
            return
        if sent:
            self._connected = self._clock()
            self.counters["sent"] += 1
            if not self._heard:
                log.info("announcing this worker to the router at %s", self._line.router)
            self._heard = True

    def _miss(self, kind: str, why: str) -> None:
        self.counters[kind] += 1
        if self._heard or self.counters[kind] == 1:  # what changed, not every time
            log.warning("[moriio-unheard] the router at %s does not answer: %s; retrying", self._line.router, why)
        self._heard = False


class _MoriioLine:
    """The socket, opened at first use on the thread that sleeps on it."""

    def __init__(self, router: str, registration: MoriioRegistration) -> None:
        self.router = router
        self.owes = False  # the last announcement found no connection; it is made up for when there is one
        self.is_writable = False
        self._registration = registration
        self._waker = Waker()
        self._poller = zmq.Poller()
        self._poller.register(self._waker.fd, zmq.POLLIN)
        self._context: Context | None = None
        self._socket: Socket | None = None

    def send(self) -> bool:
        """Whether a connection took the announcement. `ZMQError` when there can be no socket."""
        socket = self._socket or self._open()
        try:
            socket.send(self._registration.payload, zmq.NOBLOCK)
            self.owes = False
        except zmq.Again:
            self.owes = True
        self._poller.modify(socket, zmq.POLLOUT if self.owes else 0)
        return not self.owes

    def wait(self, timeout_s: float | None) -> None:
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        events: dict[object, int] = dict(self._poller.poll(timeout_ms))
        if events.pop(self._waker.fd, 0):
            self._waker.clear()
        self.is_writable = bool(events)

    def wake(self) -> None:
        self._waker.wake()

    def hang_up(self) -> None:
        """What is sent next is sent by a new socket."""
        if self._socket is not None:
            self._poller.unregister(self._socket)
            self._socket.close(linger=0)
            self._socket = None

    def close(self) -> None:
        self.hang_up()
        if self._context is not None:
            self._context.term()
        self._waker.close()

    def _open(self) -> Socket:
        self._context = self._context or Context()
        socket: Socket = self._context.socket(zmq.DEALER)
        try:
            for option, value in (
                (zmq.SNDHWM, QUEUED_MAX),
                (zmq.RCVHWM, 1),
                (zmq.MAXMSGSIZE, RECEIVED_BYTES_MAX),
                (zmq.LINGER, 0),
                (zmq.IMMEDIATE, 1),  # no connection, no queue: what waits for a router that is away would be stale
                (zmq.TCP_MAXRT, UNACKNOWLEDGED_MS_MAX),
                (zmq.RECONNECT_IVL, RECONNECT_MS_MIN),
                (zmq.RECONNECT_IVL_MAX, RECONNECT_MS_MAX),
                (zmq.IPV6, int(is_ipv6(self.router))),
            ):
                socket.setsockopt(option, value)
            if self._registration.identity is not None:
                socket.setsockopt(zmq.IDENTITY, self._registration.identity)
            socket.connect(self.router)
        except zmq.ZMQError:
            socket.close(linger=0)
            raise
        self._poller.register(socket, 0)
        self._socket = socket
        return socket


def _choice(field: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ControlError(f"{field}: got {value!r}, expected {' or '.join(choices)}")


def _http_address(text: str) -> None:
    """The router pastes it into a URL as it stands."""
    try:
        check_authority(text)
    except ValueError as error:
        raise ControlError(f"http_address: {error}") from None


def _dialable(field: str, authority: str) -> None:
    """What is advertised to peers is numeric and leads somewhere."""
    try:
        check_endpoint(f"tcp://{authority}")
    except ValueError as error:
        raise ControlError(f"{field}: {error}") from None
