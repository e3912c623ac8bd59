"""The laws of the one handshake, and the bytes of both services as every release has said them.

Law of the bytes: a peer or a store of an earlier release proves and is proven by exactly these, and encrypts its first
record so; a change here is a new version.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections import deque
from collections.abc import Callable, Generator
from typing import Any, cast

import pytest

from kvbaton.protocol.ids import Incarnation, PeerId, WorkerId
from kvbaton.security import sealing
from kvbaton.security.records import OVERHEAD_BYTES, Seals
from kvbaton.security.sealing import PLAIN, SEALED, Handshake, HandshakeError, PlainPeer, Service
from kvbaton.store import tcp_connection
from kvbaton.transports.net import connection_handshake as auth
from kvbaton.transports.net.stream_socket import ByteSource, Wire

P, D = PeerId(WorkerId("p"), Incarnation(1)), PeerId(WorkerId("d0"), Incarnation(0x1234))
SECRET, FIRST, SECOND = b"x" * 32, b"1" * 32, b"2" * 32

TCP = {
    "plain": (
        f"4b564254010302003412000000000000{FIRST.hex()}6430",
        f"{SECOND.hex()}375a8697580a7d41bc2a09810d6a8849f372d52d3aeb9b079f508491b8d8fec5",
        "dd5a1a1fca5cdf6884b7da030edaf308e13acd58d66842f2d5c7f805a4b2bc99",
    ),
    "sealed": (
        f"4b564254020302003412000000000000{FIRST.hex()}6430",
        f"{SECOND.hex()}05fb141cf2672f94e9e421d171c6d1cd8c7f1beaf9570e9a8bd1e411e8dea71b",
        "d4e9792728411dd02d0ddff91b8ee35f2b19addc02e392d6a65c37f3bd160130",
    ),
}
STORE = {
    "plain": (
        FIRST.hex(),
        f"4b56424c010000000700000000000000{SECOND.hex()}8260a2cffd5f506d2b9b400d16f3d7049fc8a6d5d1bb645f7779c3b64e9f015b",
        "47c64001c4e6d87f17e2acf796b4d8518c1dad4283cafb90b67fd4434eb991f1",
    ),
    "sealed": (
        FIRST.hex(),
        f"4b56424c020000000700000000000000{SECOND.hex()}8d4851141e57d3ae69395ce50eb320204ed2a7aedc9725b8ecb25d66bf8f6812",
        "ebb9b791d8edaccd874aade977029d58bf18146fe09a02510aed32200ab7570a",
    ),
}
RECORDS = {
    "tcp": "05000000c7fd64d17b03bd55f1355f4f052d0c1d7032f955f0",
    "store": "05000000f8c258a084935f5a008d0ffe99b580606f98e9ada3",
}
"""What a client encrypts first: b"hello"."""


@pytest.fixture(autouse=True)
def nonces(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed = iter((FIRST, SECOND))
    monkeypatch.setattr(secrets, "token_bytes", lambda count: next(fixed)[:count])


class Outbox:
    """As much of a `Wire` as a handshake needs."""

    def __init__(self) -> None:
        self.out: deque[ByteSource] = deque()

    def said(self) -> bytes:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            while self.out:
                self.out.popleft().push(ours, 1 << 20, 0.0)
            ours.shutdown(socket.SHUT_WR)
            return theirs.recv(1 << 16)


class Side:
    """A script of the tcp transport that is fed by hand."""

    def __init__(self, script: Callable[[Wire], Generator[Any, None, Any]]) -> None:
        self._box = Outbox()
        self._steps = script(cast(Wire, self._box))
        self._want = next(self._steps)
        self.result: Any = None

    def hear(self, data: bytes = b"") -> bytes:
        """What it says once it has heard this."""
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(data)
            while data:
                data = data[self._want.pull(ours, min(len(data), self._want.left), 0.0) :]
                if not self._want.left:
                    try:
                        self._want = next(self._steps)
                    except StopIteration as stop:
                        self.result = stop.value
        return self._box.said()


def record(seals: Seals | None) -> str:
    assert seals is not None
    into = memoryview(bytearray(5 + OVERHEAD_BYTES))
    seals.sealer.seal(memoryview(b"hello"), into)
    return into.hex()


@pytest.mark.parametrize("how", ["plain", "sealed"])
def test_of_tcp(how: str) -> None:
    keyring = auth.SecretRing()
    keyring._secrets[D] = SECRET
    client = Side(lambda wire: auth.greet(wire, SECRET, D, P, 3, sealed=how == "sealed"))
    server = Side(lambda wire: auth.admit(wire, keyring, P))
    hello = client.hear()
    answer = server.hear(hello)
    proof = client.hear(answer)
    server.hear(proof)
    assert (hello.hex(), answer.hex(), proof.hex()) == TCP[how]
    assert server.result.peer == D
    if how == "sealed":
        assert record(client.result) == RECORDS["tcp"]
        opened = memoryview(bytearray(5))
        assert server.result.seals.opener.open(memoryview(bytes.fromhex(RECORDS["tcp"])), opened) == 5


class Taped(tcp_connection.StoreConnection):
    """A line over a pair of sockets; what was read of it is kept."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.until = float("inf")
        self.heard: list[str] = []

    def _left(self) -> float:
        return 20.0

    def read(self, count: int) -> bytes:
        self.heard.append(super().read(count).hex())
        return bytes.fromhex(self.heard[-1])


