"""Announcing to a router of MoRI-IO's kind: the exact bytes, and a router that comes, goes and never answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
import zmq

from kvbaton.api.request_ids import MoriioAddress, parse_address
from kvbaton.control.addressing import ControlError
from kvbaton.control.plain.announcer import MoriioAnnouncer, MoriioRegistration, p2p_nccl_registration, registration
from tests.control.rig import STALL_S, costs_less, steady_bind, until

HTTP = "127.0.0.1:8100"
ZMQ = "host:127.0.0.1,handshake:6301,notify:61005"
HELLO = registration("P", HTTP, ZMQ, transfer_mode="READ")
QUICK_S = 0.02


class Router:
    """A ROUTER socket that hears announcements, as vllm-router's does."""

    def __init__(self, bind: str, ipv6: bool) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.ROUTER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.IPV6, int(ipv6))
        deadline = time.monotonic() + 30
        while True:
            try:
                self.socket.bind(bind)
                break
            except zmq.ZMQError:  # the one before has just closed it
                assert time.monotonic() < deadline
                time.sleep(0.01)
        self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        self.heard: list[list[bytes]] = []

    def hear(self, within_s: float = 20.0) -> list[bytes]:
        assert self.socket.poll(int(within_s * 1000)), "nothing was announced"
        self.heard.append(self.socket.recv_multipart())
        return self.heard[-1]

    def pending(self) -> int:
        count = 0
        while self.socket.poll(0):
            self.socket.recv_multipart()
            count += 1
        return count

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def router(bind: str | None = None, ipv6: bool = False) -> Iterator[Router]:
    opened = Router(bind or steady_bind(), ipv6)
    try:
        yield opened
    finally:
        opened.close()


@contextmanager
def announcing(
    endpoint: str, said: MoriioRegistration = HELLO, interval_s: float = QUICK_S
) -> Iterator[MoriioAnnouncer]:
    announcer = MoriioAnnouncer(endpoint, said, interval_s=interval_s)
    announcer.start()
    try:
        yield announcer
    finally:
        assert announcer.stop()


# --- what is said


def test_mori_ios_registration_is_the_map_that_vllm_sends() -> None:
    said = registration("D", HTTP, ZMQ, transfer_mode="WRITE", tp_size=2, dp_size=4)
    decoded = msgspec.msgpack.decode(said.payload)
    assert list(decoded.items()) == [
        ("type", "D"),
        ("http_address", HTTP),
        ("zmq_address", ZMQ),
        ("dp_size", 4),
        ("tp_size", 2),
        ("transfer_mode", "WRITE"),
    ]
    assert said.identity is None


def test_p2p_nccls_registration_is_sent_under_its_zmq_address() -> None:
    said = p2p_nccl_registration("P", HTTP, "127.0.0.1:21001")
    decoded = msgspec.msgpack.decode(said.payload)
    assert decoded == {"type": "P", "http_address": HTTP, "zmq_address": "127.0.0.1:21001"}
    assert said.identity == b"127.0.0.1:21001"


