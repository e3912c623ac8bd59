"""Invitations to a store's lines over CurveZMQ: the bytes of the messages, and what nonsense and silence cost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import zmq

from kvbaton.control.keyring import Keyring
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.ids import WorkerId
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.tcp_backend import Dial, InvitationClient, Invited, ServerSilent, encode, reply, request
from kvbaton.store.tcp_server_side import LineServer, StoreServer
from kvbaton.testing.transport_harness import poll

SERVER, CLIENT = WorkerId("store"), WorkerId("engine")


class Cluster:
    """A store that serves, and the control plane of one member."""

    def __init__(self) -> None:
        pairs = {worker: tuple(key.decode() for key in zmq.curve_keypair()) for worker in (SERVER, CLIENT)}
        peers = {worker: public for worker, (public, _) in pairs.items()}
        rings = {worker: Keyring(worker, *pair, peers, (b"t" * 32,)) for worker, pair in pairs.items()}
        control, memory = ZmqControl(rings[SERVER]), MemoryBackend(1 << 20)
        self.lines = LineServer(memory, "127.0.0.1", value_bytes_max=1 << 20)
        self.control = ZmqControl(rings[CLIENT], None)
        self.control.set_directory({SERVER: (control.endpoint, rings[SERVER].public)})
        self.server = StoreServer(control, memory, self.lines)


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.server.close()


def test_the_bytes_are_those_of_every_release() -> None:
    assert encode(Dial(5)) == b"\x92\xa4Dial\x05"
    assert encode(Invited(5, 99, 7, b"12")) == b"\x95\xa7Invited\x05\x63\x07\xc4\x0212"
    assert request(b"\x92\xa4Dial\x05") == Dial(5)
    assert reply(b"\x95\xa7Invited\x05\x63\x07\xc4\x0212") == Invited(5, 99, 7, b"12")


def test_each_invitation_is_another_one(cluster: Cluster) -> None:
    client = InvitationClient(cluster.control, SERVER)
    found = [client.invitation(20) for _ in range(3)]
    assert {each.port for each in found} == {cluster.lines.port}
    assert {each.number: each.secret for each in found} == cluster.lines._invitations
    assert not client._waiting
    client.close()


def test_a_server_that_is_gone_is_silence_within_the_time(cluster: Cluster) -> None:
    client = InvitationClient(cluster.control, SERVER)
    client.invitation(20)
    cluster.server.close()
    with pytest.raises(ServerSilent, match="is it running"):
        client.invitation(0.5)
    assert client.counters["silent"] == 1 and not client._waiting
    client.close()


def test_nonsense_is_dropped_and_the_next_question_is_answered(cluster: Cluster) -> None:
    control = cluster.control
    earlier = encode(("Ask", 1, ["k0"])), encode(("Keep", 1, "k0", 0, 3, b"abc"))  # of a store without lines
    for frame in (b"x", encode(("Dial",)), encode(Invited(1, 1, 1, b"")), b"\xc1" * 100, *earlier):
        control.send(SERVER, frame)
    control.send(SERVER, encode(Dial(77)))

    def answered() -> bool:
        control.wait(0.01)
        return any(said is not None and said.id == 77 for said in (reply(frame) for _, frame in control.receive()))

    assert poll(answered, 20)
    assert cluster.server.counters == {"malformed": 6}
    control.close()


@pytest.mark.parametrize("message", [Dial(-1), Dial(1 << 63), ("Dial", "1"), Invited(1, 1, 1, b"")])
def test_a_request_outside_its_bounds_is_none(message: object) -> None:
    assert request(encode(message)) is None


@pytest.mark.parametrize(
    "message", [Invited(1, 1 << 16, 1, b""), Invited(1, 1, 1, bytes(65)), Invited(-1, 1, 1, b""), Dial(1)]
)
def test_a_reply_outside_its_bounds_is_none(message: object) -> None:
    assert reply(encode(message)) is None
