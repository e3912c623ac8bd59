"""Promise 5: neither side acts before the other has proven that it holds the secret."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Generator, Iterator

import pytest

from kvbaton.protocol.errors import ProtocolError
from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.transports.net import connection_handshake
from kvbaton.transports.net.connection_handshake import Admitted, SecretRing, admit, greet
from kvbaton.transports.net.stream_socket import Bytes, Sink, Wire, take
from tests.transports.tcp.blocking import D, P, play


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    client, server = socket.socketpair()
    client.settimeout(20)
    server.settimeout(20)
    with client, server:
        yield client, server


def meet(
    ends: tuple[socket.socket, socket.socket], keyring: SecretRing, secret: bytes, server: PeerId = P
) -> tuple[Exception | None, Admitted | Exception]:
    """How the client and how the server fared."""
    client, listener = ends
    outcome: list[Admitted | Exception] = []

    def serve() -> None:
        try:
            outcome.append(play(listener, lambda wire: admit(wire, keyring, P)))
        except (ProtocolError, OSError) as error:
            outcome.append(error)
            listener.close()

    thread = threading.Thread(target=serve)
    thread.start()
    failure: Exception | None = None
    try:
        play(client, lambda wire: greet(wire, secret, D, server, 3))
    except (ProtocolError, OSError) as error:
        failure = error
        client.close()
    thread.join(20)
    return failure, outcome[0]


def test_two_that_share_a_secret_admit_each_other(ends: tuple[socket.socket, socket.socket]) -> None:
    keyring = SecretRing()
    secret = keyring.mint(D)
    assert meet(ends, keyring, secret) == (None, Admitted(D, 3, secret))


def test_a_client_with_the_wrong_secret_leaves_without_a_proof(ends: tuple[socket.socket, socket.socket]) -> None:
    keyring = SecretRing()
    keyring.mint(D)
    failure, outcome = meet(ends, keyring, secrets.token_bytes(32))
    assert isinstance(failure, ProtocolError) and "pair with it again" in failure.detail
    assert isinstance(outcome, ConnectionError)


def test_an_unknown_client_is_answered_like_a_known_one(ends: tuple[socket.socket, socket.socket]) -> None:
    failure, outcome = meet(ends, SecretRing(), secrets.token_bytes(32))
    assert isinstance(failure, ProtocolError) and isinstance(outcome, ConnectionError)


def test_a_proof_for_one_server_is_none_for_another(ends: tuple[socket.socket, socket.socket]) -> None:
    keyring = SecretRing()
    failure, _ = meet(ends, keyring, keyring.mint(D), server=PeerId(P.worker, Incarnation(9)))
    assert isinstance(failure, ProtocolError)


def test_a_client_that_skips_the_proof_is_refused(ends: tuple[socket.socket, socket.socket]) -> None:
    keyring = SecretRing()
    keyring.mint(D)

    def brazen(wire: Wire) -> Generator[Sink, None, None]:
        name = D.worker.encode()
        hello = connection_handshake._HELLO.pack(b"KVBT", 1, 0, len(name), D.incarnation, bytes(32))
        wire.out.append(Bytes(hello + name + bytes(32)))
        yield from take(64)

    client, server = ends
    thread = threading.Thread(target=lambda: play(client, brazen))
    thread.start()
    with pytest.raises(ProtocolError, match="failed to authenticate"):
        play(server, lambda wire: admit(wire, keyring, P))
    thread.join(20)


@pytest.mark.parametrize(
    "hello", [bytes(48), b"GET / HTTP/1.1\r\n" + bytes(32), b"KVBT\2" + bytes(43), b"KVBT\1\0\xff\xff" + bytes(40)]
)
def test_what_is_no_greeting_is_refused(ends: tuple[socket.socket, socket.socket], hello: bytes) -> None:
    ends[0].sendall(hello)
    with pytest.raises(ProtocolError, match="no handshake"):
        play(ends[1], lambda wire: admit(wire, SecretRing(), P))


def test_a_secret_lasts_until_it_is_revoked_and_never_comes_back() -> None:
    keyring = SecretRing()
    first = keyring.mint(D)
    assert keyring.mint(D) == first and keyring.still_admits(Admitted(D, 0, first))
    keyring.revoke(D)
    keyring.revoke(D)
    assert keyring.get(D) is None and not keyring.still_admits(Admitted(D, 0, first))
    assert keyring.mint(D) != first and not keyring.still_admits(Admitted(D, 0, first))


def test_another_life_of_a_worker_is_another_peer() -> None:
    keyring = SecretRing()
    assert keyring.mint(D) != keyring.mint(PeerId(D.worker, Incarnation(77)))


def test_the_keyring_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_handshake, "PEERS_MAX", 2)
    keyring = SecretRing()
    for number in range(2):
        keyring.mint(PeerId(WorkerId("w"), Incarnation(number)))
    with pytest.raises(RuntimeError, match="disconnect those that are gone"):
        keyring.mint(D)
