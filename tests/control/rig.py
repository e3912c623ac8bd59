"""Real sockets on loopback, and a way to wait for things without sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from kvbaton.control.addressing import ControlLimits
from kvbaton.control.keyring import Keyring
from kvbaton.control.signing import Signer
from kvbaton.control.zmq import LOOPBACK, ZmqControl
from kvbaton.processes.child_process import free_ports
from kvbaton.protocol.ids import WorkerId

DEADLINE_S = 30.0
STALL_S = 10.0  # a busy machine may stand still for seconds: no bound on what is quick is tighter
IDLE_WINDOWS = 10


def steady_bind() -> str:
    """An address to bind now or again later: outside of what the kernel gives to connections in between."""
    return f"tcp://127.0.0.1:{free_ports(1)[0]}"


def cluster(*names: str, signs: bool = False) -> dict[str, Keyring]:
    """Keyrings of one cluster, without files. Those of a release that `signs` know each other's signing keys."""
    pairs = {WorkerId(name): tuple(key.decode() for key in zmq.curve_keypair()) for name in names}
    peers = {name: public for name, (public, _) in pairs.items()}
    signing = {public: Signer.of(secret).public for public, secret in pairs.values()} if signs else {}
    return {
        name: Keyring(name, public, secret, peers, (b"t" * 32,), signing=signing)
        for name, (public, secret) in pairs.items()
    }


def until(condition: Callable[[], object], *posts: Post, timeout_s: float = DEADLINE_S) -> None:
    """Turn the posts until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        for post in posts:
            post.turn()
        if not posts:
            time.sleep(0.002)


def costs_less(cpu_s: float, in_s: float, pause: Callable[[float], object] = time.sleep) -> bool:
    """Whether this process takes less CPU in one of some pauses: what earlier tests left may work in most."""
    for _ in range(IDLE_WINDOWS):
        before = time.process_time()
        pause(in_s)
        if time.process_time() - before < cpu_s:
            return True
    return False


class Post:
    """A control plane whose loop the test turns by hand."""

    def __init__(self, keyring: Keyring, bind: str | None = LOOPBACK, limits: ControlLimits | None = None) -> None:
        self.keyring = keyring
        self.control = ZmqControl(keyring, bind, limits)
        self.inbox: list[tuple[WorkerId, bytes]] = []

    @property
    def name(self) -> WorkerId:
        return self.keyring.name

    @property
    def address(self) -> tuple[str, str]:
        return self.control.endpoint, self.keyring.public

    def turn(self) -> None:
        self.control.wait(0.002)
        self.inbox.extend(self.control.receive())

    def knows(self, *others: Post) -> None:
        self.control.set_directory({other.name: other.address for other in others})

    def send(self, other: Post, frame: bytes) -> bool:
        return self.control.send(other.name, frame)


def exchange(caller: Post, callee: Post, said: bytes = b"said", answer: bytes = b"answer") -> None:
    """The caller says something and is answered."""
    callee.inbox.clear()
    caller.inbox.clear()
    assert caller.send(callee, said)
    until(lambda: (caller.name, said) in callee.inbox, caller, callee)
    assert callee.send(caller, answer)
    until(lambda: (callee.name, answer) in caller.inbox, caller, callee)


def repeat_until_answered(caller: Post, callee: Post, said: bytes = b"hello", answer: bytes = b"yes") -> None:
    """As the protocol does: both repeat themselves, since a connection that is replaced may take a frame with it."""
    callee.inbox.clear()
    caller.inbox.clear()

    def answered() -> bool:
        caller.send(callee, said)
        if callee.inbox:
            callee.send(caller, answer)
        return (callee.name, answer) in caller.inbox

    until(answered, caller, callee)


@contextmanager
def posted(*posts: Post) -> Iterator[None]:
    try:
        yield
    finally:
        for post in posts:
            post.control.close()


@contextmanager
def raw_client(endpoint: str, server: Keyring, public: str, secret: str) -> Iterator[zmq.Socket[bytes]]:
    """A CURVE client with keys of our choosing that sends what it likes."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    dealer.setsockopt(zmq.CURVE_SERVERKEY, server.public.encode())
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
    dealer.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    dealer.connect(endpoint)
    try:
        yield dealer
    finally:
        dealer.close()
        context.term()
