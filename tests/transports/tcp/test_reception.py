"""Strangers cost a bounded number of sockets for a bounded time, and never the listening."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kvbaton.protocol.errors import ProtocolError, Reason
from kvbaton.testing.transport_harness import poll
from kvbaton.transports.net import connection_handshake
from kvbaton.transports.net.connection_handshake import Admitted, Reception, greet
from kvbaton.transports.net.socket_loop import SocketLoop
from kvbaton.transports.tcp.tcp_server import prepare
from tests.transports.tcp.blocking import D, P, is_closed, play


class Rig:
    def __init__(self, strangers_max: int = 4, handshake_s: float = 20.0) -> None:
        self.loop = SocketLoop("reception-test")
        self.welcomed: list[Admitted] = []
        self.refuse = False
        self.reception = Reception(P, self.loop, self._prepare, self._welcome, strangers_max, handshake_s)
        self.address = self.reception.listen(partial(socket.create_server, ("127.0.0.1", 0))).getsockname()

    def _prepare(self, sock: socket.socket) -> None:
        if self.refuse:
            raise ProtocolError(Reason.BAD_MESSAGE, "not today")
        prepare(sock)

    def _welcome(self, admitted: Admitted, sock: socket.socket) -> None:
        self.welcomed.append(admitted)
        sock.close()

    def dial(self) -> socket.socket:
        return socket.create_connection(self.address, timeout=20)

    def admits(self) -> bool:
        """Whether a proper peer still gets in."""
        before = len(self.welcomed)
        with self.dial() as sock:
            play(sock, lambda wire: greet(wire, self.reception.keyring.mint(D), D, P, 1))
            return poll(lambda: len(self.welcomed) > before, 20)


@pytest.fixture
def make() -> Iterator[Callable[..., Rig]]:
    rigs: list[Rig] = []

    def made(**options: float) -> Rig:
        rigs.append(Rig(**options))  # type: ignore[arg-type]
        return rigs[-1]

    yield made
    for rig in rigs:
        assert rig.loop.stop(5)


def test_a_proven_peer_is_passed_on_with_its_stream(make: Callable[..., Rig]) -> None:
    rig = make()
    assert rig.admits()
    assert (rig.welcomed[0].peer, rig.welcomed[0].stream) == (D, 1)


@pytest.mark.parametrize("garbage", [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n" * 10, bytes(100_000), b"KVBT\1"])
def test_garbage_is_dropped_and_others_are_heard(make: Callable[..., Rig], garbage: bytes) -> None:
    rig = make()
    with rig.dial() as stranger:
        with contextlib.suppress(OSError):  # it may be dropped while it still talks
            stranger.sendall(garbage)
            stranger.shutdown(socket.SHUT_WR)
        assert is_closed(stranger)
    assert rig.admits() and len(rig.welcomed) == 1


def test_silent_strangers_do_not_keep_a_peer_out_and_the_oldest_goes(make: Callable[..., Rig]) -> None:
    rig = make(strangers_max=4)
    silent = [rig.dial() for _ in range(9)]
    assert rig.admits()
    assert all(is_closed(sock) for sock in silent[:5])
    for sock in silent:
        sock.close()


def test_a_stranger_has_until_the_deadline(make: Callable[..., Rig]) -> None:
    rig = make(handshake_s=0.05)
    with rig.dial() as stranger:
        stranger.sendall(b"KVBT")
        assert is_closed(stranger)


def test_who_is_refused_at_the_door_is_not_heard(make: Callable[..., Rig]) -> None:
    rig = make()
    rig.refuse = True
    with rig.dial() as stranger:
        assert is_closed(stranger)
    rig.refuse = False
    assert rig.admits()


def test_running_out_of_descriptors_pauses_the_listening_without_spinning(
    make: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_handshake, "ACCEPT_PAUSE_S", 0.01)
    rig = make()
    failures: list[int] = []
    listener = rig.reception.listen(lambda: pytest.fail("listens already"))
    real = listener.accept

    class Exhausted:
        """The listener of a process that is out of descriptors for its first three tries."""

        def accept(self) -> tuple[socket.socket, object]:
            if len(failures) < 3:
                failures.append(1)
                raise OSError(errno.EMFILE, "Too many open files")
            return real()

        def fileno(self) -> int:
            return listener.fileno()

        def close(self) -> None:
            listener.close()

    monkeypatch.setattr(rig.reception, "_listener", Exhausted())
    assert rig.admits()
    assert len(failures) == 3


def test_the_end_of_the_loop_closes_listener_and_strangers(make: Callable[..., Rig]) -> None:
    rig = make()
    with rig.dial() as stranger:
        assert rig.admits()  # so the stranger before it was accepted, too
        assert rig.loop.stop(5)
        assert is_closed(stranger)
    with pytest.raises(ConnectionRefusedError):
        rig.dial()
