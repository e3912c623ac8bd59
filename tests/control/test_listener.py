"""Frames are never misattributed, and no message ends the listener."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import zmq

from kvbaton.control.addressing import ControlError, ControlLimits
from kvbaton.protocol.ids import WorkerId

from .rig import Post, cluster, exchange, posted, raw_client, until

RINGS = cluster("p0", "d0", "d1")
LIMITS = ControlLimits(frame_bytes_max=64 << 10, frames_queued_max=64)


@pytest.fixture
def p0() -> Iterator[Post]:
    post = Post(RINGS["p0"], limits=LIMITS)
    with posted(post):
        yield post


def test_a_frame_is_from_the_holder_of_the_key_whatever_it_says(p0: Post) -> None:
    with raw_client(p0.control.endpoint, RINGS["p0"], RINGS["d1"].public, RINGS["d1"].secret) as d1:
        d1.send(b"I am d0")
        until(lambda: p0.inbox, p0)
    assert p0.inbox == [("d1", b"I am d0")]


def test_two_who_speak_at_once_are_told_apart(p0: Post) -> None:
    d0, d1 = Post(RINGS["d0"]), Post(RINGS["d1"])
    with posted(d0, d1):
        for each in (d0, d1):
            each.knows(p0)
        for n in range(20):
            d0.send(p0, b"d0 %d" % n)
            d1.send(p0, b"d1 %d" % n)
        until(lambda: len(p0.inbox) == 40, p0, d0, d1)
    assert all(frame.startswith(worker.encode()) for worker, frame in p0.inbox)
    assert [frame for worker, frame in p0.inbox if worker == "d0"] == [b"d0 %d" % n for n in range(20)]


def test_an_answer_needs_no_directory(p0: Post) -> None:
    with posted(d0 := Post(RINGS["d0"], bind=None)):
        d0.knows(p0)
        assert not p0.send(d0, b"too early")
        exchange(d0, p0)
        assert d0.control.endpoint == ""


def test_when_the_connection_is_gone_so_is_the_way_back(p0: Post) -> None:
    with posted(d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        exchange(d0, p0)
    until(lambda: not p0.send(d0, b"hello?"), p0)


@pytest.mark.parametrize(
    "parts",
    [[b""], [b"", b""], [b"", b"x"], [b"a", b"b"], [b"x"] * 100, [b"", b"", b"x" * 1000, b""]],
    ids=["empty", "empties", "delimited", "two", "hundred", "mixed"],
)
def test_a_message_of_an_odd_shape_is_dropped_and_the_next_is_served(p0: Post, parts: list[bytes]) -> None:
    with raw_client(p0.control.endpoint, RINGS["p0"], RINGS["d0"].public, RINGS["d0"].secret) as d0:
        d0.send_multipart(parts)
        d0.send(b"good")
        until(lambda: p0.inbox, p0)
    assert p0.inbox == [("d0", b"good")]
    assert p0.control.counters["malformed"] == 1


def test_a_client_that_chose_its_own_route_is_not_heard(p0: Post) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context.socket(zmq.DEALER) as client:
        client.setsockopt(zmq.LINGER, 0)
        client.setsockopt(zmq.ROUTING_ID, b"d1")
        client.setsockopt(zmq.CURVE_SERVERKEY, RINGS["p0"].public.encode())
        client.setsockopt(zmq.CURVE_PUBLICKEY, RINGS["d0"].public.encode())
        client.setsockopt(zmq.CURVE_SECRETKEY, RINGS["d0"].secret.encode())
        client.connect(p0.control.endpoint)
        client.send(b"hello")
        until(lambda: p0.control.counters["malformed"] == 1, p0)
    context.term()
    assert p0.inbox == []


def test_a_frame_above_the_bound_costs_its_sender_the_connection_and_nobody_else(p0: Post) -> None:
    with posted(d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        exchange(d0, p0)
        with raw_client(p0.control.endpoint, RINGS["p0"], RINGS["d1"].public, RINGS["d1"].secret) as d1:
            d1.send(b"x" * (2 * LIMITS.frame_bytes_max))
            until(lambda: p0.control.counters["admitted"] >= 3, p0)  # it was hung up on, and dialled again
            exchange(d0, p0)
            d1.send(b"x" * LIMITS.frame_bytes_max)
            until(lambda: any(len(frame) == LIMITS.frame_bytes_max for _, frame in p0.inbox), p0)
    assert p0.inbox[-1][0] == "d1"


def test_a_peer_that_never_reads_loses_frames_and_blocks_nobody(p0: Post) -> None:
    with (
        posted(d0 := Post(RINGS["d0"])),
        raw_client(p0.control.endpoint, RINGS["p0"], RINGS["d1"].public, RINGS["d1"].secret) as d1,
    ):
        d0.knows(p0)
        d1.setsockopt(zmq.RCVHWM, 1)
        d1.send(b"I will not listen")
        until(lambda: p0.inbox, p0)
        frame = os.urandom(32 << 10)
        while not p0.control.counters["lost"]:
            assert p0.control.send(WorkerId("d1"), frame)
            assert p0.control.counters["frames_out"] < 10_000
        exchange(d0, p0)


def test_a_flood_is_taken_in_bounded_helpings() -> None:
    limits = ControlLimits(frames_per_receive_max=8)
    with posted(p0 := Post(RINGS["p0"], limits=limits), d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        for n in range(100):
            d0.send(p0, b"%d" % n)
        helpings: list[int] = []
        while sum(helpings) < 100:
            p0.control.wait(5.0)
            helpings.append(len(p0.control.receive()))
        assert max(helpings) == 8


def test_the_latest_of_two_connections_of_one_worker_is_the_way_back(p0: Post) -> None:
    with posted(old := Post(RINGS["d0"]), new := Post(RINGS["d0"])):
        old.knows(p0)
        new.knows(p0)
        exchange(old, p0)
        exchange(new, p0)
        assert p0.send(new, b"for the new one")
        until(lambda: new.inbox[-1][1] == b"for the new one", new, old, p0)
        assert all(frame != b"for the new one" for _, frame in old.inbox)


def test_a_port_in_use_is_named_with_the_next_step(p0: Post) -> None:
    with pytest.raises(ControlError, match=f"{p0.control.endpoint} is in use; stop the process"):
        Post(RINGS["d0"], bind=p0.control.endpoint)


@pytest.mark.parametrize(
    ("bind", "part"),
    [("tcp://192.0.2.1:0", "not one of this host's"), ("127.0.0.1:0", "not tcp://"), ("tcp://[::1]:99999", "99999")],
)
def test_an_address_that_cannot_be_bound_is_named_with_the_next_step(bind: str, part: str) -> None:
    with pytest.raises(ControlError, match=part):
        Post(RINGS["d0"], bind=bind)
