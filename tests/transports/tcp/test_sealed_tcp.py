"""Promises 1 and 5 with somebody in the middle: nothing is read, nothing altered lands, nothing is downgraded."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from array import array
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import JobId, PeerId
from kvbaton.security import sealing
from kvbaton.security.sealing import PLAIN, Encrypt
from kvbaton.testing import check_transport
from kvbaton.testing.transport_harness import poll
from kvbaton.transports import catalogue
from kvbaton.transports.catalogue import PlaneSettings
from kvbaton.transports.checksum.checksum_transport import SumConfig, SummedTransport
from kvbaton.transports.core.loans import lend_everything
from kvbaton.transports.core.transport import Copy, CopyEnded, CopyRested, Direction
from kvbaton.transports.net.connection_handshake import greet
from kvbaton.transports.net.stream_socket import FrameKind, Wire
from kvbaton.transports.tcp.tcp_transport import SealedTcpEndpoint, TcpConfig, TcpEndpoint, TcpTransport
from tests.transports.device.device_harness import DeviceHarness
from tests.transports.tcp.blocking import D, P, is_closed, play
from tests.transports.tcp.blocking import request as plain_request
from tests.transports.tcp.relay import Edit, Relay, as_it_is

SIZE = 1 << 20
MARK = b"a prompt that nobody else may read. "
SECRETS = MARK * (SIZE // len(MARK) + 1)
BLANK = b"\7" * SIZE


class OldEndpoint(msgspec.Struct, frozen=True, array_like=True, tag="tcp1"):
    """As the version before encryption knew it."""

    owner: PeerId
    host: str
    port: int
    secret: bytes
    regions: dict[int, int]


class Rig:
    """P serves, D drives, a relay may be in between."""

    def __init__(self) -> None:
        self.closing: list[Callable[[], None]] = []
        self.theirs = bytearray(SECRETS[:SIZE])
        self.ours = bytearray(BLANK)
        self._jobs = iter(range(1, 100))

    def serve(self, encrypt: Encrypt) -> TcpTransport:
        p = TcpTransport(P, TcpConfig(encrypt=encrypt))
        p.register(0, memoryview(self.theirs))
        lend_everything(p, D)
        self.closing.append(p.close)
        return p

    def reader(self, encrypt: Encrypt, endpoint: bytes) -> TcpTransport:
        d = TcpTransport(D, TcpConfig(encrypt=encrypt, streams=1))
        d.register(0, memoryview(self.ours))
        self.closing.append(d.close)
        d.connect(P, endpoint)
        return d

    def relay(
        self, endpoint: bytes, edit: Edit = as_it_is, sealed: bool = True, **more: Callable[[bytes], bytes]
    ) -> Relay:
        relay = Relay(parsed(endpoint).port, len(D.worker), edit, sealed=sealed, **more)
        self.closing.insert(0, relay.close)
        return relay

    def copy(self, d: TcpTransport, direction: Direction = Direction.READ, size: int = SIZE) -> CopyEnded:
        job = JobId(next(self._jobs))
        assert d.submit(Copy(job, P, direction, 0, 0, array("q", [0, 0, size])))
        seen: list[CopyEnded] = []
        assert poll(lambda: seen.extend(each for each in d.drain() if isinstance(each, CopyEnded)) or bool(seen), 20)
        return seen[0]


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    for close in rig.closing:
        close()


def parsed(endpoint: bytes) -> TcpEndpoint:
    return msgspec.msgpack.decode(endpoint, type=TcpEndpoint | SealedTcpEndpoint)


def at(endpoint: bytes, port: int) -> bytes:
    return msgspec.msgpack.encode(msgspec.structs.replace(parsed(endpoint), port=port))


# --- who encrypts


@pytest.mark.parametrize(
    ("there", "here", "sealed"),
    [("auto", "auto", False), ("off", "off", False), ("on", "off", True), ("off", "on", True), ("on", "on", True)],
)
@pytest.mark.parametrize("direction", Direction)
def test_the_stricter_wins_and_then_no_plaintext_is_on_the_wire(
    rig: Rig, there: Encrypt, here: Encrypt, sealed: bool, direction: Direction
) -> None:
    if direction is Direction.WRITE:
        rig.theirs, rig.ours = rig.ours, rig.theirs
    endpoint = rig.serve(there).endpoint(D)
    relay = rig.relay(endpoint, sealed=sealed)
    d = rig.reader(here, at(endpoint, relay.port))
    end = rig.copy(d, direction)
    assert end.reason is None, end
    assert rig.ours == rig.theirs == SECRETS[:SIZE]
    heard = bytes(relay.heard["client"] + relay.heard["server"])
    assert len(heard) > SIZE and (MARK in heard) is not sealed


def test_beyond_loopback_auto_encrypts(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "is_loopback", lambda host: False)
    endpoint = rig.serve("auto").endpoint(D)
    assert isinstance(parsed(endpoint), SealedTcpEndpoint)
    relay = rig.relay(endpoint)
    assert rig.copy(rig.reader("auto", at(endpoint, relay.port))).reason is None
    assert rig.ours == rig.theirs and MARK not in relay.heard["client"]


def test_an_older_version_pairs_plainly_and_is_refused_by_name_where_that_is_not_done(rig: Rig) -> None:
    plain, strict = rig.serve("auto").endpoint(D), rig.serve("on").endpoint(D)
    assert msgspec.msgpack.decode(plain, type=OldEndpoint).owner == P
    with pytest.raises(msgspec.ValidationError, match="tcp2"):
        msgspec.msgpack.decode(strict, type=OldEndpoint)
    there = parsed(plain)
    old = msgspec.msgpack.encode(OldEndpoint(P, there.host, there.port, there.secret, there.regions))
    assert rig.copy(rig.reader("auto", old)).reason is None
    with pytest.raises(ValueError, match=r"encrypt: p.* cannot encrypt"):
        rig.reader("on", old)


def test_a_plain_greeting_is_refused_where_encryption_is_wanted_and_the_log_says_who(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    there = parsed(rig.serve("on").endpoint(D))
    with caplog.at_level(logging.WARNING), socket.create_connection((there.host, there.port), 20) as sock:
        play(sock, lambda wire: greet(wire, there.secret, D, P, 0))
        sock.sendall(plain_request(FrameKind.READ, [0, 64]))
        assert is_closed(sock)
    assert "encrypt: d" in caplog.text and "does not encrypt" in caplog.text


@pytest.mark.parametrize("there", ["on", "off"])
def test_who_turns_the_greeting_into_a_plain_one_ends_the_connection(rig: Rig, there: Encrypt) -> None:
    def strip(hello: bytes) -> bytes:
        return hello[:4] + bytes([PLAIN]) + hello[5:]

    endpoint = rig.serve(there).endpoint(D)
    relay = rig.relay(endpoint, greeting=strip)
    end = rig.copy(rig.reader("on", at(endpoint, relay.port)))
    assert end.reason is Reason.TRANSFER_FAILED and "does not hold our secret" in end.detail
    assert rig.ours == BLANK and MARK not in relay.heard["client"]


def test_a_wrong_secret_gets_nothing(rig: Rig) -> None:
    there = parsed(rig.serve("on").endpoint(D))
    end = rig.copy(rig.reader("on", msgspec.msgpack.encode(msgspec.structs.replace(there, secret=bytes(32)))))
    assert end.reason is Reason.TRANSFER_FAILED and rig.ours == BLANK


# --- what is changed on its way


def flipped(record: bytes, place: int) -> bytes:
    changed = bytearray(record)
    changed[place] ^= 0x10
    return bytes(changed)


CHANGES: dict[str, Callable[[list[bytes], int, bytes], list[bytes] | None]] = {
    "a bit of the length": lambda before, number, record: [flipped(record, 1)],
    "a bit of the ciphertext": lambda before, number, record: [flipped(record, 5000 % len(record))],
    "a bit of the tag": lambda before, number, record: [flipped(record, -3)],
    "repeated": lambda before, number, record: [before[-1]],
    "twice": lambda before, number, record: [record, record],
    "left out": lambda before, number, record: [],
    "cut off": lambda before, number, record: None,
    "half of it": lambda before, number, record: [record[: len(record) // 2], b"\0" * len(record)],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("direction", Direction)
def test_what_was_changed_on_its_way_fails_the_copy_and_never_lands(
    rig: Rig, change: str, direction: Direction
) -> None:
    """The third record that carries payload: two have landed by then, and they were right."""
    to = "client" if direction is Direction.READ else "server"
    if direction is Direction.WRITE:
        rig.theirs, rig.ours = rig.ours, rig.theirs
    target, source = (rig.ours, rig.theirs) if direction is Direction.READ else (rig.theirs, rig.ours)
    seen: list[bytes] = []

    def edit(way: str, number: int, record: bytes) -> list[bytes] | None:
        if way != to:
            return [record]
        seen.append(record)
        return CHANGES[change](seen[:-1], number, record) if number == 2 else [record]

    endpoint = rig.serve("on").endpoint(D)
    relay = rig.relay(endpoint, edit)
    d = rig.reader("on", at(endpoint, relay.port))
    end = rig.copy(d, direction)
    assert end.reason is Reason.TRANSFER_FAILED, end
    # one look at each byte: what was on its way may still land
    landed, sent = (np.frombuffer(bytes(memory), np.uint8) for memory in (target, source))
    assert ((landed == sent) | (landed == BLANK[0])).all(), "bytes landed that were never sent"
    assert target != source


def test_after_an_attack_the_next_copy_goes_over_a_new_connection(rig: Rig) -> None:
    once = iter([True])

    def edit(to: str, number: int, record: bytes) -> list[bytes]:
        return [flipped(record, 40) if to == "client" and next(once, False) else record]

    endpoint = rig.serve("on").endpoint(D)
    relay = rig.relay(endpoint, edit)
    d = rig.reader("on", at(endpoint, relay.port))
    end = rig.copy(d)
    assert end.reason is Reason.TRANSFER_FAILED and "altered" in end.detail
    assert rig.ours == BLANK
    assert rig.copy(d).reason is None and rig.ours == rig.theirs


def test_records_of_an_earlier_connection_are_worth_nothing(rig: Rig) -> None:
    """The relay answers a second connection with what it heard on the first."""
    first: list[bytes] = []

    def edit(to: str, number: int, record: bytes) -> list[bytes]:
        if to != "client" or first.count(record):
            return [record]
        first.append(record)
        return [record if len(first) <= 1 else first[0]]

    endpoint = rig.serve("on").endpoint(D)
    relay = rig.relay(endpoint, edit)
    d = rig.reader("on", at(endpoint, relay.port))
    assert rig.copy(d, size=64).reason is None
    again = TcpTransport(D, TcpConfig(encrypt="on", streams=1))
    rig.closing.append(again.close)
    again.register(0, memoryview(rig.ours))
    again.connect(P, at(endpoint, relay.port))
    rig.ours[:] = BLANK
    assert rig.copy(again, size=64).reason is Reason.TRANSFER_FAILED
    assert rig.ours == BLANK


def test_a_forged_end_of_the_connection_is_not_taken_for_the_rest_of_a_write(rig: Rig) -> None:
    """The writer's half is reset; the other stays open, and gets later what was held back."""
    rig.theirs, rig.ours = bytearray(8 * SIZE), bytearray(SECRETS[:SIZE] * 8)
    endpoint = rig.serve("on").endpoint(D)
    listener = socket.create_server(("127.0.0.1", 0))
    held: list[bytes] = []
    far = socket.create_connection(("127.0.0.1", parsed(endpoint).port), 20)

    def between() -> None:
        near = listener.accept()[0]
        back = threading.Thread(target=lambda: near.sendall(far.recv(1 << 16)))  # the server's half of the greeting
        back.start()
        passed = 0
        while passed < SIZE:
            data = near.recv(1 << 16)
            far.sendall(data)
            passed += len(data)
        back.join()
        held.append(near.recv(1 << 16))
        near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        near.close()

    middle = threading.Thread(target=between)
    middle.start()
    with listener, far:
        d = rig.reader("on", at(endpoint, listener.getsockname()[1]))
        end = rig.copy(d, Direction.WRITE, 8 * SIZE)
        middle.join(20)
        assert end.reason is Reason.TRANSFER_FAILED and not end.at_rest, "it may still land"
        far.sendall(held[0])  # and so it does
        assert not d.drain()
        d.disconnect(P)  # the pairing is over: nothing here waits for it
        rested: list[object] = []
        assert poll(lambda: rested.extend(d.drain()) or bool(rested), 20) and rested == [CopyRested(end.job)]


