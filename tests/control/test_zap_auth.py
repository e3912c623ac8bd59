"""Only identities of the cluster come in (promise 5), and knocking does not disturb those who are in (promise 4)."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest
import zmq

from kvbaton.control.addressing import ControlLimits

from .rig import Post, cluster, exchange, posted, raw_client, until

RINGS = cluster("p0", "d0", "d1")


@pytest.fixture
def pair() -> Iterator[tuple[Post, Post]]:
    limits = ControlLimits(frame_bytes_max=64 << 10)
    p0, d0 = Post(RINGS["p0"], limits=limits), Post(RINGS["d0"], limits=limits)
    d0.knows(p0)
    with posted(p0, d0):
        exchange(d0, p0)
        yield p0, d0


def _dial(post: Post) -> socket.socket:
    host, port = post.control.endpoint.removeprefix("tcp://").rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=5)


def _is_hung_up(stranger: socket.socket) -> bool:
    try:
        return stranger.recv(4096) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def test_a_stranger_with_a_key_of_its_own_is_refused_and_counted(pair: tuple[Post, Post]) -> None:
    p0, d0 = pair
    public, secret = (key.decode() for key in zmq.curve_keypair())
    with raw_client(p0.control.endpoint, RINGS["p0"], public, secret) as stranger:
        stranger.send(b"let me in")
        until(lambda: p0.control.counters["refused"] == 1, p0)
        exchange(d0, p0)
    assert p0.control.strangers == 1
    assert all(frame != b"let me in" for _, frame in p0.inbox)


def test_a_client_without_encryption_is_refused(pair: tuple[Post, Post]) -> None:
    p0, d0 = pair
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    for user in (b"", b"d0"):
        with context.socket(zmq.DEALER) as stranger:
            stranger.setsockopt(zmq.LINGER, 0)
            if user:
                stranger.setsockopt(zmq.PLAIN_USERNAME, user)
                stranger.setsockopt(zmq.PLAIN_PASSWORD, b"x")
            p0.control.counters.clear()
            stranger.connect(p0.control.endpoint)
            stranger.send(b"plain")
            until(lambda: p0.control.strangers, p0)
            exchange(d0, p0)
    context.term()
    assert all(frame != b"plain" for _, frame in p0.inbox)


def test_one_who_has_a_key_but_another_servers_name_gets_no_answer(pair: tuple[Post, Post]) -> None:
    p0, d0 = pair
    with raw_client(p0.control.endpoint, RINGS["d1"], RINGS["d0"].public, RINGS["d0"].secret) as lost:
        lost.send(b"to d1")
        until(lambda: p0.control.strangers >= 1, p0)
        exchange(d0, p0)
    assert p0.control.counters["refused"] == 0


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00",
        b"\xff" * 4096,
        b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00NULL" + b"\x00" * 48 + b"\x04\x19\x05READY" * 10,
        b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00CURVE" + b"\x00" * 47 + b"\x04\xc8\x05HELLO" + b"\x00" * 300,
        b"\xff" + b"\x00" * 8 + b"\x7f\x03\x00CURVE" + b"\x00" * 47 + b"\x06\xff\xff\xff\xff\xff\xff\xff\xff",
        bytes(range(256)) * 1000,
    ],
    ids=["http", "one-byte", "ones", "null-greeting", "false-hello", "endless-command", "ramp"],
)
def test_noise_on_the_port_disturbs_nobody(pair: tuple[Post, Post], noise: bytes) -> None:
    p0, d0 = pair
    before = p0.control.strangers
    with _dial(p0) as stranger:
        with suppress(OSError):  # hung up on in the middle: as it should be
            stranger.sendall(noise)
        until(lambda: p0.control.strangers == before + 1, p0)
        exchange(d0, p0)
    assert p0.control.counters["malformed"] == 0


def test_random_bytes_after_a_good_greeting_disturb_nobody(pair: tuple[Post, Post]) -> None:
    p0, d0 = pair
    rng = random.Random(1)
    greeting = b"\xff" + b"\x00" * 8 + b"\x7f\x03\x01CURVE" + b"\x00" * 15 + b"\x00" + b"\x00" * 31
    for _ in range(40):
        with _dial(p0) as stranger, suppress(OSError):
            stranger.sendall(greeting[: rng.randint(0, 64)] + rng.randbytes(rng.randint(0, 600)))
    until(lambda: p0.control.strangers == 40, p0)
    exchange(d0, p0)


def test_half_open_connections_are_closed_in_time_and_keep_nobody_out() -> None:
    p0, d0 = Post(RINGS["p0"], limits=ControlLimits(handshake_s=1.0)), Post(RINGS["d0"])
    d0.knows(p0)
    with posted(p0, d0):
        strangers = [_dial(p0) for _ in range(50)]
        exchange(d0, p0)
        for stranger in strangers:
            stranger.setblocking(False)
        until(lambda: all(_is_hung_up(stranger) for stranger in strangers), p0)
        assert p0.control.strangers >= 50  # and the peer itself, if it took longer than that to show its key
        for stranger in strangers:
            stranger.close()
        exchange(d0, p0)


def test_a_flood_of_strangers_does_not_starve_a_peer(pair: tuple[Post, Post]) -> None:
    p0, d0 = pair
    for _ in range(10):
        for _ in range(20):
            _dial(p0).close()
        exchange(d0, p0)
    until(lambda: p0.control.strangers == 200, p0)


def test_a_key_taken_off_the_list_is_mute_at_once_though_connected(pair: tuple[Post, Post]) -> None:
    p0, d0 = pair
    p0.inbox.clear()
    p0.control.set_peers({name: key for name, key in RINGS["p0"].peers.items() if name != "d0"})
    assert d0.send(p0, b"still here")
    until(lambda: p0.control.counters["refused"] == 1, p0, d0)
    assert p0.inbox == []


def test_a_key_added_to_the_list_is_let_in() -> None:
    p0, d0 = Post(RINGS["p0"]), Post(RINGS["d0"], limits=ControlLimits(redial_s=0.05))
    p0.control.set_peers({RINGS["p0"].name: RINGS["p0"].public})
    d0.knows(p0)
    with posted(p0, d0):
        assert d0.send(p0, b"too early")
        until(lambda: p0.control.counters["refused"] == 1, p0, d0)
        p0.control.set_peers(RINGS["p0"].peers)
        until(lambda: d0.send(p0, b"now") and p0.inbox, p0, d0)
        exchange(d0, p0)
