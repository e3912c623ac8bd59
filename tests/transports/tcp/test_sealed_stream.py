"""Records: the next one opens, whole and once; anything else yields nothing. And who encrypts with whom."""

from __future__ import annotations

import importlib.metadata
import random
import socket
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvbaton.protocol.errors import ProtocolError
from kvbaton.security import records, sealing
from kvbaton.security.records import HEAD, OVERHEAD_BYTES, RECORD_BYTES, Seals
from kvbaton.security.sealing import agree, is_loopback, is_required, is_required_on
from kvbaton.transports.net.stream_socket import Bytes, SealedStream
from tests.transports.tcp.blocking import tcp_pair

SECRET = bytes(range(32))


def pair(said: bytes = b"said", secret: bytes = SECRET) -> tuple[Seals, Seals]:
    return Seals(secret, said, is_server=False), Seals(secret, said, is_server=True)


def sealed(seals: Seals, plain: bytes) -> bytes:
    room = memoryview(bytearray(len(plain) + OVERHEAD_BYTES))
    assert seals.sealer.seal(memoryview(plain), room) == len(room)
    return bytes(room)


def opened(seals: Seals, record: bytes) -> bytes:
    room = memoryview(bytearray(RECORD_BYTES))
    assert seals.opener.size_of(record[: HEAD.size]) == len(record)
    return bytes(room[: seals.opener.open(memoryview(record), room)])


# --- records


@settings(deadline=None, max_examples=50)
@given(st.lists(st.binary(min_size=1, max_size=200), max_size=8), st.booleans())
def test_what_one_side_seals_the_other_opens_in_order(said: list[bytes], backwards: bool) -> None:
    here, there = pair()[::-1] if backwards else pair()
    assert [opened(there, sealed(here, plain)) for plain in said] == said


def test_the_largest_record_opens_and_a_larger_one_is_refused_and_an_empty_one_is_not_said() -> None:
    here, there = pair()
    plain = random.Random(1).randbytes(RECORD_BYTES)
    assert opened(there, sealed(here, plain)) == plain
    for size in (0, RECORD_BYTES + 1):
        with pytest.raises(ValueError, match=str(size)):
            here.sealer.seal(memoryview(bytes(size)), memoryview(bytearray(size + OVERHEAD_BYTES)))
    with pytest.raises(ProtocolError, match="encrypt"):
        there.opener.size_of(HEAD.pack(RECORD_BYTES + 1))


def test_the_end_is_a_record_that_only_the_peer_can_say() -> None:
    here, there = pair()
    assert opened(there, sealed(here, b"x")) == b"x"
    last = here.sealer.end()
    with pytest.raises(ProtocolError, match="altered"):
        opened(pair()[1], last)
    assert opened(there, last) == b""


def test_an_empty_payload_behind_a_full_record_is_no_record() -> None:
    near, far = tcp_pair()
    with near, far:
        stream = SealedStream(pair()[0], b"")
        out = deque([Bytes(b"x" * RECORD_BYTES), Bytes(b"")])
        near.settimeout(20)
        while out or stream.has_unsent:
            stream.push(near, out)
            far.recv(1 << 20)


@pytest.mark.parametrize("at", [0, 1, HEAD.size, HEAD.size + 50, -16, -1])
def test_a_record_with_one_flipped_bit_does_not_open(at: int) -> None:
    here, there = pair()
    record = bytearray(sealed(here, b"x" * 100))
    record[at] ^= 1
    with pytest.raises(ProtocolError, match="altered"):
        there.opener.open(memoryview(record), memoryview(bytearray(200)))


@pytest.mark.parametrize("order", [[0, 0], [1], [0, 2], [0, 1, 0]], ids=["repeated", "moved", "left out", "replayed"])
def test_a_record_opens_only_in_its_place(order: list[int]) -> None:
    here, there = pair()
    made = [sealed(here, bytes([number]) * 9) for number in range(3)]
    for number in order[:-1]:
        opened(there, made[number])
    with pytest.raises(ProtocolError, match="altered"):
        opened(there, made[order[-1]])


def test_no_other_connection_direction_stream_or_secret_opens_it() -> None:
    here, _ = pair()
    for other in (
        pair(b"another greeting")[1],
        pair(secret=bytes(32))[1],
        pair()[0],  # our own words, sent back to us
    ):
        with pytest.raises(ProtocolError, match="altered"):
            opened(other, sealed(pair()[0], b"abc"))
    assert sealed(here, b"abc") != sealed(here, b"abc")


class Recorder:
    """Instead of the cipher: what it was asked to use."""

    seen: ClassVar[list[tuple[bytes, bytes]]] = []

    def __init__(self, key: bytes) -> None:
        self._key = key

    def encrypt_into(self, nonce: bytes, plain: memoryview, head: bytes, into: memoryview) -> None:
        self.seen.append((self._key, nonce))