def test_a_write_whose_answer_was_altered_pins_nothing_once_the_peer_is_gone(rig: Rig) -> None:
    endpoint = rig.serve("on").endpoint(D)
    relay = rig.relay(endpoint, lambda to, number, record: [flipped(record, 9) if to == "client" else record])
    d = rig.reader("on", at(endpoint, relay.port))
    end = rig.copy(d, Direction.WRITE)
    assert end.reason is Reason.TRANSFER_FAILED and not end.at_rest
    d.disconnect(P)
    rested: list[object] = []
    assert poll(lambda: rested.extend(d.drain()) or bool(rested), 20) and rested == [CopyRested(end.job)]


def test_a_write_that_is_cancelled_comes_to_rest_by_the_end_that_the_peer_proves(rig: Rig) -> None:
    rig.theirs, rig.ours = bytearray(64 * SIZE), bytearray(64 * SIZE)
    d = rig.reader("on", rig.serve("on").endpoint(D))
    assert rig.copy(d, Direction.WRITE).reason is None
    assert d.submit(Copy(JobId(100), P, Direction.WRITE, 0, 0, array("q", [0, 0, 64 * SIZE])))
    assert poll(lambda: any(rig.theirs) or d._links[P]._streams[0] is not None, 20)
    d.cancel(JobId(100))
    seen: list[object] = []
    at_rest = CopyRested(JobId(100)), CopyEnded(JobId(100), Reason.CANCELLED, True)
    assert poll(lambda: seen.extend(d.drain()) or any(each in at_rest for each in seen), 20), seen


