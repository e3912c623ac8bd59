"""The embedded back end served by one process to many over CurveZMQ: the contract, and what nonsense and losses do."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest
import zmq

from kvbaton.control.keyring import Keyring
from kvbaton.control.zmq import ZmqControl
from kvbaton.proof.contracts.store_case import StoreCase, engine, names, values
from kvbaton.proof.contracts.store_contract import check_store
from kvbaton.proof.contracts.transport_harness import poll
from kvbaton.protocol.errors import Reason
from kvbaton.protocol.ids import WorkerId
from kvbaton.store.memory_backend import MemoryBackend
from kvbaton.store.store_client import ServedBackend, ServerSilent
from kvbaton.store.store_messages import (
    PIECE_BYTES,
    Ask,
    Discard,
    Fetch,
    Keep,
    Kept,
    Piece,
    Told,
    encode,
    reply,
    request,
)
from kvbaton.store.store_server import StoreServer

SERVER = WorkerId("store")
VALUE_BYTES_MAX = 5 << 20
CLIENTS = 24


def keyrings(count: int) -> dict[WorkerId, Keyring]:
    """Keyrings of one cluster, without files."""
    workers = [SERVER, *(WorkerId(f"engine{number}") for number in range(count))]
    pairs = {worker: tuple(key.decode() for key in zmq.curve_keypair()) for worker in workers}
    peers = {worker: public for worker, (public, _) in pairs.items()}
    return {worker: Keyring(worker, public, secret, peers, (b"t" * 32,)) for worker, (public, secret) in pairs.items()}


class ServedHarness:
    offers = frozenset({"idle"})
    timeout_s = 15.0  # not meant to run out

    def __init__(self) -> None:
        self.reset_to(MemoryBackend(64 << 20))

    def reset_to(self, memory: MemoryBackend) -> None:
        self.memory = memory
        self._rings = keyrings(CLIENTS)
        self._names = iter([name for name in self._rings if name != SERVER])
        control = ZmqControl(self._rings[SERVER])
        self.address = control.endpoint, self._rings[SERVER].public
        self.server = StoreServer(control, memory, arriving_bytes_max=16 << 20, value_bytes_max=VALUE_BYTES_MAX)

    def backend(self) -> ServedBackend:
        control = ZmqControl(self._rings[next(self._names)], None)
        control.set_directory({SERVER: self.address})
        return ServedBackend(control, SERVER, timeout_s=self.timeout_s)

    def reset(self) -> None:
        self.server.close()
        self.reset_to(MemoryBackend(64 << 20))

    def close(self) -> None:
        self.server.close()


@pytest.fixture
def harness() -> Iterator[ServedHarness]:
    harness = ServedHarness()
    yield harness
    harness.close()


@pytest.mark.parametrize("case", check_store.cases, ids=str)
def test_a_served_store_keeps_the_contract(harness: ServedHarness, case: StoreCase) -> None:
    case(harness)


def test_large_values_travel_in_pieces_both_ways(harness: ServedHarness) -> None:
    backend = harness.backend()
    value = memoryview(os.urandom(3 * PIECE_BYTES + 17))
    assert backend.put(["a", "b"], [value, value[:5]]) == ["", ""]
    into = [memoryview(bytearray(value.nbytes)) for _ in range(3)]
    assert backend.get(["a", "b", "c"], into) == [value.nbytes, 5, 0]
    assert into[0] == value
    assert backend.get(["a"], [memoryview(bytearray(100))]) == [0], "longer than what was asked for"
    backend.close()


def test_a_value_over_the_bound_is_refused_by_name(harness: ServedHarness) -> None:
    backend = harness.backend()
    [wrong] = backend.put(["a"], [memoryview(bytes(VALUE_BYTES_MAX + 1))])
    assert "at most" in wrong
    assert backend.exists(["a"]) == [False]
    backend.close()


def test_a_server_that_is_gone_is_silence_within_the_time(harness: ServedHarness) -> None:
    backend = harness.backend()
    assert backend.exists(["a"]) == [False]
    harness.server.close()
    backend._timeout_s = 1.0
    for call in (
        lambda: backend.exists(["a"]),
        lambda: backend.put(["a"], [memoryview(b"1")]),
        lambda: backend.get(["a"], [memoryview(bytearray(1))]),
    ):
        with pytest.raises(ServerSilent, match="is it running"):
            call()
    backend.close()


def test_a_server_killed_while_engines_put_leaves_no_pin(harness: ServedHarness) -> None:
    harness.timeout_s = 4.0
    with engine(harness, call_timeout_s=1.0) as p:
        p.kept(names(2), values(2))
        orders = [p.put(names(9, seed), values(9), 5.0) for seed in range(1, 20)]
        harness.server.close()
        reasons = {p.end(order).reason for order in orders}
        assert reasons <= {None, Reason.STORE_FAILED, Reason.TRANSFER_TIMEOUT}
        p.pins.check()
        assert p.end(p.lookup(names(2), 2.0)).count == 0


def test_many_clients_at_once_get_their_own_answers(harness: ServedHarness) -> None:
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


def test_half_sent_values_are_bounded_and_nonsense_is_dropped(harness: ServedHarness) -> None:
    control = ZmqControl(harness._rings[WorkerId("engine23")], None)
    control.set_directory({SERVER: harness.address})
    piece = bytes(PIECE_BYTES)
    for number in range(40):
        control.send(SERVER, encode(Keep(number, f"k{number}", 0, 2 * PIECE_BYTES, piece)))
    for frame in (b"", b"x", encode(("Ask", 1)), encode(Ask(1, ("NOT A KEY",))), encode(Kept(1, "")), b"\xc1" * 100):
        control.send(SERVER, frame)
    control.send(SERVER, encode(Keep(1, "k", PIECE_BYTES, 3 * PIECE_BYTES, piece)))  # its beginning was dropped
    control.send(SERVER, encode(Ask(77, ("k0",))))

    def answered() -> bool:
        control.wait(0.01)
        return encode(Told(77, b"\0")) in [frame for _, frame in control.receive()]

    assert poll(answered, 20)
    assert harness.server._arriving_bytes <= 16 << 20
    assert harness.server.counters["dropped"] == 25  # each costs its key, too
    assert harness.server.counters["malformed"] == 5  # the empty frame was not sent
    assert harness.server.counters["faults"] == 0
    control.close()


@pytest.mark.parametrize(
    "message",
    [
        Ask(1, ("a/b",)),
        Discard(1, ("",)),
        Fetch(1, "A", 1),
        Keep(1, "a", 0, 0, b""),
        Keep(1, "a", 1, 2, b"12"),
        Keep(1, "a", 0, 9 << 20, bytes(PIECE_BYTES + 1)),
        Ask(1, ("a",) * 4097),
        Kept(1, ""),
    ],
)
def test_a_request_outside_its_bounds_is_none(message: object) -> None:
    assert request(encode(message)) is None


@pytest.mark.parametrize("message", [Piece(1, 1, 2, b"12"), Told(1, bytes(4097)), Ask(1, ("a",)), Kept(-1, "")])
def test_a_reply_outside_its_bounds_is_none(message: object) -> None:
    assert reply(encode(message)) is None