@pytest.mark.parametrize("how", ["plain", "sealed"])
def test_of_a_store(how: str) -> None:
    ours, theirs = socket.socketpair()
    client, server = Taped(ours), Taped(theirs)
    thread = threading.Thread(target=lambda: tcp_connection.admit(server, {7: SECRET}.get, {7: SECRET}.get))
    thread.start()
    tcp_connection.greet(client, 7, SECRET, sealed=how == "sealed")
    thread.join(20)
    assert (client.heard[0], server.heard[0], client.heard[1]) == STORE[how]
    if how == "sealed":
        assert record(client._seals) == RECORDS["store"]
    client.close()
    server.close()


# --- the laws


def side(service: Service, *, is_server: bool, secret: bytes | None = SECRET, version: int = SEALED) -> Handshake:
    return Handshake(service, version, secret, b"said by both", is_server=is_server)


@pytest.mark.parametrize("service", Service)
def test_a_proof_is_of_one_service_one_role_and_one_secret(service: Service) -> None:
    server = side(service, is_server=True)
    [other] = set(Service) - {service}
    client, elsewhere = side(service, is_server=False), side(other, is_server=False)
    assert server.is_proof(client.proof()) and client.is_proof(server.proof())
    wrong = (
        server.proof(),  # given back
        elsewhere.proof(),
        side(other, is_server=True).proof(),
        side(service, is_server=False, secret=b"y" * 32).proof(),
        Handshake(service, SEALED, SECRET, b"said by nobody", is_server=False).proof(),
        b"",
    )
    assert not any(map(server.is_proof, wrong))
    assert len({server.proof(), *wrong}) == len(wrong)


def test_keys_are_of_one_service() -> None:
    found = set()
    for service in Service:
        client, server = side(service, is_server=False), side(service, is_server=True)
        assert client.is_proof(server.proof())
        found.add(record(client.seals("p")))
    assert len(found) == len(Service)


def test_no_service_can_be_mistaken_for_the_beginning_of_another() -> None:
    assert not any(b"|" in service.value for service in Service)


def test_an_unknown_peer_is_answered_by_a_secret_of_its_own() -> None:
    one, other = (side(Service.TRANSPORT, is_server=True, secret=None) for _ in range(2))
    assert one.proof() != other.proof()


def test_nothing_follows_before_the_other_side_has_proven_itself() -> None:
    server, client = side(Service.STORE, is_server=True), side(Service.STORE, is_server=False)
    with pytest.raises(RuntimeError, match="not proven"):
        server.seals("a client")
    assert server.is_proof(client.proof()) and not server.is_proof(b"x" * 32)
    with pytest.raises(RuntimeError, match="not proven"):
        server.seals("a client")


def test_a_plain_peer_is_refused_and_logged_where_this_side_insists(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = side(Service.STORE, is_server=True, version=PLAIN)
    assert server.is_proof(side(Service.STORE, is_server=False, version=PLAIN).proof())
    assert server.seals("a client") is None
    with pytest.raises(PlainPeer, match="a client does not encrypt"):
        server.seals("a client", must_seal=True)
    assert "[plain-peer-refused]" in caplog.text
    monkeypatch.setattr(sealing, "can_seal", lambda: False)
    sealed = side(Service.STORE, is_server=True)
    assert sealed.is_proof(side(Service.STORE, is_server=False).proof())
    with pytest.raises(HandshakeError, match="pip install"):
        sealed.seals("a client")
