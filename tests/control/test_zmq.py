from __future__ import annotations

import gc
import os
import socket
import threading
import time

import pytest

from kvbaton.control.addressing import ControlLimits
from kvbaton.control.zmq import ZmqControl
from kvbaton.node.node_loop import LoopControl
from kvbaton.node.ports import ControlPort
from kvbaton.protocol.ids import WorkerId

from .rig import DEADLINE_S, STALL_S, Post, cluster, costs_less, exchange, posted, until

RINGS = cluster("p0", "d0", "d1")


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_it_is_a_control_port_that_a_loop_can_sleep_on() -> None:
    with posted(post := Post(RINGS["p0"])):
        port: ControlPort = post.control
        loop: LoopControl = post.control
        assert port is loop


def test_it_listens_on_loopback_and_tells_the_port_it_got() -> None:
    with posted(post := Post(RINGS["p0"])):
        host, port = post.control.endpoint.rsplit(":", 1)
        assert host == "tcp://127.0.0.1" and int(port) > 0


@pytest.mark.skipif(not _has_ipv6(), reason="this host has no IPv6 loopback")
def test_it_speaks_ipv6_and_mixes_with_ipv4() -> None:
    six, four = Post(RINGS["p0"], bind="tcp://[::1]:0"), Post(RINGS["d0"])
    assert six.control.endpoint.startswith("tcp://[::1]:")
    six.knows(four)
    four.knows(six)
    with posted(six, four):
        exchange(four, six)
    with posted(six := Post(RINGS["p0"], bind="tcp://[::1]:0"), four := Post(RINGS["d0"])):
        six.knows(four)
        exchange(six, four)


def test_a_wait_ends_after_its_time_and_not_before() -> None:
    with posted(post := Post(RINGS["p0"])):
        start = time.monotonic()
        post.control.wait(0.05)
        assert 0.05 <= time.monotonic() - start < STALL_S
        start = time.monotonic()
        post.control.wait(0)
        assert time.monotonic() - start < STALL_S


def test_a_wake_ends_the_wait_under_way_and_many_wakes_end_one() -> None:
    with posted(post := Post(RINGS["p0"])):
        control = post.control

        def wake_often() -> None:
            for _ in range(1000):
                control.wake()

        waker = threading.Thread(target=wake_often)
        start = time.monotonic()
        waker.start()
        control.wait(30)
        waker.join()
        control.wait(0)  # what was raised after the first wait had begun to return
        assert time.monotonic() - start < 10
        start = time.monotonic()
        control.wait(0.05)
        assert time.monotonic() - start >= 0.05


def test_a_wake_that_comes_before_frames_are_received_still_ends_the_next_wait() -> None:
    with posted(post := Post(RINGS["p0"])):
        post.control.wake()
        post.control.receive()
        start = time.monotonic()
        post.control.wait(30)
        assert time.monotonic() - start < 10


def test_a_frame_ends_the_wait() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        exchange(d0, p0)
        d0.send(p0, b"x")
        start = time.monotonic()
        p0.control.wait(30)
        assert time.monotonic() - start < 10
        assert p0.control.receive() == [("d0", b"x")]


def test_a_stranger_does_not_end_the_wait() -> None:
    with posted(p0 := Post(RINGS["p0"])):
        host, port = p0.control.endpoint.removeprefix("tcp://").rsplit(":", 1)
        with socket.create_connection((host, int(port))) as stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            start = time.monotonic()
            p0.control.wait(0.1)
            assert time.monotonic() - start >= 0.1
        until(lambda: p0.control.strangers == 1, p0)
        assert not p0.inbox


def test_frames_can_be_received_without_waiting_first() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        d0.send(p0, b"x")
        found: list[tuple[WorkerId, bytes]] = []

        def received() -> bool:
            found.extend(p0.control.receive())
            return bool(found)

        until(received)
        assert found == [("d0", b"x")]


def test_a_directory_set_from_another_thread_is_in_force_by_the_next_send() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        setter = threading.Thread(target=d0.knows, args=(p0,))
        setter.start()
        setter.join()
        exchange(d0, p0)


