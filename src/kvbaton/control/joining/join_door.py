"""The join door: a listener beside a registry, where a process that nobody knows proves a token.

Laws. Any CURVE key may knock, so nothing here is shared with listeners that only members reach: own context, thread and
counters. A question is one small frame; anything else is dropped unanswered. A flood costs a bounded
share of a core: so many questions a second are heard, while TCP holds the rest back. libzmq bounds neither how many
connections there are nor the parts of one unfinished message; so a connection may send `BYTES_MAX` and live
`CONNECTION_S`, and when one oversteps either, or there are too many, all are hung up on: who asks honestly is done
within one round trip, and asks again. The listening socket itself stays, so that nobody else can take its address.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import parse_monitor_message

from kvbaton.control.addressing import ControlError, ControlLimits, check_bind, host_of
from kvbaton.control.dialler import ROUTE_BYTES
from kvbaton.control.joining import join_messages as m
from kvbaton.control.joining.admission import Admission
from kvbaton.control.keyring import Keyring
from kvbaton.control.sockets import NOBLOCK_MORE, LoopThread, Socket, SocketPlane, Waker, ZapGate, is_ipv6
from kvbaton.observe.codes.entry import worth_saying
from kvbaton.protocol.ids import WorkerId

log = logging.getLogger(__name__)

WINDOW_S = 0.05
QUESTIONS_PER_WINDOW_MAX = 32  # 640 a second
CONNECTIONS_MAX = 256
CONNECTION_S = 5.0
BYTES_MAX = 64 << 10
"""That one connection may send; a handshake and a question are 2 KiB."""
SWEEP_S = 60.0
BACKLOG = 128
CLOSE_S = 2.0
LIMITS = ControlLimits(
    frame_bytes_max=m.QUESTION_BYTES_MAX, frames_queued_max=16, handshake_s=CONNECTION_S, linger_s=0.5
)
_BYTES_RECEIVED = struct.Struct("=128xQ")  # of struct tcp_info, which the kernel only ever appends to


class BesideDoor(Protocol):
    """What a door needs of the registry that it is beside."""

    def look_soon(self) -> None: ...

    def is_living(self, name: str, key: str) -> bool: ...


def door_bind(keys: str | None, host: str, registry_port: int, join_port: int | None) -> str:
    """Where the door of a registry listens: where asked, or on the next port once tokens were made; "": nowhere.

    `host` is bracketed where it is IPv6; port 0 asks for a free one.
    """
    if keys is None or (join_port is None and not (Path(keys) / "admission.json").exists()):
        return ""
    beside = registry_port + 1 if registry_port else 0
    return f"tcp://{host}:{beside if join_port is None else join_port}"


class JoinDoor:
    """Binds at once (`ControlError` if it cannot), answers from `start` on.

    Counters: `questions`, of them `bad` and `answered`; `hung_up` (times that all connections were closed);
    `not_opened` (times that it could not listen again yet); those of `Admission`: `joined`, `presented`,
    `refused.KIND`.
    """

    def __init__(
        self,
        admission: Admission,
        bind: str,
        registry: BesideDoor,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`registry` is told, on the door's thread, when a member was written to the key directory."""
        self._admission = admission
        self._on_admitted, self._is_living = registry.look_soon, registry.is_living
        self._clock = clock
        self._next_sweep = clock()
        self._window_ends, self._left = -math.inf, 0
        self._porch = _Porch(admission, bind, clock)
        self._thread = LoopThread("kvbaton-join", self._porch, self._turn, self._porch.close, clock)

    @property
    def endpoint(self) -> str:
        return self._porch.endpoint

    @property
    def counters(self) -> Counter[str]:
        return self._porch.counters + self._admission.counters

    def start(self) -> None:
        self._thread.start()

    def close(self) -> bool:
        return self._thread.stop(CLOSE_S)

    def _turn(self, now: float) -> float:
        if now >= self._window_ends:
            self._window_ends, self._left = now + WINDOW_S, QUESTIONS_PER_WINDOW_MAX
        while self._left and (heard := self._porch.hear()) is not None:
            self._left -= 1
            self._on_question(*heard)
        self._porch.deaf = not self._left
        self._porch.keep_order(now)
        with contextlib.suppress(ControlError):  # a directory that cannot be written now
            self._admission.save()
            if now >= self._next_sweep:
                self._next_sweep = now + SWEEP_S
                self._admission.sweep()
        if self._porch.deaf or self._porch.is_visited:
            return now + WINDOW_S
        return min(self._next_sweep, now + 1.0)

    def _on_question(self, route: bytes, key: str, frame: bytes) -> None:
        counters = self._porch.counters
        counters["questions"] += 1
        try:
            question = m.decode_question(frame)
        except m.JoinFault as fault:
            counters["bad"] += 1
            if worth_saying(counters["bad"]):
                log.warning("[join-refused] a question at the join door was skipped: %s", fault)
            return
        answer = self._admission.judge(question, key, self._is_living)
        if isinstance(answer, m.JoinRefused):
            refused = self._admission.counters[f"refused.{answer.kind.value}"]
            if worth_saying(refused):
                log.warning("[join-refused] %s: %s", _who(question), answer.detail)
        else:
            if isinstance(question, m.Join):
                log.info("%s joined as %s, by token %s", question.name, question.role, question.token)
            self._on_admitted()
        counters["answered"] += self._porch.answer(route, m.encode(answer))


