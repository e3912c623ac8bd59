"""Real sockets on loopback, and a way to wait for things without sleeping for a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from kvbaton.control.base import Limits
from kvbaton.control.keys import Keyring
from kvbaton.control.zmq import LOOPBACK, ZmqControl
from kvbaton.protocol.ids import WorkerId

DEADLINE_S = 10.0


def cluster(*names: str) -> dict[str, Keyring]:
    """Keyrings of one cluster, without files."""
    pairs = {WorkerId(name): tuple(key.decode() for key in zmq.curve_keypair()) for name in names}
    peers = {name: public for name, (public, _) in pairs.items()}
    return {name: Keyring(name, public, secret, peers, (b"t" * 32,)) for name, (public, secret) in pairs.items()}


def until(condition: Callable[[], object], *posts: Post, timeout_s: float = DEADLINE_S) -> None:
    """Turn the posts until the condition holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        for post in posts:
            post.turn()
        if not posts:
            time.sleep(0.002)


class Post:
    """A control plane whose loop the test turns by hand."""

    def __init__(self, keyring: Keyring, bind: str | None = LOOPBACK, limits: Limits | None = None) -> None:
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
    socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.public.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    socket.connect(endpoint)
    try:
        yield socket
    finally:
        socket.close()
        context.term()