def test_no_nonce_is_used_twice_with_a_key_however_long_or_often_they_talk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS_PER_KEY", 5)
    monkeypatch.setattr(records, "_aead", lambda: Recorder)
    monkeypatch.setattr(Recorder, "seen", [])
    room = memoryview(bytearray(64))
    for greeting in range(4):
        for seals in pair(b"nonces of greeting %d" % greeting):
            for _ in range(23):
                seals.sealer.seal(memoryview(b"x"), room)
    keys = [key for key, _ in Recorder.seen]
    assert len(Recorder.seen) == len(set(Recorder.seen)) == 4 * 2 * 23
    assert len(set(keys)) == 4 * 2 * 5 and max(map(keys.count, keys)) == 5


def test_both_sides_move_on_to_the_next_key_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "RECORDS_PER_KEY", 3)
    here, there = pair()
    before = here.sealer._secret
    for number in range(11):
        assert opened(there, sealed(here, bytes([number]))) == bytes([number])
    assert here.sealer._secret == there.opener._secret != before


# --- a stream of them


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    near, far = tcp_pair()
    with near, far:
        far.settimeout(20)
        yield near, far


def test_any_cut_of_the_stream_yields_the_same_plaintext(ends: tuple[socket.socket, socket.socket]) -> None:
    rng = random.Random(3)
    here, there = pair()
    said = [rng.randbytes(rng.choice((1, 28, 5000, RECORD_BYTES, 100))) for _ in range(12)]
    raw = b"".join(sealed(here, plain) for plain in said)
    stream = SealedStream(there, b"")
    found, at = b"", 0
    while at < len(raw):
        step = rng.choice((1, 3, 4, 5, 24, 4096, 300_000))
        ends[0].sendall(raw[at : at + step])
        due = min(step, len(raw) - at)
        at += due
        while due:
            due -= stream.pull(ends[1])
            for plain in stream.opened():
                found += plain
        assert stream.missing(0) > 0
    assert found == b"".join(said)


def test_what_waited_goes_first_and_plain_and_many_small_things_share_a_record(
    ends: tuple[socket.socket, socket.socket],
) -> None:
    here, there = pair()
    stream = SealedStream(here, b"proof")
    out = deque(Bytes(b"%d" % number) for number in range(10))
    while out or stream.has_unsent:
        stream.push(ends[0], out)
    ends[0].close()
    raw = ends[1].makefile("rb").read()
    assert raw.startswith(b"proof") and opened(there, raw[5:]) == b"0123456789"


# --- who encrypts


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.9.9.9", True), ("::1", True), ("::ffff:127.0.0.1", True), ("::1%lo", True),
        ("10.0.0.1", False), ("0.0.0.0", False), ("::", False), ("::ffff:10.0.0.1", False), ("localhost", False),
    ],
)  # fmt: skip
def test_only_addresses_that_cannot_leave_the_host_are_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback
    assert is_required("auto", host, "127.0.0.1") is not loopback
    assert is_required("on", host) and not is_required("off", host)


def test_a_connection_is_judged_by_its_addresses_and_a_unix_socket_never_leaves(
    ends: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not is_required_on("auto", ends[1]) and is_required_on("on", ends[1])
    near, far = socket.socketpair()
    with near, far:
        assert not is_required_on("on", far)
    monkeypatch.setattr(sealing, "is_loopback", lambda host: False)
    assert is_required_on("auto", ends[1]) and not is_required_on("off", ends[1])


def test_the_stricter_side_wins_and_who_cannot_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not agree("p", "auto", "127.0.0.1", wanted=False, able=True)
    assert not agree("p", "off", "10.0.0.1", wanted=False, able=False)
    assert agree("p", "off", "10.0.0.1", wanted=True, able=True)
    assert agree("p", "on", "127.0.0.1", wanted=False, able=True)
    with pytest.raises(ValueError, match=r"encrypt: p at 10\.0\.0\.1 cannot encrypt"):
        agree("p", "auto", "10.0.0.1", wanted=False, able=False)
    monkeypatch.setattr(sealing, "can_seal", lambda: False)
    with pytest.raises(ValueError, match="pip install"):
        agree("p", "off", "10.0.0.1", wanted=True, able=True)
    with pytest.raises(ValueError, match="pip install"):
        sealing.check("auto", "10.0.0.1")
    sealing.check("auto", "127.0.0.1")
    with pytest.raises(ValueError, match="expected one of auto, on, off"):
        sealing.check("maybe", "127.0.0.1")  # type: ignore[arg-type]


@pytest.mark.parametrize(("version", "enough"), [("46.0.3", False), ("47.0.0", True), ("50.0.2", True), (None, False)])
def test_a_library_that_is_missing_or_too_old_is_noticed(
    monkeypatch: pytest.MonkeyPatch, version: str | None, enough: bool
) -> None:
    def found(_name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    assert sealing.can_seal.__wrapped__() is enough