def _who(question: m.Question) -> str:
    return f"{question.name} may not join" if isinstance(question, m.Join) else "a certificate is not taken"


class _AnyKey(ZapGate):
    """Admits whoever has a CURVE key, and says which."""

    def _admits(self, key: str) -> bool:
        return True

    def key_of(self, frame: zmq.Frame) -> str:
        try:
            return str(frame.get("User-Id"))
        except zmq.ZMQError:
            return ""


class _Porch:
    """The sockets, and who stands there."""

    def __init__(self, admission: Admission, bind: str, clock: Callable[[], float]) -> None:
        self.deaf = False
        self._clock = clock
        self._waker = Waker()
        me = Keyring(WorkerId("door"), admission.door_public, admission.door_secret, {}, ())
        self._plane = SocketPlane(me, LIMITS, clock)
        self.counters = self._plane.counters
        self._standing: dict[int, float] = {}  # descriptors of connections, and since when
        try:
            self._listening = _listening(bind)
        except (OSError, ValueError) as error:
            self._plane.context.term()
            self._waker.close()
            raise ControlError(
                f"join door {bind}: {error}; give another port with --join-port (0: a free one)"
            ) from None
        host = host_of(bind.removeprefix("tcp://"))
        self.endpoint = f"tcp://{f'[{host}]' if ':' in host else host}:{self._listening.getsockname()[1]}"
        self._gate = _AnyKey(self._plane)
        self._is_open = False
        self._open()

    @property
    def is_visited(self) -> bool:
        return bool(self._standing)

    def hear(self) -> tuple[bytes, str, bytes] | None:
        """The next question: its route, the key of its connection, and what was said; nothing, of what is no question:
        that is one of those that are heard too."""
        if not self._is_open:
            return None
        try:
            parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        key = self._gate.key_of(parts[1]) if len(parts) == 2 and len(parts[0]) == ROUTE_BYTES else ""
        return parts[0].bytes, key, parts[1].bytes if key else b""

    def answer(self, route: bytes, frame: bytes) -> bool:
        try:
            self._socket.send(route, NOBLOCK_MORE)
            self._socket.send(frame, zmq.NOBLOCK)
        except zmq.ZMQError:  # gone, or does not read
            return False
        return True

    def keep_order(self, now: float) -> None:
        """Hang up on all if somebody stays too long or says too much."""
        if not self._is_open:
            self._open_if_possible()
        if not self._standing:
            return
        crowded = len(self._standing) > CONNECTIONS_MAX
        if crowded or now - min(self._standing.values()) > CONNECTION_S or any(map(_says_too_much, self._standing)):
            standing = len(self._standing)
            self._close_socket()
            self._open_if_possible()
            self.counters["hung_up"] += 1  # counted once it is done: whoever comes from now on is not among them
            if worth_saying(self.counters["hung_up"]):
                log.warning("[join-crowded] join door: hung up on %d connections", standing)

    def wait(self, timeout_s: float | None) -> None:
        poller = self._pause if self.deaf else self._poller
        events = dict(poller.poll(None if timeout_s is None else math.ceil(timeout_s * 1000)))
        if self._waker.fd in events:
            self._waker.clear()
        self._gate.tend()
        self._watch()

    def wake(self) -> None:
        self._waker.wake()

    def close(self) -> None:
        self._close_socket(linger_s=LIMITS.linger_s)
        self._gate.knocks.close()
        self._gate.questions.close()
        self._plane.context.term()
        self._listening.close()
        self._waker.close()

    def _open_if_possible(self) -> None:
        """Without descriptors it is not, and is tried again in the next turn: the address stays ours."""
        try:
            self._open()
        except (OSError, zmq.ZMQError) as error:
            self.counters["not_opened"] += 1
            if worth_saying(self.counters["not_opened"]):
                log.warning("[join-crowded] join door: cannot open again yet: %s", error)

    def _open(self) -> None:
        self._standing = {}
        self._pause, self._poller = zmq.Poller(), zmq.Poller()
        for poller in (self._pause, self._poller):
            poller.register(self._waker.fd, zmq.POLLIN)
            poller.register(self._gate.questions, zmq.POLLIN)
        where = f"inproc://kvbaton.join.{secrets.token_hex(8)}"
        with contextlib.ExitStack() as undo:
            self._socket = self._plane.server(ipv6=is_ipv6(self.endpoint))
            undo.callback(self._socket.close, linger=0)
            self._events: Socket = self._plane.context.socket(zmq.PAIR)
            undo.callback(self._events.close, linger=0)
            self._events.setsockopt(zmq.LINGER, 0)
            self._events.setsockopt(zmq.RCVHWM, 0)
            self._socket.monitor(where, zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            self._events.connect(where)
            self._socket.setsockopt(zmq.USE_FD, os.dup(self._listening.fileno()))
            self._socket.bind(self.endpoint)
            undo.pop_all()
        for poller in (self._pause, self._poller):
            poller.register(self._events, zmq.POLLIN)
        self._poller.register(self._socket, zmq.POLLIN)
        self._is_open = True

    def _close_socket(self, linger_s: float = 0.0) -> None:
        if not self._is_open:
            return
        self._is_open, self._standing = False, {}
        self._socket.disable_monitor()
        self._events.close()
        self._socket.close(linger=int(linger_s * 1000))

    def _watch(self) -> None:
        while self._is_open:
            try:
                event = parse_monitor_message(self._events.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if event["event"] == zmq.EVENT_ACCEPTED:
                self._standing[int(event["value"])] = self._clock()
            else:
                self._standing.pop(int(event["value"]), None)


def _listening(bind: str) -> socket.socket:
    host, _, port = check_bind(bind).removeprefix("tcp://").rpartition(":")
    found = socket.socket(socket.AF_INET6 if is_ipv6(bind) else socket.AF_INET, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(("" if host == "*" else host.strip("[]"), int(port)))
        found.listen(BACKLOG)
        found.setblocking(False)
    except OSError:
        found.close()
        raise
    return found


def _says_too_much(fd: int) -> bool:
    """By the kernel's count. Of a descriptor that is another connection's by now the answer is of no weight."""
    try:
        copy = socket.socket(fileno=os.dup(fd))
    except OSError:
        return False
    with copy:
        try:
            told = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_RECEIVED.size)
        except OSError:
            return False
    return len(told) == _BYTES_RECEIVED.size and int(_BYTES_RECEIVED.unpack(told)[0]) > BYTES_MAX