# --- the rest


def test_digests_are_encrypted_with_the_bytes_they_are_of(rig: Rig) -> None:
    sides = []
    for me in (P, D):
        side = SummedTransport(TcpTransport(me, TcpConfig(encrypt="on")), me, SumConfig(encrypt="on"))
        side.register(0, memoryview(rig.theirs if me is P else rig.ours))
        lend_everything(side, D, P)
        rig.closing.append(side.close)
        sides.append(side)
    sides[1].connect(P, sides[0].endpoint(D))
    assert rig.copy(sides[1]).reason is None  # type: ignore[arg-type]
    assert rig.ours == rig.theirs
    assert sides[1]._links[P].there.sealed


def test_a_host_without_the_library_is_refused_when_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealing, "can_seal", lambda: False)
    TcpConfig()
    for wrong in ({"encrypt": "on"}, {"host": "10.1.2.3"}, {"host": "0.0.0.0", "advertise": "10.1.2.3"}):
        with pytest.raises(ValueError, match="pip install"):
            TcpConfig(**wrong)  # type: ignore[arg-type]
    assert TcpConfig(host="10.1.2.3", encrypt="off").encrypt == "off"


@pytest.mark.parametrize(
    "name",
    [
        "scattered_spans_arrive_exactly",
        "nothing_lands_after_a_cancelled_read_has_come_to_rest",
        "nothing_lands_after_a_cancelled_write_has_come_to_rest",
        "a_fenced_writer_comes_back_only_with_a_new_endpoint",
    ],
)
def test_staging_over_tcp_is_encrypted_alike(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sealed: list[Wire] = []
    seal = Wire.seal
    monkeypatch.setattr(sealing, "is_loopback", lambda host: False)
    monkeypatch.setattr(Wire, "seal", lambda wire, seals: (sealed.append(wire), seal(wire, seals))[1])
    harness = DeviceHarness("staged-tcp", together=True)
    try:
        next(case for case in check_transport.cases if case.name == name)(harness)
    finally:
        harness.close()
    assert len(sealed) >= 2


def test_an_operator_is_told_of_a_plane_that_others_can_read(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("nixl", "mooncake", "nixl+sums"):
        assert "not encrypted" in catalogue.exposed(name, "10.0.0.1") and not catalogue.exposed(name, "127.0.0.1")
    for name in ("shm", "cuda", "staged-shm"):
        assert not catalogue.exposed(name, "10.0.0.1", "off")
    assert not catalogue.exposed("tcp", "10.0.0.1") and "encrypt is off" in catalogue.exposed("tcp", "10.0.0.1", "off")
    with caplog.at_level(logging.WARNING):
        catalogue.make("tcp", P, PlaneSettings("10.0.0.1", encrypt="off"), []).close()
    assert "tcp is not encrypted" in caplog.text
