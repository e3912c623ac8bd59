"""The hub's loop, on sockets that stand for the hosts' devices: which packets it carries, and when it ends."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from kvbaton_proof.chaos.network.hub import PACKETS_PER_TURN_MAX, Hub
from kvbaton_proof.chaos.network.hub_policy import Switch, Wires
from kvbaton_proof.chaos.network.namespaces import Host
from kvbaton_proof.chaos.network.net_control import Ask, Lines

WAIT_S = 30.0


@dataclass
class Bench:
    devices: list[socket.socket]
    switch: Switch
    control: Lines
    thread: threading.Thread


@pytest.fixture
def bench() -> Iterator[Bench]:
    names = ("client", "p0", "d0")
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in names]
    for ours, theirs in pairs:
        ours.settimeout(WAIT_S)
        theirs.setblocking(False)
    hosts = [Host(name, f"10.77.0.{i + 1}", -1, pairs[i][1].fileno()) for i, name in enumerate(names)]
    conductor, end = socket.socketpair()
    conductor.settimeout(WAIT_S)
    switch = Switch(Wires(names, 0))
    thread = threading.Thread(target=Hub(hosts, switch, Lines(end)).run, daemon=True)
    thread.start()
    yield Bench([ours for ours, _ in pairs], switch, Lines(conductor), thread)
    conductor.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
    end.close()
    for pair in pairs:
        for sock in pair:
            sock.close()


def packet(target: str, payload: bytes = b"payload", version: int = 4) -> bytes:
    return bytes([version << 4 | 5]) + bytes(15) + socket.inet_aton(target) + payload


def test_a_packet_goes_to_the_host_of_its_address(bench: Bench) -> None:
    bench.devices[1].send(packet("10.77.0.3"))
    assert bench.devices[2].recv(1000) == packet("10.77.0.3")
    assert bench.switch.counts["p0", "d0"].packets == 1


@pytest.mark.parametrize(
    "foreign",
    [packet("224.0.0.3"), packet("10.78.0.3"), packet("10.77.0.99"), packet("10.77.0.3", version=6)],
    ids=["multicast", "another network", "nobody", "IPv6"],
)
def test_a_packet_for_nobody_here_goes_nowhere(bench: Bench, foreign: bytes) -> None:
    bench.devices[1].send(foreign)
    bench.devices[1].send(packet("10.77.0.3", b"last"))
    assert bench.devices[2].recv(1000)[20:] == b"last"
    assert sum(count.packets + count.lost for count in bench.switch.counts.values()) == 1


def test_a_host_whose_queue_is_full_does_not_stop_the_others(bench: Bench) -> None:
    sent = 0
    while sent < 10 * PACKETS_PER_TURN_MAX:  # nobody reads them there
        bench.devices[1].send(packet("10.77.0.3"))
        sent += 1
    bench.devices[1].send(packet("10.77.0.1", b"other"))
    assert bench.devices[0].recv(1000)[20:] == b"other"


def test_what_is_late_comes_without_further_packets(bench: Bench) -> None:
    bench.switch.wires.slow(("p0", "d0"), 0.05, 0.0)
    bench.devices[1].send(packet("10.77.0.3"))
    assert bench.devices[2].recv(1000) == packet("10.77.0.3")


def test_requests_in_one_piece_and_in_many_are_answered_in_order(bench: Bench) -> None:
    bench.control.sock.sendall(b'{"type":"cut","source":"p0","target":"x"}\n{"type":"heal"}\n{"type"')
    assert b"expected one of" in bench.control.read()
    assert b'"error":""' in bench.control.read()
    bench.control.sock.sendall(b':"ask"}\n')
    assert b'"counts":{}' in bench.control.read()
    bench.control.send(Ask())
    assert bench.control.read()


def test_it_ends_with_the_conductor(bench: Bench) -> None:
    before = len(os.listdir("/proc/self/fd"))
    bench.control.sock.shutdown(socket.SHUT_RDWR)
    bench.thread.join(WAIT_S)
    assert not bench.thread.is_alive()
    deadline = time.monotonic() + WAIT_S
    while len(os.listdir("/proc/self/fd")) > before:  # threads that earlier tests left may open some for a moment
        assert time.monotonic() < deadline
        time.sleep(0.02)
