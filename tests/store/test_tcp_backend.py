"""Values over lines: the contract, who gets a line, and what odd, short and late talk costs."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence

import pytest
import zmq

from kvbaton.control.keyring import Keyring
from kvbaton.control.zmq import ZmqControl
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.security.records import OVERHEAD_BYTES, RECORD_BYTES
from kvbaton.security.sealing import NONCE_BYTES, PROOF_BYTES, Encrypt
from kvbaton.store import tcp_server_side
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.tcp_backend import InvitationClient, LinedBackend, ServerSilent
from kvbaton.store.tcp_connection import _HELLO, LineError, Op, StoreConnection, admit, greet
from kvbaton.store.tcp_server_side import LineServer, StoreServer
from kvbaton.testing.store_case import StoreCase, engine, names, values
from kvbaton.testing.store_contract import check_store
from kvbaton.testing.store_harness import FaultyBackend
from kvbaton.testing.transport_harness import poll

SERVER = WorkerId("store")
VALUE_BYTES_MAX = 5 << 20
CLIENTS = 24


def rings() -> dict[WorkerId, Keyring]:
    workers = [SERVER, *(WorkerId(f"engine{number}") for number in range(CLIENTS))]
    pairs = {worker: tuple(key.decode() for key in zmq.curve_keypair()) for worker in workers}
    peers = {worker: public for worker, (public, _) in pairs.items()}
    return {worker: Keyring(worker, public, secret, peers, (b"t" * 32,)) for worker, (public, secret) in pairs.items()}


class LinedHarness:
    offers = frozenset({"idle"})
    timeout_s = 15.0  # not meant to run out

    def __init__(self, encrypt: Encrypt = "auto") -> None:
        self.encrypt: Encrypt = encrypt
        self.reset_to()

    def reset_to(self) -> None:
        self.memory = FaultyBackend(MemoryBackend(64 << 20))
        self.rings = rings()
        self._names = iter([name for name in self.rings if name != SERVER])
        control = ZmqControl(self.rings[SERVER])
        self.endpoint = control.endpoint
        self.lines = LineServer(self.memory, "127.0.0.1", value_bytes_max=VALUE_BYTES_MAX, encrypt=self.encrypt)
        self.server = StoreServer(control, self.memory, self.lines)

    def backend(self) -> LinedBackend:
        control = ZmqControl(self.rings[next(self._names)], None)
        control.set_directory({SERVER: (self.endpoint, self.rings[SERVER].public)})
        return LinedBackend(
            InvitationClient(control, SERVER), "127.0.0.1", timeout_s=self.timeout_s, encrypt=self.encrypt
        )

    def reset(self) -> None:
        self.close()
        self.reset_to()

    def close(self) -> None:
        self.memory.go_on()
        self.server.close()
        self.lines.close()


@pytest.fixture
def harness() -> Iterator[LinedHarness]:
    harness = LinedHarness()
    yield harness
    harness.close()


@pytest.mark.parametrize("case", check_store.cases, ids=str)
def test_a_store_over_lines_keeps_the_contract(harness: LinedHarness, case: StoreCase) -> None:
    case(harness)


def test_large_and_absent_values_go_both_ways(harness: LinedHarness) -> None:
    backend = harness.backend()
    value = memoryview(os.urandom((3 << 20) + 17))
    assert backend.put(["a", "b"], [value, value[:5]]) == ["", ""]
    into = [memoryview(bytearray(value.nbytes)) for _ in range(3)]
    assert backend.get(["a", "c", "b"], into) == [value.nbytes, 0, 5]
    assert into[0] == value
    assert backend.get(["a"], [memoryview(bytearray(100))]) == [0], "longer than there is room for"
    assert backend.exists(["a", "c"]) == [True, False]
    backend.discard(["a"])
    assert backend.exists(["a", "b"]) == [False, True]
    assert harness.lines.counters["lines"] == 1, "one line does for calls that come one after the other"
    backend.close()


def test_a_value_over_the_bound_is_refused_and_the_line_goes_on(harness: LinedHarness) -> None:
    backend = harness.backend()
    wrong = backend.put(["a", "b"], [memoryview(bytes(VALUE_BYTES_MAX + 1)), memoryview(b"good")])
    assert "at most" in wrong[0] and wrong[1] == ""
    assert backend.exists(["a", "b"]) == [False, True]
    assert harness.lines.counters["lines"] == 1
    backend.close()


def test_calls_at_once_have_lines_of_their_own(harness: LinedHarness) -> None:
    backend = harness.backend()
    harness.memory.hangs.add("exists")
    answers: list[object] = []
    threads = [threading.Thread(target=lambda: answers.append(backend.exists(["a"]))) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert poll(lambda: harness.memory.inside == 3, 10)
    assert backend.put(["b"], [memoryview(b"1")]) == [""], "not behind those that hang"
    harness.memory.go_on()
    for thread in threads:
        thread.join(10)
    assert answers == [[False]] * 3
    backend.close()


def test_a_server_that_hangs_or_is_gone_is_silence_in_time_and_no_byte_lands_later(harness: LinedHarness) -> None:
    backend = harness.backend()
    assert backend.put(["a"], [memoryview(b"12345")]) == [""]
    harness.memory.hangs.add("get")
    into = memoryview(bytearray(5))
    backend._timeout_s = 1.0
    with pytest.raises(ServerSilent, match="is it running"):
        backend.get(["a"], [into])
    harness.memory.go_on()
    assert poll(lambda: not harness.memory.inside, 10)
    assert bytes(into) == bytes(5)
    backend._timeout_s = harness.timeout_s
    assert backend.exists(["a"]) == [True], "a new line"
    harness.server.close()
    backend._timeout_s = 1.0
    for call in (
        lambda: backend.exists(["a"]),
        lambda: backend.put(["a"], [memoryview(b"1")]),
        lambda: backend.get(["a"], [into]),
    ):
        with pytest.raises(ServerSilent, match="is it running"):
            call()
    backend.close()


def test_an_idle_line_that_the_server_left_is_replaced(harness: LinedHarness) -> None:
    backend = harness.backend()
    assert backend.put(["a"], [memoryview(b"1")]) == [""]
    for line in list(harness.lines._lines):
        line.close()
    assert backend.exists(["a"]) == [True]
    assert backend.counters["renewed"] == 1
    backend.close()


def test_a_server_killed_while_engines_put_leaves_no_pin(harness: LinedHarness) -> None:
    harness.timeout_s = 4.0
    with engine(harness, call_timeout_s=1.0) as p:
        p.kept(names(2), values(2))
        orders = [p.put(names(9, seed), values(9), 5.0) for seed in range(1, 20)]
        harness.server.close()
        reasons = {p.end(order).reason for order in orders}
        assert reasons <= {None, Reason.STORE_FAILED, Reason.TRANSFER_TIMEOUT}
        p.pins.check()
        assert p.end(p.lookup(names(2), 2.0)).count == 0


def test_many_clients_at_once_get_their_own_answers(harness: LinedHarness) -> None:
    backends = [harness.backend() for _ in range(4)]
    wrong: list[str] = []

    def use(number: int) -> None:
        backend = backends[number % 4]
        for turn in range(20):
            key, value = f"k{number}.{turn}", memoryview(bytes([number]) * 1000)
            into = memoryview(bytearray(1000))
            if backend.put([key], [value]) != [""] or backend.get([key], [into]) != [1000] or into != value:
                wrong.append(key)

    threads = [threading.Thread(target=use, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not wrong
    for backend in backends:
        backend.close()


def test_the_embedded_back_end_is_served_without_a_copy_and_with_the_same_bounds(harness: LinedHarness) -> None:
    memory = MemoryBackend(1 << 20)
    harness.lines.close()
    harness.lines = harness.server._lines = LineServer(memory, "127.0.0.1", value_bytes_max=1 << 20)
    backend = harness.backend()
    value = memoryview(os.urandom(5000))
    wrong = backend.put(["a", "b", "c"], [value, memoryview(bytes(2 << 20)), memoryview(bytes(1 << 20))])
    assert wrong[0] == "" and "at most" in wrong[1] and "larger than the store" in wrong[2]
    into = [memoryview(bytearray(size)) for size in (5000, 4999, 10)]
    assert backend.get(["a", "a", "b"], into) == [5000, 0, 0]
    assert into[0] == value
    assert bytes(into[1]) == bytes(4999)
    assert memory.counters == {"hits": 2, "misses": 1, "evicted": 0}
    backend.close()


# --- strangers and nonsense


def connect(harness: LinedHarness) -> StoreConnection:
    line = StoreConnection(socket.create_connection(("127.0.0.1", harness.lines.port)))
    line.until = time.monotonic() + 20
    return line


def is_shut(line: StoreConnection) -> bool:
    try:
        line.read(1)
    except (LineError, OSError):
        return True
    return False


def test_nobody_gets_past_the_greeting_without_an_invitation_and_none_is_good_twice(harness: LinedHarness) -> None:
    number, secret = harness.lines.invite()
    for wrong in ((number + 1, secret), (number, bytes(32))):
        line = connect(harness)
        with pytest.raises((LineError, OSError)):
            greet(line, *wrong)
    number, secret = harness.lines.invite()
    greet(connect(harness), number, secret)
    with pytest.raises((LineError, OSError)):
        greet(connect(harness), number, secret)
    stranger = connect(harness)
    stranger.read(32)
    stranger.send(b"GET / HTTP/1.1\r\n\r\n" + bytes(100))
    assert is_shut(stranger)
    assert harness.memory.calls.total() == 0


def test_a_server_that_does_not_hold_the_secret_is_left() -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    server, client = _Plain(theirs), _Plain(ours)
    failed: list[Exception] = []

    def serve() -> None:
        try:
            admit(server, lambda _: b"x" * 32, lambda _: b"x" * 32)
        except (LineError, OSError) as error:
            failed.append(error)
            server.close()

    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises((LineError, OSError)):
        greet(client, 1, b"y" * 32)
        client.read(1)
    client.close()
    thread.join(10)
    assert failed


class _Plain(StoreConnection):
    """A line over a pair of sockets that are not TCP."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self.until = time.monotonic() + 20