@pytest.mark.parametrize("host", ["10.0.0.1", "::1", "2001:db8::1"])
def test_an_address_as_request_ids_write_it_can_be_registered(host: str) -> None:
    text = str(MoriioAddress(host, 6301, 61005))
    decoded = msgspec.msgpack.decode(registration("P", "[::1]:80", text, transfer_mode="READ").payload)
    assert parse_address(decoded["zmq_address"]) == MoriioAddress(host, 6301, 61005)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("role", {"role": "prefill"}),
        ("transfer_mode", {"transfer_mode": "read"}),
        ("http_address", {"http_address": "http://127.0.0.1:80"}),
        ("http_address", {"http_address": "::1:80"}),
        ("http_address", {"http_address": "127.0.0.1"}),
        ("zmq_address", {"zmq_address": "127.0.0.1:6301"}),
        ("zmq_address.handshake", {"zmq_address": "host:127.0.0.1,handshake:0,notify:1"}),
        ("zmq_address.notify", {"zmq_address": "host:127.0.0.1,handshake:1,notify:x"}),
        ("zmq_address.handshake", {"zmq_address": "host:0.0.0.0,handshake:1,notify:2"}),
        ("zmq_address.handshake", {"zmq_address": "host:node,handshake:1,notify:2"}),
        ("tp_size", {"tp_size": 0}),
        ("dp_size", {"dp_size": 1 << 20}),
    ],
)
def test_what_a_router_could_not_use_is_refused_by_field(field: str, change: dict[str, object]) -> None:
    given = {"role": "P", "http_address": HTTP, "zmq_address": ZMQ, "transfer_mode": "READ", **change}
    with pytest.raises(ControlError, match=f"^{field}: "):
        registration(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0:1", "node:1", "::1:1", ZMQ])
def test_p2p_nccls_address_is_a_numeric_ip_and_port(address: str) -> None:
    with pytest.raises(ControlError, match=r"^zmq_address: "):
        p2p_nccl_registration("P", HTTP, address)
    assert p2p_nccl_registration("P", HTTP, "[::1]:5").identity == b"[::1]:5"


@pytest.mark.parametrize(
    ("field", "endpoint", "interval_s"),
    [
        ("router", "127.0.0.1:30001", 3.0),
        ("router", "tcp://*:30001", 3.0),
        ("router", "tcp://0.0.0.0:30001", 3.0),
        ("interval_s", "tcp://127.0.0.1:30001", 0.0),
        ("interval_s", "tcp://127.0.0.1:30001", float("nan")),
    ],
)
def test_an_announcer_refuses_what_it_could_not_do(field: str, endpoint: str, interval_s: float) -> None:
    with pytest.raises(ControlError, match=f"^{field}: "):
        MoriioAnnouncer(endpoint, HELLO, interval_s=interval_s)


# --- how it is said


def test_it_announces_again_and_again_in_one_frame() -> None:
    with router() as there, announcing(there.endpoint) as announcer:
        frames = [there.hear() for _ in range(5)]
        assert all(frame[1:] == [HELLO.payload] for frame in frames)
        assert len({frame[0] for frame in frames}) == 1  # one connection
        until(lambda: announcer.counters["sent"] >= 5)
        assert announcer.counters["failed"] == 0


def test_p2p_nccl_is_announced_under_its_identity() -> None:
    said = p2p_nccl_registration("P", HTTP, "127.0.0.1:21001")
    with router() as there, announcing(there.endpoint, said):
        assert there.hear() == [b"127.0.0.1:21001", said.payload]


def test_an_ipv6_router_is_reached() -> None:
    with router("tcp://[::1]:0", ipv6=True) as there, announcing(there.endpoint):
        assert there.hear()[1] == HELLO.payload


def test_nothing_is_said_before_start_nor_after_stop() -> None:
    with router() as there:
        announcer = MoriioAnnouncer(there.endpoint, HELLO, interval_s=QUICK_S)
        assert there.socket.poll(100) == 0 and not announcer.is_alive
        announcer.start()
        there.hear()
        assert announcer.stop() and announcer.stop() and not announcer.is_alive
        until(lambda: not there.pending() and not there.socket.poll(500))  # what was on its way, then nothing more


def test_stop_without_start_is_clean() -> None:
    assert MoriioAnnouncer("tcp://127.0.0.1:9", HELLO).stop()


def test_the_first_announcement_goes_out_with_the_connection_not_an_interval_later() -> None:
    with router() as there, announcing(there.endpoint, interval_s=60.0):
        there.hear(within_s=20.0)


def test_it_outlives_a_router_and_finds_the_next_at_the_same_address_with_nothing_stale() -> None:
    with router() as first:
        endpoint = first.endpoint
        with announcing(endpoint) as announcer:
            first.hear()
            first.close()
            until(lambda: announcer.counters["lost"] >= 5)
            before = announcer.counters["sent"]
            with router(endpoint) as second:
                second.hear()
                until(lambda: announcer.counters["sent"] > before)
                assert announcer.is_alive and announcer.counters["failed"] == 0
                assert announcer.stop()
                heard = 1 + second.pending()  # announcements of now, none of those that were due in between
                assert heard <= announcer.counters["sent"] - before


def test_a_router_that_comes_back_hears_at_once_although_the_interval_is_long() -> None:
    with router() as probe:
        endpoint = probe.endpoint
    with announcing(endpoint, interval_s=60.0) as announcer:
        time.sleep(0.05)  # nobody there: let it fail to connect
        with router(endpoint) as there:
            assert there.hear(within_s=20.0)[1] == HELLO.payload
        until(lambda: announcer.counters["sent"] == 1)


def test_stop_takes_no_time_when_nobody_listens() -> None:
    with router() as probe:
        endpoint = probe.endpoint
    announcer = MoriioAnnouncer(endpoint, HELLO, interval_s=60.0)
    announcer.start()
    began = time.monotonic()
    assert announcer.stop()
    assert time.monotonic() - began < STALL_S


def test_what_accepts_but_is_no_router_takes_nothing_and_delays_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        endpoint = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        with announcing(endpoint) as announcer:
            until(lambda: announcer.counters["lost"] >= 5)
            assert announcer.counters["sent"] == 0
            began = time.monotonic()
            assert announcer.stop()
            assert time.monotonic() - began < STALL_S


def test_whoever_else_had_the_address_keeps_no_worker_from_the_router_that_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A router with keys, say: libzmq dials nobody again who greeted by another mechanism."""
    monkeypatch.setattr("kvbaton.control.plain.announcer.REDIAL_S", 0.3)
    with router() as probe:
        endpoint = probe.endpoint
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"CURVE".ljust(20, b"\0") + b"\x01" + bytes(31)
    with socket.create_server(("127.0.0.1", int(endpoint.rpartition(":")[2]))) as server, announcing(endpoint) as ours:
        keyed, _ = server.accept()
        with keyed:
            keyed.sendall(greeting)
            while keyed.recv(1024):  # until it has understood and hung up
                pass
        server.close()
        with router(endpoint) as there:
            assert there.hear()[1] == HELLO.payload
        assert ours.counters["failed"] == 0


def test_a_router_that_talks_back_is_not_read_and_changes_nothing() -> None:
    with router() as there, announcing(there.endpoint) as announcer:
        who = there.hear()[0]
        for _ in range(200):
            there.socket.send_multipart([who, b"x" * 512])
        before = announcer.counters["sent"]
        until(lambda: announcer.counters["sent"] >= before + 5)
        for _ in range(5):
            there.hear()
        assert announcer.is_alive


def test_waiting_costs_no_processor_time() -> None:
    with router() as probe:
        nobody = probe.endpoint
    with router() as there, announcing(there.endpoint, interval_s=60.0), announcing(nobody, interval_s=60.0):
        there.hear()
        assert costs_less(0.025, 0.5)