def test_directories_set_in_a_storm_from_many_threads_end_with_the_last() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):

        def storm() -> None:
            for _ in range(200):
                d0.control.set_directory({p0.name: ("tcp://127.0.0.1:1", RINGS["p0"].public)})

        threads = [threading.Thread(target=storm) for _ in range(4)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            d0.control.send(p0.name, b"x")
        d0.knows(p0)
        exchange(d0, p0)


def test_both_ends_may_dial_each_other() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        p0.knows(d0)
        assert d0.send(p0, b"from d0") and p0.send(d0, b"from p0")
        until(lambda: p0.inbox and d0.inbox, p0, d0)
        for _ in range(5):
            exchange(d0, p0)
            exchange(p0, d0)


def test_connections_that_flood_and_one_that_whispers_share_each_helping() -> None:
    limits = ControlLimits(frames_per_receive_max=10)
    with posted(d0 := Post(RINGS["d0"], limits=limits), p0 := Post(RINGS["p0"]), d1 := Post(RINGS["d1"])):
        d0.knows(p0)
        d1.knows(d0)
        exchange(d0, p0)
        exchange(d1, d0)
        for _ in range(1000):
            d1.send(d0, b"flood")
        p0.send(d0, b"whisper")
        line = d0.control._dialler._lines[p0.name].socket
        assert line.poll(int(DEADLINE_S * 1000))  # both are there before anything is taken
        until(lambda: ("p0", b"whisper") in d0.inbox, d0)
        assert len(d0.inbox) < 1000


def test_a_frame_keeps_its_bytes() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        for size in (1, 255, 256, 65535, 65536, 1 << 20):
            exchange(d0, p0, said=os.urandom(size), answer=os.urandom(size))


def test_closing_is_idempotent_bounded_and_returns_every_descriptor() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    def live() -> None:
        post = Post(RINGS["p0"], limits=ControlLimits(linger_s=0.05))
        post.control.set_directory({WorkerId("d0"): ("tcp://127.0.0.1:1", RINGS["d0"].public)})
        post.control.send(WorkerId("d0"), b"never delivered")
        start = time.monotonic()
        post.control.close()
        post.control.close()
        post.control.wake()
        assert time.monotonic() - start < STALL_S

    live()
    gc.collect()  # what earlier tests left
    before = descriptors()
    for _ in range(5):
        live()
    until(lambda: descriptors() <= before)  # threads that earlier tests left may open some for a moment


def test_what_was_said_just_before_closing_still_arrives() -> None:
    with posted(p0 := Post(RINGS["p0"])):
        d0 = Post(RINGS["d0"])
        d0.knows(p0)
        exchange(d0, p0)
        d0.send(p0, b"goodbye")
        d0.control.close()
        until(lambda: ("d0", b"goodbye") in p0.inbox, p0)


def test_a_failed_bind_leaves_nothing_behind() -> None:
    with posted(p0 := Post(RINGS["p0"])):
        gc.collect()  # what earlier tests left must not be closed between the two counts
        for _ in range(3):
            before = len(os.listdir("/proc/self/fd"))
            with pytest.raises(Exception, match="in use"):
                ZmqControl(RINGS["d0"], p0.control.endpoint)
            until(lambda before=before: len(os.listdir("/proc/self/fd")) <= before)  # type: ignore[misc]


def test_idle_it_costs_no_cpu() -> None:
    with posted(p0 := Post(RINGS["p0"]), d0 := Post(RINGS["d0"])):
        d0.knows(p0)
        exchange(d0, p0)
        until(lambda: not p0.control.receive() and not d0.control.receive())
        assert costs_less(0.01, 1.0, p0.control.wait)


def test_one_that_is_dropped_without_being_closed_hangs_nobody() -> None:
    for _ in range(5):
        p0, d0 = (
            Post(RINGS["p0"], limits=ControlLimits(linger_s=0.0)),
            Post(RINGS["d0"], limits=ControlLimits(linger_s=0.0)),
        )
        d0.knows(p0)
        exchange(d0, p0)
        d0.knows(p0)  # a note that was not taken: a cycle
        cycle: list[object] = [p0, d0]
        cycle.append(cycle)
        del p0, d0, cycle
        gc.collect()