@pytest.mark.parametrize(
    "said",
    [
        struct.pack("<B3xI", 9, 1) + b"x",
        struct.pack("<B3xI", Op.EXISTS, 1 << 30),
        struct.pack("<B3xI", Op.EXISTS, 4) + b"\xc1\xc1\xc1\xc1",
        struct.pack("<B3xI", Op.EXISTS, 7) + b"\x91\x92\xa3A/B\x00",
        struct.pack("<B3xI", Op.GET, 1) + b"\x90",
    ],
)
def test_nonsense_costs_its_line_alone(harness: LinedHarness, said: bytes) -> None:
    backend = harness.backend()
    assert backend.exists(["a"]) == [False]
    line = connect(harness)
    greet(line, *harness.lines.invite())
    line.send(said)
    assert is_shut(line)
    assert backend.exists(["a"]) == [False]
    assert harness.lines.counters["faults"] == 0
    backend.close()


def test_lines_and_invitations_are_bounded(harness: LinedHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server_side, "LINES_MAX", 2)
    monkeypatch.setattr(tcp_server_side, "INVITATIONS_MAX", 3)
    held = [connect(harness), connect(harness)]
    for line in held:
        greet(line, *harness.lines.invite())
    assert poll(lambda: len(harness.lines._lines) == 2, 10)
    more = connect(harness)
    with pytest.raises((LineError, OSError)):
        greet(more, *harness.lines.invite())
    assert harness.lines.counters["turned_away"] == 1
    for line in (*held, more):
        line.close()
    assert poll(lambda: not harness.lines._lines, 10)
    first = harness.lines.invite()
    for _ in range(3):
        harness.lines.invite()
    late = connect(harness)
    with pytest.raises((LineError, OSError)):
        greet(late, *first)
    late.close()
    assert len(harness.lines._invitations) == 3


def test_strangers_take_no_members_place(harness: LinedHarness, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp_server_side, "LINES_MAX", 2)
    monkeypatch.setattr(tcp_server_side, "GREETING_MAX", 4)
    strangers = [connect(harness) for _ in range(20)]
    backend = harness.backend()
    assert backend.exists(["a"]) == [False]
    assert poll(lambda: harness.lines.counters["turned_away"] >= 15, 10) and len(harness.lines._greeting) <= 4
    for line in strangers:
        line.close()
    backend.close()


def test_an_invitation_is_not_spent_by_who_only_names_its_number(harness: LinedHarness) -> None:
    number, secret = harness.lines.invite()
    stranger = connect(harness)
    with pytest.raises((LineError, OSError)):
        greet(stranger, number, bytes(len(secret)))
    stranger.close()
    member = connect(harness)
    greet(member, number, secret)
    again = connect(harness)
    with pytest.raises((LineError, OSError)):
        greet(again, number, secret)
    for line in (member, again):
        line.close()


@pytest.mark.parametrize("answer", ["noise", "echo"])
def test_a_server_that_only_pretends_is_left(answer: str) -> None:
    """It cannot prove the secret: not by noise, and not by giving back what the client has proven."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    server, client = _Plain(theirs), _Plain(ours)

    def pretend() -> None:
        server.send(bytes(NONCE_BYTES))
        hello = server.read(_HELLO.size)
        server.send(bytes(PROOF_BYTES) if answer == "noise" else hello[-PROOF_BYTES:])

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(LineError, match="does not hold the secret"):
        greet(client, 1, b"y" * 32)
    thread.join(10)
    for line in (server, client):
        line.close()


def test_a_back_end_that_raises_costs_the_call(harness: LinedHarness) -> None:
    backend = harness.backend()
    harness.memory.raises["exists"] = RuntimeError("broken")
    with pytest.raises(ServerSilent):
        backend.exists(["a"])
    harness.memory.raises.clear()
    assert backend.exists(["a"]) == [False]
    backend.close()


def test_a_closed_back_end_keeps_no_line(harness: LinedHarness) -> None:
    backend = harness.backend()
    assert backend.exists(["a"]) == [False]
    backend.close()
    assert poll(lambda: not harness.lines._lines, 10)


# --- encrypted


@pytest.fixture
def encrypted() -> Iterator[LinedHarness]:
    harness = LinedHarness("on")
    yield harness
    harness.close()


def test_values_go_both_ways_over_encrypted_lines(encrypted: LinedHarness) -> None:
    test_large_and_absent_values_go_both_ways(encrypted)


def test_a_client_that_speaks_plainly_is_refused_by_a_store_that_insists(
    encrypted: LinedHarness, caplog: pytest.LogCaptureFixture
) -> None:
    plain = connect(encrypted)
    with pytest.raises(LineError, match="encrypt"):
        greet(plain, *encrypted.lines.invite())
    plain.close()
    assert poll(lambda: "does not encrypt" in caplog.text, 10)
    backend = encrypted.backend()
    assert backend.put(["a"], [memoryview(b"good")]) == [""]
    backend.close()


def test_who_encrypts_is_served_so_by_a_store_that_need_not(harness: LinedHarness) -> None:
    line = connect(harness)
    greet(line, *harness.lines.invite(), sealed=True)
    line.ask(Op.EXISTS, [("a", 0)])
    assert line.read(1) == b"\x00"
    line.close()


def sealed_pair() -> tuple[StoreConnection, StoreConnection]:
    """Client and server, past their greeting."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    client, server = _Plain(ours), _Plain(theirs)
    thread = threading.Thread(target=lambda: admit(server, lambda _: b"x" * 32, lambda _: b"x" * 32))
    thread.start()
    greet(client, 1, b"x" * 32, sealed=True)
    thread.join(10)
    return client, server


@pytest.mark.parametrize("attack", ["flip", "repeat", "cut", "swap"])
def test_what_was_changed_on_an_encrypted_line_ends_it_and_plaintext_never_shows(attack: str) -> None:
    client, server = sealed_pair()
    mark = b"nobody else may read this"
    for number in range(2):
        client.send(mark + bytes([number]))
    record = len(mark) + 1 + OVERHEAD_BYTES
    raw = bytearray(server.socket.recv(2 * record, socket.MSG_WAITALL))
    assert len(raw) == 2 * record and mark not in raw and b"nobody" not in raw
    one, two = raw[:record], raw[record:]
    if attack == "flip":
        one[record // 2] ^= 1
    said = {"flip": one + two, "repeat": one + one, "cut": one[:-1], "swap": two + one}[attack]
    near, far = socket.socketpair(socket.AF_UNIX)
    near.sendall(said)
    near.shutdown(socket.SHUT_WR)
    server.socket.close()
    server._socket = far
    with pytest.raises(LineError):
        for number in range(2):
            assert server.read(len(mark) + 1) == mark + bytes([number])
    for line in (client, server):
        line.close()
    near.close()


def test_a_value_of_many_records_arrives_in_any_pieces() -> None:
    client, server = sealed_pair()
    value = os.urandom(2 * RECORD_BYTES + 77)
    thread = threading.Thread(target=lambda: client.send(value, b"!"))
    thread.start()
    assert b"".join(server.read(size) for size in (1, 1000, RECORD_BYTES, len(value) - RECORD_BYTES - 1001, 1)) == (
        value + b"!"
    )
    thread.join(10)
    for line in (client, server):
        line.close()


def test_small_and_large_parts_arrive_in_their_order_however_little_the_kernel_takes() -> None:
    ours, theirs = socket.socketpair()
    parts = [b"a" * 8, b"b" * 3, b"c" * 400_000, b"d" * 8, b"e" * 5000, b"f" * 100]

    class Narrow:
        """Takes a few bytes of what is sent together, also less than the small part."""

        family, settimeout, sendall = ours.family, ours.settimeout, ours.sendall

        def setsockopt(self, *_: object) -> None:
            pass

        def sendmsg(self, given: Sequence[bytes]) -> int:
            return ours.send(b"".join(given)[:5])

    line = StoreConnection(Narrow())  # type: ignore[arg-type]
    line.until = time.monotonic() + 20
    sending = threading.Thread(target=line.send, args=tuple(parts))
    sending.start()
    theirs.settimeout(20)
    with ours, theirs, theirs.makefile("rb") as reader:
        assert reader.read(sum(map(len, parts))) == b"".join(parts)
        sending.join(20)
